"""The state of AdamW, full or compact, and conversions between the two."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from zerofp4.engine import CHUNK
from zerofp4.format import STATE_GROUP
from zerofp4.layout import ceil_div
from zerofp4.ops import MasterPiece
from zerofp4.shard import Shard, state_groups, state_unit
from zerofp4.storage import check_buffer

FULL = {"step": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
COMPACT = {
    "step": torch.float32,
    "exp_avg_codes": torch.int8,
    "exp_avg_sq_codes": torch.uint8,
    "scales": torch.float32,
}
"""The entries of state and their dtypes. Compact state has its own names, so that codes are never taken for
moments. docs/numerics.md defines the codes; scales are [..., groups of a row, 2].
"""

KEPT = {False: FULL, True: COMPACT}  # the entries of state, by whether it is compact

PLAIN = {torch.Tensor, nn.Parameter, type(None)}


class Slice(NamedTuple):
    """The larger parameter, in compact state, that a 1D master of ZeroFP4Optimizer is a shard of."""

    shape: torch.Size  # of the parameter
    shard: Shard  # the elements in the master, whole groups
    low: torch.Tensor | None  # the low bytes of a master of 24 bits, itself bfloat16; None if it is float32
    number: int  # of the parameter in its optimizer

    @property
    def piece(self) -> MasterPiece:
        """The shard as the piece of a plan, without amaxes."""
        cols = self.shape[-1]
        return MasterPiece(None, self.shard, (self.shape.numel() // cols, cols), torch.float32, -1, -1)


def slice_of(p: torch.Tensor) -> Slice | None:
    """A master's Slice; None unless it is in compact state and belongs to a ZeroFP4Optimizer."""
    return getattr(p, "zerofp4_slice", None)


def suits_compact(shape: torch.Size) -> bool:
    """Whether a parameter of this shape has rows that are worth the scales of their groups."""
    return len(shape) >= 2 and shape[-1] >= STATE_GROUP


def check_rows(name: str, p: torch.Tensor) -> None:
    """Raises ValueError for a DTensor whose ranks would share groups of a row."""
    ranks = 1
    for dim, placement in enumerate(p.placements if isinstance(p, DTensor) else ()):
        if getattr(placement, "dim", None) == p.dim() - 1:
            ranks *= p.device_mesh.size(dim)
    if ranks > 1 and p.shape[-1] % (ranks * STATE_GROUP):
        raise ValueError(
            f'{name} has rows of {p.shape[-1]} elements over {ranks} ranks, and state="compact" keeps groups '
            f"of {STATE_GROUP} whole: the length must be a multiple of {ranks * STATE_GROUP}"
        )


def scales_shape(shape: torch.Size) -> tuple[int, ...]:
    return (*shape[:-1], ceil_div(shape[-1], STATE_GROUP), 2)


def entry_shape(name: str, p: torch.Tensor) -> tuple[int, ...]:
    """The shape of an entry of the state of a parameter or a master."""
    if name != "scales":
        return () if name == "step" else p.shape
    of = slice_of(p)
    return scales_shape(p.shape) if of is None else (state_groups(of.shard, of.shape[-1]).numel, 2)


def first_state(p: torch.Tensor, compact: bool) -> dict[str, torch.Tensor]:
    """The state of a parameter that was never updated."""
    state = {}
    for name, dtype in KEPT[compact].items():
        zeros = torch.zeros(entry_shape(name, locals_of([p])[0]), dtype=dtype, device=p.device)
        state[name] = _sharded_like(p, name, zeros)
    return state


def converted(p: torch.Tensor, entries: Mapping[str, Any], compact: bool) -> dict[str, Any]:
    """Full or compact state as compact state, or as full state.

    Raises ValueError for other entries, and the errors of check_buffer().
    """
    kept = KEPT[compact]
    given = kept if entries.keys() >= kept.keys() else KEPT[not compact]
    if not entries.keys() >= given.keys():
        raise ValueError(
            f"the state of AdamW must have {', '.join(FULL)}, or {', '.join(COMPACT)}, got {list(entries)}"
        )
    local, *values = locals_of([p, *(entries[name] for name in given if name != "step")])
    for name, value in zip([*given][1:], values, strict=True):
        what = f"{name} in the state of AdamW"
        check_buffer(what, value, entry_shape(name, local), given[name], value.device)
    if given is kept:
        return dict(entries)
    flat, cols = [value.detach().view(-1) for value in values], p.shape[-1]
    new = encode(*flat, cols) if compact else decode(*flat, 0, cols)
    step = entries["step"]  # which the other optimizer goes on to count
    made = {"step": step.clone() if torch.is_tensor(step) else step}
    return made | {name: _sharded_like(p, name, v.view(entry_shape(name, local))) for name, v in new.items()}


def encode(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, cols: int) -> dict[str, torch.Tensor]:
    """The compact state of a shard of whole groups, all of it 1D. cols: the length of a row."""
    unit = state_unit(cols)
    new = _by_units(_encode, exp_avg.view(-1, unit), exp_avg_sq.view(-1, unit))
    return {name: value.view(-1) for name, value in zip([*COMPACT][1:], new, strict=True)}


