"""What AdamW keeps of a parameter: full or compact state, and how one becomes the other."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerofp4.format import STATE_GROUP
from zerofp4.layout import ceil_div
from zerofp4.reference import CompactMoments, decode_moments, encode_moments

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

PLAIN = {torch.Tensor, nn.Parameter, type(None)}

MOST = 2**22
"""Elements that are converted at once: the arithmetic takes many times their memory."""


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


def first_state(p: torch.Tensor, compact: bool) -> dict[str, torch.Tensor]:
    """The state of a parameter that was never updated."""
    step = torch.zeros((), dtype=torch.float32, device=p.device)
    if not compact:
        return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    codes = {name: torch.zeros_like(p, dtype=COMPACT[name]) for name in ("exp_avg_codes", "exp_avg_sq_codes")}
    scales = torch.zeros(scales_shape(_local(p).shape), dtype=torch.float32, device=p.device)
    return {"step": step, **codes, "scales": _sharded_like(p, scales, scales_shape(p.shape))}


def converted(p: torch.Tensor, entries: Mapping[str, Any], compact: bool) -> dict[str, Any]:
    """The state of a parameter as full or as compact state, whichever it is. Empty state stays empty.

    Raises ValueError for what is neither, and for what has not the shape of the parameter.
    """
    kept = COMPACT if compact else FULL
    if not entries or entries.keys() >= kept.keys():
        return dict(entries)
    given = FULL if compact else COMPACT
    if not entries.keys() >= given.keys():
        raise ValueError(
            f"the state of AdamW must have {', '.join(FULL)}, or {', '.join(COMPACT)}, got {list(entries)}"
        )
    values = {name: _local(entries[name]) for name in given if name != "step"}
    shape = _local(p).shape
    for name, value in values.items():
        wanted = scales_shape(shape) if name == "scales" else shape
        if value.shape != wanted:
            raise ValueError(
                f"{name} in the state of AdamW must have shape {tuple(wanted)}, got {tuple(value.shape)}"
            )
    new = _encoded(**values) if compact else _decoded(**values)
    shapes = {"scales": scales_shape(p.shape)}
    made = {name: _sharded_like(p, value, shapes.get(name, p.shape)) for name, value in new.items()}
    return {"step": entries["step"], **made}


def _encoded(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> dict[str, torch.Tensor]:
    shape, cols = exp_avg.shape, exp_avg.shape[-1]
    new = {
        "exp_avg_codes": torch.empty(shape, dtype=torch.int8, device=exp_avg.device),
        "exp_avg_sq_codes": torch.empty(shape, dtype=torch.uint8, device=exp_avg.device),
        "scales": torch.empty(scales_shape(shape), dtype=torch.float32, device=exp_avg.device),
    }
    first, second = exp_avg.reshape(-1, cols), exp_avg_sq.reshape(-1, cols)
    outputs = [new[name].view(len(first), *new[name].shape[len(shape) - 1 :]) for name in new]
    for rows in _row_ranges(first):
        roots = second[rows].sqrt().clamp(max=2.0**64)
        for output, values in zip(outputs, encode_moments(first[rows], roots), strict=True):
            output[rows] = values
    return new


def _decoded(
    exp_avg_codes: torch.Tensor, exp_avg_sq_codes: torch.Tensor, scales: torch.Tensor
) -> dict[str, torch.Tensor]:
    cols = exp_avg_codes.shape[-1]
    first, second = exp_avg_codes.reshape(-1, cols), exp_avg_sq_codes.reshape(-1, cols)
    scales = scales.reshape(len(first), -1, 2)
    outputs = [torch.empty_like(first, dtype=torch.float32) for _ in range(2)]
    for rows in _row_ranges(first):
        moments = decode_moments(CompactMoments(first[rows], second[rows], scales[rows]))
        for output, values in zip(outputs, moments, strict=True):
            output[rows] = values
    return {
        name: output.view(exp_avg_codes.shape)
        for name, output in zip(("exp_avg", "exp_avg_sq"), outputs, strict=True)
    }


def _row_ranges(matrix: torch.Tensor) -> list[slice]:
    rows = max(MOST // max(matrix.shape[1], 1), 1)
    bounds = [*range(0, len(matrix), rows), len(matrix)]
    return [slice(*pair) for pair in itertools.pairwise(bounds)]


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
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, p.device_mesh, p.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
