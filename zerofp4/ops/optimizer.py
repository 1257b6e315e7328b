"""Launches of an optimizer step, over many tensors by their addresses: the mean of gradients, their norm and
non-finite values, AdamW, and barriers between ranks of one host.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

import zerofp4._C as _C
from zerofp4.layout import ceil_div
from zerofp4.ops.device import DTYPE_CODES, NativePlan, target_of
from zerofp4.ops.stages import MasterPiece
from zerofp4.ops.tensor_lists import numbers, packed, pointers, pointers_of, tensor_facts
from zerofp4.shard import Shard, state_groups
from zerofp4.storage import address_of

# The mean of gradients, added in rank order, and the sums of its squares

MAX_PEERS: int = _C.MAX_PEERS
"""How many ranks of one host can read each other's memory."""

SQUARES: tuple[int, int] = (_C.SQUARE_COPIES, _C.SQUARE_WORDS)
"""The shape of sums of squares, int64: copies of words, to be added up. A word stands for a range of 8
exponents; the last two count infinite chunks and those with NaN.
"""


class PeerRows(NamedTuple):
    """A matrix [ranks, n]; each rank's row is in its own memory, which all ranks can read.

    addresses: by rank, this one included, where its row begins, at a multiple of 16 bytes.
    """

    addresses: tuple[int, ...]
    numel: int
    dtype: torch.dtype


def average(pieces: torch.Tensor | PeerRows, out, own=None, rank: int = 0, squares=None) -> None:
    """out = ((pieces[0] + pieces[1]) + ...) / len(pieces), in float32 for any dtype of pieces.

    pieces: float32, bfloat16 or float16 [ranks, n], contiguous or as PeerRows. out: float32 [n].
    own: [n] of the dtype of pieces, read instead of pieces[rank].
    squares: int64 SQUARES, to which the squares of the means are added, for norm_of_squares().
    """
    if isinstance(pieces, PeerRows):
        count, numel = len(pieces.addresses), pieces.numel
        matrix = {"rows": pieces.addresses}
    else:
        count, numel = pieces.shape
        matrix = {"pieces": address_of("pieces", pieces)}
    arguments = _C.AverageArgs(
        **matrix,
        own=address_of("own", own),
        dtype=DTYPE_CODES[pieces.dtype],
        rank=rank,
        count=count,
        numel=numel,
        output=address_of("out", out),
        squares=address_of("squares", squares),
    )
    _C.average(target_of(out.device), arguments)


def norm_of_squares(words: torch.Tensor) -> torch.Tensor:
    """float32 []: the norm of int64 [SQUARES[1]] words, copies and ranks added up. Waits for nothing."""
    # 2 ** (8 i - 150), as bits: torch would compile a kernel for exp2() of float64 at run time.
    exponents = torch.arange(_C.SQUARE_RANGES, dtype=torch.int64, device=words.device) * 8 - 150
    powers = ((exponents + 1023) << 52).view(torch.float64)
    total = (words[: _C.SQUARE_RANGES].double() * powers).sum()
    infinite, nan = words[_C.SQUARE_RANGES :].unbind()
    return total.sqrt().masked_fill(infinite != 0, math.inf).masked_fill(nan != 0, math.nan).float()


# Ranks of one host, in each other's memory


class Barrier:
    """Makes the streams of all ranks wait for one another; no host waits. Every rank must run barriers with
    the same flags equally often, one after another, also in CUDA graphs.

    flags: by rank, the address of its uint32 [ranks] flags, initially zeros, in memory that all ranks can
        write and the caller keeps alive.
    status: int32 [1], pinned: 1 + the number of a rank that came too late, for this rank or one that it
        meets. From then on nothing waits, and `failed`, float32 [] on the device, is not 0.
    """

    def __init__(self, flags: Sequence[int], rank: int, status, failed, timeout_s: float):
        self._device = failed.device
        self._passed = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._held = status, failed
        self._arguments = _C.BarrierArgs(
            flags=list(flags),
            passed=self._passed.data_ptr(),
            failed=address_of("failed", failed),
            status=address_of("status", status),
            rank=rank,
            count=len(flags),
            timeout_ns=int(timeout_s * 1e9),
        )

    def run(self) -> None:
        _C.barrier(target_of(self._device), self._arguments)


# What the ranks decide

VOTE_FLAGS: int = _C.VOTE_FLAGS
"""How many flags end a vote. The last two: the word of the first NaN or Inf, and 1 + a rank with an error."""


