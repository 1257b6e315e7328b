"""The three products of a linear layer as autograd sees them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from zerofp4.gemm import Operand, gemm, gemm_into, keeps_values
from zerofp4.nn.quantizers import Quantizers, with_columns
from zerofp4.storage import MXFP8Storage, NVFP4Storage, Side, Storage
from zerofp4.tensors import MXFP8Tensor, NVFP4Tensor, QuantizedTensor, gradient_place, multiply


class MainGrad:
    """The float32 buffer in which a parameter's gradients are added up: `main_grad`, as Megatron calls it.

    expert: which matrix of a parameter that is a stack of them this is of; autograd gets no gradient of it,
    but gradient() of the whole.
    """

    def __init__(self, parameter: torch.nn.Parameter, expert: int | None = None):
        self._parameter, self._expert = parameter, expert

    def buffer(self) -> torch.Tensor:
        """Raises RuntimeError where the parameter has none."""
        found = getattr(self._parameter, "main_grad", None)
        if found is None:
            raise RuntimeError(
                "fuse_wgrad_accumulation adds the weight's gradient to weight.main_grad, which is not there: "
                f"make it a float32 tensor of shape {tuple(self._parameter.shape)}"
            )
        return found if self._expert is None else found[self._expert]

    def gradient(self) -> torch.Tensor | None:
        """What autograd gets after the gradient was added: nothing, or, where the framework asks for it by a
        flag of the parameter, zeros without memory, for the sake of hooks.
        """
        if self._expert is not None or not hasattr(self._parameter, "grad_added_to_main_grad"):
            return None
        self._parameter.grad_added_to_main_grad = True
        zero = torch.zeros((), dtype=self._parameter.dtype, device=self._parameter.device)
        return zero.expand(self._parameter.shape)


class AddToMainGrad(torch.autograd.Function):
    """A weight as it is, for products of torch: their gradient is added to its main_grad."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, main_grad: MainGrad) -> torch.Tensor:
        ctx.main_grad = main_grad
        return weight.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        ctx.main_grad.buffer().add_(grad)
        return ctx.main_grad.gradient(), None


class LinearCall(NamedTuple):
    """What one call of a layer passes around autograd.

    weight: the record to multiply with. main_grad: where backward adds the weight's gradient, None where it
    returns it. is_current: whether the buffers of `weight` still hold what forward multiplied with; None
    where they are this call's own.
    """

    quantizers: Quantizers
    weight: Storage
    main_grad: MainGrad | None = None
    is_current: Callable[[], bool] | None = None

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None, columnwise: bool
    ) -> tuple[torch.Tensor, Storage]:
        """y [T, N], and x quantized, with a columnwise copy if that is asked for."""
        q_x = self.quantizers.input(x, columnwise=columnwise)
        backend = self.quantizers.recipe.backend
        return gemm(q_x, self.weight, out_dtype=x.dtype, bias=bias, backend=backend), q_x


class Kept(NamedTuple):
    """What a side of a record is besides its buffers (which autograd saves): enough to have it back."""

    kind: type[NVFP4Storage] | type[MXFP8Storage]
    shape: torch.Size
    context: tuple
    side: str
    layout: str
    count: int

    @classmethod
    def of(cls, record: Storage, side: str, layout: str) -> tuple["Kept", list[torch.Tensor]]:
        copy: Side = getattr(record, side)
        layout = layout if layout in copy.scales else "compact"
        buffers = [copy.data, copy.scales[layout], *([] if copy.amax is None else [copy.amax])]
        return cls(type(record), record.shape, record.context(), side, layout, len(buffers)), buffers

    def record(self, buffers: tuple[torch.Tensor, ...]) -> Storage:
        data, scale, *amax = buffers
        record = self.kind.from_context(self.shape, self.context)
        setattr(record, self.side, Side(data, {self.layout: scale}, amax[0] if amax else None))
        return record


def check_current(is_current: Callable[[], bool] | None) -> None:
    """Raises RuntimeError unless the buffers of a LinearCall's weight are as its forward pass read them."""
    if is_current is not None and not is_current():
        raise RuntimeError(
            "the weight of a layer was written to between its forward and its backward pass: "
            "call backward first"
        )


