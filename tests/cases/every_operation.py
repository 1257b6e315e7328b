"""Every operation once, for tests of what it writes and where it runs."""

from __future__ import annotations

import itertools

import torch

import zerofp4
from cases.ops import DTYPES, allocate
from cases.quantize import MODES, with_state
from zerofp4 import ops
from zerofp4.format import BLOCK, SCALE_LAYOUTS
from zerofp4.layout import ceil_div, round_up, scale_shape
from zerofp4.shard import Shard, byte_range

ZEROFP4 = torch.ops.zerofp4
MANY = 40
"""More than what travels in the arguments of a kernel."""


def matrix_of(shape, dtype, device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0] * shape[1])
    return torch.randn(shape, generator=generator).to(device, dtype)


def quantized(x: torch.Tensor):
    return zerofp4.quantize(x, columnwise=x.shape[0] % 2 == 0, scale_layouts=SCALE_LAYOUTS)


# What is run: (matrix, guards) -> (name, tensor) of every output


def quantize(x, guards):
    outputs = []
    for name, mode in MODES.items():
        options = {key: mode[key] for key in ("hadamard", "random_signs", "four_over_six") if key in mode}
        columnwise = x.shape[0] % 2 == 0 or mode.get("hadamard", False)
        for sides in ((True, columnwise), (False, columnwise), (True, False)):
            if not any(sides) or (mode.get("hadamard") and not sides[1]):
                continue
            record = allocate(
                x.shape,
                dtype=x.dtype,
                device=x.device,
                block=(mode["block_rows"], BLOCK),
                rowwise=sides[0],
                columnwise=sides[1],
                scale_layouts=SCALE_LAYOUTS,
                **options,
            )
            ops.quantize_into(x, record, rng_state=with_state(mode, x.device).get("rng_state"))
            outputs += [(f"{name} {sides} {field}", buffer) for field, buffer in record.buffers()]
    return outputs


def quantize_dequantize(x, guards):
    state = torch.tensor([1, 2], device=x.device)
    calls = {
        "nearest": (16, None, None, 0, "mae"),
        "stochastic": (1, None, state, 0, "mae"),
        "four over six": (16, None, None, 256, "mse"),
    }
    return [(name, ZEROFP4.quantize_dequantize(x, *call)) for name, call in calls.items()]


