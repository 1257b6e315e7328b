"""A step of ZeRO-1 over NVFP4 weights: what ZeroFP4Optimizer does with FusedAdamW. Read it from the top.

Every rank holds all weights. It owns a slice of each parameter: its FP32 masters and moments are on no other
rank. In a step the owner of a slice averages all ranks' gradients of it, updates its masters and casts them.
Then the ranks gather the weights. The optimizer sends many parameters at once, overlaps that with backward
and forward passes, and cuts slices elsewhere: no byte depends on it. With overlap="update" it takes this step
for one bucket after the other.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from zerofp4.format import BLOCK, MXFP8_BLOCK, SCALE_DTYPE, STATE_GROUP, STRIP
from zerofp4.reference.adamw import adamw_step, average, norm_of_squares, square_sums
from zerofp4.reference.compact import CompactMoments, compact_adamw_step, no_moments, round_master
from zerofp4.reference.shards import partial_amax, partial_cast
from zerofp4.reference.wire import mean_of_hosts, send_mean

CHUNK = 256
"""Slices begin at multiples of this many elements of a parameter."""


class ShardedParameter:
    """A parameter on one rank. cast_and_gather() makes its weight before the first step.

    values: float32, the first masters, the same on every rank; [M, K] if quantized.
    dtype: of the weight. sent_as: the dtype in which gradients travel, `dtype` by default.
    number: the position among all parameters. compact: whether state is, if rows are long enough.
    between_hosts: the format in which means of hosts travel, as of send_mean(); None if it is float32.
    """

    def __init__(
        self,
        values: torch.Tensor,
        dtype: torch.dtype,
        number: int = 0,
        group: dist.ProcessGroup | None = None,
        *,
        quantized: bool = False,
        compact: bool = False,
        sent_as: torch.dtype | None = None,
        between_hosts: str | None = None,
    ):
        self.between_hosts = between_hosts
        self.shape, self.dtype, self.sent_as, self.step = values.shape, dtype, sent_as or dtype, 0
        self.index = number
        # Slices of n elements in flat order. A slice has whole groups of compact state and whole strips.
        compact = compact and values.dim() > 1 and values.shape[-1] >= STATE_GROUP
        unit = 1 if not compact else self.shape[-1] if self.shape[-1] % STATE_GROUP else STATE_GROUP
        strip = STRIP[0] * self.shape[-1] if between_hosts == "nvfp4" else 1
        ranks, cut = dist.get_world_size(group), math.lcm(CHUNK, unit, strip)
        n = max(-(-values.numel() // (ranks * cut)), 1) * cut
        self.start = dist.get_rank(group) * n
        self.owned = min(max(values.numel() - self.start, 0), n)  # the rest of the slice is padding, zeros
        # The slice: masters, of 24 bits if they are compact and bfloat16; step count; moments.
        self.master = pad(values.flatten(), (0, ranks * n - values.numel()))[self.start :][:n].clone()
        self.number = number if compact and dtype == torch.bfloat16 else None
        if self.number is not None:
            self.master = round_master(self.master, torch.tensor(128, dtype=torch.int64))
        full = [torch.zeros(n, dtype=torch.float32) for _ in range(2)]
        self.moments = no_moments(n // unit, unit) if compact else tuple(full)
        # The whole weight: [ranks, n] values, or [ranks, n / 2] codes with compact scales and an amax.
        self.weight = torch.zeros(ranks, n, dtype=dtype)
        self.scale = self.amax = None
        if quantized:
            self.weight = torch.zeros(ranks, n // 2, dtype=torch.uint8)
            self.scale = torch.zeros([-(-size // BLOCK) for size in self.shape], dtype=SCALE_DTYPE)
            self.amax = torch.zeros(1, dtype=torch.float32)


@torch.no_grad()
def zero_step(
    parameters: Sequence[ShardedParameter],
    gradients: Sequence[torch.Tensor | None],
    group: dist.ProcessGroup | None = None,
    *,
    clips: Sequence[tuple[float, float]] = (),
    ordered: bool = True,
    earlier: Sequence[Sequence[torch.Tensor | None]] = (),
    between: tuple[int, int] | None = None,
    **options: Any,
) -> tuple[bool, list[torch.Tensor]]:
    """Take one step. Collective. Returns found_inf, and the norm that each clip finds.

    gradients: p.grad of this rank by parameter. clips: (max_norm, norm_type) of clip_grad_norm_() calls.
    ordered: whether gradients are added in rank order, or by torch's reduce-scatter.
    earlier: with offload_gradients, the gradients of each backward pass before the last one, in their order.
    between: with between_hosts, the number of hosts, and of the steps taken before.
    options: lr, betas, eps, weight_decay and maximize of AdamW.
    """
    sent = [_as_sent(p, gradient) for p, gradient in zip(parameters, gradients, strict=True)]

    if between is None:
        means = [_mean(rows, ordered, group) for rows in sent]
    else:
        pairs = zip(parameters, sent, strict=True)
        means = [_mean_of_hosts(p, _received(rows, group), *between) for p, rows in pairs]
    for i in range(len(parameters)) if earlier else ():  # in FP32, from the first pass to the last one
        before = [_as_sent(parameters[i], each[i]) for each in earlier]
        total, *others = [_mean(rows, ordered, group) for rows in before] + [means[i]]
        means[i], sent[i] = sum(others, total), torch.stack([*before, sent[i]])

    # The vote: a NaN or Inf on one rank, or for a clip in the means, skips the step on all ranks. One rank's
    # gradient is enough for an update.
    found_inf = not all(each.isfinite().all() for each in (means if clips else sent))
    present = [any(g is not None for g in passes) for passes in zip(*earlier, gradients, strict=True)]
    vote = torch.tensor([found_inf, *present], dtype=torch.float32)
    dist.all_reduce(vote, dist.ReduceOp.MAX, group)
    found_inf, *present = vote.bool().tolist()

    # Norms, and the factor of all clips.
    norms, factor = [], torch.ones((), dtype=torch.float32)
    for max_norm, norm_type in clips:
        norms.append(_norm(means, norm_type, group) * factor)
        if not found_inf:
            factor = factor * (max_norm / (norms[-1] + 1e-6)).clamp(max=1.0)

    # The update. No rank writes if the step is skipped, and nothing of a parameter without a gradient.
    if found_inf:
        return True, norms
    for p, mean, is_present in zip(parameters, means, present, strict=True):
        if is_present:
            _update(p, mean * factor, options)
    return cast_and_gather(parameters, group), norms


def _as_sent(p: ShardedParameter, gradient: torch.Tensor | None) -> torch.Tensor:
    """[ranks, n]: a row for each owner. A missing gradient travels as zeros."""
    rows = torch.zeros(len(p.weight), len(p.master), dtype=p.sent_as)
    if gradient is not None:
        rows.view(-1)[: gradient.numel()] = gradient.flatten()
    return rows


def _mean(rows: torch.Tensor, ordered: bool, group: dist.ProcessGroup | None) -> torch.Tensor:
    """float32 [n]: the mean of this rank's slice over all ranks."""
    if ordered:  # ((g0 + g1) + g2) / 3 in float32
        return average(_received(rows, group))
    total = torch.empty_like(rows[0])  # in the dtype that is sent, and in the order of the library
    dist.reduce_scatter(total, list(rows), group=group)
    return average(total.view(1, -1), len(rows))


