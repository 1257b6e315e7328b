"""convert_model: the weights of a model's linear layers become NVFP4 parameters."""

import collections
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from zerofp4 import ops
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.tensors import INIT_VAL, NVFP4Tensor, check_not_held, quantize

FilterFn = Callable[[nn.Module, str], bool]

_SHARDED = (
    "sharded before the conversion: for fully_shard, call zerofp4.integrations.fsdp2.prepare before it and "
    "in place of convert_model"
)


class Chosen(NamedTuple):
    """A parameter to convert: what the report calls it, whose it is, and what its module calls it."""

    name: str
    module: nn.Module
    parameter_name: str

    @property
    def parameter(self) -> nn.Parameter:
        return self.module._parameters[self.parameter_name]


@dataclasses.dataclass
class ConversionReport:
    """What convert_model did, and did not, with every parameter that has a matrix.

    converted: names of the modules whose weight was converted, and of stacked weights in other modules.
    skipped: why another parameter was not, by its name. shares: by name, the elements of each of them in all
    elements of the model's parameters; a tied one has its share under each of its names. layers: names of the
    converted modules that became layers of zerofp4.nn. fused: by the name of a LayerNormLinear or
    LayerNormMLP, those that its parts had before; all other names are those of the model as it is now.
    unfused: why a norm went into no such layer, by its name; empty without filter_fn.
    """

    converted: list[str] = dataclasses.field(default_factory=list)
    layers: list[str] = dataclasses.field(default_factory=list)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    fused: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    unfused: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def share(self) -> float:
        """Elements of the converted weights in all elements of the model's parameters."""
        names = [name if name in self.shares else join(name, "weight") for name in self.converted]
        return sum(self.shares[name] for name in names)


def convert_model(
    model: nn.Module, filter_fn: FilterFn | None = None, *, layers: bool = False, columnwise: bool = True
) -> ConversionReport:
    """Replace the weights of linear layers, in place, by NVFP4 parameters in 16x16 blocks.

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

    columnwise: keep the transposed copy too, which the gradients of quantized products read. Without it a
    weight takes 0.51 bytes an element in place of 1.01, and where a backward pass needs the transpose, it is
    made from the rows each time.

    Experts in one parameter [E, N, K], with N and K even, are converted, too, each with an amax of its own:
    the weight of a stacked zerofp4.nn.GroupedLinear as that of a linear layer; the parameter of another
    module, unless that is torch's own, only where filter_fn(module, the parameter's name) is true.

    get_high_precision_init_val() of a new parameter is the old value, on the CPU, until
    clear_high_precision_init_val() frees it: what a master weight should start from.

    Raises RuntimeError, before anything is changed, when a weight to convert is on the meta device or held by
    a ZeroFP4Optimizer, which would go on training the parameter that is replaced. Warns where parameters were
    sharded before, as none of those is converted.
    """
    report, chosen = choose_weights(model, filter_fn)
    for choice in chosen:
        if choice.parameter.is_meta:
            what = f"the weight of {choice.name!r}"
            raise RuntimeError(f"model: {what} is on the meta device: give it values first")
        check_not_held(f"model: the weight of {choice.name!r}", choice.parameter)
    asked = layers and filter_fn is not None
    fusions = [find(model, filter_fn, report, chosen) for find in FUSIONS] if asked else []
    for choice in chosen:
        name, module, parameter_name = choice
        setattr(module, parameter_name, primary_parameter(choice.parameter, name, columnwise))
        report.converted.append(name)
        make_layer = LAYERS.get(_kind(module)) if layers else None
        if make_layer is not None:
            make_layer(module)
            report.layers.append(name)
    if layers:
        report.layers += _stacked_layers(chosen)
    for fuse in fusions:
        fuse()
    _warn_of_shards(model, report)
    return report


def choose_weights(
    model: nn.Module, filter_fn: FilterFn | None, *, tensor_parallel: bool = False
) -> tuple[ConversionReport, list[Chosen]]:
    """The weights that convert_model would convert, and a report of all others. Changes nothing.

    tensor_parallel: also those that are DTensors, by the shape of this rank's slice.
    """
    report = ConversionReport()
    owners, heads = _owners(model), _output_heads(model)
    total = _count_elements(model)
    chosen = []
    for module, module_name, parameter_name, parameter in _matrices(model):
        name = join(module_name, parameter_name)
        tied = [other for other in owners[_address(parameter)] if other != name]
        is_head = id(module) in heads
        reason = _why_not(module, module_name, parameter_name, tied, is_head, filter_fn, tensor_parallel)
        report.shares[name] = _numel(parameter) / max(total, 1)
        if reason is None:
            chosen.append(Chosen(_called(module, module_name, parameter_name), module, parameter_name))
        else:
            report.skipped[name] = reason
    return report, chosen


