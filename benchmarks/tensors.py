"""Single tensors, amaxes and outputs given: to NVFP4 and MXFP8 and back, in groups, and scales reordered."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

import zerofp4
from benchmarks import peers, rules
from benchmarks.peers import Part
from benchmarks.session import Session
from benchmarks.workloads import Workload, chosen, shape_name
from zerofp4 import ops, reference
from zerofp4.format import E4M3_MAX, SCALE_DTYPE
from zerofp4.layout import columnwise_rows, scale_shape

ACTIVATION, WEIGHT = (1, 16), (16, 16)
BLOCKS = {"1d": ACTIVATION, "2d": WEIGHT}
RHT = {"block": ACTIVATION, "columnwise": True, "hadamard": True}

HOSTS, LINK = 4, 25e9
"""Of means: their number, and bytes per second between two of them."""


class Input(NamedTuple):
    """Normal values in bfloat16, and quantize's arguments for their amaxes, also of their transform."""

    x: torch.Tensor
    amaxes: dict[str, torch.Tensor]


def values(session: Session, shape: tuple[int, int]) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=torch.bfloat16, device=session.device)


def make_input(session: Session, shape: tuple[int, int]) -> Input:
    x = values(session, shape)
    quantized = zerofp4.quantize(x, **RHT)
    return Input(x, {"amax": quantized.amax, "columnwise_amax": quantized.columnwise_amax})


def amaxes_for(options: dict) -> tuple[str, ...]:
    return ("amax", "columnwise_amax") if "hadamard" in options else ("amax",)


# NVFP4


def quantize(session: Session, options: argparse.Namespace) -> None:
    """zerofp4.quantize with amaxes given, the amax pass, quantize_dequantize, and what others do."""
    for workload in chosen(options):
        given, name = make_input(session, workload.pieces[0].shape), workload.name
        rows = {}
        for suffix, block in BLOCKS.items():
            for operation, both in ((f"quantize_{suffix}", False), (f"quantize_{suffix}_both", True)):
                row = time_quantize(session, f"{operation}/{name}", given, block=block, columnwise=both)
                rows[operation] = row
        rows["quantize_1d_rht"] = hadamard(session, name, given)
        amaxes(session, name, given.x)
        rows |= roundings(session, name, given)
        if options.peers:
            others(session, given, rows)


def time_quantize(session: Session, name: str, given: Input, **options) -> dict:
    """A row of zerofp4.quantize."""
    amaxes = {name: given.amaxes[name] for name in amaxes_for(options)}
    return time_into(session, name, partial(zerofp4.quantize, given.x, **amaxes, **options))


def time_into(session: Session, name: str, quantize: partial) -> dict:
    """A row of a quantization into a tensor that is there."""
    out = quantize()
    return session.time(name, partial(quantize, out=out), rules.quantize(quantize.args[0], out))


def hadamard(session: Session, name: str, given: Input) -> dict:
    """Rows of both copies with the transform: compact, which is returned, swizzled too, and afterwards."""
    compact = time_quantize(session, f"quantize_1d_rht/{name}", given, **RHT)
    layouts = {"scale_layouts": ("swizzled",)}
    both = time_quantize(session, f"quantize_1d_rht_two_layouts/{name}", given, **RHT, **layouts)
    session.ratio(f"rht_two_layouts_over_compact/{name}", "ratio", both, compact)
    run = quantize_then_swizzle(given)
    after = session.time(f"quantize_1d_rht_then_swizzle/{name}", run, rules.counted_as(both))
    session.ratio(f"rht_one_pass_over_two/{name}", "speedup", after, both)
    return compact


def quantize_then_swizzle(given: Input) -> Callable[[], None]:
    """Compact scales, and then those of both copies swizzled by one launch."""
    rows, cols = given.x.shape
    out = zerofp4.quantize(given.x, **RHT)
    rowwise = out.rowwise_scale, (rows, cols)
    columnwise = out.columnwise_scale, (cols, columnwise_rows(rows, hadamard=True))

    def run() -> None:
        zerofp4.quantize(given.x, **given.amaxes, **RHT, out=out)
        zerofp4.swizzle_scales([rowwise, columnwise])

    return run


