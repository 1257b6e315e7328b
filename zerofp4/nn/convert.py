"""convert_model: the weights of a model's linear layers become NVFP4 parameters."""

import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zerofp4.cast import number_groups
from zerofp4.format import BLOCK, FourOverSix
from zerofp4.nn.choice import SHARDED, Chosen, ConversionReport, FilterFn, choose_weights, is_conv1d, is_layer
from zerofp4.nn.conv1d import Conv1D
from zerofp4.nn.experts import Experts
from zerofp4.nn.fuse import Fusions
from zerofp4.nn.linear import Linear
from zerofp4.nn.quantizers import primary_parameter, show_weights, watch_assignments
from zerofp4.tensors import NVFP4Tensor, quantize, weight_columns

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

    model: converted before its optimizer or DistributedDataParallel is built, since the parameters are new.
        They keep dtype, requires_grad, gradient and attributes.
    filter_fn: filter_fn(module, name) says whether to convert; name is the module's in the model. None
        converts all but the output head (what get_output_embeddings() returns, else a module named lm_head).
    layers: also turn the modules into layers of zerofp4.nn, which multiply quantized operands inside
        zerofp4.nn.autocast (docs/layers.md). Otherwise products dequantize weights.
    block: (16, 16), or (1, 16) along the inputs, which serving engines read. The latter has rows only, takes
        0.56 bytes per element, excludes Conv1D, and needs NVFP4Recipe(weight_block=(1, 16)) in autocast.
    columnwise: also keep the transposed copy, 1.01 instead of 0.51 bytes per element. None keeps it if
        something reads it: zerofp4.nn.Conv1D, and layers of zerofp4.nn on a GPU with FP4 tensor cores, if the
        model is there already. A reader without it makes it from the rows each time.
    four_over_six: use the better of two scales for each block, now and in casts.
    amax_groups: lists of weights of the model, as they are now, that share one amax from the start, such as
        zerofp4.serving.amax_groups(model). Give the optimizer groups of the new parameters.

    Returns a report: what was converted, and why every other matrix was not.

    Examples:
        >>> report = zerofp4.convert_model(model)
        >>> print(report)
        >>> optimizer = zerofp4.ZeroFP4Optimizer(model.named_parameters(), lr=1e-3)

    **Which weights.** Modules with the forward of nn.Linear or of transformers' Conv1D, if NVFP4 can hold the
    dtype, both sizes are even and the weight is not tied. Experts in one parameter [E, N, K], with N and K
    even, get an amax each, in zerofp4.nn.GroupedLinear and, if filter_fn(module, the parameter's name) is
    true, in other modules that are not torch's.

    **Initial values.** get_high_precision_init_val() of a new parameter is the old value, on the CPU, from
    which a master starts. The optimizer that makes the master frees it. A frozen weight's is freed when an
    optimizer of the model's other parameters is built (ZeroFP4Optimizer) or first steps (torch's). A weight
    on the meta device has none: give the model memory by to_empty(), the optimizer values by masters_from.

    Before anything is changed, raises ValueError for other blocks, for columnwise=True with (1, 16), for amax
    groups of other weights, and for a DistributedDataParallel. Raises RuntimeError for a module that does not
    keep the parameter it is given. Warns of parameters that are already sharded, which are not converted.
    """
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "DistributedDataParallel waits for gradients of the parameters that it was given: convert the "
            "model first, and then wrap it"
        )
    weight_columns(block, columnwise)  # raises for a copy that a cast cannot write
    options = {"block": block, "four_over_six": four_over_six}
    report, chosen = choose_weights(model, filter_fn, block=block)
    amaxes = _shared_amaxes(chosen, amax_groups)
    asked = layers and filter_fn is not None
    fusions = Fusions(model, filter_fn, report, chosen) if asked else None
    for choice in chosen:
        name, module, parameter_name = choice
        amax = amaxes.get(id(choice.parameter))
        columns = _read_columns(module, layers) if columnwise is None else columnwise
        converted = primary_parameter(choice.parameter, name, columns, amax=amax, **options)
        setattr(module, parameter_name, converted)
        if module._parameters[parameter_name] is not converted:
            raise RuntimeError(f"{name} was given an NVFP4 weight and keeps another: something replaces it")
        report.converted.append(name)
        if layers and (type(module) is nn.Linear or is_conv1d(module)):
            (Conv1D if is_conv1d(module) else Linear)._adopt(module)
            report.layers.append(name)
    if layers:
        report.layers += _stacked_layers(chosen)
    if fusions is not None:
        fusions.fuse()
    watch_assignments(model)
    show_weights()
    _converted[:] = map(weakref.ref, [*_living(), model])
    _warn_of_shards(model, report)
    if not _step_hook:
        _step_hook.append(register_optimizer_step_pre_hook(_free_at_first_step))
    return report


def _living() -> list[nn.Module]:
    """Converted models, the latest last. (A module may have a length, and be false.)"""
    return [model for ref in _converted if (model := ref()) is not None]


def converted_model_of(parameters: Sequence[torch.Tensor]) -> nn.Module | None:
    """The latest converted model that has all of the parameters, or None."""
    for model in reversed(_living()):
        own = {id(p) for p in model.parameters()}
        if all(id(p) in own for p in parameters):
            return model
    return None


def _read_columns(module: nn.Module, layers: bool) -> bool | None:
    """Whether something reads the columnwise copy of a module's weight; None if its device decides."""
    if layers and is_conv1d(module):
        return True  # its forward pass
    return None if layers or getattr(module, "takes_nvfp4_weight", False) else False


