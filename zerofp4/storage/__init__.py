"""Records of quantized tensors: which buffers they have and what those mean."""

from zerofp4.storage.record import (
    BUFFERS,
    SIDES,
    NVFP4Buffers,
    NVFP4Storage,
    Storage,
    allocate,
    check_block,
    check_buffer,
    check_layouts,
    check_transform,
    copy_names,
    empty_buffers,
    note_rebinding,
    rebindings,
    scale_name,
)

__all__ = [
    "BUFFERS",
    "SIDES",
    "NVFP4Buffers",
    "NVFP4Storage",
    "Storage",
    "allocate",
    "check_block",
    "check_buffer",
    "check_layouts",
    "check_transform",
    "copy_names",
    "empty_buffers",
    "note_rebinding",
    "rebindings",
    "scale_name",
]
