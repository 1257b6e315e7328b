"""convert_model for Megatron's models, whose parallel linear layers are no nn.Linear."""

from collections import Counter

from torch import nn

from zerofp4.integrations.megatron.hook import is_installed
from zerofp4.nn import ConversionReport, FilterFn, primary_parameter, why_not_quantized


def convert_model(
    model: nn.Module, filter_fn: FilterFn | None = None, *, columnwise: bool = False
) -> ConversionReport:
    """Replace the weights of a Megatron model's linear layers, in place, by NVFP4 parameters.

    filter_fn: filter_fn(module, name) says whether to convert. The output layer is converted only with one.
    columnwise: keep the transposed copy, too. Megatron's own layers dequantize the weight and do not read it.

    Converts the weights of ColumnParallelLinear, RowParallelLinear and nn.Linear with two even sizes that are
    not shared. The new parameters have the attributes that Megatron set on the old (tensor_model_parallel,
    allreduce, sequence_parallel, ...), and their values as get_high_precision_init_val() until the masters
    are made. The report says why any other parameter with two dimensions or more was left.

    Call it after install(), on every rank alike, before DistributedDataParallel lays the parameters out.
    Otherwise, and for a weight on the meta device, it raises RuntimeError before anything is changed.
    """
    if not is_installed():
        raise RuntimeError("call zerofp4.integrations.megatron.install() first: Megatron would not cast them")
    report, chosen = ConversionReport(), []
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    total = sum(parameter.numel() for parameter in model.parameters())
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2:
                continue
            full = f"{module_name}.{name}" if module_name else name
            report.shares[full] = parameter.numel() / total
            reason = _why_not(module, module_name, name, parameter, uses[id(parameter)] > 1, filter_fn)
            if reason is not None:
                report.skipped[full] = reason
            elif parameter.is_meta:
                raise RuntimeError(f"model: {full!r} is on the meta device: give it values first")
            elif hasattr(parameter, "main_grad"):
                raise RuntimeError(
                    f"model: {full!r} is in a buffer of DistributedDataParallel: convert it before that"
                )
            else:
                chosen.append((module_name, module, parameter))
    for module_name, module, parameter in chosen:
        module.weight = primary_parameter(parameter, module_name, columnwise)
        report.converted.append(module_name)
    return report


def _why_not(
    module: nn.Module,
    module_name: str,
    name: str,
    parameter: nn.Parameter,
    is_shared: bool,
    filter_fn: FilterFn | None,
) -> str | None:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    if name != "weight" or not isinstance(module, ColumnParallelLinear | RowParallelLinear | nn.Linear):
        return f"it is not the weight of a linear layer, but of {type(module).__name__}"
    reason = why_not_quantized(parameter)
    if reason is not None:
        return reason
    if is_shared or getattr(parameter, "shared_embedding", False):
        return "it is shared"
    if filter_fn is not None:
        return None if filter_fn(module, module_name) else "filter_fn is false for it"
    if getattr(parameter, "is_embedding_or_output_parameter", False):
        return "it is the output layer, which is converted only where filter_fn is true for it"
    return None
