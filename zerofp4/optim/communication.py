"""Communication: how gradients and weights travel between the ranks of a ZeroFP4Optimizer."""

import dataclasses
import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from zerofp4.format import WEIGHT_DTYPES

TRANSPORTS = ("auto", "collective", "peer")
REDUCTIONS = ("ordered", "reduce_scatter")

_CHOICES = {
    "transport": TRANSPORTS,
    "reduction": REDUCTIONS,
    "overlap": (None, "backward", "forward", "both", "update"),
    "gradient_dtype": (None, torch.float32),
    "gradient_wire": (None, *WEIGHT_DTYPES),
}

_EXCLUDED = (
    ("hosts", "overlap='backward'"),
    ("hosts", "overlap='update'"),
    ("hosts", "transport='peer'"),  # with "auto" the ranks of each host share memory, too
    ("reduction='reduce_scatter'", "hosts"),  # the backend decides how its reduce-scatter crosses hosts
    ("reduction='reduce_scatter'", "transport='peer'"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communication:
    """How gradients and weights travel. The same on every rank.

    transport: "peer" shares memory between the GPUs of one host, "collective" uses NCCL or gloo. "auto" is
        peer where that can be; where ranks span hosts, gradients are averaged on each host first.
    reduction: "ordered" adds up gradients in FP32 and in a fixed order: of ranks, or by host.
        "reduce_scatter" uses the backend's, which adds in the dtype that is sent. All ranks get the same
        result, which may differ between world sizes.
    overlap: "backward" sends gradients during backward passes, "forward" lets weights arrive during the next
        forward pass, "both", or None. "update" has backward passes update each weight as soon as its gradient
        is there, and free the gradient (page on the optimizer).
    bucket_mb: megabytes of gradients that are sent at once; None is a 14th of all, from 256 to 1024.
    gradient_dtype: torch.float32 to add up micro-batches in FP32; None is the parameter's dtype.
    gradient_wire: what gradients are rounded to before they are sent; None is the dtype that they have.
    hosts: a DeviceMesh of hosts and the ranks of each; gradients are averaged on each host first.

    Raises ValueError or TypeError for options that are not among these, or exclude each other.
    """

    transport: str = "auto"
    reduction: str = "ordered"
    overlap: str | None = None
    bucket_mb: float | None = None
    gradient_dtype: torch.dtype | None = None
    gradient_wire: torch.dtype | None = None
    hosts: DeviceMesh | None = None

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        mb, hosts = self.bucket_mb, self.hosts
        if mb is not None:
            if isinstance(mb, bool) or not isinstance(mb, int | float) or not 0 < mb < math.inf:
                raise ValueError(f"bucket_mb must be a positive number of megabytes, got {mb!r}")
            object.__setattr__(self, "bucket_mb", float(mb))  # 1 and 1.0 are the same
        if not (hosts is None or isinstance(hosts, DeviceMesh)):
            raise TypeError(f"hosts must be None or a DeviceMesh, got {type(hosts).__name__}")
        given = {
            "hosts": hosts is not None and 1 not in hosts.mesh.shape,
            "overlap='backward'": self.overlaps_backward,
            "overlap='update'": self.updates_early,
            "reduction='reduce_scatter'": not self.is_ordered,
            "transport='peer'": self.transport == "peer",
        }
        for option, other in _EXCLUDED:
            if given[option] and given[other]:
                raise ValueError(f"{option} is not supported with {other}")

    @property
    def is_ordered(self) -> bool:
        """Whether gradients are added up in FP32 and in a fixed order, of ranks or by host."""
        return self.reduction == "ordered"

    @property
    def overlaps_backward(self) -> bool:
        """Whether gradients start to travel during backward passes."""
        return self.overlap in ("backward", "both")

    @property
    def overlaps_forward(self) -> bool:
        """Whether the all-gather of weights may run into the next forward pass."""
        return self.overlap in ("forward", "both")

    @property
    def sends_early(self) -> bool:
        """Whether backward passes send gradients, or step() does."""
        return self.overlaps_backward or self.updates_early

    @property
    def updates_early(self) -> bool:
        """Whether backward passes update masters and weights."""
        return self.overlap == "update"

    def compared(self) -> list[tuple[str, Any]]:
        """Names and values that ranks must have in common. Ranks compare the shape of hosts, not the mesh."""
        return [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "hosts"]
