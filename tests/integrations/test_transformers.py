"""Calls of transformers beside converted weights."""

import pytest
import torch

import zerofp4
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.heavy


def llama(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **ends, **options))


def trainer_of(folder, overlap, **options):
    model = llama()
    zerofp4.convert_model(model)
    travels = Communication(overlap=overlap)
    optimizer = ZeroFP4Optimizer(model.named_parameters(), FusedAdamW, lr=1e-2, communication=travels)
    options |= {"max_steps": 2, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    data = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 16
    arguments = transformers.TrainingArguments(str(folder), **options)
    return optimizer, transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))


def test_trainer_cannot_clip_gradients_that_were_used(tmp_path):
    """Its max_grad_norm is 1.0 if nobody says otherwise."""
    optimizer, trainer = trainer_of(tmp_path, "update")
    before = optimizer.gathered_masters()
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0 of TrainingArguments.*pass max_grad_norm=0"):
        trainer.train()
    assert all(map(torch.equal, optimizer.gathered_masters(), before))
    for overlap, options in (("update", {"max_grad_norm": 0.0}), (None, {})):
        optimizer, trainer = trainer_of(tmp_path, overlap, **options)
        trainer.train()
        assert optimizer.state_dict()["steps"] == 2
    optimizer.train()  # without a Trainer


@pytest.mark.parametrize("size", [60, 70])
def test_embeddings_are_resized_before_the_conversion(size):
    """A converted head would be an ordinary one afterwards, and an optimizer has the old embeddings."""
    options = {"tie_word_embeddings": False}

    def is_linear(module, name):
        return isinstance(module, torch.nn.Linear)

    for mean in (False, True):
        model = llama(**options)
        zerofp4.convert_model(model, is_linear)
        with pytest.raises(NotImplementedError, match=r"resize_token_embeddings .* before convert_model"):
            model.resize_token_embeddings(size, mean_resizing=mean)
    model = llama(**options)
    zerofp4.convert_model(model)
    optimizer = ZeroFP4Optimizer(model.named_parameters(), FusedAdamW)
    model.resize_token_embeddings(size)
    message = rf"'model.embed_tokens.weight' was .* \(64, 32\) .* \({size}, 32\) .*: call resize_token"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    model = llama(**options)
    model.resize_token_embeddings(size)
    zerofp4.convert_model(model, is_linear)
    optimizer = ZeroFP4Optimizer(model.named_parameters(), FusedAdamW)
    tokens = torch.arange(16)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert isinstance(model.lm_head.weight, zerofp4.NVFP4Tensor) and model.lm_head.weight.shape[0] == size
