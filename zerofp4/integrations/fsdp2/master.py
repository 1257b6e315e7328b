"""MasterShard: the FP32 master, whole or sharded, of a weight that FSDP2 gathers in 4 bits."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from zerofp4.integrations.fsdp2.weight import Weight

_aten = torch.ops.aten


class MasterShard(torch.Tensor):
    """FP32 values of a prepared weight: an optimizer's parameter, inside a DTensor after fully_shard. FSDP2
    asks it what to gather, and what to make of that.

    local: the plain float32 tensor, which operations compute with.
    weight: common to all pieces and copies of the parameter.

    What FSDP2 cuts, pads, moves or copies is a master again; a product raises.
    """

    local: torch.Tensor
    weight: Weight
    fsdp_pre_all_gather: _PreAllGather

    @staticmethod
    def __new__(cls, local: torch.Tensor, weight: Weight) -> MasterShard:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            local.shape,
            strides=local.stride(),
            storage_offset=local.storage_offset(),
            dtype=local.dtype,
            device=local.device,
        )
        tensor.local, tensor.weight = local, weight
        tensor.fsdp_pre_all_gather = _PreAllGather(weight, local)  # FSDP2 looks at it three times a gather
        return tensor

    @property
    def gathered_block(self) -> tuple[int, int]:
        """Of the NVFP4 codes that FSDP2 gathers, for print(model)."""
        return self.weight.block

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func == torch.Tensor.data.__set__:
                return _set_data(*args)
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        masters = [master for value in (*args, *kwargs.values()) for master in _masters_in(value)]
        if func in _PRODUCTS or func.namespace == "c10d":
            raise RuntimeError(
                f"{func}: {masters[0].weight.name!r} was prepared for FSDP2, and its master is not for "
                "computing: call fully_shard on the model and zerofp4.integrations.fsdp2.attach(model, "
                "optimizer), and run the forward pass through the sharded modules (DistributedDataParallel "
                "and FullyShardedDataParallel are not supported)"
            )
        if func in _SHARED:  # the same local tensor, which counts writes through state dicts
            return cls(masters[0].local, masters[0].weight)
        if func is _aten.copy_.default:
            return _copy_(*args, **kwargs)
        if func is _aten._pin_memory.default:
            return _pin_memory(*args, **kwargs)
        result = func(*map(plain_of, args), **{name: plain_of(value) for name, value in kwargs.items()})
        for index, name in _written(func):
            _note_written(_masters_in(args[index] if index < len(args) else kwargs.get(name)))
        if result is None:
            return None
        if func in _KEPT and (func is not _aten._to_copy.default or result.dtype == torch.float32):
            return tree_map_only(torch.Tensor, lambda tensor: cls(tensor, masters[0].weight), result)
        own = {id(master.local): master for master in masters}  # what is written in place is returned
        return tree_map_only(torch.Tensor, lambda tensor: own.get(id(tensor), tensor), result)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return f"MasterShard({self.weight.name!r}, {self.local!r})"

    def __tensor_flatten__(self):
        return ["local"], self.weight

    @staticmethod
    def __tensor_unflatten__(inner: dict, weight: Weight, outer_size, outer_stride) -> MasterShard:
        return MasterShard(inner["local"], weight)

    def __deepcopy__(self, memo: dict) -> MasterShard:
        copied = memo[id(self)] = MasterShard(self.local.detach().clone(), copy.deepcopy(self.weight, memo))
        if isinstance(self, torch.nn.Parameter):
            copied = memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"the master of {self.weight.name!r} cannot be pickled: save model.state_dict(), which holds "
            "plain tensors"
        )

    @property
    def zerofp4_master(self) -> torch.Tensor:
        """The tensor that our optimizers update."""
        return self.local

    def data_ptr(self) -> int:
        """The values'. torch's is 0 for all masters, and accelerate tells parameters apart by it."""
        return self.local.data_ptr()

    # What FSDP2 asks.

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        return self.weight.gathered(all_gather_outputs, out)


class _PreAllGather:
    """A master's fsdp_pre_all_gather, with one argument: with five, FSDP2 would take the padded size of the
    FP32 shard for that of the gathered tensors. FSDP2 counts arguments before each gather of each weight, and
    deriving a method's signature takes the host eight times as long.
    """

    __slots__ = ("_local", "_weight")
    __signature__ = inspect.Signature([inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_OR_KEYWORD)])

    def __init__(self, weight: Weight, local: torch.Tensor):
        self._weight, self._local = weight, local

    def __call__(self, mesh):
        return self._weight.all_gather_input(self._local)


def _masters_in(argument: Any) -> list[MasterShard]:
    """The masters in an operator's argument, which may be one, or a list. torch's walk of trees, and
    isinstance() of plain tensors, would take an optimizer's step several times as long as its kernel.
    """
    values = argument if isinstance(argument, list | tuple) else [argument]
    return [value for value in values if type(value) is MasterShard]


def plain_of(argument: Any) -> Any:
    """An operator's argument with masters replaced by their plain tensors."""
    if type(argument) is MasterShard:
        return argument.local
    if isinstance(argument, list | tuple):
        return [value.local if type(value) is MasterShard else value for value in argument]
    return argument


