"""Products of groups in one launch: of which values, with which factor, in which group."""

import itertools
import re

import pytest
import torch
from cases.gemm import relative_error, skip_without_grouped_mm
from cases.grouped import values
from helpers import assert_bytes_equal, poisoned_allocations

import zerofp4
from zerofp4 import Operand, ops, reference
from zerofp4.gemm import grouped

SPLITS = [[16, 0, 17, 3], [0, 0, 36, 0], [130, 1, 62, 64], [5]]
MANY = pytest.param([group * 7 % 40 * (group % 2) for group in range(70)], id="many")
"""Half of them empty, and one row in some."""
of_any_width = pytest.mark.parametrize("cols", [8, 48, 264, 280])
"""Also such that end inside of what a warp writes."""


@pytest.fixture(autouse=True)
def needs_grouped_mm(device):
    skip_without_grouped_mm(device)


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


@of_any_width
@pytest.mark.parametrize("splits", [*SPLITS, MANY], ids=str)
def test_rows_without_the_padding(device, splits, cols):
    groups, _ = groups_of(splits, cols, device)
    with poisoned_allocations():
        actual, ends = grouped.values_of_groups(groups, "rowwise")
    expected = torch.cat(specified_rows(groups, splits))
    assert_bytes_equal(actual.cpu(), expected.bfloat16(), "rows")
    assert ends.dtype == torch.int32 and ends.tolist() == groups.offsets[1:].tolist()
    group = torch.repeat_interleave(torch.arange(len(splits)), torch.tensor(splits))
    assert torch.equal(grouped.groups_of_rows(groups).cpu(), group)


@pytest.mark.parametrize("options", [{}, {"hadamard": True}], ids=["plain", "hadamard"])
@of_any_width
@pytest.mark.parametrize("splits", [*SPLITS, MANY], ids=str)
def test_columns_side_by_side(device, splits, options, cols):
    groups, _ = groups_of(splits, cols, device, **options)
    with poisoned_allocations():
        actual, ends = grouped.values_of_groups(groups, "columnwise")
    actual = actual.cpu()
    assert actual.shape == (cols, len(groups.rowwise_data))
    assert ends.dtype == torch.int32 and ends.tolist() == groups.data_offsets[1:].tolist()
    expected = torch.cat(specified_columns(groups, splits), dim=1)
    used = int(groups.data_offsets[-1])
    assert_bytes_equal(actual[:, :used].contiguous(), expected.bfloat16(), "columns")
    assert not actual[:, used:].any()


@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_values_with_the_factor_of_their_group(device, splits, side):
    """Byte for byte those of an amax that is both, the other one divided by 2688 or by what it says."""
    groups, _ = groups_of(splits, 48, device, hadamard=True)
    other = torch.arange(3.0, 3.0 + len(splits), device=device)
    for e4m3_max in (448, 256):
        actual, _ = grouped.values_of_groups(groups, side, other, e4m3_max)
        shared = (other * (1 / (6 * e4m3_max))) * getattr(groups, side).amax
        exact, _ = grouped.values_of_groups(groups, side)
        ends = (groups.offsets if side == "rowwise" else groups.data_offsets).tolist()
        for group, (begin, end) in enumerate(itertools.pairwise(ends)):
            rows = slice(begin, end)
            own = (exact[rows] if side == "rowwise" else exact[:, rows]).cpu()
            mine = (actual[rows] if side == "rowwise" else actual[:, rows]).cpu()
            scale = block_scales(groups, group, side, splits)
            factor = (scale * shared[group].cpu()) * torch.tensor(1 / 2688)
            codes = torch.where(scale == 0, own.float(), own.float() / scale)
            assert_bytes_equal(mine.contiguous(), (codes * factor).bfloat16(), f"group {group}, {e4m3_max}")


