"""What a ZeRO optimizer can and cannot be built over: every rule about its parameters stands here."""

import itertools
from collections.abc import Sequence

import torch

from zerofp4.cast import check_castable, number_groups
from zerofp4.engine import Updated, gradient_dtype
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.storage import called
from zerofp4.tensors import NVFP4Tensor


def parameter_name(g: int, i: int, group: dict) -> str:
    """How messages call a parameter: by its place and, if it came with one or convert_model gave it one, its
    name.
    """
    given = group.get("param_names")
    return called(f"param_groups[{g}]['params'][{i}]", group["params"][i], given[i] if given else None)


def parameter_names(param_groups: Sequence[dict]) -> list[str]:
    """How messages call the parameters, in their order."""
    return [
        parameter_name(g, i, group)
        for g, group in enumerate(param_groups)
        for i in range(len(group["params"]))
    ]


def check_parameters(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raises TypeError or ValueError for parameters that one rank can see are wrong; changes nothing."""
    seen: dict[int, str] = {}
    for parameter, name in zip(parameters, names, strict=True):
        if id(parameter) in seen:
            raise ValueError(f"{name} is the same parameter as {seen[id(parameter)]}")
        seen[id(parameter)] = name
        if hasattr(parameter, "to_local"):
            raise TypeError(
                f"{name} is a DTensor, and ZeroFP4Optimizer shards masters of whole parameters: leave out "
                "fully_shard, or call zerofp4.integrations.fsdp2.prepare(model) before it and attach(model, "
                "optimizer) with an optimizer of torch.optim"
            )
        if parameter.layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got layout {parameter.layout}")
        if parameter.dtype not in WEIGHT_DTYPES:
            raise TypeError(f"{name} must have one of the dtypes {WEIGHT_DTYPES}, got {parameter.dtype}")
        if parameter.device.type == "meta":
            raise ValueError(f"{name} is on the meta device: give it storage first")
        if parameter.device != parameters[0].device:
            raise ValueError(f"{name} is on {parameter.device}, {names[0]} on {parameters[0].device}")
        if isinstance(parameter, NVFP4Tensor) and parameter.requires_grad:
            check_castable(name, parameter.record)
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError("params: no parameter requires a gradient")
    check_distinct_storage(parameters, names)


def amax_group_numbers(
    parameters: Sequence[torch.Tensor], amax_groups: Sequence[Sequence[torch.Tensor]] | None
) -> list[int]:
    """By parameter, the number of the amax group that it is in, alone or with others. Raises TypeError or
    ValueError for groups that a cast plan of all NVFP4 weights would refuse.
    """
    weights = [i for i, p in enumerate(parameters) if isinstance(p, NVFP4Tensor)]
    numbers = list(range(len(weights), len(weights) + len(parameters)))
    grouped = number_groups([parameters[i].record for i in weights], amax_groups)
    for i, number in zip(weights, grouped, strict=True):
        numbers[i] = number
    return numbers


def check_distinct_storage(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Two parameters over the same memory would be torn apart when they become views of the flat buffers."""
    spans = []
    for parameter, name in zip(parameters, names, strict=True):
        data = parameter.rowwise_data if isinstance(parameter, NVFP4Tensor) else parameter
        if data is not None and data.numel():
            spans.append((data.data_ptr(), data.data_ptr() + data.numel() * data.element_size(), name))
    for (_, end, first), (start, _, second) in itertools.pairwise(sorted(spans)):
        if start < end:
            raise ValueError(f"{first} and {second} share memory: pass tied weights as one parameter")


def kind_of(parameter: torch.Tensor) -> str:
    """What a parameter is, whatever its storage and its values."""
    dtype = "nvfp4 " * isinstance(parameter, NVFP4Tensor) + str(parameter.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(parameter.shape)}"


def describe(
    param_groups: Sequence[dict], optimizers: Sequence[str], updated: Sequence[Updated]
) -> list[str]:
    """By parameter, what ranks that share it must have in common.

    optimizers: by group, the name of the class. updated: by trainable parameter.
    """
    lines, how = [], iter(updated)
    for g, group in enumerate(param_groups):
        for p in group["params"]:
            frozen = "" if p.requires_grad else ", frozen"
            dtype = gradient_dtype(p)
            gradients = "" if dtype == p.dtype else f", gradients {dtype}"
            work = next(how).work if p.requires_grad else None
            whole = "" if work is None else f", updated whole in {work} operations"
            of = "" if optimizers[g] == optimizers[0] else f" of {optimizers[g]}"
            lines.append(f"{kind_of(p)} in group {g}{of}{frozen}{gradients}{whole}")
    return lines