def _set_data(master: torch.Tensor, value: torch.Tensor) -> None:
    """Module.to assigns the data of a parameter that it keeps."""
    if not (isinstance(master, MasterShard) and isinstance(value, MasterShard)):
        raise TypeError(
            f"the data of a master, and nothing else, must be a MasterShard, got {value.dtype} of "
            f"{type(value).__name__}: give a model its dtype before prepare"
        )
    torch.Tensor.data.__set__(master, value)
    master.local, master.fsdp_pre_all_gather = value.local, _PreAllGather(master.weight, value.local)
    master.weight.writes += 1


def _copy_(target, source, non_blocking=False):
    """FSDP2 copies a shard when it pads it: a copy of a master that was cast needs no other cast."""
    moves = isinstance(source, MasterShard) and source.weight.is_current(source.local)
    plain = source.local if isinstance(source, MasterShard) else source
    if not isinstance(target, MasterShard):
        return target.copy_(plain, non_blocking)
    target.local.copy_(plain, non_blocking)
    _note_written([target])
    if moves and source.weight is target.weight and source.shape == target.shape:
        target.weight.note_moved(target.local)
    return target


_pin = _aten._pin_memory.default


def _pin_memory(master: MasterShard, device=None) -> MasterShard:
    """With CPUOffloadPolicy FSDP2 pins a shard that it has padded: that needs no other cast either."""
    moves = master.weight.is_current(master.local)
    pinned = MasterShard(_pin(master.local, device), master.weight)
    if moves:
        master.weight.note_moved(pinned.local)
    return pinned


def _note_written(masters: list[MasterShard]) -> None:
    """Below autograd torch counts no writes, and views there have their own counters."""
    for master in masters:
        master.weight.writes += 1
    increment_version([master.local for master in masters])


@functools.cache
def _written(func) -> list[tuple[int, str]]:
    """The arguments that an operator writes to. Its schema is slow to read."""
    arguments = enumerate(func._schema.arguments)
    return [(index, one.name) for index, one in arguments if one.alias_info and one.alias_info.is_write]


_SHARED = {_aten.alias.default, _aten.detach.default}
_KEPT = {
    _aten.as_strided.default,
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten._to_copy.default,
    _aten.view.default,
}
"""Operators whose results are masters: FSDP2 and Module.to use them."""

_PRODUCTS = {
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.cat.default,
    _aten.embedding.default,
    _aten.linear.default,
    _aten.mm.default,
    _aten.t.default,
    _aten.transpose.int,
}
"""What a layer does with its weight, and DDP and FSDP1 with all weights."""
