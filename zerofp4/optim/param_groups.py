"""Parameter groups: what error messages call their parameters, and the options that ranks compare."""

import hashlib
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerofp4.storage import called

PROCESS_GROUPS = ("process_group", "replicated_over")
"""Entries of a parameter group that name a process group."""

MUST_BE_FINITE = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "alpha", "lr_decay", "rho")
"""Options of torch's classes that reach every master of a group."""

HASH_BITS = 48
"""A float64 holds a hash of this many bits exactly."""

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd factor, as an int64: products with it and with its powers stay distinct modulo 2**64."""


def parameter_name(g: int, i: int, group: dict) -> str:
    """What error messages call parameter i of group g: its position, and its name if it has one."""
    given = group.get("param_names")
    return called(f"param_groups[{g}]['params'][{i}]", group["params"][i], given[i] if given else None)


def parameter_names(param_groups: Sequence[dict]) -> list[str]:
    """What error messages call the parameters of all groups, in their order."""
    return [
        parameter_name(g, i, group)
        for g, group in enumerate(param_groups)
        for i in range(len(group["params"]))
    ]


def options(group: dict) -> dict:
    """The entries of a parameter group that the group of its masters has, too."""
    others = {"params", "param_names", *PROCESS_GROUPS}
    return {key: value for key, value in group.items() if key not in others}


def check_finite(param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for a NaN or Inf in MUST_BE_FINITE.

    Tensors on a GPU are not checked: the host would have to wait for them.
    """
    for g, group in enumerate(param_groups):
        for name in MUST_BE_FINITE:
            if not all(map(_may_be_finite, _items(group.get(name)))):
                raise ValueError(f"param_groups[{g}]['{name}'] must be finite, got {group[name]!r}")


def _may_be_finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type != "cpu" or bool(value.isfinite().all())
    return not isinstance(value, numbers.Real) or math.isfinite(value)


def host_options(param_groups: Sequence[dict], *, read_tensors: bool = False) -> list[tuple[str, str]]:
    """List the options that are numbers, tensors or lists of them: names and values as text, sorted by name.

    read_tensors: show the values of tensors, which waits for a GPU; otherwise their shapes.
    """
    found = []
    for name, value in _comparable(param_groups):
        texts = ", ".join(_text(item, read_tensors) for item in _items(value))
        found.append((name, f"({texts})" if isinstance(value, tuple | list) else texts))
    return found


def _text(value: Any, read_tensors: bool) -> str:
    if not isinstance(value, torch.Tensor):
        return str(float(value))
    return f"a tensor of {value.tolist() if read_tensors else tuple(value.shape)}"


def host_options_hash(param_groups: Sequence[dict]) -> int:
    """Hash host_options() to HASH_BITS."""
    digest = hashlib.sha256(repr(host_options(param_groups)).encode()).digest()
    return int.from_bytes(digest[: HASH_BITS // 8], "big")


def tensor_options_hash(param_groups: Sequence[dict], device: torch.device) -> torch.Tensor | None:
    """Hash the values of options that are tensors to HASH_BITS, on the device and without waiting for it.

    Returns float64 [], or None if no option is a tensor.
    """
    items = [item for _, value in _comparable(param_groups) for item in _items(value)]
    tensors = [item.detach() for item in items if isinstance(item, torch.Tensor)]
    if not tensors:
        return None
    values = torch.cat([t.to(device, torch.float64, non_blocking=True).reshape(-1) for t in tensors])
    words = (values + 0.0).view(torch.int64)  # -0.0 is 0.0
    factors = torch.full_like(words, _ODD).cumprod(0)  # modulo 2**64
    word = _mixed((_mixed(words) * factors).sum())
    return (word & ((1 << HASH_BITS) - 1)).double()


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Map int64 words one to one so that their low bits depend on all bits: those of 1.0 are all high, and a
    product alone moves bits up only.
    """
    words = (words ^ (words >> 32)) * _ODD
    return words ^ (words >> 29)


def _comparable(param_groups: Sequence[dict]) -> list[tuple[str, Any]]:
    """Names and values of the options that are numbers, tensors or lists of them, sorted by name."""
    found = {
        f"param_groups[{g}]['{name}']": value
        for g, group in enumerate(param_groups)
        for name, value in options(group).items()
        if all(isinstance(item, numbers.Real | torch.Tensor) for item in _items(value))
    }
    return [(name, found[name]) for name in sorted(found)]


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)
