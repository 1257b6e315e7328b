"""What gradients are on their way between ranks, and how many of them travel at once."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerofp4.format import WEIGHT_DTYPES

BUCKETS = 14
BUCKET_MB = 256.0, 1024.0
"""A model's gradients are cut into so many buckets, of at least and at most so many megabytes as they travel,
all ranks' parts together. On two H200s a bucket costs the host half a millisecond, in which 150 MB are
reduced, updated and published: smaller ones keep the device waiting, and in 64 of 256 MB the step of an 8B
model took a quarter longer than in 14 of 1024 MB.
"""


class Wire(NamedTuple):
    """How gradients travel.

    dtype: what they are rounded to before they are added; None is their own, as their parameters have it when
    the optimizer is built. bucket_mb: megabytes of one bucket, all ranks' parts together. made_in: the dtype
    of all gradients; None is what autograd makes them.
    """

    dtype: torch.dtype | None
    bucket_mb: float
    made_in: torch.dtype | None = None

    def dtype_of(self, parameters: list[torch.Tensor]) -> torch.dtype:
        """That of the gradients of all these parameters, or float32 which holds the values of all."""
        dtypes = self._made_in(parameters)
        return self.dtype or (dtypes.pop() if len(dtypes) == 1 else torch.float32)

    def keeps(self, parameters: list[torch.Tensor]) -> bool:
        """Whether the gradients of all these travel as autograd makes them."""
        return self._made_in(parameters) == {self.dtype_of(parameters)}

    def _made_in(self, parameters: list[torch.Tensor]) -> set[torch.dtype]:
        return {self.made_in or gradient_dtype(parameter) for parameter in parameters}

    def nbytes(self, parameter: torch.Tensor) -> int:
        """Of its gradient on its way, in a bucket where all gradients have its dtype."""
        return parameter.numel() * self.dtype_of([parameter]).itemsize

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mb * 2**20)


def make_wire(
    gradient_wire: torch.dtype | None,
    bucket_mb: float | None,
    parameters: Sequence[torch.Tensor] = (),
    made_in: torch.dtype | None = None,
) -> Wire:
    """parameters: what a bucket_mb of None is made for. made_in: as in Wire.

    Raises ValueError for arguments that cannot be meant.
    """
    if gradient_wire is not None and gradient_wire not in WEIGHT_DTYPES:
        raise ValueError(f"gradient_wire must be None or one of {WEIGHT_DTYPES}, got {gradient_wire!r}")
    least, most = BUCKET_MB
    if bucket_mb is None:
        wire = Wire(gradient_wire, most, made_in)
        share = sum(map(wire.nbytes, parameters)) / 2**20 / BUCKETS
        return wire._replace(bucket_mb=min(max(share, least), most))
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, int | float) or not 0 < bucket_mb < math.inf:
        raise ValueError(f"bucket_mb must be a positive number of megabytes, got {bucket_mb!r}")
    return Wire(gradient_wire, float(bucket_mb), made_in)


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """What autograd makes its gradients: the parameter's own dtype, unless its grad_dtype says another or,
    being None, any; then float32.
    """
    with torch._C.DisableTorchFunctionSubclass():
        found = getattr(parameter, "grad_dtype", parameter.dtype)
    return found or torch.float32


def check_gradient_dtype(
    dtype: torch.dtype | None, parameters: Sequence[torch.Tensor], names: Sequence[str]
) -> None:
    """Raises ValueError unless gradients of these parameters can be made in `dtype`; changes nothing."""
    if dtype not in (None, torch.float32):
        raise ValueError(f"gradient_dtype must be None or torch.float32, got {dtype!r}")
    for parameter, name in zip(parameters, names, strict=True):
        if dtype in (None, gradient_dtype(parameter)):
            continue
        if not hasattr(torch.Tensor, "grad_dtype"):
            raise ValueError(
                f"gradient_dtype={dtype}: torch {torch.__version__} gives {name} gradients of its own dtype, "
                f"{parameter.dtype}; later versions have grad_dtype, torch 2.11 for one"
            )
        if parameter.grad is not None:
            raise ValueError(
                f"gradient_dtype={dtype}: {name} has a gradient of {parameter.grad.dtype} by now; call "
                "zero_grad() first"
            )


def set_gradient_dtype(dtype: torch.dtype | None, parameters: Sequence[torch.Tensor]) -> None:
    """From now on autograd makes and adds up the gradients of these parameters in `dtype`; None leaves them
    as they are.
    """
    for parameter in parameters:
        if dtype not in (None, gradient_dtype(parameter)):
            with torch._C.DisableTorchFunctionSubclass():
                parameter.grad_dtype = dtype
