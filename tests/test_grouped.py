"""quantize_grouped on every backend: each group is quantize of that group alone, byte for byte; every other
byte of the storage is zero.
"""

import pytest
import torch
from helpers import assert_bytes_equal
from hypothesis import given
from hypothesis import strategies as st
from op_cases import DTYPES, KINDS, POISON, draw_values, run_with_instruction_set

import zerofp4
from zerofp4 import reference
from zerofp4.format import SCALE_DTYPE, SCALE_LAYOUTS
from zerofp4.layout import ceil_div, round_up
from zerofp4.ops.grouped import grouped_shapes
from zerofp4.storage import BUFFERS

SPLITS = [
    [1],
    [0],
    [16, 16, 16],
    [0, 17, 0, 0, 128, 3, 0],
    [256, 255, 257],
    [130, 2, 62, 1],
    [1] * 40,
    [5, 0, 31] * 90,  # more groups than a thread block has threads
]
SPLIT_IDS = [f"{len(splits)} groups of {sum(splits)}" for splits in SPLITS]
COLS = [2, 144, 288]
HADAMARD = [{}, {"columnwise": True}] + [
    {"columnwise": True, "hadamard": True, "random_signs": signs, "rowwise": rowwise}
    for signs in (True, False)
    for rowwise in (True, False)
]


def values(splits, cols, device, dtype=torch.bfloat16, kind="normal", seed=0):
    """Groups of different sizes of values, so that no amax fits another group."""
    rows = sum(splits)
    x = draw_values(seed, rows * cols, kind).view(rows, cols)
    scale = torch.cat([torch.full((n, 1), 2.0 ** (g % 7)) for g, n in enumerate(splits)])
    return (x * scale).to(dtype).to(device)


def columnwise_matrix(q: reference.Quantized, rows: int, cols: int, hadamard: bool):
    """Data and compact scale of the columnwise copy, data padded to a multiple of 16 rows."""
    data, scale = q.columnwise_data, q.columnwise_scale
    padded = data.new_zeros((cols, ceil_div(rows, 16) * 8))
    padded[:, : data.shape[1]] = data
    return padded, scale


def quantized_alone(x, hadamard, random_signs) -> reference.Quantized:
    """By the specification, which has no columnwise copy of an odd number of rows: a row of zeros more."""
    q = reference.quantize(x, 1, hadamard=hadamard, random_signs=random_signs)
    if q.columnwise_data is not None:
        return q
    more = reference.quantize(torch.cat([x, x.new_zeros(1, x.shape[1])]), 1, q.amax)
    return more._replace(rowwise_data=q.rowwise_data, rowwise_scale=q.rowwise_scale)


