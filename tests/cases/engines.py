"""Serving engines on the CPU, in environments of their own: which bytes of an export their loaders take."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import assert_bytes_equal

from cases.serving import FIELDS, read, safetensors, served_modules, trained
from zerofp4 import serving

ROOT = Path(__file__).parents[2]
Export = tuple[str, str, int]
"""An architecture, a format, and whether it has input scales."""


@dataclass(frozen=True)
class Engine:
    """A program in tests/peers that imports an engine, and how pip makes its environment."""

    name: str  # NAME_on_cpu.py; build/NAME; ZEROFP4_NAME_PYTHON, an interpreter to use instead
    pip: tuple[tuple[str, ...], ...]

    def python(self) -> str:
        given = os.environ.get(f"ZEROFP4_{self.name.upper()}_PYTHON")
        folder = ROOT / "build" / self.name
        if given is None and not (folder / "complete").exists():
            self._make_environment(folder)
        return given or str(folder / "bin" / "python")

    def _make_environment(self, folder: Path) -> None:
        """1 or 2 GB, in minutes. Skips the test if a package cannot be had here."""
        if sys.version_info < (3, 11):
            pytest.skip(f"{self.name} needs Python 3.11")
        pip = folder / "bin" / "python", "-m", "pip"
        for step in ([sys.executable, "-m", "venv", folder], *([*pip, *words] for words in self.pip)):
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{self.name} could not be installed: {done.stderr.strip().splitlines()[-1]}")
        (folder / "complete").touch()

    def run(self, out: Path, *arguments: str | Path) -> Path:
        """Runs the program, which writes into `out`."""
        program = ROOT / "tests" / "peers" / f"{self.name}_on_cpu.py"
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        words = [*map(str, (self.python(), program, *arguments))]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=out)
        assert done.returncode == 0, done.stdout + done.stderr
        return out


def exports_of(architectures: Iterable[str]) -> list[Export]:
    return [(name, format, inputs) for name in architectures for format in FIELDS for inputs in (0, 1)]


def write_export(root: Path, name: str, format: str, has_inputs: int) -> Path:
    model, _ = trained(name)
    amaxes = {module: 1 + i / 8 for i, module in enumerate(served_modules(model))}
    folder = root / f"{name}-{format}-{has_inputs}"
    serving.save_pretrained(model, folder, format=format, input_amaxes=amaxes if has_inputs else None)
    return folder


EXPERTS = {"w13_": (["gate_proj", "up_proj"], ["w1", "w3"]), "w2_": (["down_proj"], ["w2"])}
"""By the prefix of an engine's parameters of experts, which projections are in them."""
UP_FIRST = ("weight", "weight_packed", "weight_scale")
"""Fields in which a kernel may want the rows of up before those of gate."""


def _sources(key: str, experts: range, fused: dict[str, list[str]], is_up_first: bool) -> Iterator[list[str]]:
    """What the tensors of a checkpoint may be called that a parameter of an engine is made of."""
    module, _, field = key.rpartition(".")
    last = module.rpartition(".")[2]
    parent = module.removesuffix(last)
    yield [f"{parent}{member}.{field}" for member in fused.get(last, [last])]
    prefix = field[: field.index("_") + 1] if "_" in field else field
    layer, own = module.removesuffix(".routed_experts"), field.removeprefix(prefix)
    for projections in EXPERTS.get(prefix, ()):
        ordered = projections[::-1] if is_up_first and own in UP_FIRST else projections
        yield [f"{layer}.{e}.{name}.{own}" for e in experts for name in ordered]


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[N, K], of scalars and vectors [N, 1]."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.view(-1, 1)


def taken(export: Path, loaded: Path, fused: dict[str, list[str]], *, is_up_first: bool = False) -> set[str]:
    """The tensors of an export that an engine's parameters have, byte for byte.

    `loaded` is a file of the engine's parameters. `fused` says which modules one of its modules is made of.
    """
    exported, all_names = read(export), set()
    for key, found in safetensors.load_file(loaded).items():
        experts = range(found.shape[0] if found.dim() else 0)
        sources = _sources(key, experts, fused, is_up_first)
        names = next((names for names in sources if exported.keys() >= {*names}), [])
        if names:
            expected = torch.cat([_as_rows(exported[each]) for each in names]).to(found.dtype)
            found = found.view(-1, expected.shape[1])[: len(expected)]  # vocabularies are padded
            assert_bytes_equal(found, expected, key)
            all_names |= {*names}
    return all_names
