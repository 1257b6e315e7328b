"""Buffers have the dtype and the device that kernels expect, whatever torch's defaults are."""

import ast
from pathlib import Path

import pytest
import torch
from cases.optim import make_gradients, make_parameters, set_gradients
from helpers import assert_all_equal, assert_bytes_equal

import zerofp4
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


@pytest.fixture(autouse=True)
def bfloat16_by_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


FACTORIES = set(
    "arange as_tensor asarray empty empty_permuted empty_strided eye full linspace logspace normal ones rand "
    "randint randn randperm scalar_tensor tensor zeros Tensor".split()
)


def unnamed(option: str, source: str, owners: tuple[str, ...] = ("", "torch")) -> list[str]:
    """Calls of torch's factories, or of one under its own name as a variable, that do not name dtype or
    device. What makes a tensor like another one (new_empty, zeros_like) is none.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        owner, _, name = ast.unparse(node.func).rpartition(".")
        names_one = any(keyword.arg in (option, None) for keyword in node.keywords)  # None is of **options
        if name in FACTORIES and owner in owners and not names_one:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_every_factory_call_of_the_package_names_a_dtype():
    """Those of integers, too: whoever reads them need not know which ones torch guesses."""
    package = Path(zerofp4.__file__).parent
    found = {path.relative_to(package): unnamed("dtype", path.read_text()) for path in package.rglob("*.py")}
    assert not any(found.values()), {str(name): calls for name, calls in found.items() if calls}


def test_every_factory_call_of_the_product_names_a_device():
    """With a default device of a GPU nothing on the host could be pinned; on meta kernels got address 0."""
    package = Path(zerofp4.__file__).parent
    paths = [p for p in package.rglob("*.py") if p.relative_to(package).parts[0] != "reference"]
    found = {path.name: unnamed("device", path.read_text(), ("torch",)) for path in paths}
    for calls in found.values():
        calls[:] = [call for call in calls if "as_tensor" not in call]  # of what has a device
    assert not any(found.values()), {name: calls for name, calls in found.items() if calls}


def test_a_step_under_another_default_device(device):
    parameters = make_parameters(device)
    with torch.device("meta"):
        optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, lr=0.1)
        set_gradients(parameters, gradients_on_the_host(parameters))
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    expected = make_parameters(device)
    other = ZeroFP4Optimizer(expected, FusedAdamW, lr=0.1)
    for _ in range(2):
        set_gradients(expected, gradients_on_the_host(expected))
        other.step()
    assert_all_equal(optimizer.gathered_masters(), other.gathered_masters(), "master")


def gradients_on_the_host(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.device("cpu"):
        return make_gradients(parameters, 0)


def test_values_of_python_are_not_rounded(device):
    weight = zerofp4.empty((16, 16), dtype=torch.float32, device=device)
    weight.fill_(0.1)
    assert weight.amax.dtype == torch.float32 and weight.amax.item() == torch.tensor(0.1, dtype=torch.float32)


def test_full_state_that_becomes_compact(device):
    p = torch.randn(40, 200, device=device, dtype=torch.float32)
    saved, states = FusedAdamW([p]), []
    p.grad = torch.randn_like(p)
    saved.step()
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        loaded = FusedAdamW([p], state="compact")
        loaded.load_state_dict(saved.state_dict())
        loaded.step()
        back = FusedAdamW([p])
        back.load_state_dict(loaded.state_dict())
        states.append((loaded.state[p], back.state[p]))
    for state in states[1:]:
        for mine, expected in zip(state, states[0], strict=True):
            for name, value in expected.items():
                assert_bytes_equal(mine[name], value, name)
