"""The arguments of a cast, checked: every rule about them stands here, once."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from zerofp4.cast.scales import check_whole_blocks
from zerofp4.format import BLOCK
from zerofp4.shard import Shard, byte_range, check_bounds
from zerofp4.storage import (
    NVFP4Storage,
    called,
    check_buffer,
    check_plain,
    dispatches,
    record_of,
    weight_record,
)

NONFINITE_POLICIES = ("skip", "raise")
MASTER_DTYPES = (torch.float32, torch.bfloat16)


@dataclasses.dataclass
class CastRequest:
    """Checked arguments of a cast. amax_groups[i]: weight i's amax group, numbered by first appearance."""

    weights: list[Any]
    """As given: NVFP4Tensors, or records."""
    records: list[NVFP4Storage]
    masters: list[torch.Tensor | None]
    shards: list[Shard]
    shard_codes: list[torch.Tensor | None] | None
    amax_groups: list[int]
    on_nonfinite: str
    found_inf: torch.Tensor | None

    @property
    def device(self) -> torch.device:
        return self.records[0].device if self.records else torch.device("cpu")

    def shard_tensors(self) -> dict[str, torch.Tensor]:
        """Masters, shard buffers and found_inf by their names in messages."""
        lists = {"master_weights": self.masters, "fsdp_shard_model_weights": self.shard_codes or []}
        given = {
            f"{name}[{i}]": tensor
            for name, tensors in lists.items()
            for i, tensor in enumerate(tensors)
            if tensor is not None
        }
        return given if self.found_inf is None else {**given, "found_inf": self.found_inf}

    @functools.cached_property
    def versioned(self) -> list[torch.Tensor]:
        """The weights whose autograd versions advance: records have none."""
        return [weight for weight in self.weights if isinstance(weight, torch.Tensor)]

    def codes(self, i: int) -> torch.Tensor | None:
        """The uint8 bytes shard.byte_range of weight i that this rank writes; None if it owns nothing."""
        if not self.shards[i].numel:
            return None
        if self.shard_codes is not None:
            return self.shard_codes[i]
        first, last = byte_range(self.shards[i])
        return self.records[i].rowwise.data.view(-1)[first:last]


def weight_name(i: int, record: NVFP4Storage) -> str:
    return called(f"model_weights[{i}]", record)


def matrix_name(i: int, record: NVFP4Storage, e: int) -> str:
    if record.experts is None:
        return weight_name(i, record)
    if record.name is None:
        return f"model_weights[{i}][{e}]"
    return called(f"model_weights[{i}]", record, f"{record.name}[{e}]")


def check_lists(**lists: Sequence | None) -> None:
    """Raises TypeError for other types than list or tuple, ValueError for a length other than the first's."""
    count = None
    for name, values in lists.items():
        if values is None and count is not None:
            continue
        if not isinstance(values, list | tuple):
            raise TypeError(f"{name} must be a list or tuple, got {type(values).__name__}")
        count = len(values) if count is None else count
        if len(values) != count:
            raise ValueError(f"{name} has {len(values)} entries for {count} model_weights")


def check_castable(name: str, record: NVFP4Storage, *, has_codes: bool = True) -> None:
    """Raises ValueError for a weight that cannot be cast into. has_codes: whether it gets the codes."""
    if record.block != (BLOCK, BLOCK) and record.columnwise is not None:
        raise ValueError(
            f"{name} has block {record.block} and a columnwise copy, which does not follow from its rows: "
            "make it with columnwise=False"
        )
    if record.rowwise is None or (has_codes and record.rowwise.data is None):
        raise ValueError(f"{name} has no rowwise data to cast into")


def check_weights(model_weights: Sequence[Any], *, has_codes: bool = True) -> list[NVFP4Storage]:
    """The records of distinct weights on one device that can be cast into. Raises TypeError or ValueError."""
    records, seen, codes = [], {}, {}
    for i, weight in enumerate(model_weights):
        record = weight_record(weight)
        if not isinstance(record, NVFP4Storage):
            raise TypeError(f"model_weights[{i}] must be an NVFP4Tensor, got {_described(weight)}")
        name = weight_name(i, record)
        if id(record) in seen:
            raise ValueError(f"{name} is the same weight as model_weights[{seen[id(record)]}]")
        try:
            record.check()
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"{name}: {error}") from None
        check_castable(name, record, has_codes=has_codes)
        if record.device != (records[0].device if records else record.device):
            raise ValueError(f"{name} is on {record.device}, model_weights[0] on {records[0].device}")
        data = record.rowwise.data
        if data is not None and data.numel() and codes.setdefault(data.data_ptr(), i) != i:
            raise ValueError(f"{name} has the same rowwise_data as model_weights[{codes[data.data_ptr()]}]")
        seen[id(record)] = i
        records.append(record)
    return records


