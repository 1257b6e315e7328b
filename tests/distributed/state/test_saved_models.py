"""Models that safetensors, accelerate, transformers and torch.save write beside a ZeroFP4Optimizer: every
tensor, with its values, and nothing else.
"""

import functools
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


def tiny_llama(world, kind):
    """kind: "plain", "converted", or "values" and "tied" for one whose state dict holds values."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(5)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=kind == "tied")
    model = transformers.LlamaForCausalLM(config).to(world.device, BF16)
    for layer in model.model.layers:  # of several dtypes, as models are trained
        layer.input_layernorm.float()
        layer.input_layernorm.register_forward_hook(lambda _, __, y: y.to(BF16))
    if kind != "plain":
        zerofp4.convert_model(model)
    if kind in ("values", "tied"):
        zerofp4.register_plain_state_dict(model)
    return model


def by_accelerate(model, folder):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.Accelerator(cpu=not torch.cuda.is_available()).save_model(model, folder)


def by_safetensors(name, model, folder):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    what = model if name == "save_model" else model.state_dict()
    getattr(safetensors, name)(what, folder / "model.safetensors")


WAYS = {
    "safetensors' save_model": functools.partial(by_safetensors, "save_model"),
    "safetensors' save_file": functools.partial(by_safetensors, "save_file"),
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "Accelerator.save_model": by_accelerate,
    "torch.save": lambda model, folder: torch.save(model.state_dict(), folder / "model.pt"),
}
ON_RANK_0 = ("Accelerator.save_model", "save_pretrained")
"""Those that write there alone."""


def saved(way, model):
    """What is in the files, and how many bytes they have."""
    folder = Path(tempfile.mkdtemp())
    WAYS[way](model, folder)
    files = [path for path in folder.iterdir() if path.suffix in (".pt", ".safetensors")]
    size, found = sum(path.stat().st_size for path in files), {}
    for path in files:
        if path.suffix == ".pt":
            found |= torch.load(path, weights_only=True)
        else:
            found |= pytest.importorskip("safetensors.torch").load_file(path)
    return found, size


def buffers(tensor):
    return dict(tensor.record.buffers()) if isinstance(tensor, zerofp4.NVFP4Tensor) else {"all": tensor}


REFUSALS = {
    "converted": (TypeError, r"cannot hold the NVFP4Tensor .*zerofp4\.register_plain_state_dict"),
    "tied": (RuntimeError, "Some tensors share memory"),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", ["plain", "values", "converted", "tied"])
def test_every_tensor_is_written(world, kind):
    """A tied one once, which is read under both names. Packages that cannot hold a quantized tensor name the
    way that can.
    """
    model, tied = tiny_llama(world, kind), kind == "tied"
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    optimizer = ZeroFP4Optimizer(model.named_parameters(), lr=0.01)
    tokens = torch.arange(8, device=world.device).view(1, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    refuse = {"converted": WAYS.keys() - {"torch.save"}, "tied": {"safetensors' save_file"}}.get(kind, ())
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    assert len(expected) == 21
    once = sum(value.nbytes for name, value in expected.items() if not tied or name != "lm_head.weight")
    most = once + AROUND * (5 if kind == "converted" else 1)  # several buffers for each tensor
    for way in WAYS:
        if way in refuse:
            with pytest.raises(REFUSALS[kind][0], match=REFUSALS[kind][1]):
                saved(way, model)
            continue
        found, size = saved(way, model)
        if way in ON_RANK_0 and world.rank:
            continue
        missing = expected.keys() - found.keys()
        assert size < most and found.keys() <= expected.keys(), way
        assert not missing or (tied and missing < {"lm_head.weight", "model.embed_tokens.weight"}), way
        for name, value in found.items():
            for part, buffer in buffers(expected[name]).items():
                written = buffers(value)[part].to(world.device)
                assert_bytes_equal(written, buffer, f"{way}, {name}, {part}")
