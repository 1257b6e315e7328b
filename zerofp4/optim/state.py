"""What a ZeRO optimizer saves, loads, gathers and hands over."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.distributed import GroupReference, exchange
from zerofp4.optim import checkpoint
from zerofp4.optim.initial import HeldMaster
from zerofp4.optim.inner import copy_options
from zerofp4.optim.sharded import ShardedParameters
from zerofp4.optim.watch import ParameterWatch, Snapshot


class ShardedState(torch.optim.Optimizer):
    """An optimizer whose masters are sharded: the half of ZeroFP4Optimizer that no step needs."""

    process_group: GroupReference
    inner: torch.optim.Optimizer
    _parameters: list[torch.Tensor]
    _shards: ShardedParameters
    _watch: ParameterWatch
    _fingerprint: dict[str, Any]
    _reduced: Snapshot | None
    _steps: int

    def _push_options(self) -> None:
        copy_options(self.param_groups, self.inner.param_groups)

    def _pull_options(self) -> None:
        copy_options(self.inner.param_groups, self.param_groups)

    def _publish(self, found_inf: torch.Tensor | None = None) -> None:
        self._shards.publish(found_inf)
        self._watch.accept_values()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """This rank's masters, state and options, to be saved per rank. As in torch.optim, no copy."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._push_options()
        state_dict = self.inner.state_dict() | {
            "masters": checkpoint.masters(self._shards.buffers),
            "fingerprint": self._fingerprint,
            "steps": self._steps,
        }
        for hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what this rank saved in a world of the same size; the weights follow the masters.

        Collective. When any rank's state dict does not fit, a parameter of it was moved, or the ranks bring
        states of different steps, every rank raises ValueError (TypeError for what is no dict) and nothing
        changes.
        """
        before, steps, error = (self.inner.state, self.inner.param_groups), 0, None
        try:
            self._watch.check_places(self.param_groups)
            for hook in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = hook(self, state_dict) or state_dict
            checkpoint.load_inner(self.inner, state_dict, self._fingerprint, self._shards.buffers)
            steps = state_dict.get("steps", 0)
        except Exception as failure:  # whatever it is, the other ranks must hear of it
            error = checkpoint.load_error(failure)
        try:
            checkpoint.check_same_steps(exchange(steps, error, self.process_group()))
        except Exception:
            self.inner.state, self.inner.param_groups = before  # load_state_dict put new ones in their place
            raise
        self.state = self.inner.state
        self._pull_options()
        for buffer in self._shards.buffers:
            buffer.masters.copy_(state_dict["masters"][buffer.kind])
        self._steps, self._reduced = steps, None
        self._publish()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    @torch.no_grad()
    def gathered_masters(self) -> list[torch.Tensor | None]:
        """The whole FP32 masters in the order and shape of the parameters; None for frozen ones. Collective.

        For checks: it takes the memory that sharding saves.
        """
        trainable = self._shards.parameters
        masters = {id(p): m for p, m in zip(trainable, self._shards.gathered_masters(), strict=True)}
        return [masters.get(id(p)) for p in self._parameters]

    def gathered_bytes_per_step(self) -> dict[str, int]:
        """Bytes of the buffers that the ranks of the group gather together in each step; 0 in a world of one.

        nvfp4: codes; high_precision: all other weights; bf16_equivalent: all weights if they were bfloat16.
        """
        return self._shards.gathered_bytes()


def take_over(
    source: ShardedState | None,
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
    group: dist.ProcessGroup | None,
) -> dict[int, HeldMaster]:
    """This rank's pieces of the masters that `source` has of parameters, by their identity; nothing of None.

    Raises TypeError or ValueError for a source that cannot hand any over.
    """
    if source is None:
        return {}
    if not isinstance(source, ShardedState):
        raise TypeError(f"masters_from must be a ZeroFP4Optimizer, got {type(source).__name__}")
    if not source.process_group.refers_to(group):
        raise ValueError("masters_from must shard its masters over the same process group")
    all_held = source._shards.held_masters()
    held = {id(p): all_held[id(p)] for p in parameters if id(p) in all_held}
    if not held:
        raise ValueError("masters_from has the master of none of the trainable parameters of params")
    written = {id(source._shards.parameters[i]) for i in source._watch.written()}
    for p, name in zip(parameters, names, strict=True):
        if id(p) in held and id(p) in written:
            raise ValueError(
                f"{name} was written to since the last step of masters_from, whose master would undo that"
            )
    return held