def decode(
    codes: torch.Tensor, root_codes: torch.Tensor, scales: torch.Tensor, start: int, cols: int
) -> dict[str, torch.Tensor]:
    """The full state of a shard, 1D. start: its first element. scales: of the groups that it touches."""
    unit, numel = state_unit(cols), codes.numel()
    front = start % unit
    padded = [pad(c, (front, -(front + numel) % unit)).view(-1, unit) for c in (codes, root_codes)]
    of_unit, first = ceil_div(unit, STATE_GROUP), front // STATE_GROUP
    pairs = scales.view(-1, 2)
    pairs = pad(pairs, (0, 0, first, -(first + len(pairs)) % of_unit)).view(-1, of_unit, 2)
    moments = [moment.view(-1)[front : front + numel] for moment in _by_units(_decode, *padded, pairs)]
    return dict(zip([*FULL][1:], moments, strict=True))


def _by_units(convert: Callable[..., Sequence[torch.Tensor]], *given: torch.Tensor) -> list[torch.Tensor]:
    """Convert [units, ...], CHUNK elements at a time."""
    (count, unit), made = given[0].shape, []
    at_once = max(CHUNK // unit, 1)
    for first in range(0, max(count, 1), at_once):
        values = convert(*(t[first : first + at_once] for t in given))
        made = made or [v.new_empty((count, *v.shape[1:])) for v in values]
        for output, part in zip(made, values, strict=True):
            output[first : first + at_once] = part
    return made


def locals_of(tensors: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """Unwrap DTensors to their local tensors, and FSDP2 stand-ins to their masters."""
    if not set(map(type, tensors)) <= PLAIN:
        for inside in ("_local_tensor", "zerofp4_master"):
            tensors = [getattr(tensor, inside, tensor) for tensor in tensors]
    return tensors


def _sharded_like(p: torch.Tensor, name: str, local: torch.Tensor) -> torch.Tensor:
    """This rank's part of an entry of state, as a DTensor if p is one; but for the step count."""
    if not isinstance(p, DTensor) or name == "step":
        return local
    whole = torch.empty(entry_shape(name, p), dtype=local.dtype, device="meta")
    size = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    about = DTensor.from_local(local.to("meta"), p.device_mesh, p.placements, **size)
    # from_local() would move the state of masters in host memory to the GPUs of the mesh.
    return DTensor(local, about._spec, requires_grad=False)


# The codes of docs/numerics.md, as kernels make and read them; zerofp4.reference.compact specifies them

_LARGEST, _LARGEST_ROOT = 127, 255
"""The largest code of a first moment, and of the square root of a second moment."""


def _decode(
    codes: torch.Tensor, root_codes: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (exp_avg, exp_avg_sq) of codes [rows, cols] and scales [rows, groups, 2]."""
    s, t = (scale.repeat_interleave(STATE_GROUP, 1)[:, : codes.shape[1]] for scale in scales.unbind(-1))
    codes, root_codes = codes.long(), root_codes.long().clamp(min=1)
    exp_avg = s * (_values(_LARGEST, codes.device)[codes.abs().clamp(max=_LARGEST)] * codes.sign())
    roots = t * _values(_LARGEST_ROOT, codes.device)[root_codes]
    return exp_avg, roots * roots


def _values(largest: int, device: torch.device) -> torch.Tensor:
    """The values of the codes from 0 on, before they are scaled."""
    y = torch.arange(largest + 1, dtype=torch.float64, device="cpu") / largest
    return (8 * y / (7 + (49 - 48 * y).sqrt())).float().to(device)


def _encode(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(int8 codes, uint8 codes, scales) of float32 moments [rows, cols]."""
    # Through double, for the nearest float: torch's own square root of floats often is not, on a CPU.
    roots = exp_avg_sq.double().sqrt().float().clamp(max=2.0**64)
    m, w = (pad(v, (0, -v.shape[1] % STATE_GROUP)).unflatten(1, (-1, STATE_GROUP)) for v in (exp_avg, roots))
    # By group, the largest magnitude; Inf if one is not finite. Its codes are then 0.
    s, t = (v.abs().masked_fill(~v.isfinite(), torch.inf).amax(-1, keepdim=True) for v in (m, w))
    # The reciprocal of a scale must be a normal float.
    factor = torch.where(s < 2.0**-100, 2.0**64, torch.where(s >= 2.0**100, 2.0**-64, torch.ones_like(s)))
    codes = _nearest(m * factor, s * factor, _LARGEST).to(torch.int8)
    root_codes = _nearest(w, t, _LARGEST_ROOT).clamp(min=1).to(torch.uint8)
    flat = (each.flatten(1)[:, : exp_avg.shape[1]].contiguous() for each in (codes, root_codes))
    return *flat, torch.cat((s, t), -1)


def _nearest(values: torch.Tensor, scale: torch.Tensor, largest: int) -> torch.Tensor:
    """The integers next to largest * x (7 - 3 |x|) / 4 of x = values / scale; 0 if a scale is not finite."""
    inverse = torch.where(scale > 0, 1 / scale, 0)
    x = torch.where(scale.isfinite(), values, 0) * inverse
    # Double is exact wherever it decides, since a small x has the code 0. A kernel has one fma.
    slope = (1.75 * largest - 0.75 * largest * x.abs().double()).float()
    return (x.double() * slope.double()).round()
