"""Plans that functions find by themselves: kept with the first weight, found by what a call was given.

A call's fingerprint is all that the checks of its arguments and a plan's addresses depend on. A call with
the fingerprint of one that was checked needs no check, and taking a fingerprint costs a fraction of the
checks: a few attributes of each tensor, in loops that run in C. A function returns None where it meets a kind
of argument that it does not know all about; such calls are always checked.
"""

from collections.abc import Sequence
from operator import attrgetter
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.storage import Addresses, NVFP4Storage, pointers, rebindings, record_of

PLANS_PER_WEIGHT = 4
"""Plans that a weight keeps for functions that find theirs by themselves; the oldest goes first."""

_LISTS = {list, tuple}
_PLAIN = {torch.Tensor, torch.nn.Parameter, NoneType}
_RECORDS = {NVFP4Storage}
_FACTS = (
    torch.Tensor.data_ptr,
    torch.Tensor.numel,
    torch.Tensor.dim,
    torch.Tensor.is_contiguous,
    attrgetter("dtype"),
)


def attached(model_weights: Any, kind: str) -> list:
    """The plans kept with the first weight, the latest used last; they live as long as it does.

    Plans whose process group was destroyed are dropped. An empty list for anything but a list of weights.
    """
    for weight in model_weights if isinstance(model_weights, list | tuple) else ():
        record = record_of(weight)
        if record is not None:
            plans = record.attachments.setdefault(kind, [])
            plans[:] = [plan for plan in plans if plan.group.is_alive()]
            return plans
    return []


def find(plans: Sequence, fingerprint: list | None, group: dist.ProcessGroup | None) -> Any | None:
    """The plan in this group whose last call had this fingerprint, and whose weights have not moved since."""
    for plan in reversed(plans) if fingerprint is not None else ():
        if plan.fingerprint == fingerprint and plan.group.refers_to(group):
            return plan if plan.addresses.glance() is None else None
    return None


def keep(plans: list, plan: Any) -> None:
    """Make `plan` the latest of the plans kept with a weight; the one unused for longest may go."""
    others = [other for other in plans if other is not plan]
    plans[:] = [*others[1 - PLANS_PER_WEIGHT :], plan]


def pin(plan: Any) -> None:
    """Keep a plan that is captured in a CUDA graph, which uses its memory in every replay, for as long as the
    first weight lives, whatever becomes of it among the plans that calls find.
    """
    for record in plan.records[:1]:
        record.attachments.setdefault("captured_plans", {})[id(plan)] = plan


def same_weights(model_weights: Sequence[Any], records: Sequence[NVFP4Storage]) -> bool:
    """Whether these are the weights of those records, in the same order."""
    return len(model_weights) == len(records) and all(
        record_of(weight) is record for weight, record in zip(model_weights, records, strict=True)
    )


def advance_versions(model_weights: Sequence[Any]) -> None:
    """As after any update in place, a backward pass through the old values of the weights fails."""
    if set(map(type, model_weights)) <= _RECORDS:
        return
    torch.autograd.graph.increment_version([w for w in model_weights if isinstance(w, torch.Tensor)])


def weights_fingerprint(weights: Any) -> list | None:
    """Of a list of NVFP4 weights: their records, compared by identity, and that none was rebound since.
    On a GPU also where their codes are, which may be exchanged behind a record (.data assigned); on the
    CPU `find` asks for the addresses of all.
    """
    if type(weights) not in _LISTS:
        return None
    records = list(map(record_of, weights))
    if not set(map(type, records)) <= _RECORDS:
        return None
    on_gpu = records and records[0].device.type == "cuda"
    codes = [r.rowwise.data for r in records if r.rowwise is not None] if on_gpu else []
    return [rebindings(), records, pointers(codes)]


def weights_addresses(records: Sequence[NVFP4Storage]) -> Addresses:
    """Where the buffers of weights are, for a plan that is kept and not to keep more than it must."""
    return Addresses({f"model_weights[{i}]": record for i, record in enumerate(records)}, {}, hold=False)


def tensors_fingerprint(tensors: Any) -> list | None:
    """Of a list of plain tensors and Nones: all but their values. Holds no tensor."""
    if type(tensors) not in _LISTS:
        return None
    kinds = set(map(type, tensors))
    if not kinds <= _PLAIN:
        return None
    present = tensors
    if kinds != {torch.Tensor}:
        kinds = list(map(type, tensors))
        present = [tensor for tensor in tensors if tensor is not None]
    facts = [list(map(fact, present)) for fact in _FACTS]
    # An address says on which device it is, but that of an empty tensor.
    empty = [tensor.device for tensor in present if not tensor.data_ptr()] if 0 in facts[0] else []
    return [kinds, empty, *facts]


def integers_fingerprint(integers: Any) -> list | None:
    """Of a list of ints and Nones; a bool, which equals an int, is neither."""
    if type(integers) not in _LISTS or not set(map(type, integers)) <= {int, NoneType}:
        return None
    return list(integers)
