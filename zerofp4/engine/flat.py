"""Flat buffers: parameters of one kind one after the other, cut into one equal slice per rank.

Every rank holds the model's weights whole, as views of a flat buffer. Of the FP32 masters and gradients a
rank holds its own slice, in the same layout. So each all-gather of weights is in place: a rank casts its
masters into its slice of the buffer, and the gather fills in the other slices.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerofp4.distributed import GroupReference, all_gather_slices, rank_and_size
from zerofp4.engine.peers import Peers
from zerofp4.format import BLOCK
from zerofp4.layout import ceil_div, round_up
from zerofp4.shard import equal_slices, intersect, whole_slices
from zerofp4.storage import Gate

ALIGNMENT = 256
"""Elements that every weight and every slice starts at a multiple of: 128 bytes of packed codes, so no byte
and no vector load of a kernel is shared by two weights or two ranks."""


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor whose storage holds nothing else.

    Whoever saves models takes tensors over one storage for tied weights, and leaves all but one out, or
    writes the whole storage for each. share_memory_() moves such a storage, and leaves other tensors there.
    """
    # torch exports tensors of the current device only, and in inference mode would give an inference tensor.
    with torch.inference_mode(False), torch.cuda.device_of(view):
        return torch.from_dlpack(view)


class Sharding(NamedTuple):
    """The ranks that a parameter is sharded over, and the ranks that hold replicas of it.

    group: each element is owned by one of its ranks; None for one rank alone.
    copy: if ranks outside of the group hold the same parameter, sharded in the same way, this rank's number
        among the owners of the same elements; else None.
    replicas: the owners of the same elements in other groups, and this rank: they average their gradients.
    """

    group: dist.ProcessGroup | None = None
    copy: int | None = None
    replicas: dist.ProcessGroup | None = None


class FlatBuffer:
    """A bucket: the layout of parameters of one kind, and this rank's slice of their FP32 masters and
    gradients.

    indices: the positions of the parameters among all trainable ones.
    owners: by parameter, the rank that owns all of it, in ascending order; None where parameters are cut
        wherever a slice ends.

    A subclass allocates `weights` and `masters` in allocate(). take_values() copies the parameters into
    `weights`, and bind() makes the parameters views of it.
    """

    kind: str
    """"nvfp4", or the name of a dtype."""
    weights: torch.Tensor
    """What the model computes with: [world_size * slice], in a storage that nothing else has."""
    masters: torch.Tensor
    """float32 [slice_numel]; what lies between two parameters is zero."""
    peers: Peers | None = None
    """The ranks, where they share memory: then the weights lie there."""
    halfway: tuple[int, int, int] | None = None
    """Where a cast may stop once, so that codes are sent while the rest is cast: the position of a parameter,
    its row, or its number of rows where that is behind it, and how many elements of `weights` are before it.
    """

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[torch.Tensor],
        sharding: Sharding = Sharding(),  # noqa: B008
        owners: Sequence[int] | None = None,
    ):
        self.indices, self.parameters = list(indices), list(parameters)
        self.device = self.parameters[0].device
        self.group, self.replicas = GroupReference(sharding.group), GroupReference(sharding.replicas)
        self.rank, self.world_size = rank_and_size(sharding.group)
        self.replica, self.replica_count = rank_and_size(sharding.replicas)
        self.is_counted = not sharding.copy
        """Whether a norm over all ranks counts this rank's elements, not those of another copy."""
        self.is_of_whole_matrices = owners is not None
        sizes = [parameter.numel() for parameter in self.parameters]
        if owners is None:
            self.offsets, self.slice_numel = equal_slices(sizes, self.world_size, ALIGNMENT)
        else:
            self.offsets, self.slice_numel = whole_slices(sizes, owners, self.world_size, ALIGNMENT)
        self.numel = self.world_size * self.slice_numel
        self.begin, end = self.rank * self.slice_numel, (self.rank + 1) * self.slice_numel
        self.shards = [intersect(o, n, self.begin, end) for o, n in zip(self.offsets, sizes, strict=True)]
        """By parameter, what this rank owns of it."""
        most = round_up(ceil_div(self.slice_numel, self.replica_count), ALIGNMENT)
        bounds = [min(r * most, self.slice_numel) for r in range(self.replica_count + 1)]
        self.parts = [slice(first, last) for first, last in itertools.pairwise(bounds)]
        """By replica, what it averages of a slice."""
        self.part = self.parts[self.replica]
        """What this rank averages of its slice: all of it where there are no replicas."""

    @functools.cached_property
    def gradients(self) -> torch.Tensor:
        """float32 [slice_numel], as masters. Allocated when it is first asked for: an update that adds up
        gradients as it reads them needs none.
        """
        return self._zeros()

    @functools.cached_property
    def gradient_views(self) -> list[torch.Tensor | None]:
        """own_views() of `gradients`."""
        return self.own_views(self.gradients)

    @property
    def has_gradients(self) -> bool:
        """Whether `gradients` is allocated by now."""
        return "gradients" in vars(self)

    def is_sharded_like(self, other: "FlatBuffer") -> bool:
        """Whether both are cut over the same ranks, whose collectives have one order."""
        return self.group() is other.group() and self.replicas() is other.replicas()

    def own_views(self, flat_slice: torch.Tensor) -> list[torch.Tensor | None]:
        """This rank's part of each parameter in a tensor like `masters`; None where it owns nothing."""
        starts = [o + s.start - self.begin for o, s in zip(self.offsets, self.shards, strict=True)]
        return [
            flat_slice[start : start + shard.numel] if shard.numel else None
            for start, shard in zip(starts, self.shards, strict=True)
        ]

    def whole_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each whole parameter, in its shape, in a tensor of all ranks' slices."""
        return [
            flat[o : o + p.numel()].view(p.shape) for o, p in zip(self.offsets, self.parameters, strict=True)
        ]

    def gathered_masters(self) -> list[torch.Tensor]:
        """Collective: the whole FP32 master of each parameter, in its shape."""
        flat = torch.empty(self.numel, dtype=torch.float32, device=self.device)
        self._own_slice(flat).copy_(self.masters)
        if self.world_size > 1:
            all_gather_slices(flat, self.group(), stage="gathering masters")
        return [view.clone() for view in self.whole_views(flat)]

    def _own_slice(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.begin : self.begin + self.slice_numel]

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self.slice_numel, dtype=torch.float32, device=self.device)

    def _whole_zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for weights."""
        if self.peers is not None:
            return self.peers.zeros((numel,), dtype)
        return torch.zeros(numel, dtype=dtype, device=self.device)


class DenseBuffer(FlatBuffer):
    """Parameters of one floating dtype; their `.data` lie in the buffer.

    FP32 parameters are their own masters: this rank's slice of the weights, until somebody moves that.
    """

    @property
    def kind(self) -> str:
        return str(self.parameters[0].dtype).removeprefix("torch.")

    def allocate(self) -> None:
        dtype = self.parameters[0].dtype
        self.weights = self._whole_zeros(self.numel, dtype)
        is_float = dtype == torch.float32
        self.masters = with_own_storage(self._own_slice(self.weights)) if is_float else self._zeros()

    def take_values(self) -> None:
        for view, parameter in zip(self.whole_views(self.weights), self.parameters, strict=True):
            view.copy_(parameter.data)

    def bind(self) -> None:
        for view, parameter in zip(self.whole_views(self.weights), self.parameters, strict=True):
            parameter.data = with_own_storage(view)

    def cast(self) -> None:
        """Round the masters into this rank's slice of the weights."""
        own = self._own_slice(self.weights)
        if self.masters.data_ptr() != own.data_ptr():
            own.copy_(self.masters)


