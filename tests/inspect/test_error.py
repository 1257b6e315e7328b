"""quantization_error, against the specification and numbers that are known."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn

import zerofp4
from zerofp4 import quantization_error, reference
from zerofp4.inspect import QuantizationReport

# A sum of squares in float64, whose order is torch's choice.
SUMS = {"rel": 1e-12, "abs": 0}


class Model(nn.Module):
    """Its parameters are these weights, called w0, w1, ..."""

    def __init__(self, *weights: torch.Tensor):
        super().__init__()
        for i, weight in enumerate(weights):
            self.register_parameter(f"w{i}", nn.Parameter(weight))


def converted(*shapes: tuple[int, ...], device=None) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(k, n, bias=False, device=device) for n, k in shapes))
    zerofp4.convert_model(model)
    return model


def expected(x: torch.Tensor, block_rows: int) -> dict:
    """What a record says of a matrix that was quantized from x, by the specification and one by one."""
    made = reference.quantize(x, block_rows)
    codes = reference.unpack(made.rowwise_data)
    values = reference.dequantize(made.rowwise_data, made.rowwise_scale, made.amax, block_rows)
    difference = (values.float() - x.float()).double().norm().item()
    relative = difference / x.double().norm().item()
    scale, underflows = made.rowwise_scale.view(torch.uint8), 0
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = x[i * block_rows : (i + 1) * block_rows, 16 * j : 16 * j + 16]
            underflows += bool(scale[i, j] <= 1) and bool(block.abs().max() > 0)
    return {
        "shape": tuple(x.shape),
        "compared_with": "initial value",
        "sqnr_db": pytest.approx(-20 * math.log10(relative), **SUMS),
        "relative_error": pytest.approx(relative, **SUMS),
        "zeros": sum(code % 8 == 0 for code in codes.flatten().tolist()) / x.numel(),
        "saturated": sum(code % 8 == 7 for code in codes.flatten().tolist()) / x.numel(),
        "underflows": underflows,
        "amax": made.amax.item(),
        "flipped": None,
    }


def with_small_blocks(shape: tuple[int, ...]) -> torch.Tensor:
    """Blocks of very different sizes, also such that their scales underflow, and zeros."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(shape[-2]) // 16
    x *= (10.0 ** -(3 * (rows % 3).float()))[:, None]
    x[..., :16] *= 1e-3
    if shape[-1] > 16:
        x[..., -16:, -16:] = 0
    return x


@pytest.mark.parametrize(
    ("shape", "block"), [((16, 16), 16), ((34, 50), 16), ((130, 66), 16), ((3, 50, 34), 16), ((34, 50), 1)]
)
@pytest.mark.parametrize("columnwise", [False, True])
def test_numbers_are_those_of_the_specification(device, columnwise, shape, block):
    x = with_small_blocks(shape)
    stack = x if len(shape) == 3 else x[None]
    sides = {"rowwise": not columnwise, "columnwise": columnwise} if block == 16 else {}
    model = Model(zerofp4.quantize(x.to(device), block=(block, 16), **sides))
    model.w0.record.attachments["high_precision_init_val"] = x
    records = quantization_error(model).records
    names = ["w0"] if len(shape) == 2 else [f"w0[{e}]" for e in range(3)]
    assert records == [
        {"name": name} | expected(matrix, block) for name, matrix in zip(names, stack, strict=True)
    ]
    assert shape == (16, 16) or all(record["underflows"] for record in records)


def test_a_matrix_whose_numbers_are_known(device):
    """With this amax a block's scale is its amax / 6. A block of 6s, one of zeros, one with the smallest
    scale, and one that underflows: its codes are 6, and its values 0.
    """
    x = torch.zeros(32, 32)
    x[:16, :16], x[16:, :16], x[16:, 16:] = 2688, 6 * 2**-9, 2**-10
    model = Model(zerofp4.quantize(x.to(device)))
    record = quantization_error(model).records[0]
    assert {k: v for k, v in record.items() if v is not None} == {
        "name": "w0", "shape": (32, 32), "zeros": 0.25, "saturated": 0.75, "underflows": 2, "amax": 2688.0
    }  # fmt: skip


