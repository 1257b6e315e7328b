"""What this machine can run, where a call into the extension runs, and the device memory that plans keep."""

import functools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import zerofp4._C as _C
from zerofp4.format import SCALE_LAYOUTS
from zerofp4.storage import Side, address_of

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# What this machine can run

OLDEST_CAPABILITY = (8, 0)
FP4_CAPABILITY = (10, 0)
"""From here on tensor cores multiply FP4."""


def _slow_on_cpu() -> tuple[torch.dtype, ...]:
    has_mkldnn = torch.backends.mkldnn.is_available()
    # oneDNN takes bfloat16 on any AVX-512; without AVX512_BF16 it is five times as slow as float32.
    emulates = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    slow = {
        torch.bfloat16: not has_mkldnn or emulates or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: not has_mkldnn or not torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return tuple(dtype for dtype in slow if slow[dtype])


SLOW_ON_CPU = _slow_on_cpu()
"""Dtypes without instructions on this CPU, which torch multiplies slowly. ONEDNN_MAX_CPU_ISA counts."""


def code_for(capability: Sequence[int], architectures: Sequence[str]) -> str | None:
    """The compiled-in architecture whose code a GPU runs, or None. Machine code (sm_90) runs on its own major
    version from its minor version on, PTX (compute_90) also on all newer GPUs.
    """
    usable = []
    for name in architectures:
        parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name)
        if parts is None:
            continue
        version, own, machine_code = (int(parts[2]), int(parts[3])), tuple(capability), parts[1] == "sm"
        if version <= own and (version[0] == own[0] or not machine_code):
            usable.append((machine_code, version, name))
    return max(usable)[2] if usable else None


def check_capability(gpu: str, capability: Sequence[int], architectures: Sequence[str]) -> None:
    """Raises RuntimeError unless a build for these architectures runs on `gpu`, its name in messages."""
    has = f"{gpu} has {capability[0]}.{capability[1]}"
    if tuple(capability) < OLDEST_CAPABILITY:
        oldest = ".".join(map(str, OLDEST_CAPABILITY))
        raise RuntimeError(f"zerofp4 needs compute capability {oldest} or newer, {has}")
    if code_for(capability, architectures) is None:
        raise RuntimeError(
            f"zerofp4 was built for {', '.join(architectures)}, {has}: reinstall it on this machine, or with "
            "ZEROFP4_CUDA_ARCHS=all"
        )


@functools.cache
def check_cuda(index: int) -> None:
    """Raises RuntimeError unless this build and this GPU can run the CUDA kernels."""
    if "cuda_version" not in _C.build():
        raise RuntimeError(
            f"a tensor is on cuda:{index}, but zerofp4 was built without CUDA: "
            "reinstall it where nvcc is on the PATH"
        )
    gpu = f"cuda:{index} ({torch.cuda.get_device_name(index)})"
    check_capability(gpu, torch.cuda.get_device_capability(index), architectures())


def architectures() -> list[str]:
    """Those that the build has code for: sm_90 is machine code, compute_90 PTX."""
    return _C.build().get("cuda_architectures", "").split()


