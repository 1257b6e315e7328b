"""What tests of layers share: recipes, a step, what reference operations make of it, and a Conv1D."""

import contextlib
from typing import NamedTuple

import torch
from tensor_helpers import values
from torch import nn
from torch.nn import functional as F

import zerofp4
from zerofp4 import reference
from zerofp4.nn import MXFP8Recipe, NVFP4Recipe, autocast
from zerofp4.ops import SLOW_ON_CPU

RECIPES = {
    "nvfp4": NVFP4Recipe(),
    "nvfp4, nearest": NVFP4Recipe(stochastic_rounding=False),
    "nvfp4, no transform": NVFP4Recipe(hadamard=False),
    "nvfp4, no signs": NVFP4Recipe(random_signs=False),
    "nvfp4, weights 1x16": NVFP4Recipe(weight_block=(1, 16)),
    "nvfp4, four over six": NVFP4Recipe(four_over_six=zerofp4.FourOverSix()),
    "nvfp4, squares of errors": NVFP4Recipe(four_over_six=zerofp4.FourOverSix(448, "mse")),
    "nvfp4, dequantized": NVFP4Recipe(backward="dequantized"),
    "mxfp8": MXFP8Recipe(),
    "mxfp8, dequantized": MXFP8Recipe(backward="dequantized"),
}


class Conv1D(nn.Module):
    """The layer of that name in transformers: its weight is [in, out]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.02)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class Factor(NamedTuple):
    """float32 [rows, contraction] without the global scale, amax float32 [1] or None, and e4m3_max."""

    values: torch.Tensor
    amax: torch.Tensor | None = None
    e4m3_max: float = 448


class Copies(NamedTuple):
    """Both copies of a matrix as factors, and the values of the rowwise one."""

    rowwise: Factor
    columnwise: Factor | None
    values: torch.Tensor


def multiply(a: Factor, b: Factor, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = a.values @ b.values.t()
    if a.amax is not None:
        out = out * reference.gemm_alpha(a.amax, b.amax, a.e4m3_max, b.e4m3_max)
    return (out if bias is None else out + bias.float()).to(dtype)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of values of one dtype, in the dtype in which this CPU multiplies them."""
    wide = torch.float32 if a.dtype in SLOW_ON_CPU else a.dtype
    return (a.to(wide) @ b.to(wide)).to(a.dtype)


def nvfp4(x: torch.Tensor, block_rows: int, **options) -> Copies:
    q = reference.quantize(x, block_rows, **options)
    if q.columnwise_data is None:  # an odd number of rows is completed by zeros
        even = reference.quantize(F.pad(x, (0, 0, 0, 1)), block_rows, **options)
        q = q._replace(**{name: getattr(even, name) for name in q._fields if name.startswith("columnwise")})
    chosen = options.get("four_over_six")
    e4m3_max = chosen.e4m3_max if chosen else 448
    factors = [
        Factor(reference.nvfp4_operand(data, scale, block_rows).float(), amax, e4m3_max)
        for data, scale, amax in (
            (q.rowwise_data, q.rowwise_scale, q.amax),
            (q.columnwise_data, q.columnwise_scale, q.columnwise_amax),
        )
        if data is not None
    ]
    values = reference.dequantize(
        q.rowwise_data, q.rowwise_scale, q.amax, block_rows, torch.float32, e4m3_max
    )
    return Copies(factors[0], factors[1] if len(factors) == 2 else None, values)


def mxfp8(x: torch.Tensor) -> Copies:
    q = reference.quantize_mxfp8(x)
    rows = reference.dequantize_mxfp8(q.rowwise_data, q.rowwise_scale, False)
    columns = reference.dequantize_mxfp8(q.columnwise_data, q.columnwise_scale, True)
    return Copies(Factor(rows.bfloat16().float()), Factor(columns.bfloat16().float().t()), rows)


def copies(recipe, role: str, x: torch.Tensor, rng_state: torch.Tensor | None = None) -> Copies:
    """x, of a role in the layer, as the recipe quantizes it."""
    if isinstance(recipe, MXFP8Recipe):
        return mxfp8(x)
    chosen = {"four_over_six": recipe.four_over_six}
    if role == "weight":
        return nvfp4(x, recipe.weight_block[0], **chosen)
    transform = {"hadamard": recipe.hadamard, "random_signs": recipe.random_signs}
    if role == "input":
        return nvfp4(x, 1, **transform, **chosen)
    return nvfp4(x, 1, **transform, rng_state=rng_state if recipe.stochastic_rounding else None)


def linear(recipe, x, weight, bias, grad, rng_state=None):
    """(y, dx, dw, db) of a layer with x [T, K], weight [N, K], bias [N] or None, and y's gradient [T, N]."""
    q_x, q_w = copies(recipe, "input", x), copies(recipe, "weight", weight)
    y = multiply(q_x.rowwise, q_w.rowwise, x.dtype, bias)
    db = None if bias is None else grad.sum(0).to(bias.dtype)
    if recipe.backward == "dequantized":
        dx = matmul(grad, q_w.values.to(weight.dtype).to(grad.dtype)).to(x.dtype)
        return y, dx, matmul(grad.t(), q_x.values.to(grad.dtype)).to(weight.dtype), db
    q_g = copies(recipe, "gradient", grad, rng_state)
    dx = multiply(q_g.rowwise, q_w.columnwise, x.dtype)
    return y, dx, multiply(q_g.columnwise, q_x.columnwise, weight.dtype), db


def step(
    module: nn.Module, call, recipe, x: torch.Tensor, *arguments, grad=None
) -> list[torch.Tensor | None]:
    """y of a call, the module or what stands for it, and the gradients of x and of the parameters. Random
    numbers of the backward pass are those after manual_seed(7). recipe: or an autocast, or None for none.
    """
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    around = autocast(recipe) if isinstance(recipe, NVFP4Recipe | MXFP8Recipe) else recipe
    with around or contextlib.nullcontext():
        y = call(x, *arguments)
    torch.manual_seed(7)
    y.backward(values(*y.shape, device=y.device, dtype=y.dtype, seed=1) if grad is None else grad)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]
