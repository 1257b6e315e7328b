"""Assertions for code that uses zerofp4, and the check that a live model holds the bytes that it has to hold:
those of zerofp4.reference, the specification in plain PyTorch. Import it by name: training needs none of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from zerofp4 import reference
from zerofp4.distributed import Stage, exchange, resolve_group
from zerofp4.tensors import NVFP4Tensor

__all__ = [
    "VerificationError",
    "assert_bytes_equal",
    "first_difference",
    "verify_model",
    "verify_weights",
    "weight_buffers",
]

_SHOWN = 20  # differences that a VerificationError lists
_VERIFYING = "verifying weights"  # the stage of a CollectiveError


class VerificationError(RuntimeError):
    """Weights of a live model are not the bytes they have to be; the message says which, on which rank."""


# Two tensors


def first_difference(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """What differs between two tensors, if anything does.

    Bytes are compared, not values: -0.0 differs from 0.0, and a NaN equals itself.

    actual, expected: plain tensors of any dtype, on any device.

    Returns None if dtype, shape and every byte agree. Else a phrase that counts the elements that differ and
    names the first, its coordinates, both bytes and, unless it is a plain byte, both values.
    """
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    actual, expected = actual.detach(), expected.detach()
    if actual.device != expected.device:
        actual, expected = actual.cpu(), expected.cpu()
    found, wanted = _element_bytes(actual), _element_bytes(expected)
    if found.equal(wanted):
        return None
    wrong = (found != wanted).any(dim=1).nonzero().flatten()
    first = int(wrong[0])
    where = [int(index) for index in torch.unravel_index(wrong[0], actual.shape)]
    shown = [_show(tensor, raw, first) for tensor, raw in ((actual, found), (expected, wanted))]
    return (
        f"{len(wrong)} of {len(found)} elements differ, the first at {where}: {shown[0]}, expected {shown[1]}"
    )


def assert_bytes_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Assert that two tensors have the same dtype, shape and bytes.

    what: what they are. Raises AssertionError with it and with what first_difference() says.
    """
    difference = first_difference(actual, expected)
    assert difference is None, f"{what}: {difference}"


def _element_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [numel, itemsize]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).reshape(-1, tensor.element_size())


def _show(tensor: torch.Tensor, raw: torch.Tensor, index: int) -> str:
    """The bytes of an element as one hexadecimal number and, unless it is a plain byte, its value."""
    text = "0x" + bytes(raw[index].flip(0).tolist()).hex()
    if tensor.dtype == torch.uint8:
        return text
    value = tensor.contiguous().reshape(-1)[index]
    return f"{text} ({value.to(torch.float64).item() if tensor.is_floating_point() else value.item()})"


# A live model


def weight_buffers(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every buffer of an NVFP4 weight by name; of any other tensor {"data": the weight}."""
    if isinstance(weight, NVFP4Tensor):
        return dict(weight.record.buffers())
    return {"data": weight.detach()}


def verify_model(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, process_group: dist.ProcessGroup | None = None
) -> dict[str, int]:
    """Check every trained weight of a model against the FP32 masters that its optimizer shards. Collective.

    verify_weights() of the parameters of `optimizer`, by their names in `model`, and its gathered masters.
    For checks: the whole masters are in memory meanwhile.

    model: the live model.
    optimizer: a ZeroFP4Optimizer, or any optimizer with `param_groups` and `gathered_masters()`.
    process_group: the ranks that hold the same weights; the default group if None.

    Returns and raises as verify_weights(); ValueError for an optimizer with a parameter that `model` does not
    name.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for options in optimizer.param_groups for parameter in options["params"]]
    for i, parameter in enumerate(parameters):
        if id(parameter) not in names:
            shape = tuple(parameter.shape)
            raise ValueError(f"optimizer: its parameter {i}, {shape}, is none of the model's")
    weights = {names[id(parameter)]: parameter for parameter in parameters}
    return verify_weights(weights, optimizer.gathered_masters(), process_group=process_group)


