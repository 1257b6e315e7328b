"""Checks of the arguments of functions that quantize."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zerofp4 import ops
from zerofp4.format import BLOCK, WEIGHT_DTYPES
from zerofp4.storage import check_block, check_plain
from zerofp4.tensors.quantized_tensor import QuantizedTensor


def detached(name: str, value: torch.Tensor | None) -> torch.Tensor | None:
    """An optional tensor argument, without its autograd history."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.float32 tensor, got {type(value).__name__}")
    _check_plain(name, value)
    return value.detach()


def check_values(x: torch.Tensor) -> None:
    """Raises TypeError unless x can be quantized, RuntimeError if its storage was freed."""
    if not isinstance(x, torch.Tensor) or isinstance(x, QuantizedTensor):
        raise TypeError(f"x must be a plain torch.Tensor, got {type(x).__name__}")
    if x.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"x must have one of the dtypes {WEIGHT_DTYPES}, got {x.dtype}")
    _check_plain("x", x)


def _check_plain(name: str, x: torch.Tensor) -> None:
    """Leaves traced, transformed and fake tensors to the operators."""
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return
    if torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.maybe_current_level() is None:
        check_plain(name, x)


def kernel_input(x: torch.Tensor) -> torch.Tensor:
    """x detached, contiguous, and with any lazy negation resolved."""
    if torch.compiler.is_compiling():
        return x.detach().contiguous()
    if x.requires_grad:
        x = x.detach()
    return x.resolve_neg().contiguous()


def weight_columns(block: tuple[int, int], columnwise: bool | None) -> bool:
    """Whether a weight to cast into has a columnwise copy. Raises ValueError if a cast cannot write it."""
    check_block(block)
    has_tiles = tuple(block) == (BLOCK, BLOCK)
    if columnwise and not has_tiles:
        raise ValueError(
            f"columnwise=True needs block (16, 16): in block {tuple(block)} the columnwise copy of a weight "
            "does not follow from its rows"
        )
    return has_tiles if columnwise is None else columnwise


def reads_columns(block: tuple[int, int], device: torch.device) -> bool:
    """Whether layers read a columnwise copy of a weight: of 16x16 blocks, on FP4 tensor cores."""
    return tuple(block) == (BLOCK, BLOCK) and ops.has_fp4_tensor_cores(device)


def check_out(
    out: QuantizedTensor,
    kind: type[QuantizedTensor],
    x: torch.Tensor,
    sides: Sequence[str],
    scale_layouts: Sequence[str],
    **options: Any,
) -> None:
    """Raises TypeError or ValueError unless x can be quantized into these sides of `out`."""
    if not isinstance(out, kind):
        raise TypeError(f"out must be an {kind.__name__}, got {type(out).__name__}")
    for rule in ("shape", "dtype", "device"):
        # The tensor's own go through __torch_function__, which costs as much as a kernel.
        if getattr(out.record, rule) != getattr(x, rule):
            raise ValueError(f"out must have x's {rule} {getattr(x, rule)}, got {getattr(out, rule)}")
    for name, wanted in options.items():
        if getattr(out.record, name) != wanted:
            raise ValueError(f"out must have {name} {wanted}, got {getattr(out.record, name)}")
    for side in sides:
        copy = getattr(out.record, side)
        for layout in scale_layouts:
            if copy is None or layout not in copy.scale_places:
                raise ValueError(f"out must have {side} scales in the {layout} layout, got {out}")
    out.record.check_memory("out")


def check_generator(generator: torch.Generator | None, stochastic: bool) -> None:
    """Raises ValueError or TypeError unless it is None, or a generator for stochastic rounding."""
    if generator is not None and not stochastic:
        raise ValueError("generator is for stochastic rounding, but stochastic_rounding is False")
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
