"""Masters that a new optimizer takes from an earlier one."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zerofp4.engine import Sharding
from zerofp4.optim.initial import HeldMaster
from zerofp4.optim.state import ShardedState


def take_over(
    source: ShardedState | None,
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
    group: dist.ProcessGroup | None,
    shardings: Sequence[Sharding],
) -> dict[int, HeldMaster]:
    """This rank's pieces of the masters that `source` has of parameters, by their identity; nothing of None.

    group: of all ranks that step together. shardings: of the parameters.

    Raises TypeError or ValueError for a source that cannot hand any over.
    """
    if source is None:
        return {}
    if not isinstance(source, ShardedState):
        raise TypeError(f"masters_from must be a ZeroFP4Optimizer, got {type(source).__name__}")
    if not source.process_group.refers_to(group):
        raise ValueError("masters_from must shard its masters over the same process group")
    if source.broken is not None:
        raise ValueError(f"masters_from is of no more use: {source.broken}")
    rounds = source._rounds
    if rounds is not None and rounds.adds and rounds.is_holding:
        raise ValueError(
            "masters_from holds gradients of backward passes that no step has used, which would be lost: "
            "call its step() or zero_grad() first"
        )
    all_held = source._shards.held_masters()
    held = {id(p): all_held[id(p)] for p in parameters if id(p) in all_held}
    if not held:
        raise ValueError("masters_from has the master of none of the trainable parameters of params")
    written = {id(source._shards.parameters[i]) for i in source._watch.written()}
    before = dict(zip(map(id, source._shards.parameters), source._shards.groups(), strict=True))
    for p, name, sharding in zip(parameters, names, shardings, strict=True):
        if id(p) in held and not before[id(p)].refers_to(sharding.group):
            raise ValueError(f"{name} is sharded over another process group than in masters_from")
        if id(p) in held and id(p) in written:
            raise ValueError(
                f"{name} was written to since the last step of masters_from, whose master would undo that"
            )
    return held