def _described(weight: Any) -> str:
    if not isinstance(weight, torch.Tensor) or record_of(weight) is not None or not dispatches(weight):
        return type(weight).__name__
    kind = type(weight)
    return (
        f"{kind.__module__}.{kind.__qualname__}: for tensors of another framework import its adapter, one of "
        "zerofp4.integrations"
    )


def check_shard(what: str, name: str, record: NVFP4Storage, start: int | None, numel: int) -> Shard:
    """A shard that lies inside its weight, and has whole blocks if it must; an empty one for None."""
    if start is None:
        if numel:
            raise ValueError(f"{what}: start_offset is None, but the shard has {numel} elements")
        return Shard(0, 0)
    if isinstance(start, bool) or not hasattr(start, "__index__"):
        raise TypeError(f"{what}: start_offset must be an int or None, got {type(start).__name__}")
    shard = Shard(operator.index(start), numel)
    check_bounds(what, shard, name, record.shape.numel())
    check_whole_blocks(what, name, record, shard)
    return shard if numel else Shard(0, 0)


def check_master(i: int, record: NVFP4Storage, master: torch.Tensor | None, start: int | None) -> Shard:
    what, name = f"master_weights[{i}]", weight_name(i, record)
    if (master is None) != (start is None):
        names = "master_weights", "start_offsets"
        missing, given = names if master is None else names[::-1]
        raise ValueError(
            f"{missing}[{i}] is None, but {given}[{i}] is not; a rank that owns nothing passes None for both"
        )
    if master is None:
        return Shard(0, 0)
    if isinstance(master, torch.Tensor):
        check_plain(what, master)
    if not isinstance(master, torch.Tensor) or master.dtype not in MASTER_DTYPES:
        found = getattr(master, "dtype", type(master).__name__)
        raise TypeError(f"{what} must be a float32 or bfloat16 tensor, got {found}")
    if master.dim() != 1:
        raise ValueError(f"{what} must be one-dimensional, got shape {tuple(master.shape)}")
    if not master.is_contiguous():
        raise ValueError(f"{what} must be contiguous, got stride {master.stride(0)}")
    if master.device != record.device:
        raise ValueError(f"{what} is on {master.device}, its weight {name} on {record.device}")
    return check_shard(what, name, record, start, master.numel())


def check_shard_codes(i: int, record: NVFP4Storage, shard: Shard, codes: torch.Tensor | None) -> None:
    first, last = byte_range(shard)
    if codes is None and last == first:
        return
    if isinstance(codes, torch.Tensor):
        check_plain(f"fsdp_shard_model_weights[{i}]", codes)
    check_buffer(f"fsdp_shard_model_weights[{i}]", codes, (last - first,), torch.uint8, record.device)


