"""The process groups that parameter groups name, and the ranks that hold the same parameters.

The optimizer's process_group holds all ranks that step together: votes, errors and norms are over it. A
parameter group may name a part of it, `process_group`, to shard its parameters over. The ranks outside of
that part name a group of their own at the same position of param_groups, for other parameters: other experts,
slices of a matrix that tensor parallelism has cut, layers of another pipeline stage.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerofp4.distributed import GroupReference, rank_and_size
from zerofp4.engine import Hosts, Sharding
from zerofp4.optim.param_groups import PROCESS_GROUPS

Ranks = tuple[int, ...]
"""By their number in the optimizer's process group."""


class Place(NamedTuple):
    """The ranks that hold the parameters of a parameter group.

    sharding: as process groups. The rest is in numbers, which other ranks can read.
    ranks: all ranks that have these parameters, the replicas included.
    copies: the ranks that `replicated_over` names, or this rank alone.
    parts: how many of `ranks` each element is sharded over; fewer than all where there are replicas.
    """

    sharding: Sharding
    ranks: Ranks
    copies: Ranks
    parts: int


class MeshReference(NamedTuple):
    """A DeviceMesh of two dimensions: the first replicates, the second shards.

    ranks: global ranks, replica by replica.
    """

    replicas: GroupReference
    group: GroupReference
    ranks: Ranks


def with_references(param_group: Any) -> Any:
    """Replace the process groups of a parameter group by references that do not keep them alive.

    Raises TypeError for what is no process group, ValueError for one without the calling process.
    """
    if not isinstance(param_group, dict):
        return param_group
    named = [key for key in PROCESS_GROUPS if param_group.get(key) is not None]
    return param_group | {key: _reference(key, param_group[key]) for key in named} if named else param_group


def _reference(key: str, value: Any) -> GroupReference | MeshReference:
    if isinstance(value, GroupReference | MeshReference):  # the param_groups of another optimizer
        return value
    if key == "process_group" and isinstance(value, DeviceMesh):
        return _mesh_reference(value, "process_group of a parameter group", "replicas")
    is_outside = value == dist.GroupMember.NON_GROUP_MEMBER
    if not (is_outside or isinstance(value, dist.ProcessGroup)):
        raise TypeError(f"{key} of a parameter group must be a process group, got {type(value).__name__}")
    if is_outside or dist.get_rank(value) < 0:
        raise ValueError(f"{key} of a parameter group does not contain the calling process")
    return GroupReference(value)


def _mesh_reference(mesh: DeviceMesh, what: str, first: str) -> MeshReference:
    """Check a mesh. what: what error messages call it. first: what its first dimension is of."""
    if mesh.ndim != 2:
        raise ValueError(
            f"{what} may be a DeviceMesh of two dimensions, the first of {first} and the second of the ranks "
            f"of each, got {mesh.ndim}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"{what} does not contain the calling process")
    replicas, group = (GroupReference(mesh.get_group(dimension)) for dimension in range(2))
    return MeshReference(replicas, group, tuple(mesh.mesh.flatten().tolist()))


def find_hosts(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> Hosts | None:
    """The hosts of the optimizer's ranks; None if there is one host, or one rank on each, or no mesh.

    Raises TypeError or ValueError for a mesh that is not of these ranks, host by host.
    """
    if mesh is None:
        return None
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"hosts must be None or a DeviceMesh, got {type(mesh).__name__}")
    named = _mesh_reference(mesh, "hosts", "hosts")
    ranks = dist.get_process_group_ranks(group)
    if list(named.ranks) != ranks:
        raise ValueError(
            f"hosts has the global ranks {list(named.ranks)}, and the optimizer's process_group {ranks}: it "
            "takes all of them, host by host, in this order"
        )
    hosts = Hosts(within=named.group, across=named.replicas)
    return None if 1 in hosts.shape else hosts


def find_places(param_groups: Sequence[dict], group: dist.ProcessGroup | None) -> list[Place]:
    """The ranks that hold the parameters of each group. group: the optimizer's process group.

    Process groups of the same ranks count as one, the first that was named.

    Raises ValueError for what one rank can see is wrong.
    """
    rank, size = rank_and_size(group)
    everyone = tuple(range(size))
    known: dict[tuple[Ranks, int], Sharding] = {(everyone, size): Sharding(group)}
    places = []
    for g, param_group in enumerate(param_groups):
        named = param_group.get("process_group")
        ranks = _ranks(g, param_group, "process_group", group) or everyone
        copies = _ranks(g, param_group, "replicated_over", group) or (rank,)
        parts = len(ranks)
        if isinstance(named, MeshReference):
            parts = dist.get_world_size(named.group())
            sharding = Sharding(named.group(), replicas=named.replicas() if parts < len(ranks) else None)
        else:
            sharding = Sharding(group if named is None else named())
        if len(set(copies) & set(ranks)) > 1:
            raise ValueError(
                f"param_groups[{g}] is replicated_over ranks {list(copies)} and sharded over ranks "
                f"{list(ranks)}, which may have no rank in common but this one ({rank}): name the "
                "data-parallel ranks of the group as its process_group"
            )
        sharding = known.setdefault((ranks, parts), sharding)
        copy = copies.index(rank) if len(copies) > 1 else None
        places.append(Place(sharding._replace(copy=copy), ranks, copies, parts))
    # Ranks of a tensor-parallel group hold different elements of what is not replicated over it. A group that
    # leaves out its process_group by mistake would average them.
    copied = next((g for g, place in enumerate(places) if len(place.copies) > 1), None)
    for g, param_group in enumerate(param_groups):
        if copied is not None and param_group.get("process_group") is None:
            raise ValueError(
                f"param_groups[{g}] names no process_group, and param_groups[{copied}] is replicated_over a "
                "tensor-parallel group inside the optimizer's: name the ranks that each group is sharded over"
            )
    return places


def _ranks(g: int, param_group: dict, key: str, group: dist.ProcessGroup | None) -> Ranks | None:
    """The ranks that the entry `key` of group g names; None if it names none."""
    reference = param_group.get(key)
    if reference is None:
        return None
    is_mesh = isinstance(reference, MeshReference)
    named = reference.ranks if is_mesh else dist.get_process_group_ranks(reference())
    numbers = {r: i for i, r in enumerate(dist.get_process_group_ranks(group))}
    outside = [r for r in named if r not in numbers]
    if outside:
        raise ValueError(
            f"{key} of param_groups[{g}] has global rank {outside[0]}, and the optimizer's process_group has "
            "not: give the optimizer the group of all ranks that step together, as None is, and each "
            "parameter group the ranks that it is sharded over"
        )
    return tuple(numbers[r] for r in named)