def verify_weights(
    weights: Mapping[str, torch.Tensor],
    masters: Sequence[torch.Tensor | None],
    *,
    amax_groups: Sequence[Sequence[torch.Tensor]] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, int]:
    """Check that all ranks hold the same bytes, those that the specification makes of the FP32 masters.

    An NVFP4 weight has to be, in every buffer it keeps, reference.quantize() of its whole FP32 master rounded
    to the weight's dtype; any other weight that rounded master itself. Collective where there is a process
    group.

    weights: the weights by name, the same on every rank.
    masters: for each the whole FP32 master, of its shape or flat; None for a weight that is only compared
        over the ranks.
    amax_groups: lists of NVFP4 weights among `weights` that share one amax.
    process_group: the ranks that hold the same weights; the default group if None.

    Returns {"nvfp4_weights": how many there were, "other_weights": the same of all others}. Raises
    VerificationError, the same on every rank, if a byte is wrong on any. The message names the rank, the
    weight, the buffer, the element, and both bytes.
    """
    found = _differences_from_masters(weights, masters, amax_groups or [])
    group = resolve_group(process_group)
    if group is not None:
        found += _differences_from_the_first_rank(weights, group)
        mine = [f"rank {dist.get_rank()}: {line}" for line in found]
        found = [line for lines in exchange(mine, None, group, _VERIFYING) for line in lines]
    if found:
        more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        shown = "\n  ".join(found[:_SHOWN] + more)
        raise VerificationError(f"{len(found)} buffers are not what they have to be:\n  {shown}")
    nvfp4 = sum(isinstance(weight, NVFP4Tensor) for weight in weights.values())
    return {"nvfp4_weights": nvfp4, "other_weights": len(weights) - nvfp4}


def _differences_from_masters(weights: Mapping, masters: Sequence, amax_groups: Sequence) -> list[str]:
    """What this rank holds otherwise than the specification makes of the whole FP32 masters."""
    rounded = {
        id(weight): master.detach().to(weight.device, weight.dtype).view(weight.shape)
        for weight, master in zip(weights.values(), masters, strict=True)
        if master is not None
    }
    shared = {}
    for members in amax_groups:
        amax = torch.stack([_amaxes(weight, rounded[id(weight)]) for weight in members]).amax(dim=0)
        shared |= {id(weight): amax for weight in members}
    found = []
    for name, weight in weights.items():
        if id(weight) not in rounded:
            continue
        expected = _expected_buffers(weight, rounded[id(weight)], shared.get(id(weight)))
        for buffer, value in weight_buffers(weight).items():
            if what := first_difference(value, expected[buffer]):
                found.append(f"{name}.{buffer} is not its master's cast: {what}")
    return found


def _amaxes(weight: NVFP4Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """float32 [1], or [E] of a stack of matrices."""
    matrices = rounded if weight.record.experts is not None else [rounded]
    return torch.cat([reference.tensor_amax(matrix) for matrix in matrices])


def _expected_buffers(
    weight: torch.Tensor, rounded: torch.Tensor, amax: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The buffers of a weight as the specification makes them."""
    if not isinstance(weight, NVFP4Tensor):
        return {"data": rounded}
    record, options = weight.record, {"block_rows": weight.block[0], "four_over_six": weight.four_over_six}
    if record.experts is None:
        made = reference.quantize(rounded.view(record.matrix), amax=amax, **options)
    else:
        made = reference.quantize_experts(rounded, amax, **options)
    return made.buffers(record.matrix, weight.block[0])


def _differences_from_the_first_rank(weights: Mapping, group: dist.ProcessGroup) -> list[str]:
    """Collective: what this rank holds otherwise than the first of the group."""
    first = dist.get_global_rank(group, 0)
    buffers = [
        (f"{name}.{buffer}", value)
        for name, weight in weights.items()
        for buffer, value in weight_buffers(weight).items()
    ]
    # Agreed first: a broadcast of another size than the others' hangs, or writes past an end.
    mine = [(name, value.dtype, tuple(value.shape)) for name, value in buffers]
    described = exchange(mine, None, group, _VERIFYING)
    if any(theirs != mine for theirs in described):
        other = [buffer for buffer in mine if buffer not in described[0]]
        return [f"{name} is {dtype} {shape} here and not on rank {first}" for name, dtype, shape in other]
    found = []
    for name, value in buffers:
        theirs = value.contiguous().clone()
        if theirs.numel():
            with Stage(_VERIFYING, group):
                dist.broadcast(theirs.view(-1).view(torch.uint8), src=first, group=group)
        if what := first_difference(value, theirs):
            found.append(f"{name} differs from rank {first}: {what}")
    return found
