"""convert_model: the weights of a model's linear layers become NVFP4 parameters."""

import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zerofp4.cast import number_groups
from zerofp4.format import BLOCK, FourOverSix
from zerofp4.nn.choice import (
    SHARDED,
    Chosen,
    ConversionReport,
    FilterFn,
    choose_weights,
    is_conv1d,
    is_layer,
)
from zerofp4.nn.conv1d import Conv1D
from zerofp4.nn.experts import Experts
from zerofp4.nn.fuse import Fusions
from zerofp4.nn.linear import Linear
from zerofp4.nn.quantizers import primary_parameter, watch_assignments
from zerofp4.tensors import (
    NVFP4Tensor,
    quantize,
    weight_columns,
)

_converted: list[weakref.ref[nn.Module]] = []
"""Models that convert_model was given, the latest last."""

_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_step_hook: list[Any] = []
"""The handle of _free_at_first_step, once there is a converted model."""


def convert_model(
    model: nn.Module,
    filter_fn: FilterFn | None = None,
    *,
    layers: bool = False,
    block: tuple[int, int] = (BLOCK, BLOCK),
    columnwise: bool | None = None,
    four_over_six: FourOverSix | None = None,
    amax_groups: Sequence[Sequence[torch.Tensor]] | None = None,
) -> ConversionReport:
    """Replace the weights of linear layers, in place, by NVFP4 parameters.

    Converted are the weights of modules whose forward is that of nn.Linear, or of transformers' Conv1D, which
    keeps its weight [in, out]; of a dtype that NVFP4 can hold, with two even sizes, not tied to another
    parameter, for which filter_fn(module, name), if given, is true; name is the module's name in the model.
    The output head, which is what get_output_embeddings() returns or else a module named lm_head, stays as it
    is unless there is a filter_fn that is true for it. Everything else stays as it is, too, and the report
    says why of each parameter with two dimensions or more. Call it before the optimizer is made: the
    parameters are new ones, each with the dtype, requires_grad, gradient and attributes of the old.

    layers: the modules among them that are an nn.Linear, and not of a subclass, become zerofp4.nn.Linear, and
    those that are a Conv1D zerofp4.nn.Conv1D: the same objects, with their names, hooks and state_dict, which
    inside zerofp4.nn.autocast multiply quantized operands; so do the experts of transformers, where filter_fn
    took both of their stacked parameters, as zerofp4.nn.Experts. Without layers, and for the other modules,
    products dequantize the weight.

    With layers and a filter_fn that is true for a norm, too, an nn.LayerNorm or nn.RMSNorm that an
    nn.Sequential calls right before such a linear layer goes into a zerofp4.nn.LayerNormLinear with it, where
    it was; norm, linear layer, activation (GELU; of transformers also its squared ReLU) and linear layer, if
    filter_fn is true for all four, into a LayerNormMLP. Both hold the very modules, but for the activation,
    and compute the same bytes; in the others' places an nn.Identity is left. Their parameters, and so the
    keys of state dicts, are called as in these layers: load other checkpoints before. filter_fn's word is
    that the model calls that Sequential as a whole. Modules with hooks, or used in several places, stay.
    Where a norm and its linear layer meet in a forward of somebody's own, as in transformers' Llama, no name
    could make them one layer, since that forward would have to call it in place of the two: they stay, which
    costs nothing, as the fused layers make the same passes over memory.

    block: (16, 16), or (1, 16), the blocks along the inputs in which serving engines read weights. These have
    rows only, 0.56 bytes an element: no stacks of experts and no Conv1D are converted, and inside autocast
    they take NVFP4Recipe(weight_block=(1, 16)), on FP4 tensor cores with backward="dequantized".

    columnwise: keep the transposed copy too: 1.01 bytes an element in place of 0.51. None keeps it only where
    something reads it: the backward pass of layers of zerofp4.nn on GPUs with FP4 tensor cores, if the model
    is there already, and zerofp4.nn.Conv1D anywhere. What reads a copy that was not kept makes it from the
    rows each time.

    four_over_six: of two scales for each block the one with the smaller error, now and in casts.

    amax_groups: lists of weights of the model, as they are now, that share one amax from the first moment, as
    those of zerofp4.serving.amax_groups(model). Give the optimizer groups of the new parameters.

    Experts in one parameter [E, N, K], with N and K even, are converted, too, each with an amax of its own:
    the weight of a stacked zerofp4.nn.GroupedLinear as that of a linear layer; the parameter of another
    module, unless that is torch's own, only where filter_fn(module, the parameter's name) is true.

    get_high_precision_init_val() of a new parameter is the old value, on the CPU: what a master weight should
    start from. clear_high_precision_init_val() frees it. So does the optimizer that makes the master, and so
    does one that trains other parameters of the model while this one is frozen: ZeroFP4Optimizer when it is
    built, an optimizer of torch in its first step.

    Raises ValueError for other blocks, for columnwise=True in blocks of 1x16, where that copy does not follow
    from the rows, and for amax groups of other weights; RuntimeError when a weight to convert is on the meta
    device. All before anything is changed. Warns where parameters were sharded before, as none of those is
    converted. Convert the model before an optimizer or DistributedDataParallel is built of it: those would go
    on with the parameters that are replaced.
    """
    weight_columns(block, columnwise)  # raises for a copy that a cast cannot write
    options = {"block": block, "four_over_six": four_over_six}
    report, chosen = choose_weights(model, filter_fn, block=block)
    for choice in chosen:
        if choice.parameter.is_meta:
            what = f"the weight of {choice.name!r}"
            raise RuntimeError(f"model: {what} is on the meta device: give it values first")
    amaxes = _shared_amaxes(chosen, amax_groups, options)
    asked = layers and filter_fn is not None
    fusions = Fusions(model, filter_fn, report, chosen) if asked else None
    for choice in chosen:
        name, module, parameter_name = choice
        amax = amaxes.get(id(choice.parameter))
        columns = _read_columns(module, layers) if columnwise is None else columnwise
        converted = primary_parameter(choice.parameter, name, columns, amax=amax, **options)
        setattr(module, parameter_name, converted)
        report.converted.append(name)
        if layers and (type(module) is nn.Linear or is_conv1d(module)):
            (Conv1D if is_conv1d(module) else Linear)._adopt(module)
            report.layers.append(name)
    if layers:
        report.layers += _stacked_layers(chosen)
    if fusions is not None:
        fusions.fuse()
    watch_assignments(model)
    _converted[:] = [*(ref for ref in _converted if ref() is not None), weakref.ref(model)]
    _warn_of_shards(model, report)
    if not _step_hook:
        _step_hook.append(register_optimizer_step_pre_hook(_free_at_first_step))
    return report


