"""What must not change between the steps of a ZeRO optimizer, and whether it did."""

import operator
from collections.abc import Sequence
from operator import attrgetter

import torch

from zerofp4.distributed import OwnError
from zerofp4.engine import attributes, gradients_of
from zerofp4.optim.sharded import ShardedParameters
from zerofp4.storage import find_freed
from zerofp4.tensors import find_in_no_module, register_holder

_version, _layout, _device, _requires_grad = map(
    attrgetter, ("_version", "layout", "device", "requires_grad")
)


class ParameterWatch:
    """Notices parameters that others than the optimizer exchanged, moved, wrote to or unfroze.

    param_groups, names: of the optimizer, and what messages call its parameters.
    shards: its trainable parameters.
    """

    def __init__(self, param_groups: Sequence[dict], names: Sequence[str], shards: ShardedParameters):
        self._members = [list(group["params"]) for group in param_groups]
        pairs = list(zip((p for members in self._members for p in members), names, strict=True))
        self._trainable, self._names, self._shards = shards.parameters, shards.names, shards
        self._frozen = [p for p, _ in pairs if not p.requires_grad]
        self._frozen_names = [name for p, name in pairs if not p.requires_grad]
        self.world_size = max(buffer.world_size for buffer in shards.buffers)
        self._name_of = {id(parameter): name for parameter, name in pairs if parameter.requires_grad}
        self._replaced: list[torch.Tensor] = []
        """Parameters that some module has given up since the last check."""
        register_holder(self, self._trainable)
        self.accept_values()

    # What tensors.held calls

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether the optimizer trains it."""
        return id(parameter) in self._name_of

    def note_replaced(self, parameter: torch.Tensor) -> None:
        """A module has another parameter in the place of this one, which the optimizer trains."""
        self._replaced.append(parameter)

    def note_taken_over(self) -> None:
        """A later optimizer trains a parameter of this one."""
        self._shards.is_taken_over = True

    # What a step calls

    def gradients(self) -> list[torch.Tensor | None]:
        """p.grad of the trainable parameters. Raises RuntimeError for one that cannot be read: sparse, on
        another device, or of freed memory.
        """
        gradients = gradients_of(self._trainable)
        present = [gradient for gradient in gradients if gradient is not None]
        device = self._shards.buffers[0].device
        if (
            set(map(_layout, present)) <= {torch.strided}
            and set(map(_device, present)) <= {device}
            and find_freed(present) is None
        ):
            return gradients
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                problem = f"of layout {gradient.layout}: gradients must be dense"
            elif gradient.device != device:
                problem = f"on {gradient.device}, and its master is on {device}"
            elif find_freed([gradient]) is not None:
                problem = "whose storage was freed in place (resize_)"
            else:
                continue
            raise RuntimeError(f"{name} has a gradient {problem}")
        return gradients

    def check(self, param_groups: Sequence[dict]) -> None:
        """Raise RuntimeError if something is wrong with the groups or the parameters."""
        self.check_groups(param_groups)
        OwnError(self._shards.find_moved()).raise_if_any()
        self._check_in_use()
        written = self.written()
        if written:
            raise RuntimeError(
                f"{self._names[written[0]]} was written to since the last step, which its FP32 master would "
                "undo: load a model before its optimizer is built, or before the optimizer's "
                "load_state_dict(); wrap it in DistributedDataParallel, which writes rank 0's values, before "
                "that or with init_sync=False"
            )
        if any(attributes(_requires_grad, self._frozen)):
            name = next(n for p, n in zip(self._frozen, self._frozen_names, strict=True) if p.requires_grad)
            raise RuntimeError(
                f"{name} was frozen when the optimizer was built and has no master: build a new optimizer, "
                "with masters_from=this one, or have it load_state_dict() this one's state_dict(), moments "
                "and all"
            )

    def check_groups(self, param_groups: Sequence[dict]) -> None:
        """Raise RuntimeError unless these are the parameters that the optimizer was built with."""
        if len(param_groups) != len(self._members):
            raise RuntimeError(
                f"param_groups: there were {len(self._members)} groups, now there are {len(param_groups)}"
            )
        for g, (group, members) in enumerate(zip(param_groups, self._members, strict=True)):
            params = group["params"]
            if len(params) != len(members) or not all(map(operator.is_, params, members)):
                raise RuntimeError(
                    f"param_groups[{g}]['params'] is not the list that the optimizer was built with: masters "
                    "and weights lie in flat buffers, so build a new optimizer to change it"
                )

    def _check_in_use(self) -> None:
        """Raise RuntimeError for a parameter that was replaced in its module and is in no other."""
        if not self._replaced:
            return
        i = find_in_no_module(self._replaced)
        if i is not None:
            name = self._name_of[id(self._replaced[i])]
            raise RuntimeError(
                f"{name} was replaced in its module since the optimizer was built (by an assignment, or "
                "load_state_dict(assign=True)), and would be trained in vain: build a new optimizer from the "
                "model's present parameters"
            )
        self._replaced.clear()

    def accept_values(self) -> None:
        """Take the present values of the weights for the optimizer's own."""
        self._versions = attributes(_version, self._trainable)

    def written(self) -> list[int]:
        """Which trainable parameters others than the optimizer wrote to since its last step."""
        versions = attributes(_version, self._trainable)
        if versions == self._versions:
            return []
        return [i for i, version in enumerate(versions) if version != self._versions[i]]
