"""Models that other packages write beside a ZeroFP4Optimizer: every tensor with its values, nothing else."""

import tempfile
from pathlib import Path

import pytest
import torch
from helpers import assert_bytes_equal

import zerofp4
from distributed.run import on_ranks
from zerofp4.optim import ZeroFP4Optimizer

BF16 = torch.bfloat16
AROUND = 24 << 10
"""Bytes that a file may have beside its tensors: names and shapes."""


def tiny_llama(world, tied):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(5)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).to(world.device, BF16)
    for layer in model.model.layers:  # of several dtypes, as models are trained
        layer.input_layernorm.float()
        layer.input_layernorm.register_forward_hook(lambda _, __, y: y.to(BF16))
    zerofp4.convert_model(model)
    return model


def by_accelerate(model, folder):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.Accelerator(cpu=not torch.cuda.is_available()).save_model(model, folder)


def by_safetensors(model, folder):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    safetensors.save_model(model, folder / "model.safetensors")


WAYS = {
    "safetensors": by_safetensors,
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "accelerate": by_accelerate,
}


@on_ranks(1, 2)
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_is_written(world, tied):
    """A tied one once, which is read under both names. Before register_plain_state_dict() what cannot hold a
    quantized tensor names it.
    """
    model = tiny_llama(world, tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    optimizer = ZeroFP4Optimizer(model.named_parameters(), lr=0.01)
    tokens = torch.arange(8, device=world.device).view(1, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    for save in WAYS.values():
        with pytest.raises(
            TypeError, match=r"cannot hold the NVFP4Tensor .*zerofp4\.register_plain_state_dict"
        ):
            save(model, Path(tempfile.mkdtemp()))
    zerofp4.register_plain_state_dict(model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    assert len(expected) == 21
    once = sum(value.nbytes for name, value in expected.items() if not tied or name != "lm_head.weight")
    for way, save in WAYS.items():
        folder, found = Path(tempfile.mkdtemp()), {}
        save(model, folder)
        if way != "safetensors" and world.rank:  # rank 0 alone writes
            continue
        for path in folder.glob("*.safetensors"):
            found |= pytest.importorskip("safetensors.torch").load_file(path)
        assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) < once + AROUND, way
        missing = expected.keys() - found.keys()
        assert found.keys() <= expected.keys(), way
        assert not missing or (tied and missing < {"lm_head.weight", "model.embed_tokens.weight"}), way
        for name, value in found.items():
            assert_bytes_equal(value.to(world.device), expected[name], f"{way}, {name}")
