"""Means of hosts, rounded at random to be sent, and averaged as they arrive: the bytes of the reference."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_bytes_equal, poisoned_allocations

from zerofp4 import ops, reference
from zerofp4.layout import ceil_div

NUMEL = 12 * 1024
"""Elements of a slice."""
SLICES = [
    [],
    [
        ops.MeansPiece(0, 768, 512, 4, 256),
        ops.MeansPiece(1024, 37 * 96, 174763 * 256 * 96, 5, 96),
        ops.MeansPiece(5120, 16 * 416, 80660 * 256 * 416, 6, 416),
    ],
    [],
    [ops.MeansPiece(256, 3 * 1600, 0, 7, 1600), ops.MeansPiece(5632, 1501, 0, 8, 1501)],
]
"""With gaps, numbers of more than 32 bits, strips cut off at both edges, and a row that only bf16 takes."""
STRIPS = 29
HOSTS = 3


def slices_for(wire: str) -> list[list[ops.MeansPiece]]:
    taken = ops.MEANS_FORMATS[wire]
    return [[piece for piece in own if piece.cols % taken == 0] for own in SLICES]


def layout_of(wire: str, device) -> ops.MeansLayout:
    return ops.MeansLayout(wire, NUMEL, slices_for(wire), STRIPS, torch.device(device))


def means(host: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(host)
    shape = len(SLICES), NUMEL
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(20).exp2()
    x[1, 1024 + 96 : 1024 + 192] = 0
    x[3, 256 + 128 : 256 + 256] *= 1e-38
    special = [torch.nan, -torch.nan, torch.inf, -torch.inf, 3.4e38, -3.4e38, 0.0, -0.0, 1e-42, 1.0]
    for place, value in zip(range(5120, 5120 + 320, 32), special, strict=True):
        x[1, place] = value
    return x


def sent_by(wire: str, piece: ops.MeansPiece, x: torch.Tensor, step: int, host: int) -> reference.SentMean:
    """x: of the slice. The piece's rows, of bf16 and MXFP8 any, since their blocks do not know them."""
    own = x[piece.begin :][: piece.numel].view(-1, piece.cols)
    where = {"number": piece.number, "step": step, "host": host}
    return reference.send_mean(own, wire, first_row=piece.first // piece.cols, **where)


def write(message: torch.Tensor, piece: ops.MeansPiece, sent: reference.SentMean, strip: int) -> None:
    """message: uint8 of one slice, or of bfloat16 as bytes."""
    data = sent.data.view(torch.uint8).flatten()
    begin = piece.begin * len(data) // piece.numel
    message[begin : begin + len(data)] = data
    if sent.scale is None:
        return
    scale, per_byte = sent.scale.view(torch.uint8).flatten(), piece.numel // sent.scale.numel()
    begin = NUMEL * len(data) // piece.numel + piece.begin // per_byte
    message[begin : begin + len(scale)] = scale
    if sent.amax is not None:
        amaxes = sent.amax.view(torch.uint8).flatten()
        begin = NUMEL // 2 + NUMEL // 16 + 4 * strip
        message[begin : begin + len(amaxes)] = amaxes


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("wire", ops.MEANS_FORMATS)
@pytest.mark.parametrize(("step", "host"), [(0, 0), (2**32 - 1, 3)])
def test_messages_are_those_of_the_reference(device, wire, step, host):
    """Bytes of no element stay as they are, but those of bf16 become 0."""
    layout, x = layout_of(wire, device), means(host)
    expected = torch.full((len(SLICES), layout.nbytes), 0 if wire == "bf16" else 0xA5, dtype=torch.uint8)
    out = torch.full_like(expected, 0xA5, device=device)
    for message, values, pieces in zip(expected, x, slices_for(wire), strict=True):
        strip = 0
        for piece in pieces:
            write(message, piece, sent_by(wire, piece, values, step, host), strip)
            strip += piece.strips
    ops.round_means(x.to(device), out, layout, step=step, host=host)
    assert_bytes_equal(out.cpu(), expected, "messages")


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("wire", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("number", range(len(SLICES)))
def test_the_mean_of_messages_is_that_of_the_reference(device, wire, number):
    layout, pieces = layout_of(wire, device), slices_for(wire)[number]
    received = torch.full((HOSTS, layout.nbytes), 0xA5, dtype=torch.uint8)
    expected = torch.zeros(NUMEL, dtype=torch.float32)
    strip = 0
    for piece in pieces:
        sent = [sent_by(wire, piece, means(host)[number], 1, host) for host in range(HOSTS)]
        for message, own in zip(received, sent, strict=True):
            write(message, piece, own, strip)
        mean = reference.mean_of_hosts(sent, wire, piece.cols)
        expected[piece.begin :][: piece.numel] = mean.flatten()
        strip += piece.strips
    with poisoned_allocations():
        out = torch.empty(NUMEL, dtype=torch.float32, device=device)
    ops.average_means(received.to(device), out, layout, number)
    out, is_nan = out.cpu(), expected.isnan()
    assert_bytes_equal(out.isnan(), is_nan, "NaN")  # whose bits processors choose
    assert_bytes_equal(*(x.masked_fill(is_nan, 0).view(torch.int32) for x in (out, expected)), "mean")


def test_a_message_has_room_for_all_strips():
    assert max(sum(piece.strips for piece in own) for own in SLICES) <= STRIPS
    for wire in ("mxfp8", "nvfp4"):
        assert layout_of(wire, "cpu").nbytes % 16 == 0
    assert layout_of("mxfp8", "cpu").nbytes == NUMEL * 33 // 32
    assert layout_of("nvfp4", "cpu").nbytes == 16 * ceil_div(NUMEL * 9 // 16 + 4 * STRIPS, 16)


@pytest.mark.parametrize("piece", [(8, 8, 0, 1, 8), (0, 8, 4, 1, 8)])
def test_pieces_begin_at_multiples_of_256(piece):
    with pytest.raises(ValueError, match="multiples of 256"):
        ops.MeansLayout("bf16", 512, [[ops.MeansPiece(*piece)]], 1, torch.device("cpu"))
