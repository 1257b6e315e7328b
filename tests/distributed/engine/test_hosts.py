"""Gradients that are added up on each host first; hosts are groups of ranks here, whose memory is files where
they have no GPUs, or which send each other rows.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal, keywords, make_gradients, set_gradients
from torch.distributed.device_mesh import DeviceMesh

from distributed.cases import raised_everywhere
from distributed.engine.file_peers import FilePeers
from distributed.optim.cases import (
    LATER,
    as_if_captured,
    assert_same_on_all_ranks,
    model_bytes,
    parameters_of,
    take_exact_steps,
)
from distributed.optim.group_cases import CLASSES, OPTIONS, check_order_of_addition, gradients_of, mesh_of
from distributed.run import on_ranks
from zerofp4.engine import GradientMemory, Peers, topology
from zerofp4.engine.topology import Hosts, Location, find_hosts, find_topology, locate
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer

SHAPE = (2, 2)


@contextlib.contextmanager
def on_hosts(world, names: str | None = None, shares: bool = True) -> Iterator[None]:
    """As if each rank ran on the host of its letter. shares: whether the ranks of a host share memory, where
    they have no GPUs.
    """
    files = shares and world.device.type != "cuda"
    changes = {} if names is None else {"host": names[world.rank]}
    if files:
        changes |= {"index": world.rank, "reachable": [*range(world.world_size)], "obstacle": None}
    with contextlib.ExitStack() as patches:
        located = lambda device: locate(device)._replace(**changes)  # noqa: E731
        patches.enter_context(mock.patch.object(topology, "locate", located))
        if files:
            made = lambda group, _: FilePeers(group, late=True)  # noqa: E731
            patches.enter_context(mock.patch.object(topology, "Peers", made))
        yield


@on_ranks(4, time_limit=120)
@pytest.mark.parametrize(
    ("name", "bucket_mb", "clip", "shares"),
    [
        ("FusedAdamW", None, False, True),
        ("FusedAdamW", 0.003, True, True),
        ("AdamW", 1e-4, True, True),
        ("FusedAdamW", 1e-4, True, False),
        ("AdamW", 0.003, False, False),
    ],
)
def test_steps_in_the_documented_order_of_addition(world, name, bucket_mb, clip, shares):
    """In one bucket of each kind, in several, and in several stretches of each."""

    def build(parameters, *arguments, **options):
        optimizer = ZeroFP4Optimizer(parameters, *arguments, **keywords(options, hosts=mesh_of(world, SHAPE)))
        described = optimizer.describe()
        assert [described[k] for k in ("transport", "hosts")] == ["collective", SHAPE]
        return optimizer

    with on_hosts(world, shares=shares):
        check_order_of_addition(world, SHAPE, build, name, clip, bucket_mb=bucket_mb)


def with_hosts(world, cls=FusedAdamW, names=None, shares=True, **options):
    """Parameters, and an optimizer of them."""
    parameters = parameters_of(world)
    hosts = options.pop("hosts") if "hosts" in options else mesh_of(world, SHAPE)
    with on_hosts(world, names, shares):
        return parameters, ZeroFP4Optimizer(parameters, cls, **keywords(OPTIONS, options, hosts=hosts))


@on_ranks(4)
@pytest.mark.parametrize(
    ("wire", "shares"), [(None, True), (torch.float32, False), (torch.bfloat16, True), (None, False)]
)
def test_only_means_travel_between_hosts(world, wire, shares):
    """Rounded gradients have no place in flat memory of their own dtype; what travels is FP32 anyway."""
    sent = []
    for options in ({"gradient_wire": torch.float32}, {"gradient_wire": wire}):
        _, flat = with_hosts(world, hosts=None, transport="collective", **options)
        sent.append([bucket["gradients"] for bucket in flat.describe()["buckets"]])
    _, optimizer = with_hosts(world, gradient_wire=wire, shares=shares)
    for bucket, as_floats, as_sent in zip(optimizer.describe()["buckets"], *sent, strict=True):
        numel = as_floats // 3 // 4  # of a slice, which went to three ranks
        # Two slices to the other rank of this host, and one mean to the other host.
        assert bucket["gradients"] == 2 * as_sent // 3 + 4 * numel
        assert bucket["gradients_travel_as"] == "float32"


@on_ranks(4)
@pytest.mark.parametrize(
    "options",
    [
        {"bucket_mb": 0.003},
        {"overlap": "forward"},
        {"gradient_wire": torch.bfloat16, "bucket_mb": 0.003},
        {"bucket_mb": 1e-4},
        {"bucket_mb": 0.003, "shares": False},
        {"gradient_wire": torch.bfloat16, "bucket_mb": 1e-4, "shares": False},
    ],
)
def test_exact_sums_give_the_bytes_of_other_transports(world, options):
    """Also behind masters_from and in a CUDA graph."""
    sides, shares = [], options.pop("shares", True)
    for hosts in (None, mesh_of(world, SHAPE)):
        options = {**options, "transport": "auto" if hosts else "collective", "hosts": hosts}
        parameters, optimizer = with_hosts(world, shares=shares, **options)
        take_exact_steps(world, parameters, optimizer)
        with on_hosts(world, shares=shares):
            ways = {**options, **OPTIONS, "capturable": True}
            optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, masters_from=optimizer, **keywords(ways))
        for captured in (False, True)[: 1 if "overlap" in options else 2]:
            set_gradients(parameters, [g.round() for g in make_gradients(parameters, world.rank)])
            with as_if_captured() if captured else contextlib.nullcontext():
                optimizer.step()
        optimizer.check()
        sides.append([*optimizer.gathered_masters(), *model_bytes(parameters)])
    assert_all_equal(*sides, "tensor")


@on_ranks(4)
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("name", CLASSES)
def test_a_rank_that_cannot_take_its_gradients_leaves_no_rank_waiting(world, name, shares):
    """Before the vote with FusedAdamW, else behind it; where rows are sent, the optimizer is broken then."""
    parameters, optimizer = with_hosts(world, CLASSES[name], shares=shares)
    set_gradients(parameters, gradients_of(parameters, world.rank, 0))
    refusing = mock.patch.object(GradientMemory, "take", side_effect=MemoryError("no room"))
    told = r"rank 1 found an error|another rank could not take part|could not finish its part"
    with refusing if world.rank == 1 else contextlib.nullcontext():
        error = (MemoryError, "no room") if world.rank == 1 else (RuntimeError, told)
        with pytest.raises(error[0], match=error[1]):
            optimizer.step()
            optimizer.check()  # a GPU says it here
    if optimizer._peers is None:
        with pytest.raises(RuntimeError, match="of no more use"):
            optimizer.step()
        return
    if optimizer._agreement.defers:
        with pytest.raises(RuntimeError, match=LATER):
            optimizer.step()
    optimizer.step()
    assert_same_on_all_ranks(model_bytes(parameters))


@on_ranks(4)
def test_a_host_without_room_is_heard_of_on_all(world):
    kind = Peers if world.device.type == "cuda" else FilePeers
    zeros = kind.zeros

    def have_no_room(peers, shape, dtype):
        if dtype == torch.int32:  # the flags of barriers: without those, a host shares no memory
            return zeros(peers, shape, dtype)
        raise MemoryError("no room")

    no_room = mock.patch.object(kind, "zeros", have_no_room)
    with no_room if world.rank < 2 else contextlib.nullcontext():
        with pytest.raises((MemoryError, RuntimeError), match=r"no room|rank 0"):
            with_hosts(world)


@on_ranks(4)
def test_no_host_updates_with_means_of_one_where_a_rank_did_not_come(world):
    """As its barrier leaves it, on all ranks of that host; the means that it sends are of no use."""
    parameters, optimizer = with_hosts(world)
    expected = [master.clone() for master in optimizer.gathered_masters()]
    set_gradients(parameters, gradients_of(parameters, world.rank, 0))
    optimizer._peers.failed.fill_(world.rank < 2)
    optimizer.step()
    assert optimizer._peers.failed.item() == 1
    assert_all_equal(optimizer.gathered_masters(), expected, "master")


@on_ranks(2, 3)
def test_one_host_and_one_rank_on_each_change_nothing(world):
    sides = []
    for shape in (None, (1, world.world_size), (world.world_size, 1)):
        parameters, optimizer = with_hosts(world, shares=False, hosts=shape and mesh_of(world, shape))
        assert optimizer.describe()["hosts"] is None
        set_gradients(parameters, gradients_of(parameters, world.rank, 0))
        optimizer.step()
        sides.append(model_bytes(parameters))
        assert_all_equal(sides[-1], sides[0], "tensor")


@on_ranks(4, time_limit=60)
def test_hosts_that_cannot_be_meant(world):
    parameters = parameters_of(world)
    before = [b.clone() for b in model_bytes(parameters)]
    square, line = mesh_of(world, SHAPE), mesh_of(world, (4,))
    turned = DeviceMesh(world.device.type, [[0, 2], [1, 3]])
    groups = {"params": parameters[:2], "process_group": square}, {"params": parameters[2:]}
    halved = {"params": parameters, "process_group": square.get_group(1)}  # the same one in all groups
    for hosts, error, message, options in [
        (2, TypeError, "hosts must be None or a DeviceMesh, got int", {}),
        (square, ValueError, "hosts is not supported with transport='peer'", {"transport": "peer"}),
        (square, ValueError, "not supported with overlap='backward'", {"overlap": "backward"}),
    ]:
        with pytest.raises(error, match=message):
            Communication(hosts=hosts, **options)
    for hosts, error, message, options in [
        (line, ValueError, "rank 0: hosts must be a DeviceMesh of two dimensions, of hosts and of", {}),
        (turned, ValueError, "in this order, got [0, 2, 1, 3] in 2 dimensions", {}),
        (square, ValueError, "parameter groups name a process_group", {"params": groups}),
        (square, ValueError, "parameter groups name a process_group", {"params": [halved]}),
        (square if world.rank else None, ValueError, "hosts", {}),
    ]:
        arguments = keywords({"params": parameters, "lr": 0.1}, options, hosts=hosts)
        assert message in raised_everywhere(world, error, ZeroFP4Optimizer, **arguments)
    assert_all_equal(model_bytes(parameters), before, "parameter")


# Hosts that are found


@on_ranks(4)
def test_auto_adds_up_on_each_host_first(world):
    """With the bytes of a mesh; and where that cannot be, over all ranks."""
    sides = []
    for names, options, shape in [
        ("aabb", {"hosts": mesh_of(world, SHAPE)}, SHAPE),
        ("aabb", {}, SHAPE),
        ("aaaa", {}, None),
        ("aabb", {"transport": "collective"}, None),
        ("aabb", {"overlap": "backward"}, None),
        ("aabb", {"reduction": "reduce_scatter", "gradient_wire": torch.float32}, None),
    ]:
        parameters, optimizer = with_hosts(world, names=names, shares=False, **{"hosts": None, **options})
        assert optimizer.describe()["hosts"] == shape, options
        if shape:
            set_gradients(parameters, gradients_of(parameters, world.rank, 0))
            optimizer.step()
            sides.append(model_bytes(parameters))
    assert_all_equal(*sides, "tensor")


def in_as_many_groups(world):
    """The default group, once all ranks are in as many groups, whatever other tests have left."""
    if world.device.type == "cuda":
        pytest.skip("GPUs share memory")
    counts = [None] * world.world_size
    dist.all_gather_object(counts, len(dist.distributed_c10d._world.pg_names))
    for _ in range(counts[world.rank], max(counts)):
        dist.new_group([world.rank], use_local_synchronization=True)
    return dist.group.WORLD


@on_ranks(4)
def test_ranks_of_a_host_that_was_found_share_memory(world):
    """In one process group, however many optimizers are built; what keeps one host from it, all learn."""
    arguments = "auto", None, in_as_many_groups(world), world.device

    def refuse(*_):
        raise RuntimeError("no permission")

    with on_hosts(world, "aabb"):
        ways = [find_topology(*arguments) for _ in range(2)]
        refused = mock.patch.object(topology, "Peers", refuse)
        with refused if world.rank == 3 else contextlib.nullcontext():
            assert find_topology(*arguments) == (None, Hosts(2, 2), "rank 3: no permission")
    assert [(hosts, obstacle) for _, hosts, obstacle in ways] == [(Hosts(2, 2), None)] * 2
    groups = [peers.group() for peers, _, _ in ways]
    first = world.rank // 2 * 2
    assert groups[0] is groups[1] and dist.get_process_group_ranks(groups[0]) == [first, first + 1]


@on_ranks(4)
@pytest.mark.parametrize("kind", ["more groups", "another order"])
def test_ranks_of_a_host_that_torch_cannot_group(world, kind):
    """They would wait for each other by different names, or read each other's slices."""
    group = in_as_many_groups(world)
    if kind == "more groups":
        dist.new_group([0, 2])
    else:
        if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
            pytest.skip("this torch sorts the ranks of every group")
        group = dist.new_group([0, 1, 3, 2], sort_ranks=False)
    with on_hosts(world, "aabb"):
        peers, hosts, why_collective = find_topology("auto", None, group, world.device)
    assert peers is None and hosts == Hosts(2, 2)
    assert re.search("how many process groups|in this order", why_collective), why_collective


@pytest.mark.parametrize(
    ("names", "shape"),
    [
        ("aabb", (2, 2)),
        ("aabbcc", (3, 2)),
        ("aaaa", None),
        ("abcd", None),
        ("abab", None),
        ("aabba", None),
        ("aab", None),
        ("a", None),
    ],
)
def test_hosts_of_names(names, shape):
    """Only ranks that are numbered host by host, as many on each, have a sum by hosts."""
    found = find_hosts([Location(name, 0, [], None) for name in names])
    assert (found and found.shape) == shape
