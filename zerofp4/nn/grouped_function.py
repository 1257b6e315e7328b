"""The three products of a layer of groups as autograd sees them, one launch each for all groups."""

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from zerofp4.gemm import (
    GroupedOperand,
    chosen_backend,
    grouped_gemm,
    grouped_wgrad,
    groups_of_rows,
    why_not_grouped,
)
from zerofp4.nn.function import Kept, LinearCall, MainGrad, check_current
from zerofp4.nn.quantizers import nvfp4_options, rows_are_enough
from zerofp4.nn.recipe import NVFP4Recipe, Recipe, recipe_of_key
from zerofp4.storage import Side, Storage, rebindings
from zerofp4.tensors import GroupedNVFP4, quantize_grouped


def why_one_by_one(x: torch.Tensor, features: Sequence[int], recipe: Recipe) -> str | None:
    """Why the products of groups are not one launch each under a recipe; None where they are.

    x: what is multiplied, in the dtype of the product. features: of input and output.
    """
    if len(x) == 0:
        return "there are no tokens"
    if torch.compiler.is_compiling():
        return _why_not_traced(x.device, x.dtype, tuple(features), recipe.key)
    return _why_not(x.device, x.dtype, features, recipe)


@torch.compiler.assume_constant_result
def _why_not_traced(
    device: torch.device, dtype: torch.dtype, features: tuple[int, ...], key: str
) -> str | None:
    return _why_not(device, dtype, features, recipe_of_key(key))


def _why_not(device: torch.device, dtype: torch.dtype, features: Sequence[int], recipe: Recipe) -> str | None:
    if not isinstance(recipe, NVFP4Recipe):
        return f"{type(recipe).__name__} has no groups"
    if recipe.four_over_six is not None or recipe.backward != "quantized":
        return "groups have no four over six, and no dequantized backward pass"
    if chosen_backend(device, recipe.backend) != "exact":
        return "the native backend has no groups"
    return why_not_grouped(device, dtype, features)


class GroupedWeights:
    """The quantized weights of calls, as the products of groups take them: a record for each group, or one of
    a stack. lasting: whether they are the layer's, and not those of one call.
    """

    def __init__(self, records: Sequence[Storage], lasting: bool = False):
        self.lasting = lasting
        self.records, self._rebindings = list(records), rebindings()
        self._sides: dict[tuple[str, bool], GroupedOperand] = {}
        self._kept: list[tuple[Kept, list[torch.Tensor]]] = []

    def are(self, records: Sequence[Storage]) -> bool:
        """Whether these are the records that this was made of, with the buffers that they had."""
        same = len(records) == len(self.records) and all(map(operator.is_, records, self.records))
        return same and rebindings() == self._rebindings

    def rowwise(self) -> GroupedOperand:
        return self._operand("rowwise", False)

    def columnwise(self) -> GroupedOperand:
        """Of their columns, or of rows that have the same values."""
        rows = all(map(rows_are_enough, self.records))
        return self._operand("rowwise" if rows else "columnwise", rows)

    def _operand(self, side: str, transposed: bool) -> GroupedOperand:
        made = self._sides.get((side, transposed))
        if made is None:
            made = self._sides[side, transposed] = GroupedOperand(self.records, side, transposed)
        return made

    def kept(self) -> list[tuple[Kept, list[torch.Tensor]]]:
        """Of each what the gradient of the input is made from."""
        if not self._kept:
            self._kept = [
                Kept.of(record, "rowwise" if rows_are_enough(record) else "columnwise", "compact")
                for record in self.records
            ]
        return self._kept


