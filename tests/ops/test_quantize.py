"""zerofp4::quantize on every backend against the specification, byte for byte."""

import pytest
import torch
from cases.golden import MODES as GOLDEN_MODES
from cases.golden import cases_of, check_golden, golden_input
from cases.ops import (
    DTYPES,
    KINDS,
    POISON,
    SHAPES,
    assert_record_equals,
    draw_values,
    marked,
)
from cases.quantize import MODES, check, make_record, with_state
from hypothesis import given
from hypothesis import strategies as st

from zerofp4 import ops, reference
from zerofp4.storage import BUFFERS, SIDES

ZEROFP4 = torch.ops.zerofp4


@pytest.mark.cpu_kernel
@pytest.mark.parametrize(
    ("case", "mode"), [(case, mode) for mode in GOLDEN_MODES for case in cases_of(mode)], ids=str
)
def test_golden_file(device, case, mode):
    x, options = golden_input(case).to(device), GOLDEN_MODES[mode]
    record = make_record(x, options)
    ops.quantize_into(x, record)
    fields = {
        "data": record.buffer("rowwise_data"),
        "scale": record.buffer("rowwise_scale"),
        "data_t": record.buffer("columnwise_data"),
        "scale_t": record.buffer("columnwise_scale"),
        "amax": record.amax,
        "amax_t": record.columnwise_amax,
        "scale_swizzled": record.buffer("rowwise_scale_swizzled"),
        "dequant_f32": ZEROFP4.dequantize(
            record.buffer("rowwise_data"),
            record.buffer("rowwise_scale"),
            record.amax,
            options["block_rows"],
            torch.float32,
        ),
    }
    check_golden(case, mode, {name: value.cpu() for name, value in fields.items()})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", marked("cpu_kernel", SHAPES, (130, 144), (257, 66)))
def test_every_shape_dtype_and_mode(device, shape, dtype, mode):
    x = draw_values(0, shape[0] * shape[1], "normal").view(shape).to(dtype).to(device)
    check(x, MODES[mode], f"{shape} {dtype} {mode}")


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(2, 2), (34, 50), (130, 288)])
@pytest.mark.parametrize("side", SIDES)
def test_one_copy(device, shape, mode, side):
    if side == "rowwise" and MODES[mode].get("hadamard"):
        pytest.skip("the transform is of the columnwise copy")
    x = draw_values(1, shape[0] * shape[1], "normal").view(shape).to(device)
    sides = {other: other == side for other in SIDES}
    record = check(x, MODES[mode], f"{shape} {mode} {side}", **sides)
    assert record.amax is record.columnwise_amax or side == "rowwise"


@pytest.mark.cpu_kernel
@given(
    rows=st.integers(1, 300),
    half=st.integers(1, 150),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    mode=st.sampled_from(sorted(MODES)),
    seed=st.integers(0, 2**32 - 1),
    state=st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1)),
)
def test_drawn(device, rows, half, dtype, kind, mode, seed, state):
    x = draw_values(seed, rows * 2 * half, kind).view(rows, 2 * half).to(dtype).to(device)
    options = MODES[mode]
    if "rng_state" in options:
        options = options | {"rng_state": state}
    check(x, options, f"{tuple(x.shape)} {dtype} {kind} {mode}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layouts", [["expanded"], ["swizzled"], ["compact", "swizzled"]], ids="+".join)