def number_groups(
    weights: Sequence[Any],
    amax_groups: Sequence[Sequence[Any]] | None,
    *,
    names: Sequence[str] | None = None,
) -> list[int]:
    """The amax group of each weight, numbered by first appearance; a weight in no list is its own group.

    weights: records; or matrices and stacks that become weights, with their names for messages.
    Raises TypeError or ValueError for wrong groups, and for members that cannot share an amax.
    """
    positions = {id(weight): i for i, weight in enumerate(weights)}
    leader = list(range(len(weights)))
    grouped: set[int] = set()

    def name(i: int) -> str:
        return weight_name(i, weights[i]) if names is None else repr(names[i])

    def experts(i: int) -> int | None:
        shape = weights[i].shape
        if isinstance(weights[i], NVFP4Storage):
            return weights[i].experts
        return shape[0] if len(shape) == 3 else None

    if not isinstance(amax_groups, list | tuple | None):
        raise TypeError(f"amax_groups must be a list of lists of weights, got {type(amax_groups).__name__}")
    for g, members in enumerate(amax_groups or ()):
        if not isinstance(members, list | tuple):
            raise TypeError(f"amax_groups[{g}] must be a list of weights, got {type(members).__name__}")
        indices = []
        for weight in members:
            record = weight_record(weight)
            i = positions.get(id(weight if record is None else record))
            if i is None:
                among = "the weights to convert"
                if names is None:
                    among = (
                        "the quantized weights: groups from before convert_model have parameters that it "
                        "replaced, so make them again"
                    )
                raise ValueError(f"amax_groups[{g}] has a member that is not one of {among}")
            if i in grouped:
                raise ValueError(f"amax_groups[{g}]: {name(i)} is in an amax group already")
            grouped.add(i)
            indices.append(i)
            first = indices[0]
            if experts(i) != experts(first):
                raise ValueError(
                    f"amax_groups[{g}]: members share an amax expert by expert, but {name(i)} has shape "
                    f"{tuple(weights[i].shape)} and {name(first)} {tuple(weights[first].shape)}"
                )
        for i in indices:
            leader[i] = min(indices)
    numbers = {first: n for n, first in enumerate(sorted(set(leader)))}
    return [numbers[first] for first in leader]


def check_request(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None,
    amax_groups: Sequence[Sequence[Any]] | None,
    on_nonfinite: str,
    found_inf: torch.Tensor | None,
    manual_post_all_gather_processing: bool = True,
) -> CastRequest:
    """All checks that one rank can make alone. Raises TypeError or ValueError; changes nothing."""
    if not manual_post_all_gather_processing:
        raise ValueError(
            "manual_post_all_gather_processing=False is not supported: gather the codes, then call "
            "post_all_gather_processing"
        )
    if on_nonfinite not in NONFINITE_POLICIES:
        raise ValueError(f"on_nonfinite must be one of {NONFINITE_POLICIES}, got {on_nonfinite!r}")
    check_lists(
        model_weights=model_weights,
        master_weights=master_weights,
        start_offsets=start_offsets,
        fsdp_shard_model_weights=fsdp_shard_model_weights,
    )
    records = check_weights(model_weights, has_codes=fsdp_shard_model_weights is None)
    shards = [
        check_master(i, record, master, start)
        for i, (record, master, start) in enumerate(zip(records, master_weights, start_offsets, strict=True))
    ]
    if fsdp_shard_model_weights is not None:
        for i, arguments in enumerate(zip(records, shards, fsdp_shard_model_weights, strict=True)):
            check_shard_codes(i, *arguments)
    check_found_inf(found_inf, records)
    masters = [master if shard.numel else None for master, shard in zip(master_weights, shards, strict=True)]
    codes = None if fsdp_shard_model_weights is None else list(fsdp_shard_model_weights)
    groups = number_groups(records, amax_groups)
    lists = list(model_weights), records, masters, shards, codes, groups
    return CastRequest(*lists, on_nonfinite, found_inf)


def check_refresh(request: CastRequest, names: Sequence[str]) -> None:
    """Check moved tensors, and take the present records. Raises if more than storage has changed."""
    records = check_weights(request.weights, has_codes=request.shard_codes is None)
    for i, (old, new, shard) in enumerate(zip(request.records, records, request.shards, strict=True)):
        for what in ("shape", "dtype", "block", "four_over_six", "device"):
            if getattr(old, what) != getattr(new, what):
                raise ValueError(
                    f"{names[i]} must keep its {what} {getattr(old, what)}, now has {getattr(new, what)}: "
                    "build a new plan"
                )
        if shard.numel and request.masters[i] is not None:
            now = check_master(i, new, request.masters[i], shard.start)
            if now != shard:
                raise ValueError(f"master_weights[{i}] must keep its {shard.numel} elements, has {now.numel}")
            if request.shard_codes is not None:
                check_shard_codes(i, new, shard, request.shard_codes[i])
    check_found_inf(request.found_inf, records)
    request.records = records


def check_found_inf(found_inf: torch.Tensor | None, records: Sequence[NVFP4Storage]) -> None:
    if isinstance(found_inf, torch.Tensor):
        check_plain("found_inf", found_inf)
    if found_inf is not None and records:
        check_buffer("found_inf", found_inf, (1,), torch.float32, records[0].device)