class GroupedFunction(torch.autograd.Function):
    """y [T, N] of x [T, K] in groups, each by the weight and the bias of its own, and their gradients.

    splits: rows of each group, on the host or on x's device, where nobody reads them. weights: of the calls.
    parameters: all weights, then all biases, if there are any; or a stack of each. Numbers: gemm/grouped.py;
    the bias is added to the rounded output. What is saved is as of LinearFunction, but weights that outlive
    the call are taken from their layer.
    """

    @staticmethod
    def forward(
        ctx, x, splits, recipe: NVFP4Recipe, calls: Sequence[LinearCall], weights: GroupedWeights, *parameters
    ):
        x_needs, _, _, _, _, *needs = ctx.needs_input_grad
        biases = parameters[len(calls) :]
        columnwise = any(needs[: len(calls)])
        y, q_x = multiply_groups(x, splits, recipe, weights, biases, columnwise)
        kept = weights.kept() if x_needs else []
        columns = q_x.columnwise if columnwise else None
        buffers = [columns.data, columns.scales["compact"], columns.amax] if columns else []
        # The caller's splits are read again: autograd refuses them once they were written to.
        ctx.save_for_backward(q_x.splits, *buffers, *(buffer for _, own in kept for buffer in own))
        ctx.kept, ctx.columnwise = [each for each, _ in kept], columnwise
        # Only what is the layer's anyway: of the others autograd alone holds what it saved.
        ctx.weights = weights if weights.lasting else None
        ctx.groups = dataclasses.replace(q_x, rowwise=None, columnwise=None)
        ctx.main_grads = [call.main_grad for call in calls]
        ctx.are_current = [call.is_current for call in calls if call.is_current is not None]
        ctx.is_stack = parameters[0].dim() == 3
        ctx.recipe, ctx.has_bias, ctx.dtypes = recipe, bool(biases), [p.dtype for p in parameters]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        splits, *saved = ctx.saved_tensors
        x = _columns(ctx.groups, saved[:3]) if ctx.columnwise else None
        weights = _weights(ctx, saved[3 if ctx.columnwise else 0 :]) if ctx.kept else None
        if weights is not None:
            for is_current in ctx.are_current:
                check_current(is_current)
        grad_x, stack = gradients_of_groups(grad, splits, ctx.recipe, weights, x)
        count = len(ctx.main_grads)
        grad_weights = [None] * count
        if stack is not None:
            each = each_of(stack, ctx.is_stack)
            grad_weights = given_gradients(each, ctx.main_grads, ctx.dtypes[:count])
        sums = each_of(sums_of_groups(grad, ctx.groups.offsets), ctx.is_stack) if ctx.has_bias else ()
        grad_biases = [each.to(dtype) for each, dtype in zip(sums, ctx.dtypes[count:], strict=True)]
        return grad_x, None, None, None, None, *grad_weights, *grad_biases


def multiply_groups(
    x: torch.Tensor,
    splits: Any,
    recipe: NVFP4Recipe,
    weights: GroupedWeights,
    biases: Sequence[torch.Tensor],
    columnwise: bool,
) -> tuple[torch.Tensor, GroupedNVFP4]:
    """y, and x quantized, with a columnwise copy if that is asked for."""
    q_x = quantize_grouped(x, splits, columnwise=columnwise, **nvfp4_options(recipe, "input", columnwise))
    y = grouped_gemm(q_x, weights.rowwise())
    if biases:
        each = biases[0] if biases[0].dim() == 2 else torch.stack(list(biases))
        y += each.index_select(0, groups_of_rows(q_x))
    return y, q_x


def gradients_of_groups(
    grad: torch.Tensor,
    splits: torch.Tensor,
    recipe: NVFP4Recipe,
    weights: GroupedWeights | None,
    x: GroupedNVFP4 | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(of x, which needs the weights; of the weights [groups, N, K], which needs x), None without those."""
    if weights is None and x is None:
        return None, None
    options = nvfp4_options(recipe, "gradient", x is not None)
    copies = {"rowwise": weights is not None, "columnwise": x is not None}
    q_grad = quantize_grouped(grad, splits, **copies, **options)
    grad_x = None if weights is None else grouped_gemm(q_grad, weights.columnwise())
    return grad_x, None if x is None else grouped_wgrad(q_grad, x)


def _weights(ctx, saved: Sequence[torch.Tensor]) -> GroupedWeights:
    """Those that forward multiplied with."""
    if ctx.weights is not None:
        return ctx.weights
    records, rest = [], iter(saved)
    for kept in ctx.kept:
        records.append(kept.record(tuple(itertools.islice(rest, kept.count))))
    return GroupedWeights(records)


def _columns(groups: GroupedNVFP4, buffers: Sequence[torch.Tensor]) -> GroupedNVFP4:
    data, scale, amax = buffers
    return dataclasses.replace(groups, columnwise=Side(data, {"compact": scale}, amax))


def each_of(stack: torch.Tensor, is_stack: bool) -> Sequence[torch.Tensor]:
    """Gradients of parameters, of which one may be that of all groups."""
    return [stack] if is_stack else stack.unbind()


def given_gradients(
    gradients: Sequence[torch.Tensor], main_grads: Sequence[MainGrad | None], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor | None]:
    """What autograd gets of the weights' gradients; the others are added to main_grad."""
    given: list[torch.Tensor | None] = []
    for gradient, main_grad, dtype in zip(gradients, main_grads, dtypes, strict=True):
        if main_grad is None:
            given.append(gradient.to(dtype))
        else:
            main_grad.buffer().add_(gradient)
            given.append(main_grad.gradient())
    return given


def sums_of_groups(grad: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """float32 [groups, N] of the rows of each group."""
    # unsafe: offsets are on the device, and no check of theirs may wait for it
    return torch.segment_reduce(grad.float(), "sum", offsets=offsets, unsafe=True, initial=0)