def names_in_converted_model(parameters: Sequence[torch.Tensor]) -> list[str] | None:
    """The names of these parameters in the latest converted model that has all of them; None without one."""
    for model in [ref() for ref in reversed(_converted)]:
        names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        if all(id(p) in names for p in parameters):
            return [names[id(p)] for p in parameters]
    return None


def _read_columns(module: nn.Module, layers: bool) -> bool | None:
    """Whether something reads the columnwise copy of a module's weight; None where its device decides."""
    if layers and is_conv1d(module):
        return True  # its forward pass
    return None if layers or getattr(module, "takes_nvfp4_weight", False) else False


def _shared_amaxes(
    chosen: Sequence[Chosen], amax_groups: Sequence[Sequence[torch.Tensor]] | None, options: dict[str, Any]
) -> dict[int, torch.Tensor]:
    """By id(parameter), the largest amax of its group. Raises TypeError or ValueError for other weights."""
    parameters, names = [choice.parameter for choice in chosen], [choice.name for choice in chosen]
    among = {"names": names, "block": options["block"], "among": "the weights to convert"}
    numbers = number_groups(parameters, amax_groups, **among)
    amaxes: dict[int, list[torch.Tensor]] = {}
    counts = Counter(numbers)
    for number, parameter in zip(numbers, parameters, strict=True):
        if counts[number] > 1:
            amaxes.setdefault(number, []).append(quantize(parameter, **options).amax)
    largest = {number: torch.stack(members).amax(dim=0) for number, members in amaxes.items()}
    pairs = zip(parameters, numbers, strict=True)
    return {id(parameter): largest[number] for parameter, number in pairs if number in largest}


def _stacked_layers(chosen: Sequence[Chosen]) -> list[str]:
    """The modules with stacked parameters that became layers, by name."""
    stacks = [each for each in chosen if not is_layer(each.module, each.parameter_name)]
    modules = {each.name.removesuffix(each.parameter_name).removesuffix("."): each.module for each in stacks}
    return [name for name, module in modules.items() if Experts._adopt(module)]


def _warn_of_shards(model: nn.Module, report: ConversionReport) -> None:
    sharded = [name for name, reason in report.skipped.items() if SHARDED in reason]
    flat = [name for name, m in model.named_modules() if type(m).__name__ == "FullyShardedDataParallel"]
    if sharded or flat:
        what = f"{len(report.converted)} weights were" if report.converted else "nothing was"
        warnings.warn(
            f"convert_model: {what} converted: {(sharded or ['the model'])[0]!r} was {SHARDED}",
            stacklevel=3,
        )


def free_frozen(parameters: Iterable[torch.Tensor]) -> None:
    """Free the initial values of frozen weights when an optimizer has these parameters: of the frozen ones
    among them and beside them in converted models. The optimizer may not have adapters' base weights at all.

    What is trained beside frozen weights is trained beside their codes.
    """
    candidates = list(parameters)
    ids = set(map(id, candidates))
    for model in filter(None, [ref() for ref in _converted]):
        members = list(model.parameters())
        if not ids.isdisjoint(map(id, members)):
            candidates += members
    for parameter in candidates:
        if isinstance(parameter, NVFP4Tensor) and not parameter.requires_grad:
            parameter.clear_high_precision_init_val()


def _free_at_first_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """torch calls it before each step of every optimizer. Adapters may have one of torch."""
    if not torch.compiler.is_compiling() and optimizer not in _stepped:
        _stepped.add(optimizer)
        free_frozen(p for group in optimizer.param_groups for p in group["params"])
