"""Models, reductions and comparisons that the distributed tests of the ZeRO optimizer share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from cases import optim
from cases.optim import assert_all_equal, assert_weights_follow, make_gradients, make_parameters
from torch import nn

from distributed.cases import raised_by
from zerofp4 import NVFP4Tensor
from zerofp4.optim import ZeroFP4Optimizer
from zerofp4.optim.piece import Piece

# Sizes that cut parameters at slice boundaries, also inside rows and tiles.
SPECIFICATIONS = [
    ((34, 48), torch.bfloat16, True),
    ((7,), torch.bfloat16, False),
    ((16, 34), torch.float32, True),
    ((1000,), torch.float32, False),
    ((130, 66), torch.float16, True),
    ((300,), torch.float16, False),
    ((), torch.float32, False),
    ((30, 51), torch.bfloat16, False),
    ((5, 18, 34), torch.bfloat16, True),
]

WAYS = [
    ("AdamW", None, True),
    ("AdamW", 0.003, False),
    ("FusedAdamW", None, False),
    ("FusedAdamW", 0.003, True),
]
"""Of a step: the optimizer's name, bucket_mb, whether gradients are clipped. Each pair of them is there."""


def parameters_of(world, seed: int = 0) -> list[nn.Parameter]:
    return make_parameters(world.device, seed, SPECIFICATIONS)


def built(world, optimizer_class=torch.optim.AdamW, seed=None, **options):
    """As cases.optim.built, of the parameters here."""
    return optim.built(world.device, optimizer_class, seed, SPECIFICATIONS, **options)


def gradients_of(world, parameters, step):
    """Other ones on each rank; some ranks lack some, and some are not as they travel."""
    gradients = make_gradients(parameters, 10 * step + world.rank)
    for i in range(len(gradients)):
        if (i + step + world.rank) % 4 == 0 or (i + step) % 7 == 0:
            gradients[i] = None
    if gradients[0] is not None:
        gradients[0] = gradients[0].transpose(0, -1).contiguous().transpose(0, -1)
    return gradients


def model_bytes(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Every buffer of every weight, as bytes."""
    tensors = []
    for p in parameters:
        tensors += [b for _, b in p.record.buffers()] if isinstance(p, NVFP4Tensor) else [p.detach()]
    return [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]


def whole_state(parameters: list[nn.Parameter], optimizer: ZeroFP4Optimizer) -> list[torch.Tensor]:
    """Masters and moments, whole on every rank."""
    return _gathered([entry for p in parameters for _, entry in sorted(optimizer.state[p].items())])


def whole_masters(parameters: list[nn.Parameter], optimizer: ZeroFP4Optimizer) -> list[torch.Tensor]:
    """gathered_masters() of what is trained, faster."""
    masters = map(optimizer._saved.master, parameters)
    return _gathered([master for master in masters if master is not None])


def _gathered(pieces: list[Piece]) -> list[torch.Tensor]:
    """By one collective: on a CPU with several ranks these take the time of a test, and full_tensor() has one
    for each.
    """
    wholes = []
    for piece in pieces:
        whole = torch.zeros(piece.numel(), dtype=piece.dtype, device=piece.about.device)
        whole[piece.start : piece.shard.end] = piece.values.to(whole.device)
        wholes.append(whole.view(torch.uint8))
    for group in filter(None, dict.fromkeys(piece.about.ranks() for piece in pieces)):
        mine = [i for i, piece in enumerate(pieces) if piece.about.ranks() is group]
        together = torch.cat([wholes[i] for i in mine])
        dist.all_reduce(together, dist.ReduceOp.MAX, group=group)  # bytes of the other ranks are 0
        for i, whole in zip(mine, together.split([wholes[i].numel() for i in mine]), strict=True):
            wholes[i] = whole.clone()
    return [whole.view(piece.dtype).view(piece.shape) for piece, whole in zip(pieces, wholes, strict=True)]


def all_bytes(parameters: list[nn.Parameter], optimizer: ZeroFP4Optimizer) -> list[torch.Tensor]:
    """Of weights, masters and moments, whole on every rank."""
    return [*model_bytes(parameters), *whole_state(parameters, optimizer)]


def assert_same_on_all_ranks(tensors: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    mine = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    theirs = torch.cat(mine)
    dist.broadcast(theirs, group=group, group_src=0)
    assert_all_equal(mine, theirs.split([t.numel() for t in mine]), "tensor here and on rank 0")


def check_weights(parameters: list[nn.Parameter], optimizer: ZeroFP4Optimizer) -> None:
    assert_weights_follow(parameters, whole_masters(parameters, optimizer))
    assert_same_on_all_ranks(model_bytes(parameters), optimizer.process_group())


def averages(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of each the mean over the ranks in FP32: gathered, all at once, added in rank order, divided."""
    mine = torch.cat([tensor.float().reshape(-1) for tensor in tensors])
    total, *others = gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    for other in others:
        total += other
    ranks = torch.full_like(total[:1], dist.get_world_size())  # not by the rounded reciprocal
    means = (total / ranks).split([tensor.numel() for tensor in tensors])
    return [mean.view(tensor.shape) for mean, tensor in zip(means, tensors, strict=True)]


LATER = "of the last step, which no rank has taken"


@contextlib.contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    """Many training scripts set another default dtype of torch."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def raised_in_turn(optimizer: ZeroFP4Optimizer, call: Callable) -> BaseException | None:
    """What a collective call raises on this rank. Where no host waits for an agreement, a rank without an
    error of its own hears in the next step, in which every rank raises.
    """
    error = raised_by(call)
    if optimizer._agreement.defers:
        later = raised_by(optimizer.step)
        if LATER not in str(later):  # the call was a clip_grad_norm_, whose own error that step raises
            error, later = error or later, raised_by(optimizer.step)
        assert LATER in str(later), repr(later)
        error = error or later
    return error


def raise_in_turn(optimizer: ZeroFP4Optimizer, call: Callable) -> None:
    """Raises what raised_in_turn() returns."""
    error = raised_in_turn(optimizer, call)
    try:
        if error is not None:
            raise error
    finally:
        del error  # else it is in a cycle with this frame
