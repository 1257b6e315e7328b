"""Buckets: parameters of one kind in flat memory, cut into one equal slice per rank, and their gradients.

Every rank holds all weights, as views of a flat buffer, and its own slice of the FP32 masters and averaged
gradients, in the same layout. A rank casts its masters into its slice of the weights, and an all-gather in
place fills in the other slices.
"""

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerofp4.cast import block_unit
from zerofp4.distributed import GroupReference, rank_and_size
from zerofp4.format import STRIP
from zerofp4.layout import ceil_div, round_up
from zerofp4.ops import addresses_of
from zerofp4.shard import equal_slices, intersect, state_unit, whole_slices
from zerofp4.storage import Gate, any_dispatches, dispatches
from zerofp4.tensors import GradientPlace, NVFP4Tensor

ALIGNMENT = 256
"""Weights and slices start at multiples of this many elements, 128 bytes of packed codes: no two weights or
ranks share a byte or a kernel's vector load.
"""

Zeros = Callable[..., torch.Tensor]
"""Makes memory from a shape and `dtype`: torch.zeros() on a device, or Peers.zeros(), which is collective."""


def zeros_on(device: torch.device) -> Zeros:
    return functools.partial(torch.zeros, device=device)


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same memory with its own storage: torch.save and share_memory_() take whole storages, and other
    formats take tensors of one storage for tied weights.
    """
    # torch exports tensors of the current device only, and in inference mode would give an inference tensor.
    with torch.inference_mode(False), torch.cuda.device_of(view):
        return torch.from_dlpack(view)


class Sharding(NamedTuple):
    """The ranks that a parameter is sharded over, and the ranks that hold replicas of it."""

    group: dist.ProcessGroup | None = None  # its ranks own one slice each; None for one rank alone
    copy: int | None = None  # this rank's number among the owners of the same elements, if groups hold copies
    replicas: dist.ProcessGroup | None = None  # this rank and others who average gradients of these elements


class Trained(NamedTuple):
    """A trainable parameter, and the facts that decide its bucket."""

    parameter: torch.Tensor
    name: str  # in messages
    sharding: Sharding = Sharding()  # the ranks that it is sharded over
    by: int = 0  # the number of the optimizer that updates its master
    work: int | None = None  # the cost of its update as a whole matrix; None if it is updated in any slices
    leader: int = 0  # the position of the first parameter of its amax group, which lies in one bucket
    state: str = "full"  # or "compact", or "compact24", with masters of 24 bits for bfloat16 weights
    between_hosts: str | None = None  # the format in which means of hosts travel; None if it is float32

    @property
    def key(self) -> tuple:
        """Equal for all parameters of a bucket: their optimizer, kind, state and format between hosts. NVFP4
        weights sort first.
        """
        if isinstance(self.parameter, NVFP4Tensor):
            record = self.parameter.record
            kind = 0, -record.block[0], str(record.four_over_six or "")
        else:
            kind = (1 + (torch.bfloat16, torch.float16, torch.float32).index(self.parameter.dtype),)
        # Strips of rows of several lengths would cut slices at multiples of all of them.
        cols = self.parameter.shape[-1] if self.between_hosts == "nvfp4" else 0
        return self.by, kind, self.state != "full", self.state, self.between_hosts or "", cols


def cut_unit(one: Trained) -> int:
    """Ranks are cut at multiples of this: a block's scale, a group of compact state and a strip of NVFP4
    between hosts have one owner.
    """
    parameter, units = one.parameter, [1]
    if isinstance(parameter, NVFP4Tensor) and parameter.record.scales_travel:
        units.append(block_unit(parameter.record))
    if one.state != "full":
        units.append(state_unit(parameter.shape[-1]))
    if one.between_hosts == "nvfp4":
        units.append(STRIP[0] * parameter.shape[-1])
    return math.lcm(*units)


class Bucket:
    """Parameters of one kind in flat memory, and this rank's slice of their masters and averaged gradients.

    indices: the positions of the parameters among all trainable ones.
    trained: the parameters, of one sharding and key.
    owners: by parameter, the rank that owns all of it, in ascending order; None if a slice ends at any
        cut_unit() of a parameter.
    wire: the dtype that gradients are rounded to before they are added; None keeps autograd's.

    allocate() makes the memory of the weights, and bind() makes the parameters views of it. The memory of
    allocate_masters(), masters and low, is this rank's slice, zero between two parameters:

        state        parameters   masters [slice_numel]           low
        compact24    bf16         bfloat16, the slice of weights  uint8
        compact24    NVFP4        bfloat16                        uint8
        others       FP32         float32, the slice of weights   None
        others       others       float32                         None

    Those of an offloaded bucket are on the host, and never the slice of weights.
    """

    weights: torch.Tensor  # of all ranks, [world_size * slice_numel]; NVFP4: codes, uint8, half as long
    masters: torch.Tensor
    low: torch.Tensor | None = None
    plan: Any = None  # casts the masters of NVFP4 weights (CastPlan, OffloadedPlan); cast() rounds others
    scales: torch.Tensor | None = None  # uint8 [world_size, bytes], the plan's scales that travel, if any
    slots: Any = None  # where an offloaded bucket, whose masters are on the host, travels (Slots)

    def __init__(
        self,
        indices: Sequence[int],
        trained: Sequence[Trained],
        owners: Sequence[int] | None = None,
        wire: torch.dtype | None = None,
    ):
        first, sharding = trained[0], trained[0].sharding
        self.by, self.state, self.between_hosts = first.by, first.state, first.between_hosts
        self.indices, self.wire = list(indices), wire
        self.parameters, self.names = [one.parameter for one in trained], [one.name for one in trained]
        self.device = self.parameters[0].device
        dtypes = set(map(gradient_dtype, self.parameters))
        self.sent_as: torch.dtype = wire or (torch.float32 if len(dtypes) > 1 else next(iter(dtypes)))
        """The dtype of sent gradients: float32 if autograd makes several."""
        self.keeps_gradients = dtypes == {self.sent_as}  # whether they are sent as autograd makes them
        self.is_packed = isinstance(self.parameters[0], NVFP4Tensor)  # NVFP4; else of one floating dtype
        self.gate = Gate() if self.is_packed else None  # for reads that wait for a late gather
        self.group, self.replicas = GroupReference(sharding.group), GroupReference(sharding.replicas)
        self.rank, self.world_size = rank_and_size(sharding.group)
        self.replica, self.replica_count = rank_and_size(sharding.replicas)
        self.is_counted = not sharding.copy  # whether in norms: of several copies one
        self.is_of_whole_matrices = owners is not None
        self.shapes = [parameter.shape for parameter in self.parameters]
        sizes = [shape.numel() for shape in self.shapes]
        if owners is None:
            units = list(map(cut_unit, trained))
            self.offsets, self.slice_numel = equal_slices(sizes, self.world_size, ALIGNMENT, units)
        else:
            self.offsets, self.slice_numel = whole_slices(sizes, owners, self.world_size, ALIGNMENT)
        self.begin, end = self.rank * self.slice_numel, (self.rank + 1) * self.slice_numel
        # By parameter, this rank's shard:
        self.shards = [intersect(o, n, self.begin, end) for o, n in zip(self.offsets, sizes, strict=True)]
        most = round_up(ceil_div(self.slice_numel, self.replica_count), ALIGNMENT)
        bounds = [min(r * most, self.slice_numel) for r in range(self.replica_count + 1)]
        self.parts = [slice(first, last) for first, last in itertools.pairwise(bounds)]
        """By replica, the part of a slice that it averages."""
        self.part = self.parts[self.replica]  # all of the slice without replicas

    @functools.cached_property
    def gradients(self) -> torch.Tensor:
        """float32 [slice_numel], averaged, at home. Made on demand: many updates average as they read."""
        return self._zeros(torch.float32)

    @functools.cached_property
    def gradient_views(self) -> list[torch.Tensor | None]:
        """own_views() of `gradients`."""
        return self.own_views(self.gradients)

    # Memory

    def allocate(self, zeros: Zeros) -> None:
        """Make the memory, with `weights` by zeros(), and copy the parameters there."""
        dtype = torch.uint8 if self.is_packed else self.parameters[0].dtype
        numel = self.world_size * self.slice_numel // (2 if self.is_packed else 1)
        self.weights = zeros((numel,), dtype=dtype)
        for view, parameter in zip(self._weight_views(), self.parameters, strict=True):
            view.copy_(parameter.rowwise_data if self.is_packed else parameter.data)

    def allocate_masters(self) -> None:
        kept_as = torch.float32
        if self.state == "compact24":
            kept_as, self.low = torch.bfloat16, self._zeros(torch.uint8)
        is_shared = self.weights.dtype == kept_as and not self.is_offloaded
        self.masters = with_own_storage(self._own_weights()) if is_shared else self._zeros(kept_as)

    @property
    def is_offloaded(self) -> bool:
        return self.slots is not None

    @property
    def home(self) -> torch.device:
        """The device of the masters and their state."""
        return torch.device("cpu") if self.is_offloaded else self.device

    def _zeros(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.slice_numel, dtype=dtype, device=self.home)

    def bind(self) -> None:
        for view, parameter in zip(self._weight_views(), self.parameters, strict=True):
            if not self.is_packed:
                parameter.data = with_own_storage(view)
                continue
            parameter.rowwise_data = with_own_storage(view)
            for _, side in parameter.record.sides():
                side.gate, side.scale_gate = self.gate, self.gate if parameter.record.scales_travel else None

    def cast(self) -> None:
        """Round the masters of floating weights into this rank's slice of them."""
        own = self._own_weights()
        if self.is_offloaded:
            self.slots.send_up(self.masters, own)
        elif self.masters.data_ptr() != own.data_ptr():
            own.copy_(self.masters)

    @property
    def bytes_to_others(self) -> int:
        """Bytes of gradients that this rank sends if each goes to its owner."""
        return (self.world_size - 1) * self.slice_numel * self.sent_as.itemsize

    @property
    def gathered(self) -> list[torch.Tensor]:
        """The flat tensors of a gather of weights, with an equal slice of each rank."""
        return [self.weights] if self.scales is None else [self.weights, self.scales.view(-1)]

    # Views

    def own_views(self, flat_slice: torch.Tensor | None) -> list[torch.Tensor | None]:
        """This rank's shards in a tensor like `masters`; None for an empty shard, and without a tensor."""
        if flat_slice is None:
            return [None] * len(self.shards)
        starts = [o + s.start - self.begin for o, s in zip(self.offsets, self.shards, strict=True)]
        pairs = zip(starts, self.shards, strict=True)
        return [flat_slice[start : start + shard.numel] if shard.numel else None for start, shard in pairs]

    def whole_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each whole parameter in a tensor of all slices."""
        pairs = zip(self.offsets, self.shapes, strict=True)
        return [flat[o : o + shape.numel()].view(shape) for o, shape in pairs]

    def _weight_views(self) -> list[torch.Tensor]:
        """Each parameter's codes or values in `weights`."""
        if not self.is_packed:
            return self.whole_views(self.weights)
        return [
            self.weights[o // 2 : (o + w.numel()) // 2].view(w.record.data_shape("rowwise"))
            for o, w in zip(self.offsets, self.parameters, strict=True)
        ]

    def _own_weights(self) -> torch.Tensor:
        return self.weights[self.begin : self.begin + self.slice_numel]


# Masters of 24 bits, kept in two planes: bfloat16, and a byte

CHUNK = 2**22
"""Elements that are converted or sent at once, since arithmetic needs many times their memory."""


def joined(master: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
    """The float32 values of a master, 1D: itself, or with `low` a new tensor of its 24 bits."""
    if low is None:
        return master
    values = torch.empty(master.shape, dtype=torch.float32, device=master.device)
    for part in _chunks(values):
        bits = master[part].view(torch.int16).int()
        magnitude = (bits & 0x7FFF) * 65536 + low[part].view(torch.int8).int() * 256
        # The byte of a zero may be negative.
        values[part] = (magnitude.clamp(min=0) | (bits & -(2**31))).view(torch.float32)
    return values


def write_master(values: torch.Tensor, master: torch.Tensor, low: torch.Tensor | None = None) -> None:
    """Write float32 values, 1D, into a master: float32, or with `low` the planes of 24 bits.

    If either is on a GPU, that computes, so that masters on the host take 3 bytes per element of its link.
    """
    if low is None:
        master.copy_(values)
        return
    device = values.device if values.is_cuda else master.device
    for part in _chunks(master):
        own = values[part].to(device).float()
        bits = torch.where(own.isnan(), 0x7FC00000, own.view(torch.int32))  # the only NaN
        bits = (bits + 128) & -256  # to the nearest 24 bits; an update adds a random byte instead
        # Half way between two bfloat16 values the byte would not tell which one the plane has.
        bits += (bits & 0xFF00 == 0x8000).int() * 256
        master[part].copy_(((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16))
        low[part].copy_((bits >> 8 & 0xFF).to(torch.uint8))


def _chunks(tensor: torch.Tensor) -> Iterator[slice]:
    return (slice(first, first + CHUNK) for first in range(0, tensor.numel(), CHUNK))


# Gradients of a model

Gradients = Sequence[torch.Tensor | None]
"""p.grad of all trainable parameters, or of those in a bucket. None is sent as zeros."""


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's gradients: its grad_dtype, in which None is float32, else its own."""
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(parameter, "grad_dtype", parameter.dtype) or torch.float32


def is_sendable(gradient: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a gradient's memory has its elements in order and in this dtype."""
    return are_sendable([gradient], [dtype])


def are_sendable(gradients: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> bool:
    """Whether all are sendable. A step asks this of hundreds of tensors, so the loops run in C."""
    return (
        [gradient.dtype for gradient in gradients] == dtypes
        and not any_dispatches(gradients)
        and all(map(torch.Tensor.is_contiguous, gradients))
        and not any(map(torch.Tensor.is_neg, gradients))
        and not any(map(torch.Tensor._is_zerotensor, gradients))
    )


def add_gradient_hooks(
    owner: Any, parameters: Sequence[torch.Tensor], method: Callable[[Any, int, torch.Tensor], None]
) -> None:
    """Call method(owner, position, parameter) after each accumulation of p.grad, while the owner lives."""
    me = weakref.ref(owner)

    def hook(position: int, parameter: torch.Tensor) -> None:
        alive = me()
        if alive is not None:
            with torch._C.DisableTorchFunctionSubclass():
                method(alive, position, parameter)

    def remove() -> None:
        for handle in handles:
            handle.remove()

    with torch._C.DisableTorchFunctionSubclass():
        handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(hook, position))
            for position, parameter in enumerate(parameters)
        ]
    weakref.finalize(owner, remove).atexit = False


class GradientMemory:
    """A flat buffer for this rank's own gradients of one bucket: one row for each rank's slice.

    If it is aliased, p.grad becomes a view of it in each backward pass, so that gradients need no packing.
    The matrix product of a quantized weight writes its gradient there directly (GradientPlace); a hook moves
    other gradients there. A gradient with a graph, or one that a user assigned, stays until take() copies it.

    flat: [world_size, slice_numel] of any floating dtype; zeros if it is aliased.
    aliased_storages: the addresses of all aliased memory of one optimizer, to which this adds its own; None
        for a slot that other buckets may overwrite.
    """

    def __init__(self, bucket: Bucket, flat: torch.Tensor, aliased_storages: set[int] | None = None):
        self.flat, self._storages, self._names = flat, aliased_storages, bucket.names
        self.aliased = aliased_storages is not None
        self.views = bucket.whole_views(flat.view(-1))
        self._addresses = [view.data_ptr() for view in self.views]
        self._gaps: list[torch.Tensor] = []  # sent as zeros; other users of a slot overwrite them
        if self.aliased:
            aliased_storages.add(_storage_address(flat))
            with torch._C.DisableTorchFunctionSubclass():
                self._places = list(map(GradientPlace, bucket.parameters, self.views))
            add_gradient_hooks(self, bucket.parameters, GradientMemory._move)
        else:
            ends = [0, *(o + s.numel() for o, s in zip(bucket.offsets, bucket.shapes, strict=True))]
            pairs = zip(ends, [*bucket.offsets, flat.numel()], strict=True)
            self._gaps = [flat.view(-1)[end:begin] for end, begin in pairs if end < begin]

    def check(self, gradients: Gradients) -> None:
        """Raise RuntimeError for a gradient in the memory of another one."""
        for k in self._elsewhere(gradients) if self.aliased else ():
            if self._is_aliased(gradients[k]):
                raise RuntimeError(
                    f"the gradient of {self._names[k]} lies in memory that gradients are sent from, but not "
                    "where its own does: p.grad must not be exchanged, shared or transposed; assign a clone()"
                )

    def take(self, gradients: Gradients) -> None:
        """Copy the bucket's gradients into `flat`, rounded to its dtype, unless they lie there. None is 0."""
        missing = [view for view, gradient in zip(self.views, gradients, strict=True) if gradient is None]
        if self._gaps or missing:
            torch._foreach_zero_(self._gaps + missing)
        away = self._elsewhere(gradients)
        if away:
            torch._foreach_copy_([self.views[k] for k in away], [gradients[k] for k in away])

    def _elsewhere(self, gradients: Gradients) -> list[int]:
        """The positions of gradients outside of their views: usually none, if p.grad aliases them."""
        present = [k for k, gradient in enumerate(gradients) if gradient is not None]
        if not self.aliased:
            return present
        addresses = zip(present, addresses_of("gradients", [gradients[k] for k in present]), strict=True)
        here = [k for k, address in addresses if address == self._addresses[k]]
        if not are_sendable([gradients[k] for k in here], [self.flat.dtype] * len(here)):
            here = [k for k in here if is_sendable(gradients[k], self.flat.dtype)]
        return sorted(set(present) - set(here))

    def _is_aliased(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient lies in the aliased memory of any bucket."""
        return not dispatches(gradient) and _storage_address(gradient) in self._storages

    def _move(self, k: int, parameter: torch.Tensor) -> None:
        """After a backward pass has accumulated p.grad: make it a view of `flat`."""
        view, place, gradient = self.views[k], self._places[k], parameter.grad
        if gradient is None or gradient.requires_grad or not is_sendable(gradient, view.dtype):
            return
        if gradient.data_ptr() != view.data_ptr():
            # If it is awaited, an outer backward pass around this one has begun to write to the view.
            if place.is_awaited() or place.is_kept(gradient) or self._is_aliased(gradient):
                return
            view.copy_(gradient)
            # A new object with its own version counter, since it is another gradient.
            parameter.grad = gradient = view.data
        place.note(gradient)


def _storage_address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# Gradient memory of several buckets


def in_slots(
    layouts: Sequence[tuple[tuple[int, ...], torch.dtype]], zeros: Zeros, count: int | None
) -> list[torch.Tensor]:
    """A tensor of each shape and dtype, in slot i % count; count None gives each its own memory."""
    if count is None or not layouts:
        return [zeros(shape, dtype=dtype) for shape, dtype in layouts]
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in layouts]
    slots = itertools.cycle(zeros((min(count, len(sizes)), max(sizes)), dtype=torch.uint8))
    pairs = zip(layouts, slots, strict=False)
    return [slot.view(dtype)[: math.prod(shape)].view(shape) for (shape, dtype), slot in pairs]


def gradient_memory(
    buckets: Sequence[Bucket], zeros: Zeros, count: int | None = None, aliased: bool = True
) -> list[GradientMemory]:
    """By bucket, memory for this rank's own gradients: aliased if it may be and `keeps_gradients`.

    count: the number of slots for other gradients, which are copied; None for one per bucket.
    """
    storages: set[int] = set()
    aliases = [storages if aliased and bucket.keeps_gradients else None for bucket in buckets]
    made: dict[Bucket, torch.Tensor] = {}
    for kind, slots in ((None, count), (storages, None)):
        chosen = [bucket for bucket, own in zip(buckets, aliases, strict=True) if own is kind]
        layouts = [((b.world_size, b.slice_numel), b.sent_as) for b in chosen]
        made |= zip(chosen, in_slots(layouts, zeros, slots), strict=True)
    return [GradientMemory(b, made[b], own) for b, own in zip(buckets, aliases, strict=True)]
