"""zerofp4::transpose_packed: packed codes [M, K/2] to [K, M/2]."""

import torch

from zerofp4.layout import check_matrix
from zerofp4.ops.operator import backend
from zerofp4.ops.stages import TransposeStage
from zerofp4.storage import check_memory

torch.library.define("zerofp4::transpose_packed", "(Tensor data) -> Tensor")


def _new_transpose(data) -> torch.Tensor:
    if data.dim() != 2 or data.dtype != torch.uint8 or not data.is_contiguous():
        raise ValueError(f"data must be a contiguous uint8 matrix, got {data.dtype} {tuple(data.shape)}")
    check_memory("data", data)
    check_matrix(data.shape[0], 2 * data.shape[1], columnwise=True)
    return data.new_empty((2 * data.shape[1], data.shape[0] // 2))


@backend("transpose_packed")
def _transpose_packed(data) -> torch.Tensor:
    out = _new_transpose(data)
    TransposeStage([(data, out)]).run()
    return out


torch.library.register_fake("zerofp4::transpose_packed", _new_transpose)