def amaxes(session: Session, name: str, x: torch.Tensor) -> None:
    """What quantize does first where no amax is given, without and with that of the transform: its kernel."""
    if not session.clock.is_cuda:
        session.say("the amax pass is a kernel of quantize: left out on a CPU")
        return
    for row, options in (("tensor_amax", {"block": ACTIVATION}), ("amax_rht", RHT)):
        kernel = {f"{row}/{name}": ("amax_kernel", rules.once([x], x.numel(), "x read"))}
        session.time_kernels(partial(zerofp4.quantize, x, **options), kernel)


def roundings(session: Session, name: str, given: Input) -> dict[str, dict]:
    """Stochastic rounding, a choice of scales, no codes at all. Returns by operation what others have too."""
    rows = {}
    drawn = {"block": ACTIVATION, "stochastic_rounding": True}
    time_quantize(session, f"quantize_1d_stochastic/{name}", given, **drawn)
    for suffix, block in BLOCKS.items():
        choice = {"block": block, "four_over_six": zerofp4.FourOverSix()}
        operation = f"quantize_{suffix}_four_over_six"
        rows[operation] = time_quantize(session, f"{operation}/{name}", given, **choice)
    run = partial(zerofp4.quantize_dequantize, given.x, block=ACTIVATION, amax=given.amaxes["amax"])
    moved = rules.once([given.x, run()], given.x.numel(), "x read, values written")
    session.time(f"quantize_dequantize/{name}", run, moved)
    return rows


def others(session: Session, given: Input, rows: dict[str, dict]) -> None:
    """The reference under torch.compile, and other packages where there are any."""
    x, (amax, transformed_amax) = given.x, given.amaxes.values()
    rowwise = Part(peers.quantize, (x, amax, 1))
    tiles = Part(peers.quantize, (x, amax, 16))
    transformed = Part(peers.quantize_transformed, (x, transformed_amax), peers.EXACT)
    peers.reference_compile(session, rows["quantize_1d"], rowwise)
    peers.reference_compile(session, rows["quantize_2d"], tiles)
    peers.reference_compile(session, rows["quantize_1d_rht"], rowwise, transformed)
    fouroversix = partial(peers.fouroversix_nvfp4, x, amax)
    peers.packages(
        session,
        rows["quantize_1d"],
        torchao=partial(peers.torchao_nvfp4, x, amax),
        gemlite=partial(peers.gemlite_nvfp4, x, amax),
        fouroversix=partial(fouroversix, 1),
    )
    peers.packages(session, rows["quantize_2d"], fouroversix=partial(fouroversix, 16))
    for operation, block_rows in (("quantize_1d_four_over_six", 1), ("quantize_2d_four_over_six", 16)):
        make = partial(fouroversix, block_rows, zerofp4.FourOverSix().error)
        peers.packages(session, rows[operation], fouroversix=make)


def dequantize(session: Session, options: argparse.Namespace) -> None:
    """zerofp4::dequantize of either copy with compact and swizzled scales, and the reference of it."""
    for workload in chosen(options):
        x, name = values(session, workload.pieces[0].shape), workload.name
        for suffix, block in BLOCKS.items():
            tensor = zerofp4.quantize(x, block=block, columnwise=True, scale_layouts=("swizzled",))
            time, operation = partial(time_dequantize, session, tensor), f"dequantize_{suffix}"
            ours = time(f"{operation}/{name}")
            other = time(f"{operation}_swizzled/{name}", layout="swizzled")
            session.ratio(f"{operation}_swizzled_over_compact/{name}", "ratio", other, ours)
            time(f"{operation}_columnwise/{name}", side="columnwise")
            time(f"{operation}_fp32/{name}", dtype=torch.float32)
            if options.peers and block == ACTIVATION:
                data, scale = tensor.rowwise_data, tensor.rowwise_scale
                part = Part(reference.dequantize, (data, scale, tensor.amax, block[0], torch.bfloat16))
                peers.reference_compile(session, ours, part)