def block_scales(groups, group, side, splits) -> torch.Tensor:
    """float32 scales of a group's elements, as `_values` has these."""
    begin, rows, cols = groups.data_offsets[group].item(), splits[group], groups.shape[1]
    if side == "rowwise":
        return groups.rowwise_scale[begin : begin + rows].cpu().float().repeat_interleave(16, 1)[:, :cols]
    blocks = -(-rows // 16)
    scale = groups.columnwise_scale.cpu()[cols * begin // 16 :][: cols * blocks].view(cols, blocks)
    return scale.float().repeat_interleave(16, 1)


def weights_of(count, device, shape=(40, 48)):
    return [
        zerofp4.quantize(values([shape[0]], shape[1], device, seed=seed) * 4 ** (seed % 9), columnwise=True)
        for seed in range(count)
    ]


def grouped_operand(weights, side="rowwise"):
    return grouped.GroupedOperand([weight.record for weight in weights], side)


def folded(values, shared) -> torch.Tensor:
    """Exact values with the amaxes of a product in them, as the kernels put them there."""
    codes_and_scale = values.float()
    return (codes_and_scale * shared * torch.tensor(1 / 2688)).bfloat16().double()


def near(actual, expected) -> bool:
    """But for the order of float32 sums, one rounding, and one of values, which may go either way."""
    slack = 2.0**-8 * expected.norm() / max(expected.numel(), 1) ** 0.5
    return bool(((actual.cpu().double() - expected).abs() <= 2.0**-8 * expected.abs() + slack).all())


@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_each_group_by_its_weight(device, splits, side):
    """The factor of a group is in its rows, rounded: then float32 sums, rounded once."""
    weights = weights_of(len(splits), device)
    operands = [Operand(weight, columnwise=side == "columnwise") for weight in weights]
    groups, _ = groups_of(splits, operands[0].shape[1], device, seed=9)
    actual = grouped.grouped_gemm(groups, grouped_operand(weights, side))
    assert actual.dtype == torch.bfloat16 and actual.shape == (sum(splits), operands[0].shape[0])
    pieces = []
    for weight, rows, amax in zip(operands, specified_rows(groups, splits), groups.amax.cpu(), strict=True):
        data, scale = weight.copy.data.cpu(), weight.copy.scales["compact"].cpu()
        shared = (weight.copy.amax.cpu() * torch.tensor(1 / 2688)) * amax
        pieces.append(folded(rows, shared) @ reference.nvfp4_operand(data, scale, 16).t())
    assert near(actual, torch.cat(pieces))


def test_weights_of_four_over_six(device):
    """Their largest scale is part of the factor."""
    chosen = zerofp4.FourOverSix(e4m3_max=256)
    weights = [
        zerofp4.quantize(values([40], 48, device, seed=seed), four_over_six=chosen) for seed in range(2)
    ]
    groups, _ = groups_of([20, 16], 48, device)
    actual = grouped.grouped_gemm(groups, grouped_operand(weights))
    on_host, _ = groups_of([20, 16], 48, device, on_device=False)
    singly = [
        zerofp4.gemm(quantized, weight, out_dtype=torch.float32, backend="exact").cpu()
        for quantized, weight in zip(on_host.tensors(), weights, strict=True)
    ]
    assert relative_error(actual, torch.cat(singly).double()) <= 5e-3


@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
@pytest.mark.parametrize("shape", [(40, 48), (64, 48)], ids=str)  # of whole tiles, a stack is one matrix
@pytest.mark.parametrize("count", [3, 40])  # 40: more than travel in a kernel's arguments
def test_a_stack_is_its_matrices(device, count, shape, side):
    weights = weights_of(count, device, shape)
    stack = zerofp4.quantize(torch.stack([weight.dequantize() for weight in weights]), columnwise=True)
    one, other = grouped.GroupedOperand([stack.record], side), grouped_operand(stack.unbind(), side)
    assert_bytes_equal(one.amaxes, other.amaxes, "amaxes")
    assert_bytes_equal(one.values(), other.values(), "values")
    for operand, values_of_one in zip(stack.unbind(), one.values(), strict=True):
        exact = ops.values_of(
            getattr(operand.record, side).data,
            getattr(operand.record, side).scales["compact"],
            ops.neutral_amax(device),
            16,
            448,
            False,
            torch.bfloat16,
        )
        assert_bytes_equal(values_of_one, exact, "values")


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_gradients_of_weights(device, splits):
    options = {"hadamard": True}
    a, _ = groups_of(splits, 40, device, seed=1, **options)
    b, _ = groups_of(splits, 48, device, seed=2, **options)
    actual = grouped.grouped_wgrad(a, b)
    assert actual.dtype == torch.bfloat16 and actual.shape == (len(splits), 40, 48)
    pairs = zip(specified_columns(a, splits), specified_columns(b, splits), strict=True)
    for group, (left, right) in enumerate(pairs):
        shared = (b.columnwise_amax[group].cpu() * torch.tensor(1 / 2688)) * a.columnwise_amax[group].cpu()
        assert near(actual[group], folded(left, shared) @ right.t()), f"group {group}"
        assert splits[group] or not actual[group].any(), "a group without rows"


def test_splits_that_are_wrong_give_nan(device):
    weights = weights_of(2, device)
    groups, _ = groups_of([20, 16], 48, device)
    if device.type == "cuda":
        x = values([36], 48, device)
        groups = zerofp4.quantize_grouped(x, torch.tensor([40, 3], device=device), columnwise=True)
    else:  # where they are checked before: what the kernels leave then
        for buffer in (groups.offsets, groups.data_offsets, groups.rowwise_data, groups.columnwise_data):
            buffer.zero_()
        groups.error.fill_(1)
    assert grouped.grouped_gemm(groups, grouped_operand(weights)).isnan().all()
    assert grouped.grouped_wgrad(groups, groups).isnan().all()


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
