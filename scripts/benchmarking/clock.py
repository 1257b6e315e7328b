"""How things are timed: medians on one device, each run with cold caches, beside the copy ceiling."""

import collections
import ctypes
import statistics
import time
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

COPY_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
CPU_FLUSH_BYTES = 256 << 20
WARM_UP = 3
FEWEST_RUNS, SECONDS_PER_ROW = 5, 5.0
SPIN_CYCLES_PER_SECOND = 3e9  # more than a GPU's clock: it spins for longer than the host takes
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
HOST_CALLS, HOST_ROUNDS = 20, 15  # 80 launches in flight: far from what makes a launch wait


def keep_freed_memory() -> None:
    """Make this process's malloc keep what is freed, as torch's allocator does on a GPU. Else a call that
    returns large tensors takes several times as long on a CPU, for page faults. Does nothing without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


class Clock:
    """Times calls on one device.

    A run that moves less than `flush_bytes` (four times the L2 of a GPU) is preceded by an untimed write of
    that many bytes, so that it starts with a cold cache, full of lines that it must write back. What moves
    more than that finds nothing of its own in the cache when it starts again.

    On a GPU a pair of events encloses each run, and all runs are queued before any is waited for. Ahead of
    each the GPU spins for longer than the host takes to launch it. That is no part of its time, however short
    the run: in a training step it is hidden behind other work.
    """

    def __init__(self, device: torch.device, repeats: int):
        self.device, self.repeats = device, repeats
        self.is_cuda = device.type == "cuda"
        properties = torch.cuda.get_device_properties(device) if self.is_cuda else None
        self.flush_bytes = 4 * properties.L2_cache_size if properties else CPU_FLUSH_BYTES
        self._flushed = torch.empty(self.flush_bytes, dtype=torch.uint8, device=device)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(
        self, run: Callable[[], object], moved: float, before: Callable[[], object] | None = None
    ) -> tuple[float, int]:
        """Median time of one call and the number of calls it is the median of.

        moved: bytes that a call moves. before: what has to be done before each call, not timed.
        """
        is_cold = moved < self.flush_bytes
        for _ in range(WARM_UP):
            if before is not None:
                before()
            self.synchronize()
            begin = time.perf_counter()
            run()
            launched = time.perf_counter() - begin
            self.synchronize()
            once = time.perf_counter() - begin
        runs = min(self.repeats, max(FEWEST_RUNS, int(SECONDS_PER_ROW / max(once, 1e-9))))
        if self.is_cuda:
            times = self._cuda_runs(run, before, is_cold, runs, int(launched * SPIN_CYCLES_PER_SECOND))
        else:
            times = self._cpu_runs(run, before, is_cold, runs)
        return statistics.median(times), runs

    def _prepare(self, before: Callable[[], object] | None, is_cold: bool) -> None:
        if before is not None:
            before()
        if is_cold:
            self._flushed.fill_(1)

    def _cuda_runs(self, run, before, is_cold: bool, runs: int, spin_cycles: int) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for begin, end in pairs:
            self._prepare(before, is_cold)
            torch.cuda._sleep(spin_cycles)
            begin.record()
            run()
            end.record()
        self.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]

    def _cpu_runs(self, run, before, is_cold: bool, runs: int) -> list[float]:
        times = []
        for _ in range(runs):
            self._prepare(before, is_cold)
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return times

    def copy_gbps(self) -> float:
        """The ceiling: bytes read plus bytes written by a copy within the device's memory, over its time."""
        size = COPY_BYTES[self.device.type]
        source, target = (torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        source.view(torch.int64).random_()  # by words: bytes one at a time would take a CPU seconds
        return 2 * size / self.seconds(lambda: target.copy_(source), 2 * size)[0] / 1e9

    def host_us(self, run: Callable[[], object]) -> float:
        """Median microseconds that a call keeps the host, a few calls in the queue at a time.

        On a CPU the work itself is part of it.
        """
        times = []
        run()
        while len(times) < min(HOST_ROUNDS, self.repeats) and sum(times) < SECONDS_PER_ROW:
            self.synchronize()
            begin = time.perf_counter()
            for _ in range(HOST_CALLS):
                run()
            times.append(time.perf_counter() - begin)
        self.synchronize()
        return statistics.median(times) / HOST_CALLS * 1e6

    def kernels(self, run: Callable[[], object]) -> dict[str, int]:
        """Kernels, memory copies and memory sets that one call puts on the GPU, by name; none on a CPU."""
        if not self.is_cuda:
            return {}
        run()
        for _ in range(2):  # the first trace of a process may begin too late
            self.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                run()
                self.synchronize()
        names = (event.name for event in trace.events() if event.device_type == DeviceType.CUDA)
        return dict(collections.Counter(names))
