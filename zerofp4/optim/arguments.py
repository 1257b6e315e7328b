"""What one rank checks of the arguments of ZeroFP4Optimizer, and tells the others."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerofp4.engine import (
    TRANSPORTS,
    Hosts,
    Sharding,
    Updated,
    Wire,
    check_gradient_dtype,
    make_wire,
)
from zerofp4.optim.build import (
    Announcement,
    amax_group_numbers,
    announce,
    check_can_overlap,
    check_hosts,
    check_overlap,
    check_parameters,
    describe,
)
from zerofp4.optim.gradients import check_policy
from zerofp4.optim.groups import Place, find_hosts, find_places
from zerofp4.optim.initial import HeldMaster, take_over
from zerofp4.optim.inner import (
    InnerClass,
    check_amax_groups,
    check_values,
    group_classes,
    how_updated,
    try_options,
    without_class,
)
from zerofp4.optim.param_groups import parameter_names
from zerofp4.tensors import NVFP4Tensor


class Arguments(NamedTuple):
    """The arguments of ZeroFP4Optimizer beside parameters and ranks."""

    optimizer_class: type[torch.optim.Optimizer]
    defaults: dict[str, Any]
    amax_groups: Sequence[Sequence[torch.Tensor]] | None
    transport: str
    hosts: dist.device_mesh.DeviceMesh | None
    gradient_dtype: torch.dtype | None
    gradient_wire: torch.dtype | None
    overlap: str | None
    accumulate: str
    bucket_mb: float | None
    whole_matrices: bool | None
    masters_from: Any
    on_nonfinite: str


class Checked(NamedTuple):
    """What a rank makes of its arguments alone."""

    parameters: list[torch.Tensor]
    names: list[str]
    """What messages call the parameters."""
    trainable: list[torch.Tensor]
    trainable_names: list[str]
    classes: list[InnerClass]
    """By parameter group."""
    defaults: dict[str, Any]
    """Options of the optimizer's own class."""
    updated: list[Updated]
    """By trainable parameter."""
    shardings: list[Sharding]
    """By trainable parameter."""
    places: list[Place]
    """By parameter group."""
    hosts: Hosts | None
    wire: Wire
    held: Mapping[int, HeldMaster]
    """Masters of an earlier optimizer."""
    announcement: Announcement


def check_arguments(
    param_groups: Sequence[dict], arguments: Arguments, group: dist.ProcessGroup | None
) -> Checked:
    """Raises TypeError or ValueError for what one rank can see is wrong; changes nothing."""
    check_policy(arguments.on_nonfinite)
    check_overlap(arguments.overlap, arguments.accumulate)
    if arguments.transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {TRANSPORTS}, got {arguments.transport!r}")
    classes = group_classes(
        param_groups, arguments.optimizer_class, arguments.whole_matrices, arguments.defaults
    )
    param_groups = [without_class(param_group) for param_group in param_groups]
    parameters = [p for param_group in param_groups for p in param_group["params"]]
    names = parameter_names(param_groups)
    check_parameters(parameters, names)
    pairs = [(p, name) for p, name in zip(parameters, names, strict=True) if p.requires_grad]
    trainable, trainable_names = [p for p, _ in pairs], [name for _, name in pairs]
    if arguments.amax_groups and not any(isinstance(p, NVFP4Tensor) for p in trainable):
        raise ValueError("amax_groups was given, but no NVFP4 weight of params requires a gradient")
    device = parameters[0].device
    tried = try_options(classes, param_groups, device)
    check_values(classes, param_groups, device)
    own = [one.defaults for one in tried if type(one) is arguments.optimizer_class]
    updated = how_updated(param_groups, classes, tried)
    amax_numbers = amax_group_numbers(trainable, arguments.amax_groups)
    check_amax_groups(amax_numbers, updated, trainable_names)
    check_gradient_dtype(arguments.gradient_dtype, trainable, trainable_names)
    places = find_places(param_groups, group)
    shardings = [
        place.sharding
        for param_group, place in zip(param_groups, places, strict=True)
        for p in param_group["params"]
        if p.requires_grad
    ]
    hosts = find_hosts(arguments.hosts, group)
    check_hosts(hosts, arguments.transport, arguments.overlap, arguments.accumulate, shardings, group)
    wire = make_wire(arguments.gradient_wire, arguments.bucket_mb, trainable, arguments.gradient_dtype)
    held = take_over(arguments.masters_from, trainable, trainable_names, group, shardings)
    groups = [sharding.group for sharding in shardings]
    check_can_overlap(arguments.overlap, arguments.accumulate, arguments.transport, groups, group)
    class_names = [inner.name for inner in classes]
    given = wire if arguments.bucket_mb is not None else wire._replace(bucket_mb=None)
    common = {
        "optimizer_class": " and ".join(dict.fromkeys(class_names)),
        "on_nonfinite": arguments.on_nonfinite,
        "transport": arguments.transport,
        "hosts": str(hosts and hosts.shape),
        "overlap and accumulate": f"{arguments.overlap} and {arguments.accumulate}",
        "gradient_dtype, gradient_wire and bucket_mb": str(given),
    }
    return Checked(
        parameters=parameters,
        names=names,
        trainable=trainable,
        trainable_names=trainable_names,
        classes=classes,
        defaults=own[0] if own else tried[0].defaults,
        updated=updated,
        shardings=shardings,
        places=places,
        hosts=hosts,
        wire=wire,
        held=held,
        announcement=announce(
            param_groups,
            names,
            describe(param_groups, class_names, updated),
            places,
            amax_numbers,
            held,
            common,
            wire.bucket_mb,
        ),
    )
