"""Native operations on a list of tensors: one launch, on the current stream, without a plan."""

from collections.abc import Callable, Sequence

import torch

import zerofp4._C as _C
from zerofp4.ops.device import is_capturing, target_of

NativeList = _C.DequantizeList | _C.Mxfp8DequantizeList | _C.ScaleLayoutList


def zip_lists(**lists: Sequence) -> list[tuple]:
    """Arguments that are lists, item by item. Raises ValueError for one that is not as long as the first."""
    first, *others = lists
    count = len(lists[first])
    for name in others:
        if len(lists[name]) != count:
            raise ValueError(f"{name} must have as many items as {first}, {count}, got {len(lists[name])}")
    return list(zip(*lists.values(), strict=True))


def run_stack(make: Callable[[Sequence[int]], NativeList], words: Sequence[int], count: int, device) -> None:
    """Run the native list that `make` makes of `words`, `count` items that are the matrices of one tensor.

    As run_list, but that while a CUDA graph is captured many matrices take several launches: nobody who has
    one tensor could call for parts of it.
    """
    step, fields = _C.ARGUMENT_ITEMS, len(words) // count
    if count <= step or not is_capturing(device):
        run_list(make(words), count, device)
        return
    for first in range(0, count, step):
        part = words[first * fields : (first + step) * fields]
        run_list(make(part), len(part) // fields, device)


def run_list(native: NativeList, count: int, device: torch.device) -> None:
    """Run a native list of `count` items, at least one.

    A short list travels in the kernel's arguments, a longer one on a GPU through a table in its memory, which
    is copied there first; nothing waits for the copy. Raises RuntimeError for a long list while a CUDA graph
    is captured.
    """
    if device.type == "cuda" and count > _C.ARGUMENT_ITEMS:
        if is_capturing(device):
            # A replay would read staging memory that has long gone back to the allocator.
            raise RuntimeError(
                f"while a CUDA graph is captured a list of tensors may have {_C.ARGUMENT_ITEMS} at most, "
                f"got {count}: call for parts of the list"
            )
        contents = torch.frombuffer(bytearray(native.descriptor_bytes()), dtype=torch.uint8)
        # Alive until the launch is queued; after that torch reuses its memory in stream order.
        table = contents.pin_memory().to(device, non_blocking=True)
        native.set_device_descriptors(table.data_ptr())
    native.run(target_of(device))