def _shared_amaxes(
    chosen: Sequence[Chosen], amax_groups: Sequence[Sequence[torch.Tensor]] | None
) -> dict[int, torch.Tensor]:
    """By id(parameter), the largest amax of its group."""
    parameters, names = [choice.parameter for choice in chosen], [choice.name for choice in chosen]
    numbers = number_groups(parameters, amax_groups, names=names)
    amaxes: dict[int, list[torch.Tensor]] = {}
    counts = Counter(numbers)
    for number, parameter in zip(numbers, parameters, strict=True):
        if counts[number] > 1:
            quantized = quantize(parameter, block=(1, BLOCK), stacked=parameter.dim() == 3)
            amaxes.setdefault(number, []).append(quantized.amax)
    largest = {number: torch.stack(members).amax(dim=0) for number, members in amaxes.items()}
    pairs = zip(parameters, numbers, strict=True)
    return {id(parameter): largest[number] for parameter, number in pairs if number in largest}


def _stacked_layers(chosen: Sequence[Chosen]) -> list[str]:
    """Turn modules with stacked parameters into layers; returns their names."""
    stacks = [each for each in chosen if not is_layer(each.module, each.parameter_name)]
    modules = {each.name.removesuffix(each.parameter_name).removesuffix("."): each.module for each in stacks}
    return [name for name, module in modules.items() if Experts._adopt(module)]


def _warn_of_shards(model: nn.Module, report: ConversionReport) -> None:
    sharded = [name for name, reason in report.skipped.items() if SHARDED in reason]
    flat = [name for name, m in model.named_modules() if type(m).__name__ == "FullyShardedDataParallel"]
    if sharded or flat:
        what = f"{len(report.converted)} weights were" if report.converted else "nothing was"
        warnings.warn(
            f"convert_model: {what} converted: {(sharded or ['the model'])[0]!r} was {SHARDED}", stacklevel=3
        )


def free_frozen(parameters: Iterable[torch.Tensor]) -> None:
    """Free the initial values of frozen weights, whose codes count from now on: of these parameters of an
    optimizer, and of others in the same converted models, such as the base weights of adapters.
    """
    candidates = list(parameters)
    ids = set(map(id, candidates))
    for model in _living():
        members = list(model.parameters())
        if not ids.isdisjoint(map(id, members)):
            candidates += members
    for parameter in candidates:
        if isinstance(parameter, NVFP4Tensor) and not parameter.requires_grad:
            parameter.clear_high_precision_init_val()


def _free_at_first_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Called before each step of any torch optimizer, which may be an adapter's."""
    if not torch.compiler.is_compiling() and optimizer not in _stepped:
        _stepped.add(optimizer)
        free_frozen(p for group in optimizer.param_groups for p in group["params"])
