"""Checks of a live model: every rank holds the same bytes, and they are the bytes of the specification."""

import torch
import torch.distributed as dist
from torch import nn

from zerofp4 import NVFP4Tensor, reference
from zerofp4.layout import as_matrix


class VerificationError(RuntimeError):
    """Weights of the live model are not the bytes they have to be; the message lists them."""


def buffers(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every buffer of a weight: codes, scales and amaxes of an NVFP4 weight, else the weight itself."""
    if not isinstance(weight, NVFP4Tensor):
        return {"data": weight.detach()}
    return dict(weight.record.buffers())


def expected_buffers(master: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same buffers as the specification makes them from the whole FP32 master."""
    rounded = master.to(weight.dtype).view(weight.shape)
    if not isinstance(weight, NVFP4Tensor):
        return {"data": rounded}
    rows, columns = as_matrix(weight.shape)
    block_rows = weight.block[0]
    quantized = reference.quantize(rounded.view(rows, columns), block_rows)
    expected = quantized._asdict()
    for side, shape in (("rowwise", (rows, columns)), ("columnwise", (columns, rows))):
        compact = expected[f"{side}_scale"]
        if compact is not None:
            expanded = reference.expand_scale(compact, *shape, block_rows)
            expected[f"{side}_scale_expanded"] = expanded
            expected[f"{side}_scale_swizzled"] = reference.swizzle_scale(expanded)
    return expected


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def difference(got: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """None for equal uint8 tensors, else how many bytes differ and which is the first."""
    if got.shape != wanted.shape:
        return f"{got.numel()} bytes in place of {wanted.numel()}"
    wrong = (got != wanted).nonzero()
    if not wrong.numel():
        return None
    first = int(wrong[0])
    values = f"{int(got[first])}, not {int(wanted[first])}"
    return f"{len(wrong)} of {got.numel()} bytes, the first at {first}: {values}"


def differences_from_rank_0(named: dict[str, nn.Parameter]) -> list[str]:
    """Collective: what this rank holds otherwise than rank 0."""
    found = []
    for name, weight in named.items():
        for buffer, value in buffers(weight).items():
            mine = as_bytes(value)
            theirs = mine.clone()
            dist.broadcast(theirs, src=0)
            if what := difference(mine, theirs):
                found.append(f"rank {dist.get_rank()}: {name}.{buffer} differs from rank 0 in {what}")
    return found


def differences_from_masters(named: dict[str, nn.Parameter], masters: list[torch.Tensor]) -> list[str]:
    """What this rank holds otherwise than the specification makes of the whole FP32 masters."""
    found = []
    for (name, weight), master in zip(named.items(), masters, strict=True):
        expected = expected_buffers(master.to(weight.device), weight)
        for buffer, value in buffers(weight).items():
            if what := difference(as_bytes(value), as_bytes(expected[buffer])):
                found.append(f"rank {dist.get_rank()}: {name}.{buffer} is not its master's cast: {what}")
    return found


def verify_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Collective: check every weight of the model on every rank, and say how many there were.

    All ranks hold the same bytes; an NVFP4 weight is reference.quantize() of its gathered FP32 master rounded
    to the weight's dtype, any other weight that rounded master itself. Every rank raises the same
    VerificationError.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    named = {names[id(parameter)]: parameter for parameter in parameters}
    found = differences_from_masters(named, optimizer.gathered_masters())
    found += differences_from_rank_0(named)
    per_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(per_rank, found)
    found = [line for lines in per_rank for line in lines]
    if found:
        shown = "\n  ".join(found[:20])
        raise VerificationError(f"{len(found)} buffers are not what they have to be:\n  {shown}")
    nvfp4 = sum(isinstance(parameter, NVFP4Tensor) for parameter in named.values())
    return {"nvfp4_weights": nvfp4, "other_weights": len(named) - nvfp4}
