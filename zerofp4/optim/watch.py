"""What may not change between the steps of a ZeRO optimizer, and whether it did."""

from collections.abc import Sequence

import torch

from zerofp4.optim.sharded import ShardedParameters


class ParameterWatch:
    """Notices parameters that others than the optimizer exchanged, moved, wrote to or unfroze."""

    def __init__(self, param_groups: Sequence[dict], names: Sequence[str], shards: ShardedParameters):
        self._members = [list(group["params"]) for group in param_groups]
        parameters = [p for members in self._members for p in members]
        pairs = list(zip(parameters, names, strict=True))
        self._trainable = [(p, name) for p, name in pairs if p.requires_grad]
        self._frozen = [(p, name) for p, name in pairs if not p.requires_grad]
        self._shards = shards
        self.accept_values()

    def accept_values(self) -> None:
        """Take the present values of the weights for the optimizer's own."""
        self._versions = [p._version for p, _ in self._trainable]

    def check(self, param_groups: Sequence[dict]) -> None:
        """Raises RuntimeError if something is wrong with the groups, the parameters or their gradients."""
        self.check_places(param_groups)
        message = self._find_changed_parameter() or self._find_bad_gradient()
        if message is not None:
            raise RuntimeError(message)

    def check_places(self, param_groups: Sequence[dict]) -> None:
        """Raises RuntimeError unless these are the parameters, in the buffers, whatever their values."""
        message = self._find_changed_list(param_groups)
        if message is not None:
            raise RuntimeError(message)
        moved = self._shards.find_moved()
        if moved is not None:
            raise moved

    def _find_changed_list(self, param_groups: Sequence[dict]) -> str | None:
        if len(param_groups) != len(self._members):
            return f"param_groups: there were {len(self._members)} groups, now there are {len(param_groups)}"
        for g, (group, members) in enumerate(zip(param_groups, self._members, strict=True)):
            params = group["params"]
            if len(params) != len(members) or any(a is not b for a, b in zip(params, members, strict=True)):
                return (
                    f"param_groups[{g}]['params'] is not the list that the optimizer was built with: masters "
                    "and weights lie in flat buffers, so build a new optimizer to change it"
                )
        return None

    def _find_changed_parameter(self) -> str | None:
        for (p, name), version in zip(self._trainable, self._versions, strict=True):
            if p._version != version:
                return (
                    f"{name} was written to since the last step, which its FP32 master would undo: load a "
                    "model before its optimizer is built, or before the optimizer's load_state_dict()"
                )
        for p, name in self._frozen:
            if p.requires_grad:
                return (
                    f"{name} was frozen when the optimizer was built and has no master: build a new optimizer"
                )
        return None

    def _find_bad_gradient(self) -> str | None:
        for p, name in self._trainable:
            if p.grad is not None and p.grad.layout != torch.strided:
                return f"{name} has a gradient of layout {p.grad.layout}: gradients must be dense"
        return None


class Snapshot:
    """Which gradients were reduced, so that later changes to them are noticed."""

    def __init__(self, gradients: Sequence[torch.Tensor | None]):
        self._seen = [(g, None if g is None else g._version) for g in gradients]

    def changed(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether these are other gradients, or the same ones with other values."""
        others = any(now is not then for now, (then, _) in zip(gradients, self._seen, strict=True))
        return others or self.written()

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
        return any(g is not None and g._version != version for g, version in self._seen)
