"""zerofp4::transpose_packed: packed codes [M, K/2] to [K, M/2], of each of a stack too."""

import torch

import zerofp4._C as _C
from zerofp4.layout import check_matrix
from zerofp4.ops.device import target_of
from zerofp4.ops.operator import backend, fake
from zerofp4.ops.stages import transpose_descriptor
from zerofp4.storage import check_memory

torch.library.define("zerofp4::transpose_packed", "(Tensor data) -> Tensor")


def _new_transpose(data) -> torch.Tensor:
    if data.dim() not in (2, 3) or data.dtype != torch.uint8 or not data.is_contiguous():
        raise ValueError(
            f"data must be a contiguous uint8 matrix or a stack of them, got {data.dtype} {tuple(data.shape)}"
        )
    check_memory("data", data)
    *stack, rows, half = data.shape
    check_matrix(rows, 2 * half, columnwise=True)
    return data.new_empty((*stack, 2 * half, rows // 2))


@backend("transpose_packed")
def _transpose_packed(data) -> torch.Tensor:
    out = _new_transpose(data)
    # One launch for each: a table for all would have to be copied to the GPU and waited for.
    for pair in [(data, out)] if data.dim() == 2 else zip(data, out, strict=True):
        if data.numel():
            descriptors = [transpose_descriptor(*pair)]
            _C.TransposePlan(data.device.type == "cpu", descriptors).run(target_of(data.device))
    return out


fake("transpose_packed")(_new_transpose)