def test_what_has_no_error(device):
    model = converted((32, 32), (16, 32), device=device)
    with torch.no_grad():
        model[0].weight.zero_()
        model[1].weight.fill_(1.5)
    zero, exact = quantization_error(model).records
    assert (zero["sqnr_db"], zero["relative_error"], zero["zeros"], zero["amax"]) == (math.inf, 0, 1, 0)
    assert exact["relative_error"] < 1e-6 and exact["zeros"] == 0
    assert "inf" in str(quantization_error(model))


def test_flipped_codes_are_counted_exactly(device):
    model = converted((32, 32), (16, 34), device=device)
    first = quantization_error(model, keep_codes=True)
    assert {name: codes.device.type for name, codes in first.codes.items()} == {
        "0.weight": "cpu", "1.weight": "cpu"
    }  # fmt: skip
    with torch.no_grad():
        data = model[1].weight.rowwise_data
        data[3, 5] ^= 0x10  # one code
        data[0, 0] ^= 0x83  # two
    second = quantization_error(model, previous=first)
    assert [record["flipped"] for record in second.records] == [0, 3 / (16 * 34)]
    assert not second.codes and first.codes["1.weight"][0, 0] != data[0, 0].cpu()


def test_without_a_value_to_compare_with(device):
    model = converted((32, 32), device=device)
    model[0].weight.clear_high_precision_init_val()
    report = quantization_error(model)
    (record,) = report.records
    assert [record[k] for k in ("compared_with", "sqnr_db", "relative_error", "flipped")] == [None] * 4
    head, row = str(report).splitlines()
    assert row.split()[4:6] == ["-", "-"] and head.split()[:2] == ["weight", "shape"]


def test_masters_of_an_optimizer(device):
    model = converted((32, 32), (16, 32), device=device)
    model[1].weight.requires_grad_(False)
    optimizer = zerofp4.optim.ZeroFP4Optimizer(model.named_parameters(), lr=0.1)
    model(torch.randn(4, 32, device=device)).square().mean().backward()
    optimizer.step()
    trained, frozen = quantization_error(model, optimizer).records
    master = optimizer.gathered_masters()[0].double()
    difference = model[0].weight.dequantize(torch.float32).double() - master
    assert trained["compared_with"] == "master" and frozen["compared_with"] != "master"
    assert trained["relative_error"] == pytest.approx((difference.norm() / master.norm()).item(), rel=1e-6)


def test_models_without_nvfp4_weights():
    assert str(quantization_error(nn.Linear(4, 4))) == "no NVFP4 weight (2 other parameters)"
    report = quantization_error(Model(zerofp4.quantize_mxfp8(torch.randn(32, 32))))
    assert report.records == [] and str(report) == "no NVFP4 weight (1 other parameters)"


def test_a_long_table_has_the_worst():
    empty = quantization_error(converted((16, 16))).records[0]
    records = [empty | {"name": f"w{i}", "sqnr_db": float(i)} for i in reversed(range(103))]
    lines = str(QuantizationReport(records, 0)).splitlines()
    assert len(lines) == 102 and lines[1].startswith("w0 ") and lines[-2].startswith("w99 ")
    assert lines[-1] == "and 3 more, none with a lower SQNR"


def test_wrong_arguments():
    model, other = converted((16, 32)), converted((32, 32))
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    without, larger = quantization_error(model), quantization_error(other, keep_codes=True)
    for error, message, arguments in (
        (TypeError, r"model must be an nn\.Module, got dict", {"model": {}}),
        (TypeError, "optimizer must be a ZeroFP4Optimizer, got SGD", {"optimizer": sgd}),
        (TypeError, "previous must be what quantization_error returned, got list", {"previous": []}),
        (ValueError, r"previous has no codes of '0\.weight': make it with keep_codes", {"previous": without}),
        (ValueError, r"codes \(32, 16\) of '0\.weight', which now has \(16, 16\)", {"previous": larger}),
    ):
        with pytest.raises(error, match=message):
            quantization_error(**{"model": model} | arguments)


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    model = converted((32, 32), (16, 32))
    model[1].weight.clear_high_precision_init_val()
    quantization_error(model).plot(tmp_path / "error.png")
    assert (tmp_path / "error.png").read_bytes().startswith(b"\x89PNG")


def test_no_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        quantization_error(converted((16, 16))).plot(tmp_path / "error.png")
