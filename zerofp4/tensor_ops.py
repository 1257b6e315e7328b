"""What torch operations do to quantized tensors: the ones that __torch_dispatch__ handles, and products.

A quantized tensor is anything with a `record`; NVFP4Tensor itself is above this file.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from zerofp4 import ops
from zerofp4.format import BLOCK, SCALE_DTYPE, SCALE_LAYOUTS, WEIGHT_DTYPES
from zerofp4.storage import NVFP4Storage

SIDES = ("rowwise", "columnwise")
INIT_VAL = "high_precision_init_val"
"""Where a record's attachments hold the value that convert_model quantized."""


# On records


def scale_name(side: str, layout: str) -> str:
    """The record's field for the scales of a side in a layout."""
    return f"{side}_scale" if layout == "compact" else f"{side}_scale_{layout}"


def side_matrix(record: NVFP4Storage, side: str) -> tuple[int, int]:
    return record.matrix if side == "rowwise" else record.matrix[::-1]


def padded_scale(record: NVFP4Storage, side: str, layout: str) -> torch.Tensor:
    """The "expanded" or "swizzled" scales of a side: the persistent buffer, else made from the compact ones.

    Raises ValueError where the tensor does not have that side.
    """
    buffer = getattr(record, scale_name(side, layout))
    if buffer is not None:
        return buffer
    compact = getattr(record, scale_name(side, "compact"))
    if compact is None:
        raise ValueError(f"this tensor has no {side} copy, so it has no {side} scales")
    return torch.ops.zerofp4.pad_scale(compact, *side_matrix(record, side), record.block[0], layout)


def dequantize(record: NVFP4Storage, dtype: torch.dtype) -> torch.Tensor:
    """Values in the record's shape: computed in float32, rounded once to dtype."""
    side = "rowwise" if record.rowwise_data is not None else "columnwise"
    data, scale = getattr(record, f"{side}_data"), getattr(record, f"{side}_scale")
    amax = record.amax if side == "rowwise" else record.columnwise_amax
    kernel_dtype = dtype if dtype in WEIGHT_DTYPES else torch.float32
    matrix = torch.ops.zerofp4.dequantize(data, scale, amax, record.block[0], kernel_dtype)
    matrix = matrix if side == "rowwise" else matrix.t().contiguous()
    return matrix.view(record.shape).to(dtype)


def requantize(record: NVFP4Storage, values: torch.Tensor) -> None:
    """Quantize values, which broadcast to the record's shape, into the buffers that the record has.

    Like a master weight they are first rounded to the record's dtype.
    """
    values = values.to(device=record.device, dtype=record.dtype)
    ops.quantize_into(values.expand(record.shape).contiguous(), record)


def zero(record: NVFP4Storage) -> None:
    """Quantized zeros: every code, scale and amax is 0."""
    for _, buffer in record.buffers():
        buffer.view(torch.uint8).zero_()


def copy_record(record: NVFP4Storage, function: Callable[[torch.Tensor], torch.Tensor]) -> NVFP4Storage:
    """A record of function(buffer) that also has a copy of the high-precision initial value."""
    new = record.map(function)
    if INIT_VAL in record.attachments:
        new.attachments[INIT_VAL] = record.attachments[INIT_VAL].clone()
    return new


