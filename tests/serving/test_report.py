"""What save_pretrained reports: elements that engines round otherwise, and blocks that Marlin makes zeros."""

from __future__ import annotations

import warnings

import pytest
import torch
from cases.serving import FIELDS, make_plain, read, served_modules, trained
from torch import nn

import zerofp4
from zerofp4 import serving

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def served_values(found: dict[str, torch.Tensor], name: str, format: str) -> torch.Tensor:
    """v * (s * g) of all elements, as engines compute it, with the global scale g of the file."""
    codes, scales, global_ = (found[f"{name}.{field}"] for field in FIELDS[format])
    g = 1 / global_ if format == "compressed-tensors" else global_
    v = E2M1[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()]
    return (v * (scales.float().repeat_interleave(16, dim=1) * g)).bfloat16()


def with_weight(values: torch.Tensor, **options) -> nn.Module:
    """A Llama of which o_proj of the first layer, [64, 64], is quantized from these values."""
    model = make_plain("Llama", num_hidden_layers=1)
    weight = zerofp4.quantize(values.bfloat16(), **options)
    model.model.layers[0].self_attn.o_proj.weight = nn.Parameter(weight)
    return model


NAME = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize("format", FIELDS)
@pytest.mark.parametrize("e4m3_max", [448, 256])
@pytest.mark.parametrize("block", [(16, 16), (1, 16)])
def test_ties_are_counted(format, block, e4m3_max, tmp_path):
    """Against all elements. Of an amax in bfloat16 the mantissa must be a multiple of 7, but not with 256."""
    choice = None if e4m3_max == 448 else zerofp4.FourOverSix(e4m3_max=256)
    generator = torch.Generator().manual_seed(1)
    total = 0
    for mantissa in (128, 130, 153, 180, 183, *range(133, 256, 7)):
        sizes = torch.rand(4, 4, generator=generator).repeat_interleave(16, 0).repeat_interleave(16, 1)
        values = torch.randn(64, 64, generator=generator).mul(sizes).clamp(-0.9, 0.9)
        values[0, 0] = mantissa / 128
        model = with_weight(values, block=block, four_over_six=choice)
        report = serving.save_pretrained(model, tmp_path, format=format)
        weight = model.get_submodule(NAME).weight.dequantize()
        expected = int((served_values(read(tmp_path), NAME, format) != weight).sum())
        assert report.ties == ({NAME: expected} if expected else {})
        assert expected == 0 or mantissa % 7 == 0 or e4m3_max == 256
        total += expected
    assert total > 0


def test_the_table():
    report = serving.ExportReport(3, 12288, 27648, {"a": 100, "b": 1}, {"c": 4})
    lines = repr(report).splitlines()
    assert lines[0] == "3 matrices in NVFP4, 12288 elements; 2.76e-05 GB"
    assert lines[1].startswith("  ties     101 elements of 2 matrices, 0.0082 of all")
    assert lines[2].startswith("  flushed  4 blocks of c have scales below 2^-6") and len(lines) == 3
    assert len(repr(serving.ExportReport(1, 256, 144)).splitlines()) == 2


def test_what_is_counted(tmp_path):
    model, optimizer = trained("Mixtral")
    report = serving.save_pretrained(model, tmp_path, optimizer)
    assert report.matrices == len(served_modules(model))
    assert report.elements == sum(p.numel() for p in model.parameters() if isinstance(p, zerofp4.NVFP4Tensor))
    assert report.nbytes == sum(tensor.nbytes for tensor in read(tmp_path).values())
    assert report.flushed == {}


@pytest.mark.parametrize(
    ("small", "amax", "count"),
    [(448 / 2**-6, None, 0), (448 / 2**-7, None, 64), (448 / 2**-7, 2.5, 0)],
    ids=["the smallest normal scale", "a subnormal one", "subnormal, beside scales up to 179"],
)
def test_blocks_that_marlin_makes_zeros(small, amax, count, tmp_path):
    """Scales of the second block column, beside the largest. amax: above the weight's own."""
    values = torch.ones(64, 64)
    values[:, 16:32] = 1 / small
    amax = None if amax is None else torch.tensor([amax])
    model = with_weight(values, block=(1, 16), amax=amax)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = serving.save_pretrained(model, tmp_path)
    ours = [str(each.message) for each in caught if "Marlin" in str(each.message)]
    assert report.flushed == ({NAME: count} if count else {})
    assert len(ours) == bool(count) and all(f"{count} blocks of {NAME}" in text for text in ours)


def test_fused_matrices_have_one_largest_scale(tmp_path):
    """gate_proj has small scales and up_proj the large ones: engines make one matrix of them."""
    model, amax = make_plain("Llama", num_hidden_layers=1), torch.tensor([1.0])
    mlp = model.model.layers[0].mlp
    for name, largest in (("gate_proj", 0.25), ("up_proj", 1.0)):
        values = torch.full((80, 64), largest)
        values[:, 16:32] = 2**-7 / 448
        values[:, :16] = values[:, :16].where(torch.arange(80)[:, None] == 0, 2**-7 / 448)
        mlp.get_submodule(name).weight = nn.Parameter(zerofp4.quantize(values.bfloat16(), amax=amax))
    with pytest.warns(UserWarning, match=r"mlp\.gate_proj, .*mlp\.up_proj have scales below 2\^-6"):
        report = serving.save_pretrained(model, tmp_path)
    assert set(report.flushed) == {f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj")}
