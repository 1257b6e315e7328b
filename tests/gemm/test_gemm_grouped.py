"""Products of groups in one launch: of which values, with which factor, in which group."""

import re

import pytest
import torch
from gemm_cases import relative_error
from grouped_cases import values
from helpers import assert_bytes_equal

import zerofp4
from zerofp4 import Operand, reference
from zerofp4.gemm import grouped

SPLITS = [[16, 0, 17, 3], [0, 0, 36, 0], [130, 1, 62, 64], [5]]


@pytest.fixture(autouse=True)
def needs_grouped_mm(device):
    if grouped._grouped_mm is None:
        pytest.skip(f"torch {torch.__version__} has no grouped_mm")
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in grouped.CAPABILITIES:
        pytest.skip("grouped_mm is not one kernel on this GPU")


def groups_of(splits, cols, device, seed=0, on_device=True, **options):
    x = values(splits, cols, device, seed=seed)
    given = torch.tensor(splits, device=device) if on_device else splits
    return zerofp4.quantize_grouped(x, given, columnwise=True, **options), x


def specified_rows(groups, splits) -> list[torch.Tensor]:
    """float64 values of each group's rows, without global scales."""
    begins = groups.data_offsets.tolist()
    data, scale = groups.rowwise_data.cpu(), groups.rowwise_scale.cpu()
    return [
        reference.nvfp4_operand(data[begin : begin + rows], scale[begin : begin + rows], 1)
        for begin, rows in zip(begins, splits, strict=False)
    ]


def specified_columns(groups, splits) -> list[torch.Tensor]:
    """float64 [K, rows up to a multiple of 16] of each group."""
    cols, begins = groups.shape[1], groups.data_offsets.tolist()
    data, scale = groups.columnwise_data.cpu(), groups.columnwise_scale.cpu()
    found = []
    for begin, rows in zip(begins, splits, strict=False):
        blocks = -(-rows // 16)
        codes = data[cols * begin // 2 :][: cols * blocks * 8].view(cols, -1)
        scales = scale[cols * begin // 16 :][: cols * blocks].view(cols, -1)
        found.append(reference.nvfp4_operand(codes, scales, 1) if rows else torch.zeros(cols, 0).double())
    return found


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_rows_without_the_padding(device, splits):
    groups, _ = groups_of(splits, 48, device)
    expected = torch.cat(specified_rows(groups, splits))
    assert_bytes_equal(grouped.rowwise_values(groups).cpu(), expected.bfloat16(), "rows")
    group = torch.repeat_interleave(torch.arange(len(splits)), torch.tensor(splits))
    assert torch.equal(grouped.groups_of_rows(groups).cpu(), group)


@pytest.mark.parametrize("options", [{}, {"hadamard": True}], ids=["plain", "hadamard"])
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_columns_side_by_side(device, splits, options):
    groups, _ = groups_of(splits, 48, device, **options)
    actual = grouped.columnwise_values(groups).cpu()
    assert actual.shape == (48, len(groups.rowwise_data))
    expected = torch.cat(specified_columns(groups, splits), dim=1)
    used = int(groups.data_offsets[-1])
    assert_bytes_equal(actual[:, :used].contiguous(), expected.bfloat16(), "columns")
    assert not actual[:, used:].any()


def weights_of(count, device, side, shape=(40, 48)):
    made = [
        zerofp4.quantize(values([shape[0]], shape[1], device, seed=seed) * 4**seed, columnwise=True)
        for seed in range(count)
    ]
    return [Operand(each, side) for each in made]


@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_each_group_by_its_weight(device, splits, side):
    """The factor of a group is in its weight, rounded: then float32 sums, rounded once."""
    weights = weights_of(len(splits), device, side)
    groups, _ = groups_of(splits, weights[0].shape[1], device, seed=9)
    actual = grouped.grouped_gemm(groups, weights)
    assert actual.dtype == torch.bfloat16 and actual.shape == (sum(splits), weights[0].shape[0])
    factor = torch.tensor(1 / 2688)
    pieces = []
    for weight, rows, amax in zip(weights, specified_rows(groups, splits), groups.amax.cpu(), strict=True):
        shared = (weight.copy.amax.cpu() * factor) * amax
        data, scale = weight.copy.data.cpu(), weight.copy.scales["compact"].cpu()
        folded = reference.dequantize(data, scale, shared, 16, torch.bfloat16)
        pieces.append(rows @ folded.double().t())
    expected = torch.cat(pieces)
    slack = 1e-5 * expected.norm() / expected.numel() ** 0.5
    assert ((actual.cpu().double() - expected).abs() <= 2.0**-8 * expected.abs() + slack).all()


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_gradients_of_weights(device, splits):
    options = {"hadamard": True}
    a, _ = groups_of(splits, 40, device, seed=1, **options)
    b, _ = groups_of(splits, 48, device, seed=2, **options)
    actual = grouped.grouped_wgrad(a, b)
    assert actual.dtype == torch.bfloat16 and actual.shape == (len(splits), 40, 48)
    pairs = zip(specified_columns(a, splits), specified_columns(b, splits), strict=True)
    alpha = reference.gemm_alpha(a.columnwise_amax.cpu(), b.columnwise_amax.cpu()).double()
    expected = torch.stack([left @ right.t() for left, right in pairs]) * alpha.view(-1, 1, 1)
    for group, (mine, other) in enumerate(zip(actual, expected, strict=True)):
        assert relative_error(mine, other) <= 5e-3, f"group {group}"
    for group, rows in enumerate(splits):
        assert rows or not actual[group].any(), "a group without rows"


def test_splits_that_are_wrong_give_nan(device):
    weights = weights_of(2, device, "rowwise")
    groups, _ = groups_of([20, 16], 48, device)
    if device.type == "cuda":
        x = values([36], 48, device)
        groups = zerofp4.quantize_grouped(x, torch.tensor([40, 3], device=device), columnwise=True)
    else:  # where they are checked before: what the kernels leave then
        for buffer in (groups.offsets, groups.data_offsets, groups.rowwise_data, groups.columnwise_data):
            buffer.zero_()
        groups.error.fill_(1)
    assert grouped.grouped_gemm(groups, weights).isnan().all()
    assert grouped.grouped_wgrad(groups, groups).isnan().all()


def test_why_not():
    on_cpu = grouped.why_not_grouped(torch.device("cpu"), torch.bfloat16, (64, 64))
    assert on_cpu == "grouped_mm is one kernel on compute capabilities (9, 10) only, got cpu"


@pytest.mark.parametrize(
    ("capability", "dtype", "sizes", "message"),
    [
        ((9, 0), torch.bfloat16, (64, 48), None),
        ((10, 0), torch.bfloat16, (64, 48), None),
        ((8, 0), torch.bfloat16, (64, 48), "is one kernel on compute capabilities"),
        ((12, 0), torch.bfloat16, (64, 48), "is one kernel on compute capabilities"),
        ((9, 0), torch.float16, (64, 48), "takes bfloat16 and multiples of 8, got torch.float16"),
        ((9, 0), torch.bfloat16, (64, 44), r"multiples of 8, got torch.bfloat16 and \(64, 44\)"),
    ],
)
def test_the_rule(monkeypatch, capability, dtype, sizes, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = grouped.why_not_grouped(torch.device("cuda", 0), dtype, sizes)
    assert reason is None if message is None else re.search(message, reason)
