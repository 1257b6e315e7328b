"""Which weights convert_model converts, and why not the others."""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from zerofp4.format import BLOCK, WEIGHT_DTYPES
from zerofp4.tensors import NVFP4Tensor

FilterFn = Callable[[nn.Module, str], bool]

CONV1D = "Conv1D"
"""transformers' linear layer with a weight [in, out]."""

SHARDED = (
    "sharded before the conversion: for fully_shard, call zerofp4.integrations.fsdp2.prepare before it and "
    "in place of convert_model"
)

ALREADY = "it is an NVFP4Tensor already"
ON_REQUEST = "is converted only where filter_fn is true for it"


class Chosen(NamedTuple):
    """A parameter to convert: its name in the report, its module, and its name in the module."""

    name: str
    module: nn.Module
    parameter_name: str

    @property
    def parameter(self) -> nn.Parameter:
        return self.module._parameters[self.parameter_name]


@dataclasses.dataclass(repr=False)
class ConversionReport:
    """What convert_model did with each parameter of two or more dimensions. repr() is a table.

    converted: modules whose weight was converted, and stacked weights in other modules.
    layers: the converted modules that became layers of zerofp4.nn.
    skipped: by parameter, why it was not converted.
    shares: by parameter, its share of the model's elements, split among the names of a tied one.
    fused: by LayerNormLinear or LayerNormMLP, the names that its parts had before.
    unfused: by norm, why it was not fused; empty without filter_fn.
    possible_head: the last linear layer, if it was converted and may be the head of a model that names none.
    """

    converted: list[str] = dataclasses.field(default_factory=list)
    layers: list[str] = dataclasses.field(default_factory=list)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    fused: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    unfused: dict[str, str] = dataclasses.field(default_factory=dict)
    possible_head: str | None = None

    @property
    def share(self) -> float:
        """The share of the model's elements that is in NVFP4, converted now or before."""
        names = [name if name in self.shares else join(name, "weight") for name in self.converted]
        return sum(self.shares[name] for name in [*names, *self._already()])

    def _already(self) -> list[str]:
        return [name for name, reason in self.skipped.items() if reason == ALREADY]

    def __repr__(self) -> str:
        already, total = len(self._already()), len(self.converted) + len(self.skipped)
        count = len(self.converted) + already
        what = f"{count} of {total} matrices are in NVFP4, {self.share:.1%} of the model's parameters"
        if already:
            what += f"; {already} were before this call"
        made = len(self.layers) + len(self.fused)
        reasons: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            if reason != ALREADY:
                reasons.setdefault(reason, []).append(name)
        lines = [f"{what}; {made} layers of zerofp4.nn" if made else what]
        if self.possible_head is not None:
            lines.append(
                f"  converted  {self.possible_head}: it may be the output head; without filter_fn only what "
                "get_output_embeddings() returns, or a module called lm_head, is left out"
            )
        for reason, names in reasons.items():
            share = sum(self.shares[name] for name in names)
            shown = ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
            lines.append(f"  left out {share:6.1%}  {shown}: {reason}")
        return "\n".join([*lines, *(f"  not fused  {name}: {why}" for name, why in self.unfused.items())])


def choose_weights(
    model: nn.Module,
    filter_fn: FilterFn | None,
    *,
    tensor_parallel: bool = False,
    block: tuple[int, int] = (BLOCK, BLOCK),
) -> tuple[ConversionReport, list[Chosen]]:
    """The weights that convert_model would convert (with tensor_parallel also DTensors), and a report."""
    report = ConversionReport()
    owners, heads = collections.defaultdict(list), _output_heads(model)
    for _, module_name, parameter_name, parameter in _parameters(model):
        owners[_identity(parameter)].append(join(module_name, parameter_name))
    total = sum({_identity(p): _numel(p) for p in model.parameters()}.values())
    chosen = []
    for module, module_name, parameter_name, parameter in _parameters(model):
        if not is_lazy(parameter) and parameter.dim() < 2:
            continue
        name = join(module_name, parameter_name)
        names = owners[_identity(parameter)]
        tied = [other for other in names if other != name]
        is_head = id(module) in heads
        reason = _why_not(module, module_name, parameter_name, tied, is_head, filter_fn, tensor_parallel)
        if reason is None and block[0] == 1 and linear_forward(module) not in (None, nn.Linear.forward):
            reason = "blocks of 1x16 lie along the inputs of a layer, and its weight is [inputs, outputs]"
        report.shares[name] = _numel(parameter) / max(total, 1) / len(names)
        if reason is None:
            chosen.append(Chosen(_called(module, module_name, parameter_name), module, parameter_name))
        else:
            report.skipped[name] = reason
    if filter_fn is None and not heads:
        report.possible_head = _possible_head(model, chosen)
    return report, chosen


def join(module_name: str, name: str) -> str:
    return f"{module_name}.{name}" if module_name else name


def _called(module: nn.Module, module_name: str, parameter_name: str) -> str:
    """The name of a weight for filter_fn and the report: its module's if that is a layer, else its own."""
    return module_name if is_layer(module, parameter_name) else join(module_name, parameter_name)


def is_layer(module: nn.Module, parameter_name: str) -> bool:
    """Whether the parameter is the weight of a linear layer, or the stacked weights of several."""
    known = linear_forward(module) is not None or getattr(module, "takes_nvfp4_weight", False)
    return known and parameter_name == "weight"


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """(module, its name, parameter name, parameter), each module once."""
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, module_name, name, parameter


