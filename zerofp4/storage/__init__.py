"""Records of quantized tensors: which buffers they have, what those mean, and whether they were exchanged."""

from zerofp4.storage.memory import check_memory, check_plain, check_signs, dispatches, holds
from zerofp4.storage.mxfp8 import MXFP8Storage, allocate_mxfp8
from zerofp4.storage.nvfp4 import NVFP4Storage, allocate, check_block, check_transform
from zerofp4.storage.record import (
    Storage,
    called,
    check_buffer,
    check_layouts,
    check_sides,
    empty_buffer,
    note_rebinding,
    rebindings,
    record_of,
    register_adapter,
    weight_record,
)
from zerofp4.storage.sides import BUFFERS, SIDES, Gate, Side, Sides, scale_name, side_names, sides_of, unstack

__all__ = [
    "BUFFERS",
    "SIDES",
    "Gate",
    "MXFP8Storage",
    "NVFP4Storage",
    "Side",
    "Sides",
    "Storage",
    "allocate",
    "allocate_mxfp8",
    "called",
    "check_block",
    "check_buffer",
    "check_layouts",
    "check_memory",
    "check_plain",
    "check_sides",
    "check_signs",
    "check_transform",
    "dispatches",
    "empty_buffer",
    "holds",
    "note_rebinding",
    "rebindings",
    "record_of",
    "register_adapter",
    "scale_name",
    "side_names",
    "sides_of",
    "unstack",
    "weight_record",
]
