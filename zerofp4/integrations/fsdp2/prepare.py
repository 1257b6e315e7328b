"""prepare: turns the weights of linear layers into FP32 masters that FSDP2 gathers in 4 bits."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zerofp4.cast import number_groups
from zerofp4.format import BLOCK, FourOverSix
from zerofp4.integrations.fsdp2.master import MasterShard
from zerofp4.integrations.fsdp2.state import register
from zerofp4.integrations.fsdp2.weight import Weight
from zerofp4.nn import ConversionReport, choose_weights, show_weights
from zerofp4.tensors import NVFP4Tensor, weight_columns

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")


def prepare(
    model: nn.Module,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    amax_groups: Sequence[Sequence[torch.Tensor]] | None = None,
    columnwise: bool | None = None,
    block: tuple[int, int] = (BLOCK, BLOCK),
    four_over_six: FourOverSix | None = None,
) -> ConversionReport:
    """Have fully_shard gather the weights of linear layers in NVFP4. Call it before fully_shard and before
    the optimizer is built; then call attach(model, optimizer).

    filter_fn: as of zerofp4.convert_model, which takes the same weights. The report says why others stay.
    amax_groups: lists of weights of the model, as they are now, that share one amax.
    columnwise: give layers of zerofp4.nn (no others) the transposed codes, made on each rank from the
        gathered ones. None: for 16x16 blocks on FP4 tensor cores, where their backward pass reads them.
    block: (16, 16), or (1, 16), which serving engines read: their scales are gathered, too.
    four_over_six: use the better of two scales for each block. Only with blocks of 1x16.

    Each weight becomes an FP32 master, which FSDP2 shards, the optimizer trains and state_dict() holds. It
    may be on the meta device, frozen, or, after parallelize_module, a DTensor: this rank's slice is a weight
    of its own then. FSDP2 gathers 4 bits. Modules see plain values or an NVFP4Tensor, as docs/fsdp2.md says,
    in the dtype of MixedPrecisionPolicy, or else the present one.

    Raises RuntimeError for a model that is sharded or wrapped already, ValueError for one that was converted,
    for amax groups of other weights, and for unsupported blocks and choices. Nothing has changed then.
    """
    columns = columnwise if weight_columns(block, columnwise) else False
    if four_over_six is not None and tuple(block) != (1, BLOCK):
        raise ValueError(
            f"four_over_six needs block (1, 16) here, got {tuple(block)}: fully_shard cuts between any rows, "
            "and whoever chooses a scale must have all of its block"
        )
    _check_model(model)
    report, chosen = choose_weights(model, filter_fn, tensor_parallel=True)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [each.parameter for each in chosen]
    names = [name_of[id(parameter)] for parameter in parameters]
    numbers = number_groups(parameters, amax_groups, names=names)
    groups: dict[int, list[str]] = {}
    for name, number in zip(names, numbers, strict=True):
        groups.setdefault(number, []).append(name)
    for each, parameter, name, number in zip(chosen, parameters, names, numbers, strict=True):
        converted, module, parameter_name = each
        takes_codes = getattr(module, "takes_nvfp4_weight", False)
        kind = parameter.dtype, takes_codes, takes_codes and columns, tuple(block), four_over_six
        weight = Weight(name, *kind)
        weight.amax_group = groups[number] if len(groups[number]) > 1 else None
        setattr(module, parameter_name, _as_master(parameter, weight))
        register(module, parameter_name, weight)
        report.converted.append(converted)
    show_weights()
    return report


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        called = f"module {name!r}" if name else "the model"
        kinds = [kind.__name__ for kind in type(module).__mro__]
        wrapper = next((kind for kind in _WRAPPERS if kind in kinds), None)
        if wrapper is not None:
            raise RuntimeError(
                f"model: {called} is a {wrapper}, which cannot gather in 4 bits: use fully_shard"
            )
        if isinstance(module, FSDPModule):
            raise RuntimeError(f"model: {called} is sharded already: call prepare before fully_shard")
        for parameter_name, parameter in module.named_parameters(recurse=False):
            local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            if isinstance(local, NVFP4Tensor | MasterShard):
                how = "prepared" if isinstance(local, MasterShard) else "converted to NVFP4"
                raise ValueError(f"model: {parameter_name} of {called} was {how} already")


def _as_master(parameter: nn.Parameter, weight: Weight) -> nn.Parameter:
    """A parameter with the same values in float32, and the attributes of the old one."""
    old = parameter.detach()
    local = old.to_local() if isinstance(old, DTensor) else old
    values = MasterShard(local.to(torch.float32, memory_format=torch.contiguous_format), weight)
    if isinstance(old, DTensor):
        options = {"run_check": False, "shape": old.shape, "stride": old.stride()}
        values = DTensor.from_local(values, old.device_mesh, old.placements, **options)
    master = nn.Parameter(values, parameter.requires_grad)
    vars(master).update({k: v for k, v in vars(parameter).items() if k not in ("_is_param", *vars(values))})
    return master
