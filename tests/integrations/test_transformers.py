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
    return optimizer, transformers.Trainer(
        model, arguments, train_dataset=data, optimizers=(optimizer, None)
    )


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
