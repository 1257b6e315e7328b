"""The high-precision value that a converted weight was quantized from, kept while its codes stem from it."""

from collections.abc import Callable

import torch

from zerofp4 import ops
from zerofp4.storage import NVFP4Storage, Scheme, Storage, record_of

INIT_VAL = "high_precision_init_val"
"""Attachment of a record: the value that convert_model quantized, on the CPU."""

HAD_MASTER = "had_master"
"""Attachment: an optimizer has made a master, and the codes follow it."""

BEGINS_WITH_CODES = "begins_with_codes"
"""Attachment: the codes were loaded, and the master begins with their values."""


def note_master(parameter: torch.Tensor) -> None:
    """An optimizer has made the parameter's master."""
    record = record_of(parameter)
    if record is not None:
        record.attachments[HAD_MASTER] = True


def had_master(parameter: torch.Tensor) -> bool:
    """Whether a quantized weight has, or had, a master, and nothing else has written to it since."""
    record = record_of(parameter)
    return record is not None and HAD_MASTER in record.attachments


def initial_value(record: NVFP4Storage) -> torch.Tensor | None:
    """The value whose codes the record has, on the CPU; None if other codes were written since."""
    value = record.attachments.get(INIT_VAL)
    if value is None or _has_codes_of(record, value):
        return value
    del record.attachments[INIT_VAL]
    return None


def _has_codes_of(record: NVFP4Storage, value: torch.Tensor) -> bool:
    if record.hadamard or record.device.type == "meta":
        return False
    name, side = next(record.sides())
    sides = {"rowwise": name == "rowwise", "columnwise": name == "columnwise"}
    options = {"four_over_six": record.four_over_six, "stacked": record.stacked}
    scheme = Scheme(block=record.block, **options, **sides)
    made = scheme.allocate(record.shape, record.dtype, record.device)
    ops.quantize_into(value.to(record.device), made, amax=side.amax)
    again = getattr(made, name)
    pairs = ((again.data, side.data), (again.scales["compact"], side.scales["compact"]))
    return all(torch.equal(mine.view(torch.uint8), other.view(torch.uint8)) for mine, other in pairs)


def replace_initial_value(record: Storage, values: torch.Tensor) -> None:
    """Values were written to the record: they become its initial value, if it has one."""
    record.attachments.pop(HAD_MASTER, None)
    if INIT_VAL not in record.attachments:
        return
    if ops.is_capturing(record.device):  # which cannot copy to the host
        del record.attachments[INIT_VAL]
        return
    values = values.detach().expand(record.shape)
    record.attachments[INIT_VAL] = values.to("cpu", record.dtype, copy=True).contiguous()


def is_kept_by(record: Storage, values: torch.Tensor, present: Callable[[], torch.Tensor]) -> bool:
    """Whether a record with an initial value or master already holds these values, which present() makes. DDP
    copies a weight's own values back into it, and that must not change what they were quantized from.
    """
    if record.attachments.keys().isdisjoint((INIT_VAL, HAD_MASTER)) or ops.is_capturing(record.device):
        return False
    return values.shape == record.shape and torch.equal(values.to(record.device, record.dtype), present())


def take_initial_value(target: Storage, source: Storage) -> None:
    """The target has got the source's bytes: its initial value, if any, becomes the source's."""
    target.attachments.pop(HAD_MASTER, None)
    if target.attachments.pop(INIT_VAL, None) is None:
        return
    value = initial_value(source)
    if value is not None:
        target.attachments[INIT_VAL] = value.clone()
