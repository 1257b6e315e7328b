"""zerofp4.testing in one process: the assertions that every test leans on, and the check of a live model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zerofp4
from zerofp4.format import SCALE_LAYOUTS
from zerofp4.optim import ZeroFP4Optimizer
from zerofp4.testing import (
    VerificationError,
    assert_bytes_equal,
    first_difference,
    verify_model,
    verify_weights,
    weight_buffers,
)

# Two tensors


def test_equal_bytes_pass():
    for tensor in (
        torch.arange(6, dtype=torch.uint8).reshape(2, 3),
        torch.tensor([0.5, float("nan")]),
        torch.tensor(1.5),
        torch.zeros(0, 4, dtype=torch.bfloat16),
        torch.arange(6).reshape(2, 3).t(),
    ):
        assert_bytes_equal(tensor, tensor.clone(), "tensor")


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.zeros(2), torch.zeros(3), "shape (2,), expected (3,)"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), "dtype torch.float32, expected torch.int32"),
        (
            torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8),
            torch.tensor([[1, 2], [7, 0xFF]], dtype=torch.uint8),
            "2 of 4 elements differ, the first at [1, 0]: 0x03, expected 0x07",
        ),
        (
            torch.tensor([0.0]),
            torch.tensor([-0.0]),
            "1 of 1 elements differ, the first at [0]: 0x00000000 (0.0), expected 0x80000000 (-0.0)",
        ),
        (
            torch.tensor(448.0).to(torch.float8_e4m3fn),
            torch.tensor(1.0).to(torch.float8_e4m3fn),
            "1 of 1 elements differ, the first at []: 0x7e (448.0), expected 0x38 (1.0)",
        ),
        (
            torch.tensor([[0, 0], [0, 0], [0, 9]], dtype=torch.uint8).t(),  # a view: by its coordinates
            torch.zeros(2, 3, dtype=torch.uint8),
            "1 of 6 elements differ, the first at [1, 2]: 0x09, expected 0x00",
        ),
    ],
)
def test_first_difference_names_it(actual, expected, message):
    assert first_difference(actual, expected) == message
    with pytest.raises(AssertionError, match="codes: "):
        assert_bytes_equal(actual, expected, "codes")


def test_tensors_of_two_devices_are_compared(device):
    x = torch.arange(6.0, device=device)
    assert first_difference(x, x.cpu()) is None
    assert "the first at [2]: 0x40a00000 (5.0)" in first_difference(
        x.cpu().index_fill(0, torch.tensor(2), 5.0), x
    )


# A live model


def make_weights(device) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """An NVFP4 weight with every buffer, one of odd rows, one of three dimensions, experts, two others;
    masters.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = {"whole": (34, 48), "odd": (33, 16), "deep": (2, 3, 32), "bias": (7,), "scalar": ()}
    shapes["experts"] = (3, 18, 32)
    masters = [torch.randn(shape, generator=generator).to(device) for shape in shapes.values()]
    weights = {
        "whole": zerofp4.quantize(masters[0].bfloat16(), columnwise=True, scale_layouts=SCALE_LAYOUTS),
        "odd": zerofp4.quantize(masters[1], block=(1, 16)),
        "deep": zerofp4.quantize(masters[2].half(), block=(1, 16), columnwise=True),
        "bias": masters[3].bfloat16(),
        "scalar": masters[4].clone(),
        "experts": zerofp4.quantize(masters[5].bfloat16(), columnwise=True, scale_layouts=SCALE_LAYOUTS),
    }
    return weights, masters


def test_weights_that_are_their_masters_casts(device):
    weights, masters = make_weights(device)
    assert verify_weights(weights, masters) == {"nvfp4_weights": 4, "other_weights": 2}
    assert verify_weights(weights, [master.flatten() for master in masters])["nvfp4_weights"] == 4
    weights["bias"].add_(1)
    assert verify_weights(weights, [*masters[:3], None, *masters[4:]])["other_weights"] == 2


def test_every_buffer_is_looked_at(device):
    weights, masters = make_weights(device)
    places = [(name, buffer) for name, weight in weights.items() for buffer in weight_buffers(weight)]
    assert ("whole", "columnwise_scale_swizzled") in places and ("scalar", "data") in places
    for name, buffer in places:
        raw = weight_buffers(weights[name])[buffer].view(-1).view(torch.uint8)
        kept = raw.clone()
        raw[5 % raw.numel()] += 1
        with pytest.raises(VerificationError, match=rf"{name}\.{buffer} is not its master's cast: 1 of "):
            verify_weights(weights, masters)
        raw.copy_(kept)
    verify_weights(weights, masters)


@pytest.mark.parametrize("shape", [(16, 32), (2, 16, 32)])
def test_weights_that_share_an_amax(device, shape):
    """Stacks expert by expert: the first of one weight with the first of the other."""
    masters = [torch.randn(shape, device=device) * f for f in (1.0, 3.0)]
    amax = torch.stack([m.abs().amax((-2, -1)) for m in masters]).amax(0).view(-1)
    weights = {name: zerofp4.quantize(m, amax=amax) for name, m in zip("qk", masters, strict=True)}
    assert verify_weights(weights, masters, amax_groups=[list(weights.values())])["nvfp4_weights"] == 2
    with pytest.raises(VerificationError, match=r"q\.amax is not its master's cast"):
        verify_weights(weights, masters)


@pytest.mark.parametrize("shape", [(130, 144), (3, 66, 80)])
def test_weights_of_four_over_six(device, shape):
    """Not those that are quantized without it, of which some tiles have other scales."""
    master = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    choice = zerofp4.FourOverSix(448, "mse")
    weights = {"w": zerofp4.quantize(master.bfloat16(), columnwise=True, four_over_six=choice)}
    assert verify_weights(weights, [master])["nvfp4_weights"] == 1
    weights = {"w": zerofp4.empty(shape, four_over_six=choice, device=device)}
    weights["w"].copy_(zerofp4.quantize(master.bfloat16(), columnwise=True))
    with pytest.raises(VerificationError, match=r"w\.rowwise_scale is not its master's cast"):
        verify_weights(weights, [master])


def test_a_long_list_of_differences_is_cut(device):
    weights = {f"w{i}": torch.zeros(3, device=device) for i in range(30)}
    with pytest.raises(
        VerificationError, match=r"(?s)30 buffers are not .*w19\.data.*\n  and 10 more$"
    ) as caught:
        verify_weights(weights, [torch.ones(3)] * 30)
    assert "w20" not in str(caught.value)


def test_a_model_and_its_optimizer(device):
    model = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 6)).to(device)
    zerofp4.convert_model(model)
    optimizer = ZeroFP4Optimizer(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(4, 32, device=device)).sum().backward()
        optimizer.step()
        assert verify_model(model, optimizer) == {"nvfp4_weights": 2, "other_weights": 4}
    model[0].weight.rowwise_data[3, 1] ^= 1
    with pytest.raises(
        VerificationError, match=r"1 buffers .*\n  0\.weight\.rowwise_data is .* \[3, 1\]: 0x"
    ):
        verify_model(model, optimizer)
    with pytest.raises(ValueError, match=r"its parameter 0, \(48, 32\), is none of the model's"):
        verify_model(nn.Linear(2, 2), optimizer)
