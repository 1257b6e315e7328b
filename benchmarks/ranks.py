"""How what several ranks do together is timed, and what it allocates."""

import contextlib
import gc
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.autograd import DeviceType

from benchmarks.session import Run, Session
from zerofp4.distributed import PREFIX
from zerofp4.launch import World

WARM_UP = 3
PROFILED = 5
AHEAD = 4_000_000
"""Cycles that a GPU spends on nothing before it is timed, about 2 ms: the host has begun by then."""
MEGABYTES = 1e6


class Timer:
    """Times what all ranks do together: the longest of the ranks' times, and the median of those.

    A GPU has other work before, while the host begins: a training step queues its optimizer's step behind a
    backward pass. from_idle=True: it has none.
    """

    def __init__(
        self, session: Session, world: World, repeats: int, prefix: str = "", warm_up: int = WARM_UP
    ):
        """prefix: of the names of rows. warm_up: calls that are not timed."""
        self._warm_up = warm_up
        self.session, self.world, self.repeats, self.prefix = session, world, repeats, prefix
        self.device = session.device
        self.places = f"{world.world_size}x{self.device.type}"
        self._own_bytes = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def count(self, name: str, kind: str, value: float, rule: str, **extra) -> None:
        """Add a row of these ranks."""
        self.session.count(f"{self.prefix}{name}/{self.places}", kind, value, rule, **extra)

    def ms(self, name: str, run: Run, rule: str, *, parts: int = 1, **options) -> float:
        """time(), with a row of it. parts: equal ones that `run` has, of which one counts."""
        found = self.time(run, **options) / parts
        self.count(name, "milliseconds", found, rule)
        return found

    def time(self, run: Run, **options) -> float:
        """Milliseconds. options: of in_turns()."""
        return self.in_turns(run, **options)[0]

    def in_turns(
        self, *runs: Run, before: Run | None = None, from_idle: bool = False, of_host: bool = False
    ) -> list[float]:
        """Milliseconds of each. One follows the other in every repeat, so that all meet the same clocks.

        before: what is done before each turn, not timed. of_host: until a call returns, from an idle device.
        """
        times = []
        for _ in range(self._warm_up + self.repeats):
            if before is not None:
                before()
            times.append([self._once(run, from_idle, of_host) for run in runs])
        return [self._longest(list(own)) for own in zip(*times[self._warm_up :], strict=True)]

    def spans(self, run: Run, **parts: Iterable[str]) -> dict[str, float]:
        """Milliseconds of parts of a call, each of some of zerofp4.distributed.PHASES, as of span()."""
        on_gpu = self.device.type == "cuda"
        times: dict[str, list[float]] = {part: [] for part in parts}
        for number in range(1 + PROFILED):  # the first trace of a process may begin too late
            self._meet()
            with torch.profiler.profile(acc_events=True) as profile:
                run()
                self.session.clock.synchronize()
            for part, phases in parts.items() if number else ():
                times[part].append(span(profile.events(), {PREFIX + phase for phase in phases}, on_gpu))
        return {part: self._longest(own) for part, own in times.items()}

    def _meet(self) -> None:
        dist.barrier()
        self.session.clock.synchronize()

    def _longest(self, times: list[float]) -> float:
        """The median of the longest of the ranks' times."""
        longest = torch.tensor(times, device=self.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return statistics.median(longest.tolist())

    def _once(self, run: Run, from_idle: bool, of_host: bool) -> float:
        self._meet()
        if of_host or self.device.type == "cpu":
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

    @contextlib.contextmanager
    def peak(
        self, name: str, beside: str, before: int | None = None, shared: int = 0
    ) -> Iterator[list[float]]:
        """Report the most memory that was allocated meanwhile, and leave it in the list, in megabytes; not on
        the CPU. before: bytes of something else in it (default: of the benchmark). shared: beside torch's.
        """
        found: list[float] = []
        if self.device.type == "cpu":
            yield found
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        yield found
        before = self._own_bytes if before is None else before
        found.append((torch.cuda.max_memory_allocated(self.device) + shared - before) / MEGABYTES)
        self.count(name, "megabytes", found[0], f"peak on rank 0, {beside}")

    def has_room(self, name: str, nbytes: float) -> bool:
        """Whether every rank's GPU has so many free bytes; else it is said that `name` is left out."""
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


def span(events: Iterable, names: set[str], on_gpu: bool) -> float:
    """Milliseconds of the ranges of these names: on the CPU their sum; on a GPU, where a range is the work
    that was launched in it, from the begin of the first to the end of the last.
    """
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    times = [event.time_range for event in events if event.name in names and event.device_type == kind]
    if on_gpu:
        return (max(t.end for t in times) - min(t.start for t in times)) / 1e3 if times else 0.0
    return sum(t.elapsed_us() for t in times) / 1e3


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
