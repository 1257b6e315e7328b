"""convert_model: the weights of a model's linear layers become NVFP4 parameters."""

import collections
import dataclasses
from collections.abc import Callable

from torch import nn

from zerofp4.format import WEIGHT_DTYPES
from zerofp4.tensors import INIT_VAL, NVFP4Tensor, quantize


@dataclasses.dataclass
class ConversionReport:
    """Names of the modules whose weight was converted, and why others that have a matrix were not."""

    converted: list[str] = dataclasses.field(default_factory=list)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)


def convert_model(
    model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> ConversionReport:
    """Replace the weights of nn.Linear layers, in place, by NVFP4 parameters (16x16 blocks, both copies).

    Converted are the weights of modules whose forward is nn.Linear.forward, of a dtype that NVFP4 can hold,
    with two even sizes, not tied to another parameter, for which filter_fn(module, name), if given, is true;
    name is the module's name in the model. Everything else stays as it is. Call it before the optimizer is
    made: the parameters are new ones, each with the dtype, requires_grad, gradient and attributes of the old.

    get_high_precision_init_val() of a new parameter is the old value, on the CPU, until
    clear_high_precision_init_val() frees it: what a master weight should start from.

    Raises RuntimeError, before anything is changed, when a weight to convert is on the meta device.
    """
    report = ConversionReport()
    owners = _owners(model)
    chosen = []
    for name, module in model.named_modules():
        reason = _why_not(module, name, owners, filter_fn)
        if reason is None:
            chosen.append((name, module))
        elif reason:
            report.skipped[name] = reason
    for name, module in chosen:
        if module.weight.is_meta:
            raise RuntimeError(f"model: the weight of {name!r} is on the meta device: give it values first")
    for name, module in chosen:
        module.weight = _convert(module.weight, name)
        report.converted.append(name)
    return report


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Names of the parameters that start at each address. A module used in several places counts once."""
    owners = collections.defaultdict(list)
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            owners[_address(parameter)].append(name)
    return owners


def _address(parameter: nn.Parameter) -> int:
    in_memory = type(parameter) is nn.Parameter and parameter.numel() and not parameter.is_meta
    return parameter.data_ptr() if in_memory else id(parameter)


def _why_not(module: nn.Module, name: str, owners: dict[int, list[str]], filter_fn) -> str | None:
    """Why the weight of a module is not converted, "" where it has no matrix; None when it is converted."""
    weight = module._parameters.get("weight")
    if not isinstance(module, nn.Linear):
        has_matrix = type(weight) is nn.Parameter and weight.dim() >= 2
        return f"{type(module).__name__} is not an nn.Linear" if has_matrix else ""
    if type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} has a forward of its own"
    if isinstance(weight, NVFP4Tensor):
        return "its weight is an NVFP4Tensor already"
    if type(weight) is not nn.Parameter:
        return "its weight is not an ordinary parameter"
    if weight.dtype not in WEIGHT_DTYPES:
        return f"dtype {weight.dtype} is not one of {WEIGHT_DTYPES}"
    if weight.dim() != 2 or weight.shape[0] % 2 or weight.shape[1] % 2:
        return f"a weight of shape {tuple(weight.shape)} does not have two even sizes"
    own_name = f"{name}.weight" if name else "weight"
    tied = [other for other in owners[_address(weight)] if other != own_name]
    if tied:
        return f"its weight is tied to {tied[0]}"
    if filter_fn is not None and not filter_fn(module, name):
        return "filter_fn is false for it"
    return None


def _convert(weight: nn.Parameter, name: str) -> nn.Parameter:
    tensor = quantize(weight, columnwise=True)
    tensor.record.name = name or None
    tensor.record.attachments[INIT_VAL] = weight.detach().to("cpu", copy=True)
    converted = nn.Parameter(tensor, weight.requires_grad)
    vars(converted).update({k: v for k, v in vars(weight).items() if k != "_is_param"})
    converted.grad = weight.grad
    return converted