CONV1D = "Conv1D"
"""What transformers calls its linear layer with a weight [in, out]."""

LAYERS: dict[type[nn.Module] | str, Callable[[nn.Module], None]] = {}
"""By type of module, or CONV1D, what makes it a layer of zerofp4.nn, in place. The layers' files fill it."""


STACKED_LAYERS: list[Callable[[nn.Module], bool]] = []
"""Each makes a module with stacked parameters, now converted, a layer of zerofp4.nn, in place, where it knows
its kind; and says whether it did.
"""


FUSIONS: list[Callable[[nn.Module, FilterFn, ConversionReport, list[Chosen]], Callable[[], None]]] = []
"""Each finds modules that are to become one layer of zerofp4.nn, and gives what makes it of them once the
weights that were chosen are converted. Both write to the report.
"""


def _stacked_layers(chosen: Sequence[Chosen]) -> list[str]:
    """The modules with stacked parameters that became layers, by name."""
    stacks = [each for each in chosen if not _is_layer(each.module, each.parameter_name)]
    modules = {each.name.removesuffix(each.parameter_name).removesuffix("."): each.module for each in stacks}
    return [name for name, module in modules.items() if any(make(module) for make in STACKED_LAYERS)]


def _kind(module: nn.Module) -> type[nn.Module] | str:
    is_conv1d = type(module).__name__ == CONV1D and _linear_forward(module) is type(module).forward
    return CONV1D if is_conv1d else type(module)


def join(module_name: str, name: str) -> str:
    return f"{module_name}.{name}" if module_name else name


def _called(module: nn.Module, module_name: str, parameter_name: str) -> str:
    """What filter_fn and the report call a weight: by its module, or by itself where that is no layer."""
    return module_name if _is_layer(module, parameter_name) else join(module_name, parameter_name)


def _is_layer(module: nn.Module, parameter_name: str) -> bool:
    """Whether the parameter is the weight of a linear layer, or of several in one."""
    known = _linear_forward(module) is not None or getattr(module, "takes_nvfp4_weight", False)
    return known and parameter_name == "weight"


