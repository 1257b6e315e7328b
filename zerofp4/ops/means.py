"""Launches on the means of hosts: rounded at random to be sent, and averaged by the owner of a slice."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

import zerofp4._C as _C
from zerofp4.format import BLOCK, MXFP8_BLOCK, STRIP
from zerofp4.layout import ceil_div, round_up
from zerofp4.ops.device import target_of
from zerofp4.storage import address_of

MEANS_FORMATS: dict[str, int] = {"bf16": 1, "mxfp8": MXFP8_BLOCK, "nvfp4": BLOCK}
"""By format of means, the elements of a row in a block."""


class MeansPiece(NamedTuple):
    """The part of a parameter in a slice: elements [first, first + numel), at `begin` of the slice.

    number: of the parameter in its optimizer. cols: elements of a row. NVFP4 needs whole strips.
    """

    begin: int
    numel: int
    first: int
    number: int
    cols: int

    @property
    def strips(self) -> int:
        return ceil_div(self.numel // self.cols, STRIP[0]) * ceil_div(self.cols, STRIP[1])


class MeansLayout:
    """Messages of means, one for each slice of `numel` elements, padded to 16 bytes.

    bf16: the elements. MXFP8: E4M3 elements, then E8M0 scales. NVFP4: packed codes, then E4M3 scales, then
        float32 amaxes of strips.

    format: one of MEANS_FORMATS.
    slices: by slice, its pieces, ascending.
    strips: amaxes in a message; for NVFP4, the most strips of any slice on any rank.

    Raises ValueError for a piece that does not begin at a multiple of 256.
    """

    def __init__(
        self,
        format: str,
        numel: int,
        slices: Sequence[Sequence[MeansPiece]],
        strips: int,
        device: torch.device,
    ):
        rows = []
        for s, pieces in enumerate(slices):
            strip = s * strips
            for piece in pieces:
                if (piece.begin | piece.first | numel) % _C.MEANS_AT_ONCE:
                    raise ValueError(
                        f"parameter {piece.number}: element {piece.first} lies at {piece.begin}, which must "
                        f"be multiples of {_C.MEANS_AT_ONCE}"
                    )
                rows.append((s * numel + piece.begin, *piece[1:], strip))
                strip += piece.strips
        self.is_decoded = format != "bf16"
        """Whether average_means() reads messages; else they are rows of bfloat16."""
        dense = {"bf16": 2 * numel, "mxfp8": numel + numel // MXFP8_BLOCK}
        size = dense.get(format, numel // 2 + numel // BLOCK + 4 * strips)
        self.nbytes = round_up(size, 16)
        """Of a message."""
        self._pieces = torch.tensor(rows or [(0, 0, 0, 0, 1, 0)], dtype=torch.int64, device="cpu").to(device)
        self.fields = {
            "pieces": address_of("pieces", self._pieces),
            "count": len(rows),
            "numel": numel,
            "bytes": self.nbytes,
            "strips": strips,
            "format": list(MEANS_FORMATS).index(format),
        }


def round_means(means: torch.Tensor, out: torch.Tensor, layout: MeansLayout, *, step: int, host: int) -> None:
    """Round the means of a host at random, as reference.send_mean() does.

    means: float32 [slices, numel], contiguous.
    out: the messages, contiguous. bfloat16 elements outside of pieces become 0; other padding stays.
    step: number of the update. host: the sender's number.
    """
    arguments = _C.RoundMeansArgs(
        **layout.fields,
        values=address_of("means", means),
        output=address_of("out", out),
        slices=len(means),
        step=step,
        host=host,
    )
    _C.round_means(target_of(out.device), arguments)


def average_means(received: torch.Tensor, out: torch.Tensor, layout: MeansLayout, slice_number: int) -> None:
    """out = the mean of the messages of all hosts, as reference.mean_of_hosts(); 0 outside of pieces.

    received: uint8 [hosts, layout.nbytes], contiguous, of MXFP8 or NVFP4. out: float32 [numel].
    slice_number: of the received slice in the layout.
    """
    arguments = _C.AverageMeansArgs(
        **layout.fields,
        received=address_of("received", received),
        output=address_of("out", out),
        hosts=len(received),
        slice=slice_number,
    )
    _C.average_means(target_of(out.device), arguments)
