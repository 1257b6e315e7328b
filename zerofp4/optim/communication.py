"""Communication: how gradients and weights travel between the ranks of a ZeroFP4Optimizer."""

import dataclasses
import math
from typing import Any

import torch

from zerofp4.format import WEIGHT_DTYPES

TRANSPORTS = ("auto", "collective", "peer")
REDUCTIONS = (None, "ordered", "reduce_scatter")

_CHOICES = {
    "transport": TRANSPORTS,
    "reduction": REDUCTIONS,
    "overlap": (None, "backward", "forward", "both", "update"),
    "gradient_dtype": (None, torch.float32),
    "gradient_wire": (None, *WEIGHT_DTYPES),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communication:
    """How gradients and weights travel. The same on every rank.

    transport: "peer" shares memory between the GPUs of one host, "collective" uses NCCL or gloo. "auto" is
        peer if every rank can, and the reduction is ordered.
    reduction: "ordered" adds up gradients in FP32 and in rank order. "reduce_scatter" uses the backend's,
        which adds in the dtype that is sent: all ranks get the same result, which may differ between world
        sizes. None is "ordered" if each parameter is sharded over ranks of one host, else "reduce_scatter".
    overlap: "backward" sends gradients during backward passes, "forward" lets weights arrive during the next
        forward pass, "both", or None. "update" has backward passes update each weight as soon as its gradient
        is there, and free the gradient (page on the optimizer).
    bucket_mb: megabytes of gradients that are sent at once; None is a 14th of all, from 256 to 1024.
    gradient_dtype: torch.float32 to add up micro-batches in FP32; None is the parameter's dtype.
    gradient_wire: what gradients are rounded to before they are sent; None is the dtype that they have.

    Raises ValueError or TypeError for options that are not among these, or exclude each other.
    """

    transport: str = "auto"
    reduction: str | None = None
    overlap: str | None = None
    bucket_mb: float | None = None
    gradient_dtype: torch.dtype | None = None
    gradient_wire: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        mb = self.bucket_mb
        if mb is not None:
            if isinstance(mb, bool) or not isinstance(mb, int | float) or not 0 < mb < math.inf:
                raise ValueError(f"bucket_mb must be a positive number of megabytes, got {mb!r}")
            object.__setattr__(self, "bucket_mb", float(mb))  # 1 and 1.0 are the same
        if self.reduction == "reduce_scatter" and self.transport == "peer":
            raise ValueError("reduction='reduce_scatter' is not supported with transport='peer'")

    @property
    def overlaps_backward(self) -> bool:
        """Whether gradients start to travel during backward passes."""
        return self.overlap in ("backward", "both")

    @property
    def overlaps_forward(self) -> bool:
        """Whether the all-gather of weights may run into the next forward pass."""
        return self.overlap in ("forward", "both")

    @property
    def updates_early(self) -> bool:
        """Whether backward passes update masters and weights."""
        return self.overlap == "update"

    def compared(self) -> list[tuple[str, Any]]:
        """Names and values that ranks must have in common."""
        return [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
