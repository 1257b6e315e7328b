"""What overlap and accumulate may be, and what cannot be had together with them, or with hosts."""

from collections.abc import Sequence

import torch.distributed as dist

from zerofp4.engine import Hosts, Sharding

OVERLAPS = (None, "backward", "forward", "both")
"""What overlap may be."""
ACCUMULATIONS = ("local", "sharded")
"""What accumulate may be."""


def check_overlap(overlap: str | None, accumulate: str) -> None:
    """Raises ValueError for values that there are not."""
    if overlap not in OVERLAPS:
        raise ValueError(f"overlap must be one of {OVERLAPS}, got {overlap!r}")
    if accumulate not in ACCUMULATIONS:
        raise ValueError(f"accumulate must be one of {ACCUMULATIONS}, got {accumulate!r}")


def overlaps_backward(overlap: str | None) -> bool:
    """Whether gradients begin to travel in backward passes."""
    return overlap in ("backward", "both")


def overlaps_forward(overlap: str | None) -> bool:
    """Whether the gather of weights may run into the next forward pass."""
    return overlap in ("forward", "both")


def travel_before_step(overlap: str | None, accumulate: str) -> bool:
    """Whether gradients do."""
    return overlaps_backward(overlap) or accumulate == "sharded"


def check_can_overlap(
    overlap: str | None,
    accumulate: str,
    transport: str,
    groups: Sequence[dist.ProcessGroup | None],
    group: dist.ProcessGroup | None,
) -> None:
    """Raises ValueError where gradients cannot travel before a step. groups: of the parameters."""
    if not travel_before_step(overlap, accumulate):
        return
    asked = f"overlap={overlap!r}, accumulate={accumulate!r}"
    if (transport, accumulate) == ("peer", "sharded"):
        raise ValueError(
            f'{asked} is not supported with transport="peer": what ranks write into memory that they share '
            'is added up in step(), once; accumulate="local" adds up micro-batches in p.grad, and '
            'transport="collective" takes "sharded"'
        )
    if any(other is not group for other in groups):
        raise ValueError(f"{asked} is not supported where parameter groups name a process_group of their own")


def check_hosts(
    hosts: Hosts | None,
    transport: str,
    overlap: str | None,
    accumulate: str,
    shardings: Sequence[Sharding],
    group: dist.ProcessGroup | None,
) -> None:
    """Raises ValueError where gradients cannot be added up host by host. shardings: of the parameters."""
    if hosts is None:
        return
    if transport == "peer":
        raise ValueError(
            'hosts are not for transport="peer", which is of one host: with "collective" or "auto" the ranks '
            "of each share memory, too"
        )
    if travel_before_step(overlap, accumulate):
        raise ValueError(f"hosts are not supported with overlap={overlap!r}, accumulate={accumulate!r}")
    if any(sharding.group is not group or sharding.replicas for sharding in shardings):
        raise ValueError("hosts are not supported where parameter groups name a process_group of their own")