def _side_of(record: NVFP4Storage, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(data, compact scale) of a side, transposed from the other side where the record has only that one."""
    data, scale = getattr(record, f"{side}_data"), getattr(record, f"{side}_scale")
    if data is not None:
        return data, scale
    if record.block[0] != BLOCK:
        raise ValueError(
            f"the source has no {side} copy, and block {record.block} does not let it follow from the other: "
            f"quantize the original values with {side}=True"
        )
    data, scale = _side_of(record, SIDES[1 - SIDES.index(side)])
    transposed_scale = scale.view(torch.uint8).t().contiguous().view(SCALE_DTYPE)
    return torch.ops.zerofp4.transpose_packed(data), transposed_scale


def copy_bytes(target: NVFP4Storage, source: NVFP4Storage, non_blocking: bool = False) -> None:
    """Fill every buffer of target from a source of the same shape and block; no value is quantized again.

    What the source does not have is derived from what it has. Raises ValueError, before anything is written,
    where that is impossible: one side of a (1, 16) quantization does not determine the other.
    """
    wanted = [side for side in SIDES if getattr(target, f"{side}_data") is not None]
    for side, (data, scale) in [(side, _side_of(source, side)) for side in wanted]:
        getattr(target, f"{side}_data").copy_(data, non_blocking)
        compact = getattr(target, f"{side}_scale")
        compact.copy_(scale, non_blocking)
        for layout in SCALE_LAYOUTS[1:]:
            buffer = getattr(target, scale_name(side, layout))
            if buffer is not None:
                matrix = side_matrix(target, side)
                buffer.copy_(torch.ops.zerofp4.pad_scale(compact, *matrix, target.block[0], layout))
    target.amax.copy_(source.amax, non_blocking)


# Handlers of __torch_dispatch__. Autograd is above them.


def plain(tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return dequantize(tensor.record, dtype or tensor.dtype)


def _share(tensor):
    with torch.inference_mode(tensor.is_inference()):  # what shares a version counter must be of one kind
        return type(tensor)(tensor.record)


def _clone(tensor, *, memory_format=None):
    return type(tensor)(tensor.record.map(torch.clone))


def _to_copy(tensor, *, dtype=None, device=None, non_blocking=False, **layout):
    """Another dtype dequantizes, another device does not."""
    if dtype is not None and dtype != tensor.dtype:
        return plain(tensor, dtype).to(device=device, non_blocking=non_blocking)
    options = {"device": device or tensor.device, "non_blocking": non_blocking, "copy": True}
    return type(tensor)(copy_record(tensor.record, lambda buffer: buffer.to(**options)))


def _copy_(target, source, non_blocking=False):
    from_record, into_record = getattr(source, "record", None), getattr(target, "record", None)
    if into_record is None:
        return target.copy_(plain(source, target.dtype), non_blocking)
    if from_record is None:
        requantize(into_record, source)
    elif (from_record.shape, from_record.block) == (into_record.shape, into_record.block):
        copy_bytes(into_record, from_record, non_blocking)
    else:
        requantize(into_record, plain(source, target.dtype))
    return target


def _fill_(tensor, value):
    requantize(tensor.record, torch.as_tensor(value))
    return tensor


def _zero_(tensor):
    zero(tensor.record)
    return tensor


_aten = torch.ops.aten
HANDLERS = {
    _aten.alias.default: _share,
    _aten.clone.default: _clone,
    _aten.copy_.default: _copy_,
    _aten.dequantize.self: plain,
    _aten.detach.default: _share,
    _aten.fill_.Scalar: _fill_,
    _aten.fill_.Tensor: _fill_,
    _aten._to_copy.default: _to_copy,
    _aten.zero_.default: _zero_,
}


# What __torch_function__ replaces. The products save the quantized tensor as it is, so that the dequantized
# weight lives no longer than one GEMM. Inside them __torch_function__ is off: what touches a quantized tensor
# there dequantizes it. (torch.compile merges the dequantizations of forward and backward, and saves one.)


class Dequantize(torch.autograd.Function):
    """A quantized tensor to the plain tensor of its values, in its dtype; the gradient passes through."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:
        return torch.dequantize(tensor)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Linear(torch.autograd.Function):
    """F.linear(x [..., K], weight [N, K], bias [N] or None), where x or weight is quantized."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        x_needs, weight_needs, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if weight_needs else None, weight if x_needs else None)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return F.linear(x, weight.detach(), bias)  # detached: autocast would cache its copy of a leaf

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        x, weight = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        with torch._C.DisableTorchFunctionSubclass():
            if weight is not None:
                grad_x = (grad @ weight.to(grad.dtype)).to(x_dtype)
            if x is not None:
                grad_weight = (rows.t() @ x.to(grad.dtype).reshape(-1, x.shape[-1])).to(weight_dtype)
            if ctx.needs_input_grad[2]:
                grad_bias = rows.sum(0).to(bias_dtype)
        return grad_x, grad_weight, grad_bias


class MatMul(torch.autograd.Function):
    """torch.matmul(a, b) with its broadcasting, where a or b is quantized."""

    @staticmethod
    def forward(ctx, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a_needs, b_needs = ctx.needs_input_grad
        ctx.save_for_backward(a if b_needs else None, b if a_needs else None)
        ctx.a, ctx.b = (a.shape, a.dtype), (b.shape, b.dtype)
        return torch.matmul(a.detach(), b.detach())

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        a, b = ctx.saved_tensors
        (a_shape, a_dtype), (b_shape, b_dtype) = ctx.a, ctx.b
        # A vector on the left is a matrix of one row, on the right one of one column.
        left = (1, *a_shape) if len(a_shape) == 1 else a_shape
        right = (*b_shape, 1) if len(b_shape) == 1 else b_shape
        grad = grad.unsqueeze(-2) if len(a_shape) == 1 else grad
        grad = grad.unsqueeze(-1) if len(b_shape) == 1 else grad
        grad_a = grad_b = None
        with torch._C.DisableTorchFunctionSubclass():
            if b is not None:
                grad_a = grad @ b.to(grad.dtype).reshape(right).mT
                grad_a = grad_a.sum_to_size(left).reshape(a_shape).to(a_dtype)
            if a is not None:
                a = a.to(grad.dtype).reshape(left)
                if len(right) == 2:  # one matrix for all batches: one product over all their rows
                    a, grad = a.reshape(-1, left[-1]), grad.reshape(-1, right[-1])
                grad_b = (a.mT @ grad).sum_to_size(right).reshape(b_shape).to(b_dtype)
        return grad_a, grad_b


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return Linear.apply(input, weight, bias)


def _matmul(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return MatMul.apply(input, other)


def _mm(input: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    if input.dim() != 2 or mat2.dim() != 2:
        return torch.mm(input, mat2)  # which says what is wrong
    return MatMul.apply(input, mat2)


FUNCTIONS = {
    torch.dequantize: lambda tensor: Dequantize.apply(tensor),
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__rmatmul__: lambda other, input: _matmul(input, other),
    torch.mm: _mm,
    torch.Tensor.mm: _mm,
}
"""By function of torch: what else autograd cannot differentiate, or would save a dequantized weight for."""