class Decision:
    """Whether a step writes: the words that the update and the cast read, in one block on the device.

    A word stands for a gradient with a NaN or Inf: above 0, and larger for an earlier parameter.

    count: the number of presence flags. failed: as of Barrier.
    """

    def __init__(self, count: int, device: torch.device, failed: torch.Tensor | None = None):
        self._block = torch.zeros(_C.DECISION_WORDS + count, dtype=torch.float64, device=device)
        self._words, self.failed = self._block[: _C.DECISION_WORDS], failed
        integers, floats = (self._words.view(dtype) for dtype in (torch.int32, torch.float32))
        self.own, self.nonfinite, self.first, self.skipped = integers[:4].unbind()
        """int32 []: the word of this rank; of all ranks when gradients were last checked; the largest in this
        step; how many steps were skipped for it.
        """
        self.skip, self.refused = floats[4:].unbind()
        """float32 []: 1 if the step, or bucket, changes nothing; 1 if the ranks do not take it."""
        self.present = self._block[_C.DECISION_WORDS :]
        """float64 [count]: the presence flags of the last vote, as its last ones; 0 if it changes nothing."""

    def decide(
        self,
        vote: torch.Tensor | None,
        count: int = 0,
        *,
        found_inf: torch.Tensor | None = None,
        looks: bool = True,
        counts: bool = False,
        goes_on: bool = False,
        keeps: bool = False,
    ) -> None:
        """Decide, in one launch. Waits for nothing.

        vote: float64, the maximum over all ranks of `count` presence flags, words that must be equal on all
            ranks, their negatives, and VOTE_FLAGS flags. None in a world of one, which reads `own`.
        found_inf: float32 [1], becomes `skip`.
        looks: whether gradients were checked for the vote; otherwise `nonfinite` and `first` stay.
        counts: whether to count a step that is skipped for a NaN or Inf.
        goes_on: the vote is on another bucket of a step, in which `first` and found_inf only grow.
        keeps: whether a step that an earlier vote refused stays refused.
        """
        arguments = _C.DecideArgs(
            vote=address_of("vote", vote),
            failed=address_of("failed", self.failed),
            decision=address_of("decision", self._words),
            present=address_of("present", self.present[len(self.present) - count :]),
            found_inf=address_of("found_inf", found_inf),
            count=count,
            equal=0 if vote is None else (vote.numel() - count - VOTE_FLAGS) // 2,
            looks=looks,
            counts=counts,
            goes_on=goes_on,
            keeps=keeps,
        )
        _C.decide(target_of(self._block.device), arguments)


# Lists of tensors of any dtypes: is there a NaN or Inf, the sums of squares, float32 copies


class MultiTensor:
    """Launches over contiguous tensors of format.WEIGHT_DTYPES, which may move between launches: the caller
    sets `addresses`, as from pointers(), before each.

    tensors: None for a missing one. words: of each tensor, above 0, for find_nonfinite().
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None], words: Sequence[int] | None = None):
        self.addresses = b""
        words = [0] * len(tensors) if words is None else words
        positions: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(tensors):
            if tensor is not None:
                positions.setdefault(tensor.dtype, []).append(i)
        self._lists = [
            _C.MultiTensorList(
                positions=own,
                numels=[tensors[i].numel() for i in own],
                words=[words[i] for i in own],
                dtype=DTYPE_CODES[dtype],
            )
            for dtype, own in positions.items()
        ]

    def find_nonfinite(self, found: torch.Tensor, when: torch.Tensor | None = None) -> None:
        words = address_of("found", found), address_of("when", when)
        for own in self._lists:
            own.find_nonfinite(target_of(found.device), self.addresses, *words)

    def add_squares(self, squares: torch.Tensor) -> None:
        for own in self._lists:
            own.add_squares(target_of(squares.device), self.addresses, address_of("squares", squares))

    def widen(self, outputs: list[torch.Tensor]) -> None:
        """Copy tensors to `outputs`, contiguous float32 on their device; None leaves its output unchanged."""
        addresses = pointers(outputs)
        for own in self._lists:
            own.widen(target_of(outputs[0].device), self.addresses, addresses)


def find_nonfinite(
    tensors: Sequence[torch.Tensor],
    words: Sequence[int],
    found: torch.Tensor,
    when: torch.Tensor | None = None,
) -> None:
    """Raise found[0], int32, to the largest word of a tensor that holds a NaN or Inf, in one pass over them.

    tensors: contiguous, of format.WEIGHT_DTYPES, on the device of `found`. words: of each, above 0.
    when: int64 [2] on the device; if both are 0, nothing is checked.
    """
    launches = MultiTensor(tensors, words)
    launches.addresses = pointers_of("tensors", tensors)
    launches.find_nonfinite(found, when)


def add_squares(tensors: Sequence[torch.Tensor], squares: torch.Tensor) -> None:
    """Add to `squares` what average() would for means that are these tensors, as of find_nonfinite()."""
    launches = MultiTensor(tensors)
    launches.addresses = pointers_of("tensors", tensors)
    launches.add_squares(squares)


# AdamW

ROW = 128
"""Columns of the matrix that a tensor without tiles is taken for: those of a kernel's strip."""

