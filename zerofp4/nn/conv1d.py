"""Conv1D: transformers' linear layer with a weight [in, out] and quantized operands."""

import torch
from torch import nn

from zerofp4.nn.linear import by_autocast, refuse_shared
from zerofp4.nn.operators import layer_product
from zerofp4.nn.quantizers import check_primary, shown, weight_state, with_columns
from zerofp4.nn.recipe import Recipe, current_recipe
from zerofp4.storage import NVFP4Storage
from zerofp4.tensors import NVFP4Tensor


class Conv1D(nn.Module):
    """What convert_model(layers=True) turns transformers' Conv1D into, in place: y = x w + b, w [in, out].

    With an NVFP4 weight inside `autocast(recipe)` it has the bytes of a zerofp4.nn.Linear with the transposed
    weight. In blocks of 16x16 that is the same weight with its two copies exchanged. Otherwise it is
    transformers' layer. torch.compile runs it eagerly.
    """

    takes_nvfp4_weight = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] of float32, bfloat16 or float16 to [..., out]. Errors as of Linear."""
        recipe = current_recipe(self)
        if recipe is None or not isinstance(self.weight, NVFP4Tensor):
            refuse_shared(x)
            rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
            return rows.view(*x.shape[:-1], self.nf)
        return _by_recipe(self, x, recipe)

    @classmethod
    def _adopt(cls, module: nn.Module) -> None:
        module.__class__ = cls

    def extra_repr(self) -> str:
        return shown(self, f"nf={self.nf}, nx={self.weight.shape[0]}")


@torch.compiler.disable
def _by_recipe(layer: Conv1D, x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    weight = layer.weight
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"x must have {weight.shape[0]} values in its last dimension, got shape {tuple(x.shape)}"
        )
    check_primary(weight, recipe)
    state = weight_state(weight)

    def check(_: torch.Tensor) -> None:
        if weight_state(weight) != state:
            raise RuntimeError(
                "the weight of a layer was written to between its forward and its backward pass: call "
                "backward first"
            )

    y = layer_product(by_autocast(x), _Turn.apply(weight), layer.bias, recipe)
    if y.requires_grad and x.requires_grad:
        y.register_hook(check)  # the transpose has its own version
    return y


class _Turn(torch.autograd.Function):
    """A weight [in, out] in blocks of 16x16 to its transpose over the same buffers, and the gradient back."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor) -> torch.Tensor:
        record = weight.record
        made = NVFP4Storage.from_context(torch.Size(record.shape[::-1]), record.context())
        made.rowwise, made.columnwise = with_columns(record).columnwise, record.rowwise
        return NVFP4Tensor(made)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad.t()
