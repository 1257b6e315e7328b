"""quantize_grouped on every backend: each group is quantize of that group alone, byte for byte; every other
byte of the storage is zero.
"""

import pytest
import torch
from cases.grouped import OPTIONS, assert_buffers, assert_storage, expected_of_values, values
from cases.ops import DTYPES, KINDS, POISON
from helpers import assert_all_equal, assert_bytes_equal
from hypothesis import given
from hypothesis import strategies as st
from tensor_helpers import assert_record_equal

import zerofp4
from zerofp4 import ops
from zerofp4.format import SCALE_LAYOUTS
from zerofp4.tensors import grouped as grouped_module

SPLITS = [
    [1],
    [0],
    [16, 16, 16],
    [0, 17, 0, 0, 128, 3, 0],
    [256, 255, 257],
    [130, 2, 62, 1],
    [1] * 40,
    [5, 0, 31] * 90,  # several groups a lane of the search
]
SPLIT_IDS = [f"{len(splits)} groups of {sum(splits)}" for splits in SPLITS]


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
@pytest.mark.parametrize("cols", [2, pytest.param(144, marks=pytest.mark.cpu_kernel), 288])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_group_is_quantize_of_it_alone(device, monkeypatch, splits, cols, options):
    poison_allocations(monkeypatch)
    x = values(splits, cols, device)
    grouped = zerofp4.quantize_grouped(x, splits, scale_layouts=SCALE_LAYOUTS, **options)
    expected = expected_of_values(tuple(splits), cols, grouped.hadamard, grouped.random_signs)
    assert_buffers(grouped, expected, f"{splits} {cols} {options}")


@given(
    splits=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    half=st.integers(1, 150),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    options=st.sampled_from(OPTIONS),
    seed=st.integers(0, 2**32 - 1),
)
def test_drawn(device, splits, half, dtype, kind, options, seed):
    x = values(splits, 2 * half, device, dtype, kind, seed)
    grouped = zerofp4.quantize_grouped(x, splits, scale_layouts=SCALE_LAYOUTS, **options)
    assert_storage(grouped, x, splits, f"{splits} {2 * half} {dtype} {kind} {options}")


@pytest.mark.threads
@pytest.mark.cpu_kernel
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


@pytest.mark.parametrize("options", OPTIONS, ids=str)
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
    assert_record_equal(tensor, alone)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
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


@pytest.mark.heavy
def test_views_compile_without_a_break(device):
    def use(x):
        return [tensor.dequantize() for tensor in zerofp4.quantize_grouped(x, [16, 48]).tensors()]

    x = values([16, 48], 48, device)
    compiled = torch.compile(use, fullgraph=True, backend="aot_eager")
    assert_all_equal(compiled(x), use(x), "compiled")


# Errors


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"m_splits": [32, 33]}, ValueError, r"must sum to the 64 rows of x, got \[32, 33\]"),
        ({"m_splits": torch.tensor([32])}, ValueError, r"must sum to the 64 rows of x, got \[32\]"),
        ({"m_splits": [-1, 65]}, ValueError, "m_splits must not be negative and must sum"),
        ({"m_splits": [32.0, 32]}, TypeError, "m_splits must be integers"),
        ({"m_splits": torch.tensor([64.0])}, ValueError, "m_splits must be a vector of int32 or int64"),
        ({"m_splits": torch.tensor([[64]])}, ValueError, "m_splits must be a vector of int32 or int64"),
        ({"x": torch.zeros(64, 5)}, ValueError, "last dimension must be even, got 5"),
        ({"x": torch.zeros(4, 16, 6)}, ValueError, r"x must be a matrix \[tokens, K\]"),
        ({"x": torch.zeros(64, 6, dtype=torch.int32)}, TypeError, "int32"),
        ({"generator": torch.Generator()}, ValueError, "generator is for stochastic rounding"),
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


# Stochastic rounding


@pytest.mark.parametrize("splits", [[16, 0, 48, 3], [1, 130, 300]], ids=str)
@pytest.mark.parametrize("options", OPTIONS[2:], ids=str)
def test_each_group_rounds_by_its_own_state(device, splits, options):
    """What the operator gives with a state for each group is quantization of that group with it."""
    x = values(splits, 96, device)
    states = []
    draw = grouped_module.draw_rng_state

    def drawn(*arguments):
        states.append(draw(*arguments))
        return states[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_module, "draw_rng_state", drawn)
        grouped = zerofp4.quantize_grouped(x, splits, stochastic_rounding=True, **options)
    assert states[0].shape == (len(splits), 2)
    for part, state, actual in zip(x.split(splits), states[0], grouped.tensors(), strict=True):
        if not len(part):
            continue
        record = actual.record.map(torch.zeros_like)
        ops.quantize_into(part.contiguous(), record, rng_state=state.clone())
        for (name, expected), (_, found) in zip(record.buffers(), actual.record.buffers(), strict=True):
            assert_bytes_equal(found, expected, name)


def test_what_belongs_to_no_group_is_zero_with_stochastic_rounding(monkeypatch, device):
    poison_allocations(monkeypatch)
    x, splits = values([17, 3], 64, device), [17, 3]
    options = {"columnwise": True, "hadamard": True, "scale_layouts": SCALE_LAYOUTS}
    nearest = zerofp4.quantize_grouped(x, splits, **options)
    stochastic = zerofp4.quantize_grouped(x, splits, stochastic_rounding=True, **options)
    for (name, one), (_, other) in zip(nearest.buffers(), stochastic.buffers(), strict=True):
        if "data" not in name:
            assert_bytes_equal(other, one, name)
    rows = torch.ones(len(nearest.rowwise_data), dtype=torch.bool)
    rows[:17] = rows[32:35] = False
    assert not stochastic.rowwise_data[rows.to(device)].any()