class PackedBuffer(FlatBuffer):
    """NVFP4 weights; their rowwise_data lie in the buffer, uint8 [numel / 2]."""

    kind = "nvfp4"

    @functools.cached_property
    def gate(self) -> Gate:
        """What reads of the weights' codes pass, for a gather that they wait for (LateGathers)."""
        return Gate()

    def allocate(self) -> None:
        self.weights = self._whole_zeros(self.numel // 2, torch.uint8)
        self.masters = self._zeros()

    def _codes(self) -> list[torch.Tensor]:
        """The codes of each weight, in the shape that its record gives them."""
        return [
            self.weights[o // 2 : (o + w.numel()) // 2].view(w.record.data_shape("rowwise"))
            for o, w in zip(self.offsets, self.parameters, strict=True)
        ]

    def take_values(self) -> None:
        for codes, weight in zip(self._codes(), self.parameters, strict=True):
            codes.copy_(weight.rowwise_data)

    def bind(self) -> None:
        for codes, weight in zip(self._codes(), self.parameters, strict=True):
            weight.rowwise_data = with_own_storage(codes)
            for _, side in weight.record.sides():
                side.gate = self.gate

    @functools.cached_property
    def halfway(self) -> tuple[int, int, int] | None:
        """Of ranks that share memory: the last row of tiles that begins in the first half of this rank's
        codes, or the end of a weight where the middle is in a gap behind it.
        """
        if self.peers is None or self.world_size == 1:
            return None
        middle = self.begin + self.slice_numel // 2
        owned = [i for i, shard in enumerate(self.shards) if shard.numel and self.offsets[i] <= middle]
        if not owned:
            return None
        position = owned[-1]
        weight, offset = self.parameters[position], self.offsets[position]
        rows, cols = weight.record.matrix
        matrix, row = divmod(min(middle - offset, weight.numel()) // cols, rows)
        row = matrix * rows + row // BLOCK * BLOCK
        sent = offset + row * cols - self.begin
        return (position, row, sent // 2) if sent > 0 else None
