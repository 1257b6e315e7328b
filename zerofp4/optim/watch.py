"""What may not change between the steps of a ZeRO optimizer, and whether it did."""

import operator
from collections.abc import Sequence
from operator import attrgetter

import torch

from zerofp4.distributed import OwnError
from zerofp4.optim.sharded import ShardedParameters
from zerofp4.storage import find_freed
from zerofp4.tensors import find_in_no_module, register_holder

_version, _grad, _layout, _device, _requires_grad = map(
    attrgetter, ("_version", "grad", "layout", "device", "requires_grad")
)


def _attributes(get: attrgetter, tensors: Sequence[torch.Tensor]) -> list:
    """An attribute of every tensor, without a call of __torch_function__ for each quantized one, which would
    cost ten times as much.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(get, tensors))


def gradients_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    return _attributes(_grad, parameters)


class ParameterWatch:
    """Notices parameters that others than the optimizer exchanged, moved, wrote to or unfroze."""

    def __init__(self, param_groups: Sequence[dict], names: Sequence[str], shards: ShardedParameters):
        self._members = [list(group["params"]) for group in param_groups]
        parameters = [p for members in self._members for p in members]
        pairs = list(zip(parameters, names, strict=True))
        self._trainable, self._names = shards.parameters, shards.names
        self._frozen = [p for p, _ in pairs if not p.requires_grad]
        self._frozen_names = [name for p, name in pairs if not p.requires_grad]
        self._shards = shards
        self.world_size = max(buffer.world_size for buffer in shards.buffers)
        self._name_of = {id(parameter): name for parameter, name in pairs if parameter.requires_grad}
        self._replaced: list[torch.Tensor] = []
        register_holder(self, self._trainable)
        self.accept_values()

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether it is one of those that are trained."""
        return id(parameter) in self._name_of

    def note_replaced(self, parameter: torch.Tensor) -> None:
        """Of a parameter that is held: a module has another in its place now."""
        self._replaced.append(parameter)

    def note_taken_over(self) -> None:
        self._shards.is_taken_over = True

    def accept_values(self) -> None:
        """Take the present values of the weights for the optimizer's own."""
        self._versions = _attributes(_version, self._trainable)

    def gradients(self) -> list[torch.Tensor | None]:
        """The gradients of the trainable parameters, which are dense, in memory on the device of the masters:
        they can be read before check() has looked at the parameters. Raises RuntimeError for others.
        """
        gradients = gradients_of(self._trainable)
        message = self._find_bad_gradient(gradients)
        if message is not None:
            raise RuntimeError(message)
        return gradients

    def check(self, param_groups: Sequence[dict]) -> None:
        """Raises RuntimeError if something is wrong with the groups or the parameters."""
        self.check_places(param_groups)
        self._check_in_use()
        message = self._find_written() or self._find_unfrozen()
        if message is not None:
            raise RuntimeError(message)

    def check_places(self, param_groups: Sequence[dict]) -> None:
        """Raises RuntimeError unless these are the parameters, in the buffers, whatever their values."""
        message = self._find_changed_list(param_groups)
        if message is not None:
            raise RuntimeError(message)
        OwnError(self._shards.find_moved()).raise_if_any()

    def _check_in_use(self) -> None:
        """Raises RuntimeError for a parameter that was replaced in its module and is in no other."""
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

    def _find_changed_list(self, param_groups: Sequence[dict]) -> str | None:
        if len(param_groups) != len(self._members):
            return f"param_groups: there were {len(self._members)} groups, now there are {len(param_groups)}"
        for g, (group, members) in enumerate(zip(param_groups, self._members, strict=True)):
            params = group["params"]
            if len(params) != len(members) or not all(map(operator.is_, params, members)):
                return (
                    f"param_groups[{g}]['params'] is not the list that the optimizer was built with: masters "
                    "and weights lie in flat buffers, so build a new optimizer to change it"
                )
        return None

    def written(self) -> list[int]:
        """The trainable parameters that others than the optimizer wrote to since its last step."""
        versions = _attributes(_version, self._trainable)
        if versions == self._versions:
            return []
        return [i for i, version in enumerate(versions) if version != self._versions[i]]

    def _find_written(self) -> str | None:
        written = self.written()
        if not written:
            return None
        name = self._names[written[0]]
        return (
            f"{name} was written to since the last step, which its FP32 master would undo: load a model "
            "before its optimizer is built, or before the optimizer's load_state_dict(); wrap it in "
            "DistributedDataParallel, which writes rank 0's values, before that or with init_sync=False"
        )

    def _find_unfrozen(self) -> str | None:
        if not any(_attributes(_requires_grad, self._frozen)):
            return None
        name = next(n for p, n in zip(self._frozen, self._frozen_names, strict=True) if p.requires_grad)
        return (
            f"{name} was frozen when the optimizer was built and has no master: build a new optimizer, with "
            "masters_from=this one, or have it load_state_dict() this one's state_dict(), moments and all"
        )

    def _find_bad_gradient(self, gradients: Sequence[torch.Tensor | None]) -> str | None:
        present = [gradient for gradient in gradients if gradient is not None]
        device = self._shards.buffers[0].device
        if (
            set(map(_layout, present)) <= {torch.strided}
            and set(map(_device, present)) <= {device}
            and find_freed(present) is None
        ):
            return None
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                return f"{name} has a gradient of layout {gradient.layout}: gradients must be dense"
            if gradient is not None and gradient.device != device:
                return f"{name} has a gradient on {gradient.device}, and its master is on {device}"
            if gradient is not None and find_freed([gradient]) is not None:
                return f"{name} has a gradient whose storage was freed in place (resize_)"
        return None


class Snapshot:
    """Which gradients were reduced, so that later changes to them are noticed."""

    def __init__(self, gradients: Sequence[torch.Tensor | None]):
        self._gradients = list(gradients)
        self._present = [gradient for gradient in gradients if gradient is not None]
        self._versions = _attributes(_version, self._present)

    def changed(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether these are other gradients, or the same ones with other values."""
        return not all(map(operator.is_, gradients, self._gradients)) or self.written()

    def first_changed(self, gradients: Sequence[torch.Tensor | None]) -> int | None:
        """The position of one that changed()."""
        if not self.changed(gradients):
            return None
        seen = iter(self._versions)
        before = [(g, None if g is None else next(seen)) for g in self._gradients]
        return next(
            i
            for i, (now, (g, version)) in enumerate(zip(gradients, before, strict=True))
            if now is not g or (g is not None and g._version != version)
        )

    def check_unchanged(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Raises RuntimeError if step() would use what is no longer in these gradients."""
        if self.changed(gradients):
            raise RuntimeError(
                "gradients changed after clip_grad_norm_, which had reduced and clipped them for this step: "
                "call it after the last backward pass, or zero_grad() before the next one"
            )

    def check_unwritten(self) -> None:
        """Raises RuntimeError if clip_grad_norm_ would reduce again what it has reduced and clipped."""
        if self.written():
            raise RuntimeError(
                "gradients were added to clipped ones: clip_grad_norm_ scales what step() uses, not p.grad, "
                "so call zero_grad() before the next backward pass"
            )

    def written(self) -> bool:
        """Whether some of the gradients seen have been written to."""
        return _attributes(_version, self._present) != self._versions