def time_dequantize(
    session: Session,
    tensor: zerofp4.NVFP4Tensor,
    name: str,
    side: str = "rowwise",
    layout: str = "compact",
    dtype: torch.dtype = torch.bfloat16,
) -> dict:
    """A row of the operator: a tensor's dequantize() takes the rowwise copy and compact scales."""
    data = getattr(tensor, f"{side}_data")
    scale = getattr(tensor, f"{side}_scale" if layout == "compact" else f"{side}_scale_{layout}")
    how = (tensor.block[0], dtype, layout, int(E4M3_MAX), side == "columnwise")
    run = partial(torch.ops.zerofp4.dequantize, data, scale, tensor.amax, *how)
    return session.time(name, run, rules.dequantize(data, scale, run()))


# Groups


def grouped(session: Session, options: argparse.Namespace) -> None:
    """zerofp4.quantize_grouped of 64 matrices beside zerofp4.quantize of one that is as large as all."""
    for workload in chosen(options):
        m_splits = [piece.shape[0] for piece in workload.pieces]
        given = make_input(session, (sum(m_splits), workload.pieces[0].shape[1]))
        on_device = torch.tensor(m_splits, device=session.device)
        name, whole = workload.name, shape_name(given.x.shape)
        for kind, how in (("_rht", {"columnwise": True, "hadamard": True}), ("", {})):
            one = time_quantize(session, f"quantize_1d{kind}/{whole}", given, block=ACTIVATION, **how)
            run = in_groups(given, on_device, **how)
            ours = session.time(f"quantize_grouped{kind}/{name}", run, rules.counted_as(one))
            session.ratio(f"grouped{kind}_over_one/{name}", "ratio", ours, one)
        session.launches(f"launches/quantize_grouped/{name}", run)
        run = in_groups(given, m_splits)
        session.time(f"quantize_grouped_host_splits/{name}", run, rules.counted_as(one))


def in_groups(given: Input, m_splits: torch.Tensor | list[int], **options) -> partial:
    """A call that gives every group the amaxes of all; it allocates what it returns."""
    amaxes = {name: given.amaxes[name].repeat(len(m_splits)) for name in amaxes_for(options)}
    return partial(zerofp4.quantize_grouped, given.x, m_splits, **amaxes, **options)


# MXFP8


def mxfp8(session: Session, options: argparse.Namespace) -> None:
    """zerofp4.quantize_mxfp8 and the way back, rowwise and columnwise, beside the reference and torchao."""
    for workload in chosen(options):
        x, name = values(session, workload.pieces[0].shape), workload.name
        kinds = {
            "quantize_mxfp8": {},
            "quantize_mxfp8_two_layouts": {"scale_layouts": ("swizzled",)},
            "quantize_mxfp8_columnwise": {"rowwise": False, "columnwise": True},
            "quantize_mxfp8_both": {"columnwise": True},
        }
        ours, *_ = (
            time_into(session, f"{kind}/{name}", partial(zerofp4.quantize_mxfp8, x, **how))
            for kind, how in kinds.items()
        )
        if options.peers:
            peers.reference_compile(session, ours, Part(peers.quantize_mxfp8, (x,)))
            peers.packages(session, ours, torchao=partial(peers.torchao_quantize_mxfp8, x))
        dequantize_mxfp8(session, name, zerofp4.quantize_mxfp8(x, columnwise=True), options.peers)


def dequantize_mxfp8(session: Session, name: str, tensor: zerofp4.MXFP8Tensor, with_peers: bool) -> None:
    """Both copies to bfloat16."""
    rows = {}
    for side, suffix in (("rowwise", ""), ("columnwise", "_columnwise")):
        data, scale = getattr(tensor, f"{side}_data"), getattr(tensor, f"{side}_scale")
        arguments = (data, scale, side == "columnwise", "compact", torch.bfloat16)
        run = partial(torch.ops.zerofp4.dequantize_mxfp8, *arguments)
        moved = rules.dequantize(data, scale, run())
        rows[side] = session.time(f"dequantize_mxfp8{suffix}/{name}", run, moved)
    if with_peers:
        data, scale, ours = tensor.rowwise_data, tensor.rowwise_scale, rows["rowwise"]
        arguments = (data, scale.view(torch.uint8), False, torch.bfloat16)
        peers.reference_compile(session, ours, Part(reference.dequantize_mxfp8, arguments))
        make = partial(peers.torchao_dequantize_mxfp8, data, scale, torch.bfloat16)
        peers.packages(session, ours, torchao=make)