def quantize_grouped(x, guards):
    rows, outputs = x.shape[0], []
    for splits in ([rows], [rows // 3, 0, rows - rows // 3]):
        for options in ({}, {"columnwise": True}, {"columnwise": True, "hadamard": True}):
            grouped = zerofp4.quantize_grouped(x, splits, scale_layouts=SCALE_LAYOUTS, **options)
            outputs += [(f"{splits} {options} {name}", buffer) for name, buffer in grouped.buffers()]
            outputs += [("offsets", grouped.offsets), ("error", grouped.error)]
    return outputs


def dequantize(x, guards):
    def call(copy, layout, dtype, columnwise):
        options = (BLOCK, dtype, layout, 448, columnwise)
        return ZEROFP4.dequantize(copy.data, copy.scales[layout], copy.amax, *options)

    return all_values(quantized(x), call)


def mxfp8(x, guards):
    def call(copy, layout, dtype, columnwise):
        return ZEROFP4.dequantize_mxfp8(copy.data, copy.scales[layout], columnwise, layout, dtype)

    t = zerofp4.quantize_mxfp8(x, columnwise=True, scale_layouts=["swizzled"])
    return [*t.record.buffers(), *all_values(t, call)]


def all_values(t, call):
    """Of each copy, layout and dtype by call(copy, layout, dtype, columnwise); and of lists."""
    outputs = []
    for side, copy in t.record.sides():
        for layout, dtype in itertools.product(copy.scales, DTYPES):
            outputs.append((f"{side} {layout} {dtype}", call(copy, layout, dtype, side == "columnwise")))
    for count in (2, MANY):
        outputs += [(f"list of {count}", values) for values in zerofp4.dequantize_many([t] * count)]
    return outputs


def scale_layouts(x, guards):
    outputs = []
    for block_rows in (1, BLOCK):
        scale = zerofp4.quantize(x, block=(block_rows, BLOCK)).rowwise_scale
        assert scale.shape == scale_shape(*x.shape, block_rows)
        for layout in SCALE_LAYOUTS[1:]:
            padded = ZEROFP4.pad_scale(scale, *x.shape, block_rows, layout)
            back = ZEROFP4.unpad_scale(padded, *x.shape, block_rows, layout)
            outputs += [(f"{layout}, {block_rows} rows", padded), (f"{layout} back", back)]
            for count in (2, MANY):
                sizes = [[size] * count for size in (*x.shape, block_rows)]
                many = ops.change_scales([scale] * count, *sizes, layout, True)
                back = ops.change_scales(many, *sizes, layout, False)
                outputs += [(f"list of {count} {layout}", each) for each in (*many, *back)]
    return outputs


def transpose(x, guards):
    if x.shape[0] % 2:
        return []
    t, outputs = zerofp4.quantize(x, columnwise=True), []
    for count in (1, 2, MANY):
        records = [t.record.map(torch.clone) for _ in range(count)]
        for record in records:
            record.columnwise.data = torch.empty_like(record.columnwise.data)
        with guards.suspended():
            stage = ops.PostStage(x.device)
            stage.bind(records)
        stage.run()
        outputs += [(f"{i} of {count}", record.columnwise.data) for i, record in enumerate(records)]
    return [*outputs, ("alone", ZEROFP4.transpose_packed(t.rowwise_data))]


def shards_of(numel: int) -> list[Shard]:
    """Whole, from an odd to an odd offset, of one element, and none."""
    third = numel // 3 | 1
    last = min(2 * third | 1, numel)
    return [Shard(0, numel), Shard(third, last - third), Shard(numel - 1, 1), Shard(0, 0)]


def cast_stages(x, guards):
    """Every shard alone and all in one plan. A byte that is shared with another rank is left out."""
    shards, outputs = shards_of(x.numel()), []
    tiles = ceil_div(x.shape[0], BLOCK) * ceil_div(x.shape[1], BLOCK)
    for chosen in ([shard] for shard in shards), [shards * 3]:
        for group in chosen:
            reduced = torch.empty(ops.HEADER_WORDS + len(group) * (1 + tiles), device=x.device)
            items = [item_of(x, shard, i, len(group), tiles) for i, shard in enumerate(group)]
            with guards.suspended():
                stages, found_inf = ops.NativePlan(x.device), torch.zeros(1, device=x.device)
                ops.load_cast(stages, items, reduced, found_inf=found_inf)
            for stage in ("begin_amax", "scale_cast"):
                stages.run(stage)
            outputs.append(("reduced", reduced))
            for i, item in enumerate(items):
                shard = item.piece.shard
                end = item.codes.numel() - (shard.start + shard.numel) % 2
                outputs.append((f"codes {i} of {len(group)}", item.codes[shard.start % 2 : end]))
                outputs += [
                    (f"{name} {i} of {len(group)}", buffer)
                    for name, buffer in item.record.buffers()
                    if not name.endswith("_data")
                ]
    return outputs


def item_of(x, shard, index, count, tiles) -> ops.CastItem:
    record = allocate(
        x.shape, dtype=x.dtype, device=x.device, columnwise=x.shape[0] % 2 == 0, scale_layouts=SCALE_LAYOUTS
    )
    first, last = byte_range(shard)
    codes = torch.empty(last - first, dtype=torch.uint8, device=x.device)
    master = x.flatten()[shard.start : shard.start + shard.numel].float()
    places = (ops.HEADER_WORDS + count + index * tiles, ops.HEADER_WORDS + index)
    return ops.CastItem(record, ops.MasterPiece(master, shard, record.matrix, x.dtype, *places), codes)


def adamw(x, guards):
    """Every shard and a tensor without tiles in one update, for gradients of both dtypes."""
    tiles = ceil_div(x.shape[0], BLOCK) * ceil_div(x.shape[1], BLOCK)
    shards, outputs = shards_of(x.numel())[:3], []
    options = ops.adamw_options(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, maximize=False)
    for dtype in (torch.float32, torch.bfloat16):
        reduced = torch.empty(ops.HEADER_WORDS + len(shards) * (1 + tiles), device=x.device).zero_()
        items = []
        for i, shard in enumerate([*shards, Shard(0, x.numel())]):
            master = guards.place(x.flatten()[shard.start : shard.start + shard.numel].float())
            state = [guards.place(torch.zeros(size, device=x.device)) for size in ((), *[master.shape] * 2)]
            places = (ops.HEADER_WORDS + len(shards) + i * tiles, ops.HEADER_WORDS + i)
            piece = ops.MasterPiece(None, shard, tuple(x.shape), x.dtype, *places)
            items.append(ops.AdamWItem(master, *state, dtype, (piece,) if i < len(shards) else ()))
        gradients = [guards.place(item.master.to(dtype)) for item in items]
        with guards.suspended():
            stage = ops.AdamWStage(items, reduced)
        stage.begin(options, 0, gradients)
        stage.update()
        outputs.append(("reduced", reduced))
        for i, item in enumerate(items):
            names = ("master", "step", "exp_avg", "exp_avg_sq")
            outputs += [(f"{name} {i}", tensor) for name, tensor in zip(names, item[:4], strict=True)]
    return outputs


def average(x, guards):
    """Of the rows, as gradients of so many ranks."""
    out = torch.empty(x.shape[1], device=x.device)
    ops.average(x, out)
    return [("mean", out)]


def gather(x, guards):
    """Bytes of one rank through both slots of a staging buffer, which is aligned."""
    codes = x.view(torch.uint8).flatten()
    taken = torch.empty_like(codes)
    with guards.suspended():
        slot = round_up(codes.numel() + ops.GATHER_VECTOR, ops.GATHER_VECTOR)
        staging = torch.zeros(2, slot, dtype=torch.uint8, device=x.device)
        own, other = (staging[rank].data_ptr() + ops.GATHER_VECTOR for rank in (0, 1))
        stages = ops.NativePlan(x.device)
        runs = [
            [ops.GatherRun(*run, 0, codes.numel())]
            for run in ((codes.data_ptr(), own), (other, taken.data_ptr()))
        ]
        ops.load_gather(stages, staging, 0, None, *runs, [codes, taken])
    stages.run("pack", ops.GATHER_PRESENT)
    staging[1] = staging[0]
    stages.run("unpack")
    assert torch.equal(taken, codes)
    return [("taken", taken), ("own", staging[0, ops.GATHER_VECTOR :][: codes.numel()])]


RUNS = (
    quantize,
    quantize_dequantize,
    quantize_grouped,
    dequantize,
    mxfp8,
    scale_layouts,
    transpose,
    cast_stages,
    adamw,
    average,
    gather,
)