def _matrices(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """(module, its name, the parameter's name in it, the parameter) of all that have, or may have, a matrix.
    A module used in several places counts once.
    """
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not _is_initialized(parameter) or parameter.dim() >= 2:
                yield module, module_name, name, parameter


def _is_initialized(parameter: nn.Parameter) -> bool:
    return not nn.parameter.is_lazy(parameter)


def _numel(parameter: nn.Parameter) -> int:
    return parameter.numel() if _is_initialized(parameter) else 0


def _count_elements(model: nn.Module) -> int:
    return sum({_address(p): _numel(p) for p in model.parameters()}.values())


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


def _output_heads(model: nn.Module) -> set[int]:
    """The ids of the modules that make logits: those that a model names itself, else those called lm_head."""
    named = set()
    for module in model.modules():
        if hasattr(module, "get_output_embeddings"):
            head = module.get_output_embeddings()
            if isinstance(head, nn.Module):
                named.add(id(head))
    return named or {id(m) for name, m in model.named_modules() if name.rpartition(".")[2] == "lm_head"}


def _linear_forward(module: nn.Module) -> Callable | None:
    """The forward of the linear layer that a module is; None for one that is none.

    transformers' Conv1D is known by its name and its attribute nf, so that transformers need not be there.
    """
    if isinstance(module, nn.Linear):
        return nn.Linear.forward
    bases = [base for base in type(module).__mro__ if base.__name__ == CONV1D and hasattr(module, "nf")]
    return bases[0].forward if bases else None


def _why_not(
    module: nn.Module,
    module_name: str,
    parameter_name: str,
    tied: list[str],
    is_head: bool,
    filter_fn: FilterFn | None,
    tensor_parallel: bool,
) -> str | None:
    """Why a parameter is not converted; None when it is."""
    kind, parameter = type(module).__name__, module._parameters[parameter_name]
    forward = _linear_forward(module)
    if isinstance(parameter, NVFP4Tensor):
        return "it is an NVFP4Tensor already"
    if hasattr(parameter, "to_local"):
        if not tensor_parallel:
            return f"it is a DTensor, {_SHARDED}"
        parameter = nn.Parameter(parameter.detach().to_local(), parameter.requires_grad)
    if _may_be_experts(module, parameter_name, filter_fn):
        name = _called(module, module_name, parameter_name)
        return _why_not_quantized(parameter, 3, tied) or _why_not_chosen(filter_fn, module, name)
    if forward is None or parameter_name != "weight":
        what = "" if not _is_initialized(parameter) or parameter.dim() == 2 else _dimensions(parameter)
        return f"{kind} is not an nn.Linear{what}" if forward is None else f"it is not the weight of {kind}"
    if type(module).forward is not forward and not getattr(module, "takes_nvfp4_weight", False):
        return f"{kind} has a forward of its own"
    reason = _why_not_quantized(parameter, 2, tied)
    if reason is not None:
        return reason
    if is_head and (filter_fn is None or not filter_fn(module, module_name)):
        return "it is the output head, which is converted only where filter_fn is true for it"
    return None if is_head else _why_not_chosen(filter_fn, module, module_name)


def _may_be_experts(module: nn.Module, parameter_name: str, filter_fn: FilterFn | None) -> bool:
    """Whether a parameter of three dimensions is a stack of matrices: our own layer's, or one that there is
    a filter_fn to say so of. Those of torch's own modules, convolutions above all, are not.
    """
    parameter = module._parameters[parameter_name]
    if not _is_initialized(parameter) or parameter.dim() != 3 or _linear_forward(module) is not None:
        return False
    if _is_layer(module, parameter_name):
        return True
    return filter_fn is not None and not type(module).__module__.startswith("torch.nn.")


def _why_not_quantized(parameter: nn.Parameter, dimensions: int, tied: list[str]) -> str | None:
    """Why a parameter cannot be that of a weight in NVFP4."""
    if type(parameter) is not nn.Parameter:
        return f"it is not an ordinary parameter, but of {type(parameter).__name__}"
    if parameter.dtype not in WEIGHT_DTYPES:
        return f"dtype {parameter.dtype} is not one of {WEIGHT_DTYPES}"
    if parameter.dim() != dimensions or parameter.shape[-2] % 2 or parameter.shape[-1] % 2:
        return f"a weight of shape {tuple(parameter.shape)} does not have two even sizes"
    return f"it is tied to {tied[0]}" if tied else None


def _why_not_chosen(filter_fn: FilterFn | None, module: nn.Module, name: str) -> str | None:
    return None if filter_fn is None or filter_fn(module, name) else "filter_fn is false for it"


def _dimensions(parameter: nn.Parameter) -> str:
    return f", and shape {tuple(parameter.shape)} is no matrix"


def _warn_of_shards(model: nn.Module, report: ConversionReport) -> None:
    sharded = [name for name, reason in report.skipped.items() if _SHARDED in reason]
    flat = [name for name, m in model.named_modules() if type(m).__name__ == "FullyShardedDataParallel"]
    if sharded or flat:
        what = f"{len(report.converted)} weights were" if report.converted else "nothing was"
        warnings.warn(
            f"convert_model: {what} converted: {(sharded or ['the model'])[0]!r} was {_SHARDED}",
            stacklevel=3,
        )


def primary_parameter(weight: nn.Parameter, name: str, columnwise: bool = True) -> nn.Parameter:
    """The parameter in NVFP4 that takes the place of `weight`, with its value as the initial one."""
    # Native products read swizzled scales: where there are some, casts write them, and nobody swizzles.
    layouts = ("compact", "swizzled") if ops.has_fp4_tensor_cores(weight.device) else ("compact",)
    tensor = quantize(weight, columnwise=columnwise, scale_layouts=layouts)
    tensor.record.name = name or None
    tensor.record.attachments[INIT_VAL] = weight.detach().to("cpu", copy=True)
    converted = nn.Parameter(tensor, weight.requires_grad)
    vars(converted).update({k: v for k, v in vars(weight).items() if k != "_is_param"})
    converted.grad = weight.grad
    return converted