def _numel(parameter: nn.Parameter) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()


def _identity(parameter: nn.Parameter) -> int:  # equal for tied parameters
    in_memory = type(parameter) is nn.Parameter and parameter.numel() and not parameter.is_meta
    return parameter.data_ptr() if in_memory else id(parameter)


def _output_heads(model: nn.Module) -> set[int]:
    """The ids of the modules that the model names as its output heads, else of those called lm_head."""
    named = set()
    for module in model.modules():
        if hasattr(module, "get_output_embeddings"):
            head = module.get_output_embeddings()
            if isinstance(head, nn.Module):
                named.add(id(head))
    return named or {id(m) for name, m in model.named_modules() if name.rpartition(".")[2] == "lm_head"}


def _possible_head(model: nn.Module, chosen: list[Chosen]) -> str | None:
    """The last linear layer, if it is converted and is not one of several repeated blocks."""
    names = [name for name, module in model.named_modules() if linear_forward(module) is not None]
    kinds = [re.sub(r"\d+\.", "", name) for name in names]
    is_head = bool(names) and kinds.count(kinds[-1]) == 1
    return names[-1] if is_head and any(choice.name == names[-1] for choice in chosen) else None


def linear_forward(module: nn.Module) -> Callable | None:
    """nn.Linear.forward or Conv1D.forward, if a module is one. Conv1D is recognized without transformers."""
    if isinstance(module, nn.Linear):
        return nn.Linear.forward
    bases = [base for base in type(module).__mro__ if base.__name__ == CONV1D and hasattr(module, "nf")]
    return bases[0].forward if bases else None


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D itself, not a subclass."""
    return type(module).__name__ == CONV1D and linear_forward(module) is type(module).forward


def _why_not(
    module: nn.Module,
    module_name: str,
    parameter_name: str,
    tied: list[str],
    is_head: bool,
    filter_fn: FilterFn | None,
    tensor_parallel: bool,
) -> str | None:
    kind, parameter = type(module).__name__, module._parameters[parameter_name]
    forward, tie = linear_forward(module), f"it is tied to {tied[0]}" if tied else None
    if isinstance(parameter, NVFP4Tensor):
        return ALREADY
    if not isinstance(module._parameters, dict):  # compressed-tensors' copies into the old parameter
        kept = type(module._parameters).__name__
        return (
            f"{kind} has its parameters in a {kept}, which may not hold another: load it without offloading"
        )
    if hasattr(parameter, "to_local"):
        if not tensor_parallel:
            return f"it is a DTensor, {SHARDED}"
        parameter = nn.Parameter(parameter.detach().to_local(), parameter.requires_grad)
    if _may_be_experts(module, parameter_name):
        if filter_fn is None and not is_layer(module, parameter_name):
            return f"{kind} is not an nn.Linear, and a stack of shape {tuple(parameter.shape)} {ON_REQUEST}"
        name = _called(module, module_name, parameter_name)
        return why_not_quantized(parameter, 3) or tie or _why_not_chosen(filter_fn, module, name)
    if forward is None or parameter_name != "weight":
        if forward is not None:
            return f"it is not the weight of {kind}"
        is_matrix = is_lazy(parameter) or parameter.dim() == 2
        what = "" if is_matrix else f", and shape {tuple(parameter.shape)} is no matrix"
        return f"{kind} is not an nn.Linear{what}"
    if type(module).forward is not forward and not getattr(module, "takes_nvfp4_weight", False):
        return f"{kind} has a forward of its own"
    reason = why_not_quantized(parameter) or tie
    if reason is not None:
        return reason
    if is_head and (filter_fn is None or not filter_fn(module, module_name)):
        return f"it is the output head, which {ON_REQUEST}"
    return None if is_head else _why_not_chosen(filter_fn, module, module_name)


def _may_be_experts(module: nn.Module, parameter_name: str) -> bool:
    """Whether a 3D parameter may be a stack of matrices: of our layers, or of another class outside torch,
    if a filter_fn says so.
    """
    parameter = module._parameters[parameter_name]
    if is_lazy(parameter) or parameter.dim() != 3 or linear_forward(module) is not None:
        return False
    return is_layer(module, parameter_name) or not type(module).__module__.startswith("torch.nn.")


def why_not_quantized(parameter: nn.Parameter, dimensions: int = 2) -> str | None:
    """Why a parameter cannot become an NVFP4 weight, or None."""
    if isinstance(parameter, NVFP4Tensor):
        return ALREADY
    if type(parameter) is not nn.Parameter:
        return f"it is not an ordinary parameter, but of {type(parameter).__name__}"
    if parameter.dtype not in WEIGHT_DTYPES:
        return f"dtype {parameter.dtype} is not one of {WEIGHT_DTYPES}"
    if parameter.dim() != dimensions or parameter.shape[-2] % 2 or parameter.shape[-1] % 2:
        return f"a weight of shape {tuple(parameter.shape)} does not have two even sizes"
    return None


def _why_not_chosen(filter_fn: FilterFn | None, module: nn.Module, name: str) -> str | None:
    return None if filter_fn is None or filter_fn(module, name) else "filter_fn is false for it"