RANDOM_COLUMNS: int = _C.RANDOM_COLUMNS
"""Elements of a row that share a block of random bytes."""


class AdamWItem(NamedTuple):
    """One tensor of an update, contiguous. Without state (None) only its amaxes are taken."""

    master: torch.Tensor
    """float32, or bfloat16 with `low` in compact state, where without pieces its last dimension is a row."""
    step: torch.Tensor | None
    """float32 [] or [1]: how many updates there were."""
    exp_avg: torch.Tensor | None
    """float32; int8 codes in compact state."""
    exp_avg_sq: torch.Tensor | None
    """float32; uint8 codes in compact state."""
    gradient_dtype: torch.dtype
    pieces: tuple[MasterPiece, ...] = ()
    """If amaxes are wanted: its part of a weight, or of several matrices, one after the other. In compact
    state each begins and ends with a group of its matrix.
    """
    present: torch.Tensor | None = None
    """float64 of one element on the device; 0 means that the item has no gradient."""
    # Of compact state:
    compact: bool = False
    scales: torch.Tensor | None = None
    """float32 [groups, 2]: the owned groups of rows of STATE_GROUP elements, row by row."""
    low: torch.Tensor | None = None
    """uint8, as many as masters: their lowest bytes. None for float32 masters."""
    number: int = 0
    """The parameter's in its optimizer, below 2**32. It seeds the rounding of its masters."""
    first_row: int = 0
    """The number of rows of the parameter before it, on other ranks."""


class RankGradients(NamedTuple):
    """Unreduced gradients of all ranks, which the kernel averages as average() does.

    received: [ranks, n], contiguous or as PeerRows. This rank's gradient comes from begin() instead.
    masters: float32 [n], with every item's master at the position of its gradient in the rows.
    """

    received: torch.Tensor | PeerRows
    masters: torch.Tensor
    rank: int

    def pieces(self) -> _C.GradientPieces:
        if isinstance(self.received, PeerRows):
            rows = self.received.addresses
            count, places = len(rows), {"rows": rows}
        else:
            count, stride = self.received.shape
            places = {"received": address_of("received", self.received), "stride": stride}
        masters = address_of("masters", self.masters)
        return _C.GradientPieces(**places, masters=masters, rank=self.rank, count=count, share=1 / count)


class _Split:
    """An item as one part for each of its pieces. begins: the first element of each part.

    Each part after the first has its own copy of the step counter, because every part increments it.
    """

    def __init__(self, item: AdamWItem):
        self.parts, self.begins, self._step = [item], [0], item.step
        self._copies = None
        if len(item.pieces) < 2:
            return
        numels = [piece.shard.numel for piece in item.pieces]
        groups = [2 * state_groups(p.shard, p.matrix[1]).numel if item.compact else 0 for p in item.pieces]
        self.begins = list(itertools.accumulate(numels[:-1], initial=0))
        steps: list[torch.Tensor | None] = [item.step] * len(numels)
        if item.step is not None:
            self._copies = torch.empty(len(numels) - 1, dtype=torch.float32, device=item.step.device)
            steps[1:] = self._copies.split(1)
        arrays = {"step": steps}
        for name in ("master", "low", "exp_avg", "exp_avg_sq", "scales"):
            array = getattr(item, name)
            if array is not None:
                arrays[name] = array.view(-1).split(groups if name == "scales" else numels)
        self.parts = [
            item._replace(pieces=(piece,), **{name: parts[k] for name, parts in arrays.items()})
            for k, piece in enumerate(item.pieces)
        ]
        # The rows of a stack are those of its matrices, one after another.
        rows = item.pieces[0].matrix[0]
        self.parts = [p._replace(first_row=item.first_row + rows * k) for k, p in enumerate(self.parts)]

    def take_step(self) -> None:
        """Copy the step counter to the parts, on its device."""
        if self._copies is not None:
            self._copies.copy_(self._step.view(1).expand_as(self._copies))