def _received(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[ranks, n]: this rank's slice of each rank's gradient."""
    received = torch.empty_like(rows)
    dist.all_to_all_single(received.view(torch.uint8), rows.view(torch.uint8), group=group)
    return received


def _mean_of_hosts(p: ShardedParameter, received: torch.Tensor, hosts: int, taken: int) -> torch.Tensor:
    """float32 [n]: the mean of all hosts' means, rounded at random unless they travel as they are."""
    means, wire = [average(own) for own in received.unflatten(0, (hosts, -1))], p.between_hosts
    if wire is None:
        return average(torch.stack(means))
    # Only NVFP4 depends on rows: bf16 has no blocks, and those of MXFP8 follow each other.
    cols = p.shape[-1] if wire == "nvfp4" else {"bf16": CHUNK, "mxfp8": MXFP8_BLOCK}[wire]
    where = {"number": p.index, "step": taken, "first_row": p.start // cols}
    sent = [send_mean(mean.view(-1, cols), wire, host=host, **where) for host, mean in enumerate(means)]
    return mean_of_hosts(sent, wire, cols).flatten()


def _norm(means: Sequence[torch.Tensor], norm_type: float, group: dist.ProcessGroup | None) -> torch.Tensor:
    """float32 []: the norm of the means of all parameters."""
    if norm_type == 2.0:  # exactly the same in any order
        words = torch.stack(list(map(square_sums, means))).sum(0)
        dist.all_reduce(words, group=group)
        return norm_of_squares(words)
    values = torch.cat([torch.zeros(1, dtype=torch.float32), *(mean.view(-1) for mean in means)]).double()
    own = torch.linalg.vector_norm(values, norm_type)
    of_all = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_all, own, group=group)
    of_all = torch.stack(of_all)
    return torch.linalg.vector_norm(of_all, norm_type).float()


def _update(p: ShardedParameter, gradient: torch.Tensor, options: dict[str, Any]) -> None:
    """AdamW of this rank's slice."""
    p.step += 1
    if not isinstance(p.moments, CompactMoments):
        p.master, *p.moments = adamw_step(p.master, gradient, *p.moments, p.step, **options)
        return
    matrix = p.moments.exp_avg.shape
    state = p.master.view(matrix), gradient.view(matrix), p.moments, p.step
    which = {"number": p.number, "first_row": p.start // matrix[1]}  # of the random bytes
    master, p.moments = compact_adamw_step(*state, **which, **options)
    p.master = master.flatten()


def cast_and_gather(parameters: Sequence[ShardedParameter], group: dist.ProcessGroup | None = None) -> bool:
    """Have the weights follow their masters. Collective. Returns whether any NVFP4 weight was skipped."""
    # Amaxes of tiles and of weights: each rank's of its own masters, and one MAX all-reduce.
    shards = [(p.master[: p.owned], p.start, p.shape, p.dtype) for p in parameters]
    pairs = [partial_amax(*shard) for p, shard in zip(parameters, shards, strict=True) if p.scale is not None]
    amaxes = [amax.flatten() for pair in pairs for amax in pair] or [torch.zeros(1, dtype=torch.float32)]
    reduced = torch.cat(amaxes)
    dist.all_reduce(reduced, dist.ReduceOp.MAX, group)
    reduced = iter(reduced.split(list(map(len, amaxes))))

    # Every rank computes the scales of whole weights, and the codes of its own slices. These it sends to all.
    found_inf = False
    for p, shard in zip(parameters, shards, strict=True):
        own = p.weight[dist.get_rank(group)]
        if p.scale is None:
            own.copy_(p.master)
        else:
            tiles, amax = next(reduced).view(p.scale.shape), next(reduced)
            if amax.isfinite():
                p.scale, p.amax = partial_cast(*shard, tiles, amax, own[: p.owned // 2]), amax.clone()
            found_inf |= not amax.isfinite()
        dist.all_gather(list(p.weight.view(torch.uint8)), own.clone().view(torch.uint8), group=group)
    return found_inf
