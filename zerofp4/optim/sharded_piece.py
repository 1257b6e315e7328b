"""Pieces of tensors whose other elements are on other ranks, which gather them together."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from zerofp4.distributed import Stage
from zerofp4.optim.piece import Home, Piece


def make_piece(values: torch.Tensor, shape: Any, start: int, home: Home) -> Piece:
    """Where there are several ranks it is a DTensor in name, so that what asks for a full state dict gathers
    it.
    """
    kind = Piece if home.group() is None else _sharded_piece()
    return kind(values, shape, start, home, live=True)


class _AsPieces(TorchDispatchMode):
    """Under it every operator does with pieces what Piece has for it, whatever else they are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return Piece.__torch_dispatch__(func, types, args, kwargs)


@functools.cache
def _sharded_piece() -> type[Piece]:
    from torch.distributed.tensor import DTensor, Replicate

    class ShardedPiece(Piece, DTensor):
        """A piece of a tensor whose other elements are on other ranks.

        torch's full state dicts gather nothing but DTensors. Of one it has the mesh, redistribute() and
        full_tensor(); the placement says that whoever distributes a whole tensor leaves it whole, which the
        optimizer cuts.
        """

        device_mesh = property(lambda self: self.home.mesh)
        placements = property(lambda self: (Replicate(),))

        def redistribute(self, device_mesh=None, placements=None, **_):
            """Collective: the whole tensor on every rank, as a replicated DTensor."""
            return DTensor.from_local(gathered(self), self.home.mesh, [Replicate()], run_check=False)

        def to_local(self, *, grad_placements=None):
            return self

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            """torch 2.11 takes every DTensor past its __torch_dispatch__, to operators that know no pieces. A
            mode comes before both.
            """
            with _AsPieces(), torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    return ShardedPiece


def gathered(piece: Piece) -> torch.Tensor:
    """Collective: the whole tensor, in its shape, from the ranges that the ranks hold, wherever these lie."""
    group, own = piece.home.group(), piece.present()
    if group is None:
        return own.view(piece.shape).clone()
    flat = torch.zeros(piece.numel(), dtype=piece.dtype, device=piece.home.device)
    flat[piece.start : piece.shard.end] = own.to(flat.device)
    if flat.numel():
        # Of the bytes: the others' are 0, and what several ranks have is the same. A sum makes -0 a 0.
        with Stage("gathering a whole tensor", group):
            dist.all_reduce(flat.view(-1).view(torch.uint8), dist.ReduceOp.MAX, group=group)
    return flat.view(piece.shape)
