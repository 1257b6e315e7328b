"""zerofp4::transpose_packed and its multi-tensor form: packed codes [M, K/2] to [K, M/2]."""

import torch

from zerofp4.layout import check_matrix, packed_shape
from zerofp4.ops.operator import backend
from zerofp4.ops.stages import TransposeStage
from zerofp4.storage import check_buffer

torch.library.define("zerofp4::transpose_packed", "(Tensor data) -> Tensor")
torch.library.define("zerofp4::transpose_packed_into", "(Tensor[] data, Tensor(a!)[] out) -> ()")


def _new_transpose(data) -> torch.Tensor:
    if data.dim() != 2 or data.dtype != torch.uint8 or not data.is_contiguous():
        raise ValueError(f"data must be a contiguous uint8 matrix, got {data.dtype} {tuple(data.shape)}")
    check_matrix(data.shape[0], 2 * data.shape[1], columnwise=True)
    return data.new_empty((2 * data.shape[1], data.shape[0] // 2))


@backend("transpose_packed")
def _transpose_packed(data) -> torch.Tensor:
    out = _new_transpose(data)
    TransposeStage([(data, out)]).run()
    return out


torch.library.register_fake("zerofp4::transpose_packed", _new_transpose)


def _check_transposes(data, out) -> None:
    if len(data) != len(out):
        raise ValueError(f"data and out must have the same length, got {len(data)} and {len(out)}")
    for i, (source, target) in enumerate(zip(data, out, strict=True)):
        rows, cols = source.shape[0], 2 * source.shape[1]
        check_matrix(rows, cols, columnwise=True)
        check_buffer(f"data[{i}]", source, packed_shape(rows, cols), torch.uint8, data[0].device)
        check_buffer(f"out[{i}]", target, packed_shape(cols, rows), torch.uint8, data[0].device)


@backend("transpose_packed_into")
def _transpose_packed_into(data, out) -> None:
    _check_transposes(data, out)
    TransposeStage(list(zip(data, out, strict=True))).run()


@torch.library.register_fake("zerofp4::transpose_packed_into")
def _(data, out) -> None:
    _check_transposes(data, out)
