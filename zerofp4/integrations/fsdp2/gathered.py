"""Gathered: the whole weight while a module computes with it, over memory that FSDP2 frees and gives back."""

from __future__ import annotations

import torch

from zerofp4.ops import TransposeStage, transpose_pairs, write_values
from zerofp4.storage import NVFP4Storage, Side
from zerofp4.tensors import NVFP4Tensor


class Gathered:
    """What a module gets in place of its master, made from what was gathered.

    source: the record with the weight's scales, and no codes. rows: uint8, what was gathered, whose storage
    FSDP2 frees and fills. as_values: as plain values of the record's dtype, which are dequantize() of the
    whole weight; else as an NVFP4Tensor over the rows, the scales, and the columns that are derived from the
    rows where the record has such.

    tensor: that. inner: what else FSDP2 is to free and to give memory to.
    """

    def __init__(self, source: NVFP4Storage, rows: torch.Tensor, as_values: bool):
        self._source, self._is_copy = source, source.device != rows.device
        self._record = record = NVFP4Storage.from_context(source.shape, source.context())
        record.name = source.name
        amax = source.amax.to(rows.device)
        for name, side in source.sides():
            scales = {layout: scale.to(rows.device) for layout, scale in side.scales.items()}
            setattr(record, name, Side(rows, scales, amax))
        self._values: torch.Tensor | None = None
        self._transposes: TransposeStage | None = None
        self.inner: tuple[torch.Tensor, ...] = ()
        if as_values:
            self._values = torch.empty(source.shape, dtype=source.dtype, device=rows.device)
            scale = record.rowwise.scales["compact"]
            self._codes = (rows, scale, amax, record.block[0], record.e4m3_max, False)
            self.inner = (self._values,)
        elif record.columnwise is not None:
            columns = torch.empty(record.data_shape("columnwise"), dtype=torch.uint8, device=rows.device)
            record.columnwise.data = columns
            self.inner = (columns,)
        self.tensor = NVFP4Tensor(record) if self._values is None else self._values

    def fill(self, changed: bool) -> None:
        """All that is not gathered, from what was. changed: whether there was a cast since the last time."""
        if changed and self._is_copy:
            pairs = zip(self._source.buffers(), _without_data(self._record), strict=True)
            for (_, mine), (_, copy) in pairs:
                copy.view(torch.uint8).copy_(mine.view(torch.uint8), non_blocking=True)
        if self._values is not None:
            write_values(*self._codes, self._values)
            self._codes[0].untyped_storage().resize_(0)  # read, and FSDP2 gives them memory for each gather
        elif self._record.columnwise is not None:
            pairs = transpose_pairs([self._record])
            if self._transposes is None:
                self._transposes = TransposeStage(pairs)
            else:
                self._transposes.bind(pairs)  # their memory was freed in between
            self._transposes.run()


def _without_data(record: NVFP4Storage) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in record.buffers() if not name.endswith("_data")]