# The order of scales


def swizzle(session: Session, options: argparse.Namespace) -> None:
    """zerofp4.swizzle_scales and unswizzle_scales, of one tensor and of many, beside a clone of them."""
    for workload in chosen(options):
        scales = random_scales(session, workload)
        ours = rearrangements(session, workload.name, scales)
        if len(scales) > 1:
            run, name = partial(zerofp4.swizzle_scales, scales), f"swizzle/{workload.name}"
            session.host(f"host_{name}", run, "zerofp4.swizzle_scales")
            session.launches(f"launches/{name}", run)
        elif options.peers:
            (scale, matrix), *_ = scales
            peers.reference_compile(session, ours, Part(peers.swizzle, (scale, *matrix)))
            peers.packages(session, ours, torchao=partial(peers.torchao_swizzle, scale))


Scales = list[tuple[torch.Tensor, tuple[int, int]]]
"""Each with the shape of its matrix."""


def random_scales(session: Session, workload: Workload) -> Scales:
    """Compact scales of 1x16 blocks of each weight."""
    torch.manual_seed(0)
    made = []
    for shape, _ in workload.pieces:
        scale = torch.randint(256, scale_shape(*shape, 1), dtype=torch.uint8, device=session.device)
        made.append((scale.view(SCALE_DTYPE), shape))
    return made


def rearrangements(session: Session, name: str, scales: Scales) -> dict:
    """Both ways, and a copy of as many bytes in one tensor; the row of the way there is returned."""
    swizzled = zerofp4.swizzle_scales(scales)
    moved = rules.rearrange([scale for scale, _ in scales], swizzled)
    ours = session.time(f"swizzle/{name}", partial(zerofp4.swizzle_scales, scales), moved)
    pairs = [(scale, matrix) for scale, (_, matrix) in zip(swizzled, scales, strict=True)]
    back = partial(zerofp4.unswizzle_scales, pairs, block=ACTIVATION)
    session.time(f"unswizzle/{name}", back, moved)
    flat = torch.cat([scale.view(torch.uint8).flatten() for scale, _ in scales])
    clone = session.time(f"clone/{name}", flat.clone, rules.rearrange([flat], [flat]))
    session.compare(ours, clone)
    session.ratio(f"swizzle_over_clone/{name}", "ratio", ours, clone)
    return ours


def means(session: Session, options: argparse.Namespace) -> None:
    """Means of 4 hosts, rounded for one another and averaged, beside the time that few bits save a link."""
    for workload in chosen(options):
        name, (rows, cols) = workload.name, workload.pieces[0].shape
        numel = rows * cols // HOSTS
        values = torch.randn((HOSTS, numel), dtype=torch.float32, device=session.device)
        mean = torch.empty_like(values[0])
        pieces = [ops.MeansPiece(0, numel, number * numel, 0, cols) for number in range(HOSTS)]
        for format in ops.MEANS_FORMATS:
            layout = ops.MeansLayout(
                format, numel, [[piece] for piece in pieces], pieces[0].strips, session.device
            )
            sent = torch.zeros((HOSTS, layout.nbytes), dtype=torch.uint8, device=session.device)
            send = partial(ops.round_means, values, sent, layout, step=1, host=0)
            receive = partial(ops.average, sent.view(torch.bfloat16), mean)
            if layout.is_decoded:
                receive = partial(ops.average_means, sent, mean, layout, 0)
            found = [
                session.time(f"round_means_{format}/{name}", send, rules.round_means(values, sent)),
                session.time(f"average_means_{format}/{name}", receive, rules.average_means(sent, mean)),
            ]
            if layout.is_decoded:
                saved = (HOSTS - 1) * (2 * numel - layout.nbytes) / LINK
                rule = "both, over the time in which 25 GB/s send what bf16 would have more"
                own = sum(row["ms"] for row in found) / 1e3
                session.count(f"means_{format}_over_saved/{name}", "ratio", own / saved, rule)