def has_fp4_tensor_cores(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP4_CAPABILITY


def cpu_cores() -> set[int]:
    """The cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return os.sched_getaffinity(0) if has_affinity else set(range(os.cpu_count() or 1))


# Where a call runs

_target = functools.lru_cache(maxsize=256)(_C.Target)
"""Finding a target costs the host less than making one."""


def target_of(device: torch.device) -> _C.Target:
    """The current stream of a GPU, or torch's number of threads."""
    if device.type == "cpu":
        return _target(-1, 0, torch.get_num_threads())
    if device.type != "cuda":
        raise RuntimeError(f"zerofp4 runs on CPU and CUDA tensors, not on {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    check_cuda(index)
    return _target(index, current_stream(index), 0)


current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""The handle of a GPU's current stream, by its index, ten times as fast as a Stream. None without CUDA."""


def is_capturing(device: torch.device) -> bool:
    """Whether a GPU's current stream is being captured in a CUDA graph, whichever GPU is current."""
    if device.type != "cuda":
        return False
    if device.index in (None, torch.cuda.current_device()):  # no context manager in every step
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def scale_addresses(name: str, side: Side | None) -> list[int]:
    """The addresses of a side's NVFP4 scales by layout, 0 for missing ones."""
    scales = {} if side is None else side.scale_places
    return [address_of(name, scales.get(layout)) for layout in SCALE_LAYOUTS]


def run_list(make: Callable[[Sequence[int]], Any], words: Sequence[int], fields: int, device) -> None:
    """Run the native list that make(words) returns, with items of `fields` words. Short lists travel in the
    kernel's arguments, longer ones in a table in GPU memory. A replay of a CUDA graph could not copy the
    table, so a capture takes several launches.
    """
    target, most = target_of(device), _C.ARGUMENT_ITEMS * fields
    if device.type != "cuda" or len(words) <= most:
        make(words).run(target)
    elif is_capturing(device):
        for first in range(0, len(words), most):
            make(words[first : first + most]).run(target)
    else:
        native = make(words)
        contents = torch.frombuffer(bytearray(native.descriptor_bytes()), dtype=torch.uint8)
        # Alive until the launch is queued; after that torch reuses its memory in stream order.
        table = contents.pin_memory().to(device, non_blocking=True)
        native.set_device_descriptors(table.data_ptr())
        native.run(target)


# What plans keep


class Filled:
    """Orders uses of a buffer on any stream after its copy: note() follows that, wait() precedes each use."""

    def __init__(self, device: torch.device):
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self.stream: int | None = None
        """The stream of the last note() or wait(), which needs no other wait."""

    def note(self) -> None:
        """The copy is queued on the current stream."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))
            self.stream = current_stream(self._device.index)

    def wait(self) -> None:
        """Make the current stream wait for it. Not in a CUDA graph: torch.cuda.graph has synchronized."""
        if self.stream is None:
            return
        stream = current_stream(self._device.index)
        if stream != self.stream and not is_capturing(self._device):
            torch.cuda.current_stream(self._device).wait_event(self._event)
        self.stream = stream


class NativePlan:
    """A plan of the extension, with the GPU memory that its launches use.

    A load overwrites the table of descriptors in place. It makes a new one after hold(), since a captured
    graph reads the old one, and if the last use was on another stream, which may not have run yet.

    native: the plan; None if there is nothing to launch.
    tables: those that graphs read, then the latest.
    captured: by address, the storage that captured CUDA graphs use, kept alive here.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.native: Any = None
        self.tables: list[torch.Tensor] = []
        self.captured: dict[int, torch.Tensor] = {}
        self._held = False
        self._contents = b""
        self._memory: Sequence[torch.Tensor] = ()
        self._items: Sequence[torch.Tensor] = ()
        self._filled = Filled(device)
        self._last: int | None = None
        """The stream of the last launch: the allocator knows that it uses the memory."""

    def load(
        self,
        native: Any,
        needs_table: bool,
        *,
        memory: Sequence[torch.Tensor] = (),
        items: Sequence[torch.Tensor] = (),
    ) -> None:
        """Use this native plan from now on. Launches that are already queued keep theirs.

        needs_table: whether its descriptors do not fit into a kernel's arguments.
        memory: used by every launch, so the allocator must not reuse it earlier.
        items: tensors with an address in the descriptors; a graph that captures a launch keeps them alive.

        Raises RuntimeError for a copy while a CUDA graph is captured; nothing has changed then.
        """
        if self.device.type == "cuda" and needs_table:
            contents = native.descriptor_bytes()
            if contents != self._contents:
                self._copy(contents)
            native.set_device_descriptors(self.tables[-1].data_ptr())
        self.native, self._memory, self._items = native, memory, items
        self._last = None

    def _copy(self, contents: bytes) -> None:
        if is_capturing(self.device):
            # A replay would read the staging memory again, long after it went back to the allocator.
            raise RuntimeError(
                "while a CUDA graph is captured a plan cannot take addresses, and it is new or storage has "
                "moved: make the same call once before the capture, with the same storage"
            )
        fits = bool(self.tables) and self.tables[-1].numel() == len(contents)
        if not fits or self._held or self._filled.stream != current_stream(self.device.index):
            kept = self.tables if self._held else self.tables[:-1]
            self.tables = [*kept, torch.empty(len(contents), dtype=torch.uint8, device=self.device)]
            self._held = False
        # torch does not reuse pinned memory before the copies from it are done.
        staging = torch.frombuffer(bytearray(contents), dtype=torch.uint8).pin_memory()
        self.tables[-1].copy_(staging, non_blocking=True)
        self._filled.note()
        self._contents = contents

    def hold(self, tensors: Iterable[torch.Tensor | None] = ()) -> None:
        """Every replay of the CUDA graph that is being captured uses these tensors, and the present table."""
        self._held = True
        self.captured.update((t.data_ptr(), t.detach()) for t in tensors if t is not None)

    def run(self, stage: str, *arguments: Any) -> None:
        """Queue a stage of the plan on the current stream."""
        if self.native is None:
            return
        if self._items and is_capturing(self.device):
            self.hold(self._items)
        if self.device.type == "cuda" and (stream := current_stream(self.device.index)) != self._last:
            # The allocator must not reuse the memory, once freed, before the launch.
            for tensor in (*self._memory, *self.tables[-1:]):
                tensor.record_stream(torch.cuda.current_stream(self.device))
            self._filled.wait()
            self._last = stream
        getattr(self.native, stage)(target_of(self.device), *arguments)