def test_layouts_do_not_need_each_other(device, mode, layouts):
    """The operator writes any of them; padding is zeroed."""
    x = draw_values(2, 146 * 210, "normal").view(146, 210).to(device)
    options = with_state(MODES[mode], device)
    record = make_record(x, MODES[mode])
    for _, side in record.sides():
        side.scale_places = {layout: side.scales[layout] for layout in layouts}
    ops.quantize_into(x, record, rng_state=options.get("rng_state"))
    assert_record_equals(record, reference.quantize(x, **options), f"{mode} {layouts}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [0.3, 1.0, 1e3])
@pytest.mark.parametrize("rowwise", [True, False])
def test_given_amaxes(device, mode, factor, rowwise):
    """What is larger saturates."""
    x = draw_values(3, 66 * 96, "normal").view(66, 96).to(device)
    amaxes = [torch.tensor([3.0 * factor], device=device), None]
    if MODES[mode].get("hadamard"):
        amaxes[1] = torch.tensor([5.0 * factor], device=device)
    record = check(x, MODES[mode], f"{mode} {factor}", amaxes, rowwise=rowwise, columnwise=True)
    for amax in amaxes:
        assert amax is None or amax.data_ptr() not in (
            record.amax.data_ptr(),
            record.columnwise_amax.data_ptr(),
        )


def test_one_given_amax_of_two(device):
    x = draw_values(4, 50 * 96, "normal").view(50, 96).to(device)
    mode, amax = MODES["hadamard"], torch.tensor([7.0], device=device)
    for amaxes in ((amax, None), (None, amax)):
        check(x, mode, "one of two", amaxes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("given", [False, True])
def test_skip_leaves_everything_as_it_is(device, mode, given):
    x = draw_values(5, 34 * 64, "normal").view(34, 64).to(device)
    options = with_state(MODES[mode], device)
    record = make_record(x, MODES[mode])
    amaxes = {"amax": torch.ones(1, device=device)} if given else {}
    if given and record.hadamard:
        amaxes["columnwise_amax"] = torch.ones(1, device=device)
    for value in (1.0, -0.5, torch.inf, torch.nan):
        skip = torch.tensor([value], device=device)
        ops.quantize_into(x, record, rng_state=options.get("rng_state"), skip=skip, **amaxes)
    for name, buffer in record.buffers():
        assert (buffer.view(torch.uint8) == POISON).all(), name
    for value in (0.0, -0.0):
        skip = torch.tensor([value], device=device)
        ops.quantize_into(x, record, rng_state=options.get("rng_state"), skip=skip, **amaxes)
        assert_record_equals(record, reference.quantize(x, **amaxes, **options), f"skip {value}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0)])
def test_no_elements(device, mode, shape):
    x, options = torch.empty(shape, device=device), with_state(MODES[mode], device)
    record = make_record(x, MODES[mode])
    state, skip = options.get("rng_state"), torch.ones(1, device=device)
    ops.quantize_into(x, record, rng_state=state, skip=skip)
    assert (record.amax.view(torch.uint8) == POISON).all()
    ops.quantize_into(x, record, rng_state=state)
    assert record.amax.item() == record.columnwise_amax.item() == 0
    ops.quantize_into(x, record, rng_state=state, amax=2 * skip, skip=skip - 1)
    assert record.amax.item() == 2


# Sizes: several bands of tiles, one copy with whole strips, more rows than a dimension of a CUDA grid


def normal(*shape: int) -> torch.Tensor:
    return draw_values(4, shape[0] * shape[1], "normal").view(shape)


@pytest.mark.threads  # each band has one
@pytest.mark.parametrize("mode", ["1d", "2d", "hadamard"])
@pytest.mark.parametrize("shape", [(2304, 300), (4098, 258)])
def test_several_bands(device, shape, mode):
    check(normal(*shape).bfloat16().to(device), MODES[mode], f"{shape} {mode}")


@pytest.mark.threads
@pytest.mark.parametrize("mode", ["1d", "2d"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 256), (130, 288), (2304, 384)])
def test_rows_alone(device, shape, dtype, mode):
    check(normal(*shape).to(dtype).to(device), MODES[mode], f"{shape} {dtype} {mode}", columnwise=False)


def test_more_rows_than_a_grid_dimension(device):
    if device.type == "cpu":
        pytest.skip("grids are CUDA's")
    rows = 65535 * 256 + 16
    x = normal(4096, 2).bfloat16().to(device).repeat(-(-rows // 4096), 1)[:rows]
    check(x, MODES["1d"], f"{rows} rows", scale_layouts=("compact",), columnwise=False)


# The operator in torch.library


def operator_calls(device) -> list:
    x = torch.randn(32, 48, device=device)
    calls = []
    for mode in ("2d", "hadamard", "stochastic 1d", "2d, FourOverSix(e4m3_max=256, error='mse')"):
        record = make_record(x, MODES[mode])
        buffers = dict(record.buffers())
        # Scales as bytes: opcheck compares arguments with operations that float8 does not have.
        raw = [buffers[name].view(torch.uint8) if "scale" in name else buffers.get(name) for name in BUFFERS]
        choice = ops.choice_arguments(record.four_over_six)
        state = with_state(MODES[mode], device).get("rng_state")
        block_rows, transform = record.block[0], (record.hadamard, record.random_signs)
        calls.append((x, block_rows, None, None, *transform, state, *choice, None, *raw))
        skip, given = torch.zeros(1, device=device), torch.ones(1, device=device)
        given_columnwise = given if record.hadamard else None
        calls.append((x, block_rows, given, given_columnwise, *transform, state, *choice, skip, *raw))
    return calls


@pytest.mark.heavy
@pytest.mark.parametrize("index", range(8))
def test_opcheck(device, index):
    torch.library.opcheck(ZEROFP4.quantize.default, operator_calls(device)[index])
