"""The options of parameter groups, as ranks compare them: in two words, one of them made on the device."""

import hashlib
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zerofp4.optim.inner import options

HASH_BITS = 48
"""A float64 word holds it exactly."""

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd factor as an int64: whatever is multiplied by it and its powers stays different."""


MUST_BE_FINITE = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "alpha", "lr_decay", "rho")
"""Options of torch's classes that reach every master of a group."""


def check_finite(param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError for a NaN or Inf in MUST_BE_FINITE. The value of a tensor on a GPU is not looked at,
    since the host would wait for it.
    """
    for g, group in enumerate(param_groups):
        for name in MUST_BE_FINITE:
            value = group.get(name)
            if not all(map(_may_be_finite, value if isinstance(value, tuple | list) else (value,))):
                raise ValueError(f"param_groups[{g}]['{name}'] must be finite, got {value!r}")


def _may_be_finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type != "cpu" or bool(value.isfinite().all())
    return not isinstance(value, numbers.Real) or math.isfinite(value)


def host_options(param_groups: Sequence[dict], *, read_tensors: bool = False) -> list[tuple[str, str]]:
    """The options of groups that are numbers, tensors or lists of them, by what messages call them, sorted.

    Of tensors only the shape is looked at, unless read_tensors: then their values, which waits for a GPU.
    """
    found = []
    for name, value in _comparable(param_groups):
        several = isinstance(value, tuple | list)
        shown = [_shown(v, read_tensors) for v in (value if several else (value,))]
        found.append((name, f"({', '.join(shown)})" if several else shown[0]))
    return sorted(found)


def host_options_hash(param_groups: Sequence[dict]) -> int:
    """HASH_BITS of host_options()."""
    digest = hashlib.sha256(repr(host_options(param_groups)).encode()).digest()
    return int.from_bytes(digest[: HASH_BITS // 8], "big")


def tensor_options_hash(param_groups: Sequence[dict], device: torch.device) -> torch.Tensor | None:
    """float64 [] on the device: HASH_BITS of the values of options that are tensors, wherever they are. None
    where there are none. Waits for nothing.
    """
    tensors = [
        tensor
        for _, value in sorted(_comparable(param_groups), key=lambda pair: pair[0])
        for tensor in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(tensor, torch.Tensor)
    ]
    if not tensors:
        return None
    values = [t.detach().to(device, torch.float64, non_blocking=True).reshape(-1) for t in tensors]
    words = (torch.cat(values) + 0.0).view(torch.int64)  # -0.0 is 0.0
    factors = torch.full_like(words, _ODD).cumprod(0)  # modulo 2**64
    word = _mixed((_mixed(words) * factors).sum())
    return (word & ((1 << HASH_BITS) - 1)).double()


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Other int64 words for other words, with every bit of them in the low ones: a float64 such as 1.0 has
    only high ones, which a product alone moves out.
    """
    words = (words ^ (words >> 32)) * _ODD
    return words ^ (words >> 29)


def _comparable(param_groups: Sequence[dict]) -> Iterator[tuple[str, Any]]:
    for g, group in enumerate(param_groups):
        for name, value in options(group).items():
            values = value if isinstance(value, tuple | list) else (value,)
            if all(isinstance(v, numbers.Real | torch.Tensor) for v in values):
                yield f"param_groups[{g}]['{name}']", value


def _shown(value: Any, read_tensors: bool) -> str:
    if not isinstance(value, torch.Tensor):
        return str(float(value))
    return f"a tensor of {value.tolist() if read_tensors else tuple(value.shape)}"
