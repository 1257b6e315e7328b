"""The gather of packed codes with all its ranks in one process: every boundary, alignment and refusal, and
that the host waits for nothing.
"""

from __future__ import annotations

import pytest
import torch
from cases.optim import assert_all_equal
from helpers import assert_bytes_equal, needs_gpu

from distributed.cases import SPLITS, split
from zerofp4 import ops
from zerofp4.distributed import OwnError, PackedGather, packed_gather
from zerofp4.shard import Shard

POISON = 0xA5
HASH = 77
SHAPES = [(2, 2), (16, 16), (34, 288), (2, 1000), (130, 66), (514, 1030)]
"""The last one has runs of more than one unit of the kernels."""


def header_of(hash: int, error: float = 0.0, minus: int | None = None) -> list[float]:
    """What a step with this hash leaves; minus: another rank's, whose bytes are there negated."""
    own, others = ([n >> 8 * i & 255 for i in range(3)] for n in (hash, hash if minus is None else minus))
    return [error, *map(float, own), *(-float(byte) for byte in others), 0.0]


def refusal_of(rank: int, why: int = ops.GATHER_REFUSED) -> int:
    """The status of a gather in which this rank found an error, or its last step did not take place."""
    return why | rank << ops.STATUS_RANK_SHIFT


class Ranks:
    """One gather per rank over copies of the same weights, of which a rank has its own codes."""

    def __init__(self, monkeypatch, device, shards: list[list[Shard]], shapes=SHAPES, offset=0):
        """shards: [weight][rank]. offset: of every weight's codes from where they would be aligned."""
        world = len(shards[0])
        monkeypatch.setattr(packed_gather, "all_gather_slices", lambda flat, group, stage: None)
        generator = torch.Generator().manual_seed(world)
        codes = [torch.randint(256, (m, k // 2), dtype=torch.uint8, generator=generator) for m, k in shapes]
        self.whole = [whole.to(device) for whole in codes]
        self.buffers, self.gathers, self.statuses, self.headers = [], [], [], []
        by_rank = list(map(list, zip(*shards, strict=True)))
        for rank in range(world):
            monkeypatch.setattr(packed_gather, "rank_and_size", lambda group, rank=rank: (rank, world))
            pairs = zip(self.whole, by_rank[rank], strict=True)
            self.buffers.append([_own(whole, shard, offset) for whole, shard in pairs])
            status = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
            reduced = torch.tensor(header_of(HASH), device=device)
            header = ops.GatherHeader(reduced, HASH, status)
            self.gathers.append(PackedGather(self.buffers[rank], by_rank, None, device, header))
            self.statuses.append(status)
            self.headers.append(reduced)

    def run(self, failed: tuple[int, ...] = ()) -> None:
        """What queue() does on every rank, with the collective between its halves."""
        staging = [gather.staging for gather in self.gathers]
        stages = [gather._stages for gather in self.gathers]
        for rank, own in enumerate(stages):
            own.run("pack", ops.GATHER_FAILED if rank in failed else ops.GATHER_PRESENT)
        for mine in staging:
            for rank, theirs in enumerate(staging):
                mine[rank] = theirs[rank]
        for rank, own in enumerate(stages):
            if rank not in failed:
                own.run("unpack")
        if staging[0].is_cuda:
            torch.cuda.synchronize()

    def check(self, expected: list[list[torch.Tensor]] | None = None) -> None:
        """Every rank has all codes, or [rank][weight] what is expected."""
        for rank, buffers in enumerate(self.buffers):
            wanted = self.whole if expected is None else expected[rank]
            assert_all_equal(buffers, wanted, f"rank {rank}, weight")

    def snapshot(self) -> list[list[torch.Tensor]]:
        return [[buffer.clone() for buffer in buffers] for buffers in self.buffers]


def _own(whole: torch.Tensor, shard: Shard, offset: int) -> torch.Tensor:
    """The codes of a weight on a rank that has only those of its shard."""
    memory = torch.full((offset + whole.numel(),), POISON, dtype=torch.uint8, device=whole.device)
    mine = memory[offset:].view(whole.shape)
    element = torch.arange(2 * whole.numel(), device=whole.device).view(-1, 2)
    owned = (element >= shard.start) & (element < shard.end)
    mask = (owned[:, 0] * 0x0F + owned[:, 1] * 0xF0).to(torch.uint8).view(whole.shape)
    mine.copy_((mine & ~mask) | (whole & mask))
    return mine


def _split_all(world: int, how: str, shapes=SHAPES) -> list[list[Shard]]:
    return [split(m * k, world, how, seed) for seed, (m, k) in enumerate(shapes)]


def gathered(monkeypatch, device, shards: list[list[Shard]], **options) -> None:
    ranks = Ranks(monkeypatch, device, shards, **options)
    ranks.run()
    ranks.check()
    assert not any(status.item() for status in ranks.statuses)


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("offset", [0, 1, 4, 6, 8])
def test_every_boundary_at_any_address(monkeypatch, device, world, how, offset):
    gathered(monkeypatch, device, _split_all(world, how), offset=offset)


@pytest.mark.parametrize("first", range(30, 36))
@pytest.mark.parametrize("numel", [1, 2, 3, 29, 30, 31, 32, 33, 34, 35, 63, 64, 65])
def test_short_runs_around_a_vector(monkeypatch, device, first, numel):
    """Elements are half a byte: runs that begin and end just before, at and after 16 bytes."""
    shards = [Shard(0, first), Shard(first, numel), Shard(first + numel, 200 - first - numel)]
    gathered(monkeypatch, device, [shards], shapes=[(2, 100)])
    if first == numel:  # and bytes of which each element has another owner
        gathered(monkeypatch, device, [[Shard(i, 1) for i in range(12)]], shapes=[(2, 6)])


@pytest.mark.threads
def test_runs_of_many_units_on_many_threads(monkeypatch):
    shapes = [(1026, 2050), (2, 2), (512, 1024)]
    gathered(monkeypatch, torch.device("cpu"), _split_all(2, "odd", shapes), shapes=shapes)


@pytest.mark.parametrize("failed", [(0,), (2,), (1, 2)])
def test_no_rank_takes_anything_where_one_found_an_error(monkeypatch, device, failed):
    """What a step has said in a status is not overwritten."""
    ranks = Ranks(monkeypatch, device, _split_all(3, "odd"))
    before = ranks.snapshot()
    ranks.statuses[1].fill_(ops.PEER_ERROR)
    ranks.run(failed)
    ranks.check(before)
    told = [0 if rank in failed else refusal_of(failed[0]) for rank in range(3)]
    assert [status.item() for status in ranks.statuses] == [told[0], ops.PEER_ERROR, told[2]]
    for rank in failed:  # whose codes may be in memory that is gone
        assert not ranks.gathers[rank].staging[rank, ops.GATHER_VECTOR :].any()
    ranks.run()  # and the next one is as if nothing had been
    ranks.check()


OTHER_HASHES = [header_of(HASH, minus=HASH + n) for n in (1, 256)] + [header_of(HASH + n) for n in (1, 65536)]


@pytest.mark.parametrize("header", [header_of(HASH, error=torch.inf), *OTHER_HASHES])
def test_no_rank_takes_anything_after_a_step_that_did_not_take_place(monkeypatch, device, header):
    """Also where one rank only should think so."""
    ranks = Ranks(monkeypatch, device, _split_all(3, "odd"))
    before = ranks.snapshot()
    ranks.headers[1].copy_(torch.tensor(header))
    ranks.run()
    ranks.check(before)
    assert [status.item() for status in ranks.statuses] == [refusal_of(1, ops.GATHER_WITHOUT_STEP)] * 3


@pytest.mark.parametrize("refusing", [0, 255, 256, 299])
def test_any_of_hundreds_of_ranks_is_heard(device, refusing):
    """More ranks than a thread block has threads."""
    staging = torch.zeros(300, ops.GATHER_VECTOR, dtype=torch.uint8, device=device)
    status = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
    header = ops.GatherHeader(torch.tensor(header_of(HASH), device=device), HASH, status)
    stages = ops.NativePlan(device)
    source = torch.arange(64, dtype=torch.uint8, device=device)
    output = torch.full_like(source, POISON)
    run = ops.GatherRun(source.data_ptr(), output.data_ptr(), 0, 64)
    ops.load_gather(stages, staging, 7, header, [], [run], [output])
    staging.view(torch.int32)[refusing, 0] = ops.GATHER_FAILED
    stages.run("unpack")
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert status.item() == refusal_of(refusing)
    assert_bytes_equal(output, torch.full_like(source, POISON), "codes that must not change")
    staging.zero_()
    stages.run("unpack")
    assert_bytes_equal(output, source, "codes")


@needs_gpu
def test_queueing_waits_for_nothing_and_can_be_captured(monkeypatch):
    """Nothing is allocated either; and each replay decides anew whether all ranks take part."""
    device = torch.device("cuda", torch.cuda.current_device())
    ranks = Ranks(monkeypatch, device, _split_all(2, "odd"))
    gather, status = ranks.gathers[0], ranks.statuses[0]
    gather.queue(OwnError())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda._sleep(10**8)
        gather.queue(OwnError())
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert not torch.cuda.current_stream().query(), "the host waited, or was too slow to show anything"
        with pytest.raises(ValueError, match="mine"):
            gather.queue(OwnError(ValueError("mine")))
        assert not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ranks.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather.unpack()
    for refused in (False, True, False):
        status.zero_()
        gather.staging.view(torch.int32)[1, 0] = int(refused)
        for whole, buffer in zip(ranks.whole, ranks.buffers[0], strict=True):
            buffer.copy_(whole)
            buffer.view(-1)[-3:] = POISON  # owned by the other rank
        poisoned = ranks.buffers[0][-1].clone()
        graph.replay()
        torch.cuda.synchronize()
        assert status.item() == (refusal_of(1) if refused else 0)
        assert_bytes_equal(ranks.buffers[0][-1], poisoned if refused else ranks.whole[-1], "codes")
