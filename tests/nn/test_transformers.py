"""Models of transformers, tiny ones from their configurations: converted, trained, and asked for tokens."""

import pytest
import torch
from cases.serving import SIZES, transformers

import zerofp4
from zerofp4.nn import Conv1D, Experts, Linear, NVFP4Recipe, autocast

pytestmark = pytest.mark.heavy

TOKENS = SIZES["vocab_size"]
ENDS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
LAYERS = SIZES | ENDS | {"intermediate_size": 128}
MODELS = {
    "Llama": LAYERS,
    "Qwen3": LAYERS,
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": TOKENS, **ENDS},
    "Mixtral": {**LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2},
}
WEIGHTS = {"Llama": 14, "Qwen3": 14, "GPT2": 8, "Mixtral": 8}
"""Linear layers of two blocks: Mixtral's experts are stacked parameters of one module."""


EXPERTS = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def with_experts(module, name):
    return name != "lm_head"


def made(name):
    torch.manual_seed(0)
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**MODELS[name]))


def train(model, optimizer, tokens, steps):
    losses = []
    for _ in range(steps):
        with autocast(NVFP4Recipe()):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", [*MODELS, "Mixtral, experts too"])
def test_training_with_checkpointing_and_what_the_model_learned(device, name):
    name, _, experts = name.partition(", ")
    model = made(name).to(device)
    if experts and not hasattr(model.get_submodule(EXPERTS[0]), "has_gate"):
        pytest.skip("this version of transformers does not say how its experts are laid out")
    report = zerofp4.convert_model(model, with_experts if experts else None, layers=True)
    if experts:
        assert report.layers[-2:] == EXPERTS and len(report.converted) == WEIGHTS[name] + 4
        assert all(isinstance(model.get_submodule(module), Experts) for module in EXPERTS)
        del report.layers[-2:]
        report.converted = [each for each in report.converted if ".mlp.experts." not in each]
    kind = Conv1D if name == "GPT2" else Linear
    assert report.layers == report.converted and len(report.layers) == WEIGHTS[name]
    assert all(type(model.get_submodule(module)) is kind for module in report.layers)
    optimizer = zerofp4.optim.ZeroFP4Optimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-2)
    model.gradient_checkpointing_enable()
    model.train()
    tokens = torch.randint(1, TOKENS, (4, 33), generator=torch.Generator().manual_seed(2)).to(device)
    losses = train(model, optimizer, tokens, 32)
    assert losses[-1] < 0.1 * losses[0]
    model.eval()
    prompt = tokens[:, :8]
    with autocast(NVFP4Recipe()):
        mask = torch.ones_like(prompt)
        made_up = model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert made_up.shape == (4, 16)
    assert (made_up[:, 8:] == tokens[:, 8:16]).float().mean() > 0.9  # what it was trained on


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Mixtral"])
def test_checkpointing_changes_no_byte(name):
    """Of the first step: what is computed again is what was computed, outside of the context."""
    tokens = torch.randint(1, TOKENS, (2, 17), generator=torch.Generator().manual_seed(2))
    gradients = []
    for checkpointed in (True, False):
        model = made(name).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        zerofp4.convert_model(model, with_experts if name == "Mixtral" else None, layers=True)
        if checkpointed:
            model.gradient_checkpointing_enable()
        with autocast(NVFP4Recipe(stochastic_rounding=False)):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        gradients.append({key: p.grad for key, p in model.named_parameters()})
    assert all(torch.equal(gradients[0][key], gradients[1][key]) for key in gradients[1])
