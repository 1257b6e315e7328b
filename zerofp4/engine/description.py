"""What a step of many ranks does with its buckets, for people who ask."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.cast import CastPlan
from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.transport import Transport

HIGH_PRIORITY = (
    "NCCL's stream has the priority of the others, so that what travels waits until kernels that were queued "
    "before it have begun all of their blocks; zerofp4.launch.init_process_group makes a group with one "
    "of high priority, as pg_options=ProcessGroupNCCL.Options(is_high_priority_stream=True) does"
)


def describe_buckets(
    buffers: Sequence[FlatBuffer],
    plans: Sequence[CastPlan | None],
    transport: Transport,
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """buckets: what lies in each, and the bytes that this rank sends for it in a step. bytes_sent: those of
    all of them by phase. advice: what would make it faster, if anything.
    """
    buckets = []
    for b, (buffer, plan) in enumerate(zip(buffers, plans, strict=True)):
        others = buffer.world_size - 1
        amaxes = 0 if plan is None else plan.wire.nbytes
        buckets.append(
            {
                "kind": buffer.kind,
                "parameters": len(buffer.parameters),
                "ranks": buffer.world_size,
                "replicas": buffer.replica_count,
                "elements": sum(parameter.numel() for parameter in buffer.parameters),
                "whole_matrices": buffer.is_of_whole_matrices,
                "gradients_travel_as": str(transport.dtypes[b]).removeprefix("torch."),
                "gradients": transport.nbytes_sent(b),
                # A ring sends every byte twice, but for the share of a rank.
                "amaxes": 2 * others * amaxes // buffer.world_size,
                "weights": others * buffer.weights.nbytes // buffer.world_size,
            }
        )
    phases = ("gradients", "amaxes", "weights")
    return {
        "buckets": buckets,
        "bytes_sent": {phase: sum(bucket[phase] for bucket in buckets) for phase in phases},
        "advice": _advice(buffers[0].device, group),
    }


def _advice(device: torch.device, group: dist.ProcessGroup | None) -> str | None:
    if group is None or device.type != "cuda" or dist.get_world_size(group) == 1:
        return None
    options = getattr(group._get_backend(device), "options", None)
    return None if getattr(options, "is_high_priority_stream", True) else HIGH_PRIORITY