def _descriptor(item: AdamWItem) -> _C.AdamWDescriptor:
    if item.pieces:
        piece = item.pieces[0]
    else:
        numel, cols = item.master.numel(), item.master.shape[-1] if item.compact else ROW
        piece = MasterPiece(None, Shard(0, numel), (ceil_div(numel, cols), cols), torch.float32, -1, -1)
    master, low, exp_avg, exp_avg_sq = (
        address_of(name, getattr(item, name)) for name in ("master", "low", "exp_avg", "exp_avg_sq")
    )
    state = {}
    if item.compact:
        is_float = item.master.dtype == torch.float32
        state["compact"] = _C.CompactState(
            high=0 if is_float else master,
            low=low,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            scales=address_of("scales", item.scales),
            first_group=state_groups(piece.shard, piece.matrix[1]).start,
            first_block=item.first_row * ceil_div(piece.matrix[1], RANDOM_COLUMNS),
            number=item.number,
            aligned=not any(each % 16 for each in (master, low, exp_avg, exp_avg_sq)),
        )
        master, exp_avg, exp_avg_sq = master if is_float else 0, 0, 0
    return _C.AdamWDescriptor(
        master=master,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        step=address_of("step", item.step),
        present=address_of("present", item.present),
        gradient_dtype=DTYPE_CODES[item.gradient_dtype],
        **piece.fields(),
        **state,
    )


class AdamWStage:
    """AdamW for a list of tensors: begin() per parameter group, then one update().

    items: all in compact state, or none.
    reduced: the vector for the amaxes of items with pieces, cleared since the last update. Words of tiles
        with owned elements are written; words of amax groups, and of weights whose scales travel, are raised.

    Holds addresses: the caller keeps the items' tensors alive, also for CUDA graphs that captured calls.
    """

    def __init__(self, items: Sequence[AdamWItem], reduced: torch.Tensor | None):
        self.device = items[0].master.device
        splits = [_Split(item) for item in items]
        parts = [part for split in splits for part in split.parts]
        self._splits = None if len(parts) == len(items) else splits
        self._firsts = list(itertools.accumulate((len(split.parts) for split in splits), initial=0))
        native = _C.AdamWPlan(
            on_cpu=self.device.type == "cpu",
            compact=items[0].compact,
            tensors=[_descriptor(part) for part in parts],
            reduced=address_of("reduced", reduced),
        )
        self._plan = NativePlan(self.device)
        self._plan.load(native, True)

    def begin(self, options: _C.AdamWOptions, first: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Count the step of items [first, first + len(gradients)), which share their options. gradients:
        contiguous, of the item's gradient_dtype; None leaves the item unchanged.
        """
        addresses = tensor_facts(list(gradients)).addresses
        if self._splits is not None:
            splits = self._splits[first : first + len(gradients)]
            for split in splits:
                split.take_step()
            addresses = packed(
                -1 if gradient is None else start + begin * gradient.itemsize
                for split, gradient, start in zip(splits, gradients, numbers(addresses), strict=True)
                for begin in split.begins
            )
        self._plan.run("begin", options, self._firsts[first], addresses)

    def update(self, brought: RankGradients | None = None) -> None:
        """brought: the other ranks' gradients, in begin()'s dtype; begin() got this rank's own then."""
        self._plan.run("update", _C.GradientPieces() if brought is None else brought.pieces())


def adamw_options(
    *, lr: float | torch.Tensor, betas, eps, weight_decay, maximize, skip=None, factor=None, **others
) -> _C.AdamWOptions:
    """The options of a parameter group; other entries are ignored. An lr on a GPU is read there.

    skip: float32, one element, on the items' device, or None. If it is not 0 when begin() runs, the update
        only takes amaxes, and leaves items and counters unchanged.
    factor: likewise; multiplies gradients, in float32, as they are read, but not RankGradients.
    """
    on_gpu = isinstance(lr, torch.Tensor) and lr.is_cuda
    return _C.AdamWOptions(
        lr_address=address_of("lr", lr) if on_gpu else 0,
        skip=address_of("skip", skip),
        factor=address_of("factor", factor),
        lr=0.0 if on_gpu else float(lr),
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        maximize=bool(maximize),
    )
