"""Plans that functions find by themselves, kept with the first weight.

A call's fingerprint is all that its checks and a plan's addresses depend on. A call with the fingerprint of a
checked one is not checked again.
"""

import dataclasses
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.distributed import GroupReference, attempt
from zerofp4.ops import increment_versions, tensor_facts
from zerofp4.shard import Shard
from zerofp4.storage import NVFP4Storage, rebindings, weight_record
from zerofp4.tensors import QuantizedTensor

_RECORD, _CODES = attrgetter("record"), attrgetter("rowwise.place")


@dataclasses.dataclass(eq=False)
class Kept:
    """A plan for calls with the same weights in the same group."""

    plan: Any
    records: list[NVFP4Storage]
    """Kept alive, so that their ids stay valid."""
    group: GroupReference
    shards: list[Shard] | None = None
    """This rank's, of a gather."""
    fingerprint: list | None = None
    """Of the last call; None if the next one must be checked."""


class PlanCache:
    """The plans of one kind that are kept with the first weight of a call, and live as long as it does."""

    def __init__(self, kind: str, model_weights: Any, group: dist.ProcessGroup | None):
        self._weights = weights = model_weights if isinstance(model_weights, list | tuple) else ()
        self._only_ours = all(issubclass(each, QuantizedTensor) for each in set(map(type, weights)))
        self._records = list(map(_RECORD if self._only_ours else weight_record, weights))
        self._plans: dict[tuple, Kept] = {}
        if self._records and self._records[0] is not None:  # else it is no weight
            self._plans = self._records[0].attachments.setdefault(kind, {})
        self._group, self._key = group, (id(group), *map(id, self._records))

    def find(
        self, tensors: Sequence[Sequence[torch.Tensor | None]], *others: Any
    ) -> tuple[Kept | None, bool]:
        """The plan of a call; and whether the call equals the last one, by tensors and repr of others."""
        self._fingerprint = attempt(self._identify, tensors, others)[0]
        kept = self._plans.get(self._key)
        if kept is None or not kept.group.refers_to(self._group):
            return None, False
        return kept, self._fingerprint is not None and kept.fingerprint == self._fingerprint

    def _identify(self, tensors, others) -> list:
        codes = map(_CODES, self._records)  # a `.data` assigned to them changes no record
        facts = [tensor_facts(list(each)) for each in (codes, *tensors)]
        return [rebindings(), facts, repr([list(each) if type(each) is tuple else each for each in others])]

    def keep(self, kept: Kept) -> None:
        """Keep a plan for calls like that of find(), and drop those of destroyed groups."""
        kept.fingerprint = self._fingerprint
        for key in [key for key, other in self._plans.items() if not other.group.is_alive()]:
            del self._plans[key]
        self._plans[self._key] = kept

    def drop(self, *, captured: bool = False) -> None:
        """Let no call find the plan again. A captured one lives on: each replay of the CUDA graph uses it."""
        kept = self._plans.pop(self._key)
        if captured:
            self._plans[(id(kept),)] = kept

    def advance_versions(self) -> None:
        """A backward pass through the old values fails, as after any update in place."""
        weights = self._weights
        if not self._only_ours:
            weights = [weight for weight in weights if isinstance(weight, torch.Tensor)]  # records have none
        increment_versions(list(weights))
