"""How what several ranks do together is timed, and what it allocates."""

import contextlib
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from benchmarking.session import Session
from zerofp4.launch import World

MOST_HOST = 0.5  # milliseconds
WARM_UP = 3
AHEAD = 4_000_000
"""Cycles that a GPU spends on nothing in front of what is timed, about 2 ms: the host has begun by then, as
it has behind a backward pass.
"""
MEGABYTES = 1e6


class Timer:
    """Times what all ranks do together: the longest of the ranks' times, and the median of those.

    The time of a GPU runs from where it is done with what was queued before, while the host is at work on
    what is timed by then: a training step queues its optimizer's step behind a backward pass. What the host
    takes longer than that counts. from_idle=True: the GPU has nothing to do before.
    """

    def __init__(self, session: Session, world: World, repeats: int):
        self.session, self.world, self.repeats = session, world, repeats
        self.device = session.device
        self.places = f"{world.world_size}x{self.device.type}"
        self._own_bytes = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def ms(
        self,
        name: str,
        run: Callable[[], object],
        rule: str,
        *,
        parts: int = 1,
        after: Callable[[], object] | None = None,
        from_idle: bool = False,
    ) -> float:
        """time(), with a row of it. parts: equal ones that `run` has, of which one counts."""
        found = self.time(run, after, from_idle=from_idle) / parts
        self.count_ms(name, found, rule)
        return found

    def time(
        self,
        run: Callable[[], object],
        after: Callable[[], object] | None = None,
        *,
        from_idle: bool = False,
        repeats: int | None = None,
    ) -> float:
        """Milliseconds. after: what is done after each that counts, not timed, once the device is done.
        repeats: how many count; None for all that there are of a row.
        """
        times = []
        for index in range(WARM_UP + (repeats or self.repeats)):
            times.append(self._once(run, from_idle))
            if after is not None and index >= WARM_UP:
                after()
        return self._longest(times)

    def _longest(self, times: list[float]) -> float:
        """The median, without those of warming up, of the longest of the ranks' times."""
        longest = torch.tensor(times[WARM_UP:], device=self.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return statistics.median(longest.tolist())

    def in_turns(self, *runs: Callable[[], object]) -> list[float]:
        """time() of each, where one follows the other in every repeat: so all meet the clocks that products
        leave a GPU which they warm up.
        """
        times: list[list[float]] = [[] for _ in runs]
        for _ in range(WARM_UP + self.repeats):
            for run, own in zip(runs, times, strict=True):
                own.append(self._once(run, False))
        return [self._longest(own) for own in times]

    def count_ms(self, name: str, found: float, rule: str) -> None:
        self.session.count(f"{name}/{self.places}", "milliseconds", found, rule)

    def host_ms(self, name: str, run: Callable[[], object], rule: str) -> None:
        """host_time(), with a row of it."""
        found, target = self.host_time(run), MOST_HOST if self.device.type == "cuda" else None
        rule = f"until all is queued, {rule}"
        self.session.count(f"{name}/{self.places}", "milliseconds", found, rule, target=target)

    def host_time(self, run: Callable[[], object], repeats: int | None = None) -> float:
        """Milliseconds that the host takes to queue what the device then does."""
        times = []
        for _ in range(WARM_UP + (repeats or self.repeats)):
            dist.barrier()
            self.session.clock.synchronize()
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e3)
        self.session.clock.synchronize()
        return self._longest(times)

    def sizes(self, prefix: str, described: dict) -> None:
        """What optimizer.describe() says that a rank sends. prefix: of the names of rows."""
        for phase, nbytes in described["bytes_sent"].items():
            rule = f"sent by a rank in a step, {len(described['buckets'])} buckets"
            self.session.count(f"{prefix}sent_{phase}/{self.places}", "megabytes", nbytes / MEGABYTES, rule)

    def _once(self, run: Callable[[], object], from_idle: bool) -> float:
        dist.barrier()
        self.session.clock.synchronize()
        if self.device.type == "cpu":
            begin = time.perf_counter()
            run()
            return (time.perf_counter() - begin) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if not from_idle:
            torch.cuda._sleep(AHEAD)
        begin.record()
        run()
        end.record()
        self.session.clock.synchronize()
        return begin.elapsed_time(end)

    def ratio(self, part: str, ours: float, theirs: float, most: float | None) -> None:
        rule = f"{part} of ours over that of bf16"
        target = most if self.device.type == "cuda" else None
        self.session.count(f"{part}_over_bf16/{self.places}", "ratio", ours / theirs, rule, target=target)

    @contextlib.contextmanager
    def peak(
        self, name: str, beside: str, before: int | None = None, shared: int = 0
    ) -> Iterator[list[float]]:
        """Report the most memory that was allocated meanwhile, and leave it in the list, in megabytes; not on
        the CPU. before: bytes of something else in it; None for those of the benchmark itself. shared: those
        that other ranks can access, which torch does not count.
        """
        found: list[float] = []
        if self.device.type == "cpu":
            yield found
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        yield found
        before = self._own_bytes if before is None else before
        held = (torch.cuda.max_memory_allocated(self.device) + shared - before) / MEGABYTES
        found.append(held)
        self.session.count(f"{name}/{self.places}", "megabytes", held, f"peak on rank 0, {beside}")

    def has_room(self, name: str, nbytes: float) -> bool:
        """Whether every rank's GPU has so many free bytes, once those of nobody are given back; it is said
        where `name` is left out for it. Memory of the CPU is not looked at.
        """
        if self.device.type == "cpu":
            return True
        free_memory(self.device)
        free = torch.tensor(float(torch.cuda.mem_get_info(self.device)[0]), device=self.device)
        dist.all_reduce(free, dist.ReduceOp.MIN)
        if nbytes <= free.item():
            return True
        needs = f"needs {nbytes / 1e9:,.1f} GB, and a rank has {free.item() / 1e9:,.1f} GB free"
        self.session.say(f"{name} is left out: it {needs}; --scale makes it smaller")
        return False


def free_memory(device: torch.device) -> int:
    """What is allocated once the model of before is gone, which is full of cycles."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


@contextlib.contextmanager
def only_rank_0_speaks(world: World) -> Iterator[None]:
    if world.rank == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
    sys.stdout.flush()
