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

from zerofp4.ops import Addresses, pointers, tensor_facts
from zerofp4.storage import NVFP4Storage, rebindings, weight_record
from zerofp4.tensors import QuantizedTensor

PLANS_PER_WEIGHT = 4
"""Plans that a weight keeps for functions that find theirs by themselves; the oldest goes first."""

_LISTS = {list, tuple}
_PLAIN = {torch.Tensor, torch.nn.Parameter, NoneType}
_RECORD, _CODES = attrgetter("record"), attrgetter("rowwise.data")


def attached(model_weights: Any, kind: str) -> list:
    """The plans kept with the first weight, the latest used last; they live as long as it does.

    Plans whose process group was destroyed are dropped. An empty list for anything but a list of weights.
    """
    for weight in model_weights if isinstance(model_weights, list | tuple) else ():
        record = weight_record(weight)
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
        weight_record(weight) is record for weight, record in zip(model_weights, records, strict=True)
    )


def advance_versions(model_weights: Sequence[Any]) -> None:
    """As after any update in place, a backward pass through the old values of the weights fails."""
    torch.autograd.graph.increment_version(tensors_among(model_weights))


def tensors_among(weights: Sequence[Any]) -> Sequence[torch.Tensor]:
    """Those that have autograd versions, which records have not."""
    if _all_are(torch.Tensor, weights):
        return weights
    return [weight for weight in weights if isinstance(weight, torch.Tensor)]


def _all_are(kind: type, values: Sequence[Any]) -> bool:
    """A loop over all values in Python would take longer than all that follows."""
    return all(issubclass(each, kind) for each in set(map(type, values)))


def weights_fingerprint(weights: Any) -> list | None:
    """Of a list of NVFP4 weights: their records, compared by identity, and that none was rebound since.
    Raises AttributeError for records without codes, which no check lets pass.
    On a GPU also where their codes are, which may be exchanged behind a record (.data assigned); on the
    CPU `find` asks for the addresses of all.
    """
    if type(weights) not in _LISTS:
        return None
    records = list(map(_RECORD if _all_are(QuantizedTensor, weights) else weight_record, weights))
    if not _all_are(NVFP4Storage, records):
        return None
    on_gpu = records and records[0].device.type == "cuda"
    return [rebindings(), records, pointers(list(map(_CODES, records))) if on_gpu else ()]


def weights_addresses(records: Sequence[NVFP4Storage]) -> Addresses:
    """Where the buffers of weights are, for a plan that is kept and not to keep more than it must."""
    return Addresses({f"model_weights[{i}]": record for i, record in enumerate(records)}, {}, hold=False)


def tensors_fingerprint(tensors: Any) -> bytes | list | None:
    """Of a list of plain tensors and Nones: all but their values. Holds no tensor."""
    if type(tensors) not in _LISTS or not set(map(type, tensors)) <= _PLAIN:
        return None
    return tensor_facts(list(tensors))


def integers_fingerprint(integers: Any) -> list | None:
    """Of a list of ints and Nones; a bool, which equals an int, is neither."""
    if type(integers) not in _LISTS or not set(map(type, integers)) <= {int, NoneType}:
        return None
    return list(integers)
