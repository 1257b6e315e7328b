"""Gathered: the whole weight while a module computes with it, over memory that FSDP2 frees and gives back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerofp4.format import SCALE_DTYPE
from zerofp4.ops import PostStage, has_fp4_tensor_cores, write_values
from zerofp4.storage import NVFP4Storage, Side, empty_buffer
from zerofp4.tensors import NVFP4Tensor


class Gathered:
    """What a module gets in place of its master, made from what was gathered.

    source: the record with the weight's scales, and no codes. rows: uint8, what was gathered, whose storage
    FSDP2 frees and fills: the codes, and the compact scales where these travel. as_values: as plain values of
    the record's dtype, which are dequantize() of the whole weight; else as an NVFP4Tensor over the rows, the
    scales, and what is derived from both: the columns, where the record has such, and swizzled scales.

    tensor: that. inner: what else FSDP2 is to free and to give memory to.
    """

    def __init__(self, source: NVFP4Storage, rows: Sequence[torch.Tensor], as_values: bool):
        self._record = record = NVFP4Storage.from_context(source.shape, source.context())
        record.name = source.name
        codes, *scale_rows = rows
        codes, device = codes.view(record.data_shape("rowwise")), codes.device
        self._source, self._is_copy, self._rows = source, source.device != device, rows
        amax = source.amax.to(device)
        derived: list[torch.Tensor] = []
        for name, side in source.sides():
            scales = {layout: scale.to(device) for layout, scale in side.scales.items() if not scale_rows}
            setattr(record, name, Side(codes, scales, amax))
        for scales in scale_rows:
            record.rowwise.scales["compact"] = scales.flatten(0, -2).view(SCALE_DTYPE)  # of the same memory
            if has_fp4_tensor_cores(device) and not as_values:
                swizzled = empty_buffer(record.scale_shape("rowwise", "swizzled"), SCALE_DTYPE, device)
                record.rowwise.scales["swizzled"] = swizzled
                derived.append(swizzled)
        self._values: torch.Tensor | None = None
        self._stage = PostStage(device)
        if as_values:
            self._values = torch.empty(source.shape, dtype=source.dtype, device=device)
            scale = record.rowwise.scales["compact"]
            self._read = (codes, scale, amax, record.block[0], record.e4m3_max, False)
            derived = [self._values]
        elif record.columnwise is not None:
            columns = torch.empty(record.data_shape("columnwise"), dtype=torch.uint8, device=device)
            record.columnwise.data = columns
            derived.append(columns)
        self.inner = tuple(derived)
        self.tensor = NVFP4Tensor(record) if self._values is None else self._values

    def fill(self, changed: bool) -> None:
        """All that is not gathered, from what was. changed: whether there was a cast since the last time."""
        if changed and self._is_copy:
            mine = dict(self._source.buffers())
            for name, copy in self._record.buffers():
                travels = self._source.scales_travel and name != "amax"
                if not travels and not name.endswith("_data"):
                    copy.view(torch.uint8).copy_(mine[name].view(torch.uint8), non_blocking=True)
        if self._values is not None:
            is_stack = self._source.experts is not None
            write_values(*self._read, self._values if is_stack else self._values.flatten(0, -2))
            for rows in self._rows:  # read, and FSDP2 gives them memory for each gather
                rows.untyped_storage().resize_(0)
        elif self.inner:
            self._stage.bind([self._record])  # its memory was freed since the last gather
            self._stage.run()