class LinearFunction(torch.autograd.Function):
    """y [T, N] = x [T, K] w^T + bias, and its gradients, by a recipe (NUMERICS: in all backends of the gemm).

    - y: x rowwise, w rowwise; sums times alpha, plus bias in float32, rounded once to x's dtype.
    - dx: the gradient g rowwise, w columnwise, or the same values from its rows; in x's dtype.
    - dw: g columnwise and x columnwise, in the weight's dtype, or added unrounded to main_grad. x is saved as
      its columnwise copy only.
    - the bias' gradient is the sum of g's rows.
    With a dequantized backward, g, and the values of w and x in g's dtype, are multiplied by torch.

    x may be quantized already: then its own buffers are saved, which several layers share.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, call: LinearCall) -> torch.Tensor:
        x_needs, weight_needs, _, _ = ctx.needs_input_grad
        quantizers = call.quantizers
        y, q_x = call.forward(x, bias, weight_needs and quantizers.quantized_backward)
        side = "columnwise" if quantizers.quantized_backward else "rowwise"
        # A primary weight may have rows only, from which its columns follow.
        has_columns = call.weight.columnwise is not None
        weight_side = "columnwise" if has_columns and not quantizers.reads_rows(call.weight) else "rowwise"
        ctx.x, buffers = Kept.of(q_x, side, quantizers.layout) if weight_needs else (None, [])
        # A cached weight that is kept dequantized is more than its buffers: that is not this call's to save.
        ctx.cached = call.weight if x_needs and keeps_values(call.weight) else None
        saves = x_needs and ctx.cached is None
        ctx.weight, more = Kept.of(call.weight, weight_side, quantizers.layout) if saves else (None, [])
        ctx.save_for_backward(*buffers, *more)
        ctx.quantizers, ctx.main_grad, ctx.is_current = quantizers, call.main_grad, call.is_current
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        # Only here, before gradients are off for what is once differentiable, shows that create_graph is on.
        out = None if ctx.main_grad is not None else gradient_place(ctx, 1, ctx.dtypes[1])
        return LinearFunction._backward(ctx, grad, out)

    @staticmethod
    @once_differentiable
    def _backward(ctx, grad: torch.Tensor, out: torch.Tensor | None):
        saved = ctx.saved_tensors
        count = 0 if ctx.x is None else ctx.x.count
        x = None if ctx.x is None else ctx.x.record(saved[:count])
        weight = ctx.cached if ctx.weight is None else ctx.weight.record(saved[count:])
        if weight is not None:
            check_current(ctx.is_current)
        grad_x, grad_weight = gradients(ctx.quantizers, grad, x, weight, ctx.dtypes[:2], ctx.main_grad, out)
        grad_bias = grad.sum(0).to(ctx.dtypes[2]) if ctx.needs_input_grad[2] else None
        return None if grad_x is None else grad_x.view(ctx.shape), grad_weight, grad_bias, None


def gradients(
    quantizers: Quantizers,
    grad: torch.Tensor,
    x: Storage | None,
    weight: Storage | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    main_grad: MainGrad | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx, dw) of y's gradient [T, N], in these dtypes; dx needs the weight, dw needs x, and each is None
    where that is. out: memory for dw.
    """
    products = _quantized if quantizers.quantized_backward else _dequantized
    return products(quantizers, grad, x, weight, dtypes, main_grad, out)


def _quantized(quantizers, grad, x, weight, dtypes, main_grad, out):
    """Of a gradient in its own quantization."""
    grad_x = grad_weight = None
    if x is None and weight is None:
        return grad_x, grad_weight
    backend = quantizers.recipe.backend
    q_grad = quantizers.record("gradient", grad, rowwise=weight is not None, columnwise=x is not None)
    if weight is not None:
        if quantizers.reads_rows(weight):
            columns = Operand.of_rows(weight)
        else:
            columns = Operand(with_columns(weight), columnwise=True)
        grad_x = gemm(q_grad, columns, out_dtype=dtypes[0], backend=backend)
    if x is not None:
        operands = Operand(q_grad, columnwise=True), Operand(x, columnwise=True)
        if out is not None:
            grad_weight = gemm_into(*operands, out, backend=backend)
        elif main_grad is None:
            grad_weight = gemm(*operands, out_dtype=dtypes[1], backend=backend)
        else:
            gemm(*operands, accumulate_into=main_grad.buffer(), backend=backend)
            grad_weight = main_grad.gradient()
    return grad_x, grad_weight


def _dequantized(quantizers, grad, x, weight, dtypes, main_grad, out):
    grad_x = grad_weight = None
    if weight is not None:
        grad_x = multiply(torch.mm, grad, _values(weight, grad.dtype)).to(dtypes[0])
    if x is not None:
        out = out if grad.dtype == dtypes[1] else None
        grad_weight = multiply(torch.mm, grad.t(), _values(x, grad.dtype).flatten(0, -2), out=out)
        if main_grad is None:
            grad_weight = grad_weight.to(dtypes[1])
        else:
            main_grad.buffer().add_(grad_weight)
            grad_weight = main_grad.gradient()
    return grad_x, grad_weight


def _values(record: Storage, dtype: torch.dtype) -> torch.Tensor:
    kind: type[QuantizedTensor] = NVFP4Tensor if isinstance(record, NVFP4Storage) else MXFP8Tensor
    return kind(record).dequantize(dtype)
