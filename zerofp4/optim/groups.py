"""The process groups that parameter groups name, and which ranks hold the same parameters.

The optimizer's process_group is of all ranks that step together: votes, errors and norms are over it. A
parameter group may name a part of it, `process_group`, that its parameters are sharded over. Ranks outside of
that part have a group of their own in the same place of param_groups, with other parameters: other experts,
slices of a matrix that tensor parallelism has cut, layers of another pipeline stage.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from zerofp4.distributed import GroupReference, rank_and_size
from zerofp4.engine import Hosts, Sharding

PROCESS_GROUPS = ("process_group", "replicated_over")
"""Entries of a parameter group that name a process group."""

Ranks = tuple[int, ...]
"""By their number in the optimizer's process group."""


class Place(NamedTuple):
    """Where the parameters of a parameter group are. ranks: that share them, each element or, where there are
    replicas, each of `parts` of them. copies: that `replicated_over` names, this one among them; this one
    alone where it names none.
    """

    sharding: Sharding
    ranks: Ranks
    copies: Ranks
    parts: int


class MeshReference(NamedTuple):
    """A DeviceMesh of two dimensions, of which the first one replicates and the second one shards. ranks:
    global ones, replica by replica.
    """

    replicas: GroupReference
    group: GroupReference
    ranks: Ranks


def with_references(param_group: Any) -> Any:
    """The same parameter group, holding no process group alive; one that names none as it is.

    Raises TypeError for what is no process group, ValueError for one without the calling process.
    """
    if not isinstance(param_group, dict):
        return param_group
    named = [key for key in PROCESS_GROUPS if param_group.get(key) is not None]
    return param_group | {key: _reference(key, param_group[key]) for key in named} if named else param_group


def _reference(key: str, value: Any) -> GroupReference:
    if isinstance(value, GroupReference | MeshReference):  # the param_groups of another optimizer
        return value
    if key == "process_group" and dist.is_available() and isinstance(value, dist.device_mesh.DeviceMesh):
        return _mesh_reference(value, "process_group of a parameter group", "replicas")
    if dist.is_available() and value == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{key} of a parameter group does not contain the calling process")
    if not (dist.is_available() and isinstance(value, dist.ProcessGroup)):
        raise TypeError(f"{key} of a parameter group must be a process group, got {type(value).__name__}")
    if dist.get_rank(value) < 0:
        raise ValueError(f"{key} of a parameter group does not contain the calling process")
    return GroupReference(value)


def _mesh_reference(mesh: dist.device_mesh.DeviceMesh, what: str, first: str) -> MeshReference:
    """first: what its first dimension is of."""
    if mesh.ndim != 2:
        raise ValueError(
            f"{what} may be a DeviceMesh of two dimensions, the first of {first} and the second of the ranks "
            f"of each, got {mesh.ndim}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"{what} does not contain the calling process")
    replicas, group = (GroupReference(mesh.get_group(dimension)) for dimension in range(2))
    return MeshReference(replicas, group, tuple(mesh.mesh.flatten().tolist()))


def find_hosts(mesh: dist.device_mesh.DeviceMesh | None, group: dist.ProcessGroup | None) -> Hosts | None:
    """None where no sum is another with hosts: there are none, or one, or one rank on each.

    Raises TypeError or ValueError for what cannot be the hosts of these ranks.
    """
    if mesh is None:
        return None
    if not (dist.is_available() and isinstance(mesh, dist.device_mesh.DeviceMesh)):
        raise TypeError(f"hosts must be None or a DeviceMesh, got {type(mesh).__name__}")
    named = _mesh_reference(mesh, "hosts", "hosts")
    ranks = dist.get_process_group_ranks(group)
    if list(named.ranks) != ranks:
        raise ValueError(
            f"hosts has the global ranks {list(named.ranks)}, and the optimizer's process_group {ranks}: it "
            "takes all of them, host by host, in this order"
        )
    hosts = Hosts(named.group, named.replicas)
    return None if 1 in hosts.shape else hosts


def find_places(param_groups: Sequence[dict], group: dist.ProcessGroup | None) -> list[Place]:
    """By parameter group. Groups of the same ranks are one: the first that was named.

    Raises ValueError for what one rank can see is wrong.
    """
    rank, size = rank_and_size(group)
    known: dict[tuple[Ranks, int], Sharding] = {(tuple(range(size)), size): Sharding(group)}
    places = []
    for g, param_group in enumerate(param_groups):
        ranks = _ranks(g, param_group, "process_group", group) or tuple(range(size))
        copies = _ranks(g, param_group, "replicated_over", group) or (rank,)
        named, parts = param_group.get("process_group"), len(ranks)
        sharding = None if named is None or isinstance(named, MeshReference) else Sharding(named())
        if isinstance(named, MeshReference):
            parts = dist.get_world_size(named.group())
            sharding = Sharding(named.group(), replicas=named.replicas() if parts < len(ranks) else None)
        sharding = known.setdefault((ranks, parts), sharding)
        copy = copies.index(rank) if len(copies) > 1 else None
        places.append(Place(sharding._replace(copy=copy), ranks, copies, parts))
    for g, place in enumerate(places):
        if len(set(place.copies) & set(place.ranks)) > 1:
            raise ValueError(
                f"param_groups[{g}] is replicated_over ranks {list(place.copies)} and sharded over ranks "
                f"{list(place.ranks)}, which may have no rank in common but this one ({rank}): name the "
                "data-parallel ranks of the group as its process_group"
            )
    _check_all_named(param_groups, places)
    return places


def _ranks(g: int, param_group: dict, key: str, group: dist.ProcessGroup | None) -> Ranks | None:
    """Those that it names, None where it names none."""
    reference = param_group.get(key)
    if reference is None:
        return None
    numbers = {r: i for i, r in enumerate(dist.get_process_group_ranks(group))}
    if isinstance(reference, MeshReference):
        named = reference.ranks
    else:
        named = dist.get_process_group_ranks(reference())
    outside = [r for r in named if r not in numbers]
    if outside:
        raise ValueError(
            f"{key} of param_groups[{g}] has global rank {outside[0]}, and the optimizer's process_group has "
            "not: give the optimizer the group of all ranks that step together, as None is, and each "
            "parameter group the ranks that it is sharded over"
        )
    return tuple(numbers[r] for r in named)


def _check_all_named(param_groups: Sequence[dict], places: Sequence[Place]) -> None:
    """What is not replicated over a tensor-parallel group is other elements on each of its ranks, and must
    not be averaged over them because somebody forgot to say so.
    """
    copied = next((g for g, place in enumerate(places) if len(place.copies) > 1), None)
    for g, param_group in enumerate(param_groups):
        if copied is not None and param_group.get("process_group") is None:
            raise ValueError(
                f"param_groups[{g}] names no process_group, and param_groups[{copied}] is replicated_over a "
                "tensor-parallel group inside the optimizer's: name the ranks that each group is sharded over"
            )