def expected_storage(x, splits, hadamard=False, random_signs=True) -> dict[str, torch.Tensor]:
    """What every buffer should hold, of the specification's bytes of every group."""
    tokens, cols = x.shape
    shapes = grouped_shapes(tokens, len(splits), cols)
    expected = {name: torch.zeros(shape, dtype=torch.uint8) for name, shape in shapes.items()}
    amaxes = {name: torch.zeros(len(splits)) for name in ("amax", "columnwise_amax")}
    first = data_row = scale_row = 0
    for group, rows in enumerate(splits):
        if rows and cols:
            part = x[first : first + rows].cpu()
            q = quantized_alone(part, hadamard, random_signs)
            amaxes["amax"][group] = q.amax
            amaxes["columnwise_amax"][group] = q.columnwise_amax
            expected["rowwise_data"][data_row : data_row + rows] = q.rowwise_data
            expected["rowwise_scale"][data_row : data_row + rows] = q.rowwise_scale.view(torch.uint8)
            data, scale = columnwise_matrix(q, rows, cols, hadamard)
            for name, value, begin in (
                ("columnwise_data", data, cols * data_row // 2),
                ("columnwise_scale", scale, cols * data_row // 16),
            ):
                flat = value.view(torch.uint8).flatten()
                expected[name][begin : begin + flat.numel()] = flat
            for side, compact, m, k in (
                ("rowwise", q.rowwise_scale, rows, cols),
                ("columnwise", scale, cols, rows),
            ):
                begin = scale_row if side == "rowwise" else round_up(cols, 128) * scale_row // 16
                padded = reference.expand_scale(compact, m, k, 1)
                for layout in SCALE_LAYOUTS[1:]:
                    value = padded if layout == "expanded" else reference.swizzle_scale(padded)
                    value = value.view(torch.uint8)
                    value = value if side == "rowwise" else value.flatten()
                    expected[f"{side}_scale_{layout}"][begin : begin + value.shape[0]] = value
        first, data_row = first + rows, data_row + round_up(rows, 16)
        scale_row += round_up(rows, 128)
    return expected | amaxes


def assert_storage(grouped, x, splits, what: str) -> None:
    expected = expected_storage(x, splits, grouped.hadamard, grouped.random_signs)
    if grouped.rowwise_data is None and grouped.hadamard:
        expected["amax"] = expected["columnwise_amax"]
    if not grouped.hadamard:
        expected["columnwise_amax"] = expected["amax"]
    for name in BUFFERS:
        buffer = getattr(grouped, name)
        if buffer is not None:
            buffer = buffer if "amax" in name else buffer.view(torch.uint8)
            assert_bytes_equal(buffer, expected[name].to(buffer.device), f"{what}: {name}")
    assert grouped.error.item() == 0, what


def poison_allocations(monkeypatch) -> None:
    """Storage that quantize_grouped allocates holds POISON, so that a byte that is not written is seen."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        buffer = empty(*args, **kwargs)
        buffer.view(torch.uint8).fill_(POISON)
        return buffer

    monkeypatch.setattr(torch, "empty", poisoned)


# The bytes


@pytest.mark.parametrize("splits", SPLITS, ids=SPLIT_IDS)
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("options", HADAMARD, ids=str)
def test_every_group_is_quantize_of_it_alone(device, monkeypatch, splits, cols, options):
    poison_allocations(monkeypatch)
    x = values(splits, cols, device)
    grouped = zerofp4.quantize_grouped(x, splits, scale_layouts=SCALE_LAYOUTS, **options)
    assert_storage(grouped, x, splits, f"{splits} {cols} {options}")


@given(
    splits=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    half=st.integers(1, 150),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    options=st.sampled_from(HADAMARD),
    seed=st.integers(0, 2**32 - 1),
)
def test_drawn(device, splits, half, dtype, kind, options, seed):
    x = values(splits, 2 * half, device, dtype, kind, seed)
    grouped = zerofp4.quantize_grouped(x, splits, scale_layouts=SCALE_LAYOUTS, **options)
    assert_storage(grouped, x, splits, f"{splits} {2 * half} {dtype} {kind} {options}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_larger_than_a_tile(device, dtype):
    splits = [1000, 24, 600, 513]
    x = values(splits, 272, device, dtype)
    options = {"columnwise": True, "hadamard": True, "scale_layouts": SCALE_LAYOUTS}
    assert_storage(zerofp4.quantize_grouped(x, splits, **options), x, splits, f"{dtype}")


@pytest.mark.parametrize("splits", [[0, 0, 0], []])
def test_no_tokens(device, monkeypatch, splits):
    poison_allocations(monkeypatch)
    x = torch.empty((0, 32), device=device)
    options = {"columnwise": True, "scale_layouts": SCALE_LAYOUTS}
    grouped = zerofp4.quantize_grouped(x, splits, **options)
    assert_storage(grouped, x, splits, f"{splits}")
    assert grouped.offsets.tolist() == [0] * (len(splits) + 1)


def test_no_columns(device):
    grouped = zerofp4.quantize_grouped(torch.zeros((48, 0), device=device), [16, 32])
    assert grouped.offsets.tolist() == [0, 16, 48] and grouped.amax.tolist() == [0, 0]


@pytest.mark.parametrize("options", HADAMARD, ids=str)
def test_given_amaxes(device, options):
    splits = [40, 0, 24]
    x = values(splits, 64, device)
    two = options.get("hadamard", False)
    amax = torch.tensor([0.5, 1.0, 300.0], device=device) if options.get("rowwise", True) else None
    other = torch.tensor([700.0, 2.0, 0.25], device=device) if two else None
    grouped = zerofp4.quantize_grouped(x, splits, amax=amax, columnwise_amax=other, **options)
    first = 0
    for group, (rows, tensor) in enumerate(zip(splits, grouped.tensors(), strict=True)):
        given = {"amax": None if amax is None else amax[group : group + 1]}
        given["columnwise_amax"] = None if other is None else other[group : group + 1]
        alone = zerofp4.quantize(x[first : first + rows], block=(1, 16), **given, **options)
        assert_same_tensor(tensor, alone)
        first += rows


# Views


def assert_same_tensor(tensor, alone) -> None:
    assert tensor.record.context() == alone.record.context()
    for name in BUFFERS:
        mine, other = getattr(tensor, name), getattr(alone, name)
        assert (mine is None) == (other is None), name
        if mine is not None:
            assert_bytes_equal(mine, other, name)


@pytest.mark.parametrize("options", HADAMARD, ids=str)
@pytest.mark.parametrize("on_host", ["list", "tensor"])
def test_views_equal_quantize(device, options, on_host):
    splits = [48, 0, 18, 130]
    x = values(splits, 80, device)
    sizes = splits if on_host == "list" else torch.tensor(splits, dtype=torch.int32)
    options = {"scale_layouts": SCALE_LAYOUTS, **options}
    grouped = zerofp4.quantize_grouped(x, sizes, **options)
    assert len(grouped) == 4 and grouped.m_splits == tuple(splits)
    offsets = [sum(splits[:group]) for group in range(5)]
    assert grouped.offsets.tolist() == offsets
    assert grouped.data_offsets.tolist() == [0, 48, 48, 80, 224]
    assert grouped.scale_offsets.tolist() == [0, 128, 128, 256, 512]
    for group, tensor in enumerate(grouped.tensors()):
        part = x[offsets[group] : offsets[group + 1]]
        assert_same_tensor(tensor, zerofp4.quantize(part, block=(1, 16), **options))
        assert_same_tensor(grouped[group - 4], tensor)
        if tensor.rowwise_data is not None:
            assert_bytes_equal(tensor.dequantize(), zerofp4.quantize(part, block=(1, 16)).dequantize(), "")


def test_views_share_memory(device):
    grouped = zerofp4.quantize_grouped(values([16, 32], 64, device), [16, 32], columnwise=True)
    tensor = grouped[1]
    assert tensor.rowwise_data.data_ptr() == grouped.rowwise_data[16:].data_ptr()
    assert tensor.columnwise_data.data_ptr() == grouped.columnwise_data[64 * 8 :].data_ptr()
    assert tensor.amax.data_ptr() == grouped.amax[1:].data_ptr()


def test_views_refuse(device):
    x = values([3, 13], 32, device)
    grouped = zerofp4.quantize_grouped(x, [3, 13], columnwise=True)
    with pytest.raises(ValueError, match="group 0 has 3 rows"):
        grouped.tensors()
    with pytest.raises(IndexError, match="group must be below 2, got 2"):
        grouped[2]
    if device.type == "cuda":
        grouped = zerofp4.quantize_grouped(x, torch.tensor([3, 13], device=device))
        with pytest.raises(ValueError, match="m_splits are known on cuda:0 only"):
            grouped.tensors()


# Splits


def run_operator(x, splits, scale_layouts=SCALE_LAYOUTS):
    """The operator on poisoned buffers: what it does with splits that nobody checked."""
    shapes = grouped_shapes(x.shape[0], splits.numel(), x.shape[1])
    buffers = {name: torch.full(shape, POISON, dtype=torch.uint8) for name, shape in shapes.items()}
    buffers = {name: buffer.to(x.device) for name, buffer in buffers.items()}
    buffers["amax"] = torch.full((splits.numel(),), 7.0, device=x.device)
    buffers["columnwise_amax"] = None
    offsets = torch.full((3, splits.numel() + 1), -7, device=x.device)
    error = torch.full((1,), 9, dtype=torch.int32, device=x.device)
    arguments = (None, None, False, True, *buffers.values(), offsets, error)
    torch.ops.zerofp4.quantize_grouped(x, splits, *arguments)
    return buffers, offsets, error


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "splits",
    [
        [-16, 48, 32],
        [16, 16, 16],
        [32, 32, 1],
        [65, -1, 0],
        [2**31 - 1, 2**31 - 1, 66],
        [-(2**31), -(2**31), 64],
        [1] * 300,
        [64] + [0] * 500 + [-64, 64],
    ],
)
def test_invalid_splits_set_the_error_flag(device, splits, dtype):
    x = values([64], 48, device)
    buffers, offsets, error = run_operator(x, torch.tensor(splits, dtype=dtype, device=device))
    assert error.tolist() == [1] and not offsets.any()
    for name, buffer in buffers.items():
        assert buffer is None or not buffer.any(), name


@pytest.mark.parametrize("splits", [[2**62, 2**62, 64], [-(2**63), -(2**63), 64]])
def test_large_invalid_splits(device, splits):
    x = values([64], 48, device)
    _, offsets, error = run_operator(x, torch.tensor(splits, device=device))
    assert error.tolist() == [1] and not offsets.any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_unchecked_splits(device, dtype):
    splits = [10, 0, 54]
    x = values(splits, 48, device)
    buffers, offsets, error = run_operator(x, torch.tensor(splits, dtype=dtype, device=device))
    expected = expected_storage(x, splits)
    for name, buffer in buffers.items():
        if buffer is not None:
            assert_bytes_equal(buffer, expected[name].to(device), name)
    assert error.tolist() == [0]
    assert offsets.tolist() == [[0, 10, 10, 64], [0, 16, 16, 80], [0, 128, 128, 256]]


def test_check_raises_on_the_host(device):
    x = values([64], 48, device)
    zerofp4.quantize_grouped(x, [60, 4]).check()
    if device.type == "cuda":
        grouped = zerofp4.quantize_grouped(x, torch.tensor([60, 5], device=device))
    else:  # the host checks a CPU tensor, but not under torch.compile
        call = torch.compile(zerofp4.quantize_grouped, fullgraph=True, backend="eager")
        grouped = call(x, torch.tensor([60, 5]))
    with pytest.raises(ValueError, match=r"must sum to the 64 rows of x, got \[60, 5\]"):
        grouped.check()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"m_splits": [32, 33]}, ValueError, "m_splits must sum to the 64 rows of x, got 65"),
        ({"m_splits": torch.tensor([32])}, ValueError, "m_splits must sum to the 64 rows of x, got 32"),
        ({"m_splits": [-1, 65]}, ValueError, r"m_splits\[0\] must not be negative, got -1"),
        ({"m_splits": [32.0, 32]}, TypeError, r"m_splits\[0\] must be an int, got float"),
        ({"m_splits": torch.tensor([64.0])}, ValueError, "m_splits must be a vector of int32 or int64"),
        ({"m_splits": torch.tensor([[64]])}, ValueError, "m_splits must be a vector of int32 or int64"),
        ({"x": torch.zeros(64, 5)}, ValueError, "last dimension must be even, got 5"),
        ({"x": torch.zeros(4, 16, 6)}, ValueError, r"x must be a matrix \[tokens, K\]"),
        ({"x": torch.zeros(64, 6, dtype=torch.int32)}, TypeError, "int32"),
        ({"block": (16, 16)}, ValueError, r"block must be \(1, 16\) for groups"),
        ({"block": (4, 4)}, ValueError, "block must be"),
        ({"stochastic_rounding": True}, ValueError, "stochastic_rounding is not there for groups"),
        ({"four_over_six": zerofp4.FourOverSix()}, ValueError, "four_over_six is not there for groups"),
        ({"rowwise": False}, ValueError, "both False"),
        ({"hadamard": True}, ValueError, "transforms the columnwise copy, but none is asked for"),
        ({"random_signs": False}, ValueError, "but hadamard is False"),
        ({"scale_layouts": ("padded",)}, ValueError, "scale_layouts must be out of"),
        ({"amax": torch.zeros(1)}, ValueError, r"amax must have shape \(2,\)"),
        ({"amax": 3.0}, TypeError, "amax must be a torch.float32 tensor, got float"),
        ({"columnwise_amax": torch.zeros(2)}, ValueError, "but hadamard is False"),
    ],
)
def test_refuses(change, error, message):
    arguments = {"x": torch.zeros(64, 6), "m_splits": [32, 32]} | change
    with pytest.raises(error, match=message):
        zerofp4.quantize_grouped(**arguments)


# The operator in torch.library


def operator_arguments(device, hadamard):
    x = values([10, 0, 54], 48, device)
    splits = torch.tensor([10, 0, 54], device=device)
    shapes = grouped_shapes(64, 3, 48)
    buffers = [torch.zeros(shapes[name], dtype=torch.uint8, device=device) for name in BUFFERS[:8]]
    amaxes = [torch.zeros(3, device=device), torch.zeros(3, device=device) if hadamard else None]
    offsets = torch.zeros((3, 4), dtype=torch.int64, device=device)
    error = torch.zeros(1, dtype=torch.int32, device=device)
    return (x, splits, None, None, hadamard, True, *buffers, *amaxes, offsets, error)


@pytest.mark.parametrize("hadamard", [False, True])
def test_opcheck(device, hadamard):
    arguments = operator_arguments(device, hadamard)
    torch.library.opcheck(torch.ops.zerofp4.quantize_grouped.default, arguments)


@pytest.mark.parametrize(
    ("index", "value", "error", "message"),
    [
        (0, torch.zeros(48, 64).t(), ValueError, "x must be contiguous"),
        (1, torch.zeros(3), ValueError, "m_splits must be a vector of int32 or int64"),
        (6, None, ValueError, "rowwise_data and at least one buffer of its scales"),
        (6, torch.zeros(64, 24, dtype=torch.uint8), ValueError, r"rowwise_data must have shape \(112, 24\)"),
        (10, torch.zeros(2688, dtype=SCALE_DTYPE), TypeError, "columnwise_data must be a torch.uint8"),
        (11, torch.zeros(4, dtype=torch.uint8), ValueError, r"columnwise_scale must have shape \(336,\)"),
        (16, torch.zeros(3, 3, dtype=torch.int64), ValueError, r"offsets must have shape \(3, 4\)"),
        (17, torch.zeros(1), TypeError, "error must be a torch.int32 tensor"),
    ],
)
def test_operator_refuses(index, value, error, message):
    arguments = list(operator_arguments(torch.device("cpu"), True))
    arguments[index] = value
    with pytest.raises(error, match=message):
        torch.ops.zerofp4.quantize_grouped(*arguments)


@pytest.mark.parametrize("splits", ["list", "tensor"])
def test_compiles_without_a_break(device, splits):
    options = {"columnwise": True, "hadamard": True, "scale_layouts": SCALE_LAYOUTS}
    sizes = [10, 0, 54] if splits == "list" else torch.tensor([10, 0, 54], device=device)

    def use(x):
        grouped = zerofp4.quantize_grouped(x * 2, sizes, **options)
        return grouped, grouped.rowwise_data + 1, grouped.data_offsets * 2

    x = values([10, 0, 54], 48, device)
    grouped, *rest = torch.compile(use, fullgraph=True, backend="aot_eager")(x)
    assert_storage(grouped, x * 2, [10, 0, 54], "compiled")
    for actual, expected in zip(rest, use(x)[1:], strict=True):
        assert_bytes_equal(actual, expected, "compiled")


def test_views_compile_without_a_break(device):
    def use(x):
        return [tensor.dequantize() for tensor in zerofp4.quantize_grouped(x, [16, 48]).tensors()]

    x = values([16, 48], 48, device)
    compiled = torch.compile(use, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(x), use(x), strict=True):
        assert_bytes_equal(actual, expected, "compiled")


def test_does_not_synchronize_and_can_be_captured(device):
    if device.type != "cuda":
        pytest.skip("a CPU has nothing to synchronize with, and no graphs")
    options = {"columnwise": True, "hadamard": True, "scale_layouts": SCALE_LAYOUTS}
    x, splits = values([100, 28, 0], 144, device), torch.tensor([100, 28, 0], device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        zerofp4.quantize_grouped(x, splits, **options)
        zerofp4.quantize_grouped(x, [100, 28, 0], **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped = zerofp4.quantize_grouped(x, splits, **options)
        with pytest.raises(RuntimeError, match="m_splits must be on x's device"):
            zerofp4.quantize_grouped(x, [100, 28, 0], **options)
    for sizes in ([100, 28, 0], [0, 1, 127], [128, 0, 0]):
        splits.copy_(torch.tensor(sizes))
        x.copy_(values(sizes, 144, device, seed=sizes[0]))
        graph.replay()
        assert_storage(grouped, x, sizes, f"replayed {sizes}")
    splits.fill_(3)
    graph.replay()
    with pytest.raises(ValueError, match="must sum to the 128 rows of x"):
        grouped.check()
    assert not grouped.rowwise_data.any() and not grouped.offsets.any()


def test_host_splits_survive_until_they_are_used(device):
    """The copy to the device is asynchronous: splits of later calls must not reach it."""
    x = values([64], 48, device)
    calls = [[group, 64 - group] for group in range(65)]
    grouped = [zerofp4.quantize_grouped(x, splits) for splits in calls]
    for splits, each in zip(calls, grouped, strict=True):
        assert each.offsets.tolist() == [0, splits[0], 64]


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set(isa):
    run_with_instruction_set(isa, __file__, "cpu and (larger or unchecked or invalid or 144)")
