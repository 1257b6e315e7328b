"""What AdamW keeps of a parameter: full or compact state, and how one becomes the other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from zerofp4.format import STATE_GROUP
from zerofp4.layout import ceil_div
from zerofp4.ops import MasterPiece
from zerofp4.reference import CompactMoments, decode_moments, encode_moments, root
from zerofp4.shard import Shard, state_groups, state_unit
from zerofp4.storage import check_buffer

FULL = {"step": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
COMPACT = {
    "step": torch.float32,
    "exp_avg_codes": torch.int8,
    "exp_avg_sq_codes": torch.uint8,
    "scales": torch.float32,
}
"""What is kept of a parameter, and in which dtype. Compact state has names of its own, so that nobody takes
codes for moments. docs/numerics.md has the codes; scales are [..., groups of a row, 2].
"""

CODES = ("exp_avg_codes", "exp_avg_sq_codes")
PLAIN = {torch.Tensor, nn.Parameter, type(None)}

MOST = 2**22
"""Elements that are converted at once."""


class Slice(NamedTuple):
    """What a 1D parameter of an optimizer is of a larger one, which is kept in compact state.

    shape: of the larger one. shard: the elements of it, whole groups.
    low: the bytes of masters of 24 bits, of which the parameter has the bfloat16 plane; None where it is
        float32.
    number: of the larger one in its optimizer.
    """

    shape: torch.Size
    shard: Shard
    low: torch.Tensor | None
    number: int

    @property
    def groups(self) -> int:
        return state_groups(self.shard, self.shape[-1]).numel

    @property
    def piece(self) -> MasterPiece:
        """Of a plan that wants no amaxes."""
        cols = self.shape[-1]
        return MasterPiece(None, self.shard, (self.shape.numel() // cols, cols), torch.float32, -1, -1)


def suits_compact(shape: torch.Size) -> bool:
    """Whether a parameter of this shape has rows that are worth the scales of their groups."""
    return len(shape) >= 2 and shape[-1] >= STATE_GROUP


def check_rows(name: str, p: torch.Tensor) -> None:
    """Raises ValueError for a DTensor whose ranks would share groups of a row."""
    parts = [
        p.device_mesh.size(dim)
        for dim, placement in enumerate(p.placements if isinstance(p, DTensor) else ())
        if getattr(placement, "dim", None) == p.dim() - 1
    ]
    whole = STATE_GROUP * torch.Size(parts).numel()
    if parts and p.shape[-1] % whole:
        raise ValueError(
            f"{name} has rows of {p.shape[-1]} elements over {whole // STATE_GROUP} ranks, and "
            f'state="compact" keeps groups of {STATE_GROUP} whole: the length must be a multiple of {whole}'
        )


def scales_shape(shape: torch.Size) -> tuple[int, ...]:
    return (*shape[:-1], ceil_div(shape[-1], STATE_GROUP), 2)


def first_state(p: torch.Tensor, compact: bool, of: Slice | None = None) -> dict[str, torch.Tensor]:
    """The state of a parameter that was never updated. of: what it is a slice of."""
    step = torch.zeros((), dtype=torch.float32, device=p.device)
    if not compact:
        return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    codes = {name: torch.zeros_like(p, dtype=COMPACT[name]) for name in CODES}
    shape = scales_shape(_local(p).shape) if of is None else (of.groups, 2)
    scales = torch.zeros(shape, dtype=torch.float32, device=p.device)
    return {"step": step, **codes, "scales": _sharded_like(p, scales, scales_shape(p.shape))}


def converted(p: torch.Tensor, entries: Mapping[str, Any], compact: bool) -> dict[str, Any]:
    """The state of a parameter as full or as compact state, whichever it is.

    Raises ValueError for what is neither, and what check_buffer() raises.
    """
    kept, other = (COMPACT, FULL) if compact else (FULL, COMPACT)
    given = kept if entries.keys() >= kept.keys() else other
    if not entries.keys() >= given.keys():
        raise ValueError(
            f"the state of AdamW must have {', '.join(FULL)}, or {', '.join(COMPACT)}, got {list(entries)}"
        )
    values = {name: _local(entries[name]) for name in given if name != "step"}
    shape = _local(p).shape
    for name, value in values.items():
        wanted = scales_shape(shape) if name == "scales" else shape
        check_buffer(f"{name} in the state of AdamW", value, wanted, given[name], value.device)
    if given is kept:
        return dict(entries)
    new = _encoded(**values) if compact else _decoded(**values)
    shapes = {"scales": scales_shape(p.shape)}
    made = {name: _sharded_like(p, value, shapes.get(name, p.shape)) for name, value in new.items()}
    step = entries["step"]  # which the other optimizer goes on to count
    return {"step": step.clone() if torch.is_tensor(step) else step, **made}


def encode_shard(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, cols: int) -> dict[str, torch.Tensor]:
    """The compact state, 1D, of a shard that has whole groups of a tensor with rows of `cols` elements."""
    unit = state_unit(cols)
    new = _encoded(exp_avg.view(-1, unit), exp_avg_sq.view(-1, unit))
    return {name: value.view(-1) for name, value in new.items()}


def decode_shard(
    exp_avg_codes: torch.Tensor, exp_avg_sq_codes: torch.Tensor, scales: torch.Tensor, start: int, cols: int
) -> dict[str, torch.Tensor]:
    """The full state, 1D, of a shard from element `start` on, and from wherever in a group. scales: of all
    groups that have elements of it.
    """
    unit, numel = state_unit(cols), exp_avg_codes.numel()
    front = start % unit
    around = front, -(front + numel) % unit
    codes = [pad(c, around).view(-1, unit) for c in (exp_avg_codes, exp_avg_sq_codes)]
    of_unit, first = ceil_div(unit, STATE_GROUP), front // STATE_GROUP
    pairs = scales.view(-1, 2)
    pairs = pad(pairs, (0, 0, first, -(first + len(pairs)) % of_unit)).view(-1, of_unit, 2)
    new = _decoded(*codes, pairs)
    return {name: value.view(-1)[front : front + numel] for name, value in new.items()}


def _encoded(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> dict[str, torch.Tensor]:
    shape, device = exp_avg.shape, exp_avg.device
    codes = {name: torch.empty(shape, dtype=COMPACT[name], device=device) for name in CODES}
    new = codes | {"scales": torch.empty(scales_shape(shape), dtype=torch.float32, device=device)}
    _by_rows(lambda m, v: encode_moments(m, root(v).clamp(max=2.0**64)), (exp_avg, exp_avg_sq), new)
    return new


def _decoded(
    exp_avg_codes: torch.Tensor, exp_avg_sq_codes: torch.Tensor, scales: torch.Tensor
) -> dict[str, torch.Tensor]:
    shape, device = exp_avg_codes.shape, exp_avg_codes.device
    new = {name: torch.empty(shape, dtype=torch.float32, device=device) for name in ("exp_avg", "exp_avg_sq")}
    compact = exp_avg_codes, exp_avg_sq_codes, scales
    _by_rows(lambda *rows: decode_moments(CompactMoments(*rows)), compact, new)
    return new


def _by_rows(
    convert: Callable[..., Sequence[torch.Tensor]],
    given: Sequence[torch.Tensor],
    new: Mapping[str, torch.Tensor],
) -> None:
    """Write what `convert` makes of tensors into new ones, a few rows at a time: it takes many times their
    memory.
    """
    dims = given[0].dim() - 1
    inputs, outputs = ([t.reshape(-1, *t.shape[dims:]) for t in side] for side in (given, new.values()))
    rows = max(MOST // max(given[0].shape[-1], 1), 1)
    for first in range(0, len(inputs[0]), rows):
        here = slice(first, first + rows)
        for output, values in zip(outputs, convert(*(t[here] for t in inputs)), strict=True):
            output[here] = values


def locals_of(tensors: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """The plain tensors whose memory these are: of a DTensor this rank's own, of a tensor that stands for a
    master (as those of zerofp4.integrations.fsdp2 do) that master. Plain tensors cost no Python call.
    """
    if not set(map(type, tensors)) <= PLAIN:
        for inside in ("_local_tensor", "zerofp4_master"):
            tensors = [getattr(tensor, inside, tensor) for tensor in tensors]
    return tensors


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return locals_of([tensor])[0].detach()


def _sharded_like(p: torch.Tensor, local: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The local tensor, as a DTensor of this shape where p is one."""
    if not isinstance(p, DTensor):
        return local
    stride = torch.empty(shape, dtype=local.dtype, device="meta").stride()
    return DTensor.from_local(
        local, p.device_mesh, p.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
