"""Process groups of parameter groups, and names of their parameters.

All ranks that step together are in the optimizer's process_group: votes, errors and norms are over it. A
parameter group may name some of these ranks as its `process_group`, to shard its parameters over. The other
ranks name a group of their own at the same position of param_groups, for other parameters: other experts,
other parts of a matrix that tensor parallelism has cut, layers of another pipeline stage.
"""

import collections
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerofp4.distributed import rank_and_size
from zerofp4.engine import Sharding
from zerofp4.nn import converted_model_of
from zerofp4.optim.state_dict import own_name
from zerofp4.storage import called

FOR_BUILDING = ("optimizer_class", "process_group", "replicated_over")
"""Entries that are taken out of parameter groups: unlike options, ranks do not compare them, checkpoints do
not have them, and they would keep process groups alive.
"""


def find_names(param_groups: Sequence[dict]) -> bool:
    """Give parameters without names their names in convert_model's model. Returns whether they have names:
    not if no one model has them all, or two would have one in checkpoints: a ValueError if they were given.
    """
    are_given = "param_names" in param_groups[0]
    if are_given:
        found = [name for group in param_groups for name in group["param_names"]]
    else:
        parameters = [p for group in param_groups for p in group["params"]]
        model = converted_model_of(parameters)
        names_of = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        found = [names_of[id(p)] for p in parameters if id(p) in names_of]
    twice = [name for name, count in collections.Counter(map(own_name, found)).items() if count > 1]
    if are_given and twice:
        raise ValueError(
            f"params: several parameters have the name {twice[0]!r} in checkpoints: give the parameters of "
            "each model a prefix, as in [('generator.weight', p)]"
        )
    if twice or not found:
        return False
    names = iter(found)
    for group in param_groups:
        group["param_names"] = list(itertools.islice(names, len(group["params"])))
    return True


def parameter_name(g: int, i: int, group: dict) -> str:
    """The name of parameter i of group g in error messages: its position, and its own name if it has one."""
    given = group.get("param_names")
    return called(f"param_groups[{g}]['params'][{i}]", group["params"][i], given[i] if given else None)


# Process groups

Ranks = tuple[int, ...]  # by their number in the optimizer's process group


class Place(NamedTuple):
    """The ranks that hold the parameters of a parameter group."""

    sharding: Sharding  # as process groups
    ranks: Ranks  # all of them, replicas too
    copies: Ranks  # the ranks that `replicated_over` names, or this rank alone


def find_places(param_groups: Sequence[dict], group: dist.ProcessGroup | None) -> list[Place]:
    """The ranks that hold the parameters of each group. Process groups of the same ranks count as one, the
    first that was named. A DeviceMesh replicates over its first dimension and shards over the second.

    group: the optimizer's process group. Raises TypeError or ValueError for errors that one rank can see.
    """
    rank, size = rank_and_size(group)
    everyone = tuple(range(size))
    known: dict[tuple[Ranks, int], Sharding] = {(everyone, size): Sharding(group)}
    places: list[Place] = []
    for g, param_group in enumerate(param_groups):
        named = param_group.get("process_group")
        ranks = _ranks(g, param_group, "process_group", group) or everyone
        copies = _ranks(g, param_group, "replicated_over", group) or (rank,)
        parts = len(ranks)  # that each element is sharded over
        if isinstance(named, DeviceMesh):
            replicas, shards = named.get_group(0), named.get_group(1)
            parts = dist.get_world_size(shards)
            sharding = Sharding(shards, replicas=replicas if parts < len(ranks) else None)
        else:
            sharding = Sharding(group if named is None else named)
        if len(set(copies) & set(ranks)) > 1:
            raise ValueError(
                f"param_groups[{g}] is replicated_over ranks {list(copies)} and sharded over ranks "
                f"{list(ranks)}, which may have no rank in common but this one ({rank}): name the "
                "data-parallel ranks of the group as its process_group"
            )
        sharding = known.setdefault((ranks, parts), sharding)
        copy = copies.index(rank) if len(copies) > 1 else None
        places.append(Place(sharding._replace(copy=copy), ranks, copies))
    # Unless a parameter is replicated over a tensor-parallel group, its ranks hold different elements, and a
    # group without process_group would average them.
    unnamed = [g for g, param_group in enumerate(param_groups) if param_group.get("process_group") is None]
    if unnamed and any(len(place.copies) > 1 for place in places):
        raise ValueError(
            f"param_groups[{unnamed[0]}] names no process_group, and another is replicated_over a "
            "tensor-parallel group inside the optimizer's: name the ranks that each group is sharded over"
        )
    return places


def _ranks(g: int, param_group: dict, key: str, group: dist.ProcessGroup | None) -> Ranks | None:
    """The ranks that the entry `key` of group g names; None if it names none."""
    named, what = param_group.get(key), f"{key} of param_groups[{g}]"
    if named is None:
        return None
    is_mesh = isinstance(named, DeviceMesh)
    if named.get_coordinate() is None if is_mesh else named == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{what} does not contain the calling process")
    if key == "process_group" and is_mesh:
        if named.ndim != 2:
            raise ValueError(
                f"{what} may be a DeviceMesh of two dimensions, of replicas and of the ranks of each, got "
                f"{named.ndim} dimensions"
            )
        global_ranks = named.mesh.flatten().tolist()
    elif isinstance(named, dist.ProcessGroup):
        global_ranks = dist.get_process_group_ranks(named)
    else:
        raise TypeError(f"{what} must be a process group, got {type(named).__name__}")
    numbers = {r: i for i, r in enumerate(dist.get_process_group_ranks(group))}
    outside = [r for r in global_ranks if r not in numbers]
    if outside:
        raise ValueError(
            f"{what} has global rank {outside[0]}, and the optimizer's process_group has not: give the "
            "optimizer the group of all ranks that step together, as None is, and each parameter group the "
            "ranks that it is sharded over"
        )
    return tuple(numbers[r] for r in global_ranks)
