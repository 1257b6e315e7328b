"""Whether the storage of tensors has moved: whoever holds addresses asks here."""

from collections.abc import Mapping
from typing import Any

import torch

from zerofp4.ops.tensor_lists import first_moved, pointers
from zerofp4.storage import rebindings, record_of, weight_record


class Addresses:
    """The addresses of the buffers of records and of plain tensors, when this was made.

    weights: by what messages call them, quantized tensors or records. tensors: likewise, plain ones.
    hold: keep alive what a GPU may still use; without it whoever asks looks at codes in some other way
    before a step.
    owner: what was built with these addresses, and has a refresh(), in messages.

    On the CPU torch moves storages in place (share_memory_, pickling to another process, resize_), and no
    alias protects what was there: every step looks at the codes of every weight, which move where the rest of
    it does, and at every tensor. On a GPU storage does not move under its tensor; what is exchanged (.data
    assigned, a weight rebound) stays alive here until it is noticed, so that a step need only ask one
    counter. Nobody counts what other libraries do to their tensors: where one is a weight, every step looks
    there too.
    """

    def __init__(
        self,
        weights: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        *,
        hold: bool = True,
        owner: str = "plan",
    ):
        self._owner = owner
        self._weights = list(weights.items())
        self._records = [weight_record(weight) for weight in weights.values()]
        self._adapted = [weight for weight in weights.values() if record_of(weight) is None]
        self._plain = dict(tensors)
        self._take(*self._present())
        self._on_gpu = any(tensor.is_cuda for tensor in self._tensors)
        self._aliases = [tensor.detach() for tensor in self._tensors] if hold and self._on_gpu else []

    def glance(self) -> RuntimeError | None:
        """What a step asks before it reads or writes: an error for the first thing that is known to have
        moved.
        """
        if self._on_gpu and not self._adapted and self._rebindings == rebindings():
            return None
        return self.find_moved()

    def find_moved(self) -> RuntimeError | None:
        """An error for the first thing that has moved. Looks at the codes of all weights and at all tensors,
        and at everything where a weight was rebound.
        """
        for weight in self._adapted:
            weight_record(weight)  # which counts what has changed
        if self._rebindings == rebindings():
            before, now = self._watched_pointers, pointers(self._watched)
            return None if now == before else self._moved(self._names[first_moved(before, now)])
        for (name, weight), record in zip(self._weights, self._records, strict=True):
            if weight_record(weight) is not record:
                return self._moved(f"{name}: rowwise_data")
        names, tensors = self._present()
        if names != self._names:
            return self._moved(_first_other(self._names, names))
        now = pointers(tensors)
        if now != self._pointers:
            return self._moved(names[first_moved(self._pointers, now)])
        self._take(names, tensors)
        return None

    def _present(self) -> tuple[list[str], list[torch.Tensor]]:
        """Everything; what each step looks at comes first."""
        codes, others = [], []
        for (name, _), record in zip(self._weights, self._records, strict=True):
            first, *rest = ((f"{name}: {field}", buffer) for field, buffer in record.places())
            codes.append(first)
            others += rest
        pairs = [*codes, *self._plain.items(), *others]
        return [name for name, _ in pairs], [tensor for _, tensor in pairs]

    def _take(self, names: list[str], tensors: list[torch.Tensor]) -> None:
        self._names, self._tensors = names, tensors
        self._watched = tensors[: len(self._records) + len(self._plain)]
        self._pointers, self._watched_pointers = pointers(tensors), pointers(self._watched)
        self._rebindings = rebindings()

    def _moved(self, what: str) -> RuntimeError:
        self._rebindings = -1  # the next glance finds it again
        return RuntimeError(
            f"{what} has moved since the {self._owner} was built; call refresh() to take its new address"
        )


def _first_other(before: list[str], now: list[str]) -> str:
    """The first buffer that one of two lists has, and the other has not."""
    return next(name for name in (*before, *now) if name not in before or name not in now)
