"""Records of quantized tensors: which buffers they have, what those mean, and whether they were exchanged."""

# ruff: noqa: F401
from zerofp4.storage.memory import (
    address_of,
    any_dispatches,
    check_memory,
    check_plain,
    dispatches,
    is_freed,
    note_rebinding,
    rebindings,
)
from zerofp4.storage.mxfp8 import MXFP8Storage
from zerofp4.storage.nvfp4 import NVFP4Storage, Scheme, check_block, check_rounding, check_transform
from zerofp4.storage.record import (
    BUFFERS,
    SIDES,
    Gate,
    Side,
    Sides,
    Storage,
    adapters,
    called,
    check_buffer,
    check_layouts,
    check_sides,
    empty_buffer,
    record_of,
    scale_name,
    side_and_layout,
    side_names,
    side_of,
    sides_of,
    unstack,
    weight_record,
)
