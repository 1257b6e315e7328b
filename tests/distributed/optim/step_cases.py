"""An optimizer beside reference.zero_step(): both get the same gradients, and have the same bytes."""

from __future__ import annotations

import os
from unittest import mock

import torch
import torch.distributed as dist
from cases.optim import keywords, make_parameters, plain_masters
from helpers import assert_all_equal, assert_bytes_equal, assert_values_equal
from torch.distributed.device_mesh import DeviceMesh

from distributed.optim.cases import whole_state
from zerofp4 import NVFP4Tensor, reference
from zerofp4.format import STATE_GROUP
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

HYPERS = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
TINY = 1e-6
"""bucket_mb for each parameter alone."""


def gradient_values(seed: int, shape, dtype: torch.dtype, exact: bool) -> torch.Tensor:
    """float32 values of that dtype. exact: integers so small that sums of ranks are the same in any order."""
    generator = torch.Generator().manual_seed(seed)
    if exact:
        return torch.randint(-4, 5, shape, generator=generator).float()
    return (torch.randn(shape, generator=generator) * 10.0 ** (seed % 5 - 2)).to(dtype).float()


class Pair:
    """Parameters with their optimizer, the reference of these, and what backward passes have added up.

    group: of the ranks that step together, this one among them.
    replicated: whether hosts hold replicas. options: of ZeroFP4Optimizer and Communication.
    """

    def __init__(self, specifications, group: dist.ProcessGroup, replicated: bool = False, **options):
        self.group = group
        self.hypers = {name: options.pop(name, value) for name, value in HYPERS.items()}
        self.parameters = make_parameters(torch.device("cpu"), 0, specifications)
        self.ordered = options.get("reduction", "ordered") == "ordered"
        self.overlap = options.get("overlap")
        self.sums = options.get("offload_gradients", False)
        size = dist.get_world_size(group)
        self.hosts = (size // 2 if size == 4 else size) if options.get("between_hosts") else None
        """Of two ranks if they are four, else of one."""
        compact = options.get("state") == "compact"
        self.gradient_dtypes = [options.get("gradient_dtype") or p.dtype for p in self.parameters]
        self.expected = [
            reference.ShardedParameter(
                values,
                p.dtype,
                i,
                group,
                quantized=isinstance(p, NVFP4Tensor),
                compact=compact,
                sent_as=options.get("gradient_wire") or self.gradient_dtypes[i],
                between_hosts=_format_between_hosts(i, p, options),
            )
            for i, (p, values) in enumerate(zip(self.parameters, plain_masters(self.parameters), strict=True))
        ]
        reference.cast_and_gather(self.expected, group)
        named = [(f"weight {i}", p) for i, p in enumerate(self.parameters)]
        if replicated:
            named = [{"params": named, "process_group": mesh_of_hosts(group, self.hosts)}]
        host = None if self.hosts is None else dist.get_rank(group) // (size // self.hosts)
        with mock.patch.dict(os.environ, {} if host is None else {"NCCL_HOSTID": str(host)}):
            self.optimizer = ZeroFP4Optimizer(
                named, FusedAdamW, process_group=group, **keywords(self.hypers, options)
            )
        self.forget()
        self.skipped_steps = 0

    def forget(self, zeros: bool = False) -> None:
        """The gradients of backward passes and what clips have made of them. zeros: they stay, as zeros."""
        before = self.gradients if zeros else [None] * len(self.parameters)
        self.gradients = [None if g is None else torch.zeros_like(g) for g in before]
        self.passes: list[list[torch.Tensor | None]] = []
        self.clips: list[tuple[float, float]] = []
        self.norms: list[torch.Tensor] = []

    def loss(self, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        """Its backward pass makes these gradients, which are added up here, too."""
        if self.sums:
            pairs = zip(gradients, self.gradient_dtypes, strict=True)
            self.passes.append([None if g is None else g.to(dtype) for g, dtype in pairs])
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                before, gradient = self.gradients[i], gradient.to(self.gradient_dtypes[i])
                self.gradients[i] = gradient if before is None else before + gradient
        pairs = zip(self.parameters, gradients, strict=True)
        return sum((p.float() * gradient).sum() for p, gradient in pairs if gradient is not None)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> None:
        """Gradients stay as they are: the step multiplies what it averages."""
        given = [p.grad for p in self.parameters if p.grad is not None]
        before = [gradient.clone() for gradient in given]
        self.clips.append((max_norm, norm_type))
        self.norms.append(self.optimizer.clip_grad_norm_(max_norm, norm_type))
        assert_all_equal(given, before, "clipped gradient")

    def step(self) -> bool:
        """The reference's step after the optimizer's. Returns whether it was skipped."""
        options = self.hypers | {"ordered": self.ordered, "clips": self.clips}
        if self.hosts is not None:
            options["between"] = self.hosts, self.optimizer._agreement.look() - 1
        if self.passes:
            *options["earlier"], self.gradients = self.passes
        if self.overlap == "update":
            assert all(bucket["parameters"] == 1 for bucket in self.optimizer.describe()["buckets"])
            steps = [
                reference.zero_step([p], [gradient], self.group, **options)
                for p, gradient in zip(self.expected, self.gradients, strict=True)
            ]
            found_inf, norms = any(found_inf for found_inf, _ in steps), []
        else:
            found_inf, norms = reference.zero_step(self.expected, self.gradients, self.group, **options)
        assert self.optimizer.found_inf.item() == found_inf
        self.skipped_steps += found_inf
        assert self.optimizer.skipped_steps == self.skipped_steps
        for found, norm in zip(self.norms, norms, strict=True):
            assert_values_equal(found, norm, f"norm of {self.clips}")
        return found_inf

    def check(self, what: str) -> None:
        """Everything that a step changes, on every rank. Collective."""
        self.optimizer.check()
        for i, (p, expected) in enumerate(zip(self.parameters, self.expected, strict=True)):
            for name, found, values in weight_of(p, expected):
                assert_bytes_equal(found, values, f"{what}: weight {i}: {name}")
        names = [(i, n) for i, p in enumerate(self.parameters) for n in sorted(self.optimizer.state[p])]
        found: list[dict[str, torch.Tensor]] = [{} for _ in self.parameters]
        for (i, name), whole in zip(names, whole_state(self.parameters, self.optimizer), strict=True):
            found[i][name] = whole
        for i, (kept, expected) in enumerate(zip(found, self.state(), strict=True)):
            if "master_high" in kept:
                kept["master"] = reference.join_master(kept.pop("master_high"), kept.pop("master_low"))
            assert kept.keys() == expected.keys()
            for name, values in expected.items():
                assert_values_equal(kept[name], values, f"{what}: weight {i}: {name}")

    def restore(self, state: list[dict[str, torch.Tensor]]) -> None:
        """Go on from what state() returned in any world, of any kind. Collective."""
        for p, kept in zip(self.expected, state, strict=True):
            p.step, master = int(kept["step"]), kept["master"]
            if p.number is not None:
                master = reference.round_master(master, torch.tensor(128))
            p.master = _own(p, master, p.master)
            if p.step:
                wholes = _moments(kept, isinstance(p.moments, reference.CompactMoments))
                own = [_own(p, *pair) for pair in zip(wholes, p.moments, strict=True)]
                p.moments = type(p.moments)(*own) if len(own) == 3 else own
        reference.cast_and_gather(self.expected, self.group)

    def state(self) -> list[dict[str, torch.Tensor]]:
        """By parameter what the reference keeps, whole, under the names of the optimizer. Collective."""
        kept = [tensor for p in self.expected for tensor in (p.master, *p.moments)]
        flat = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in kept])
        by_rank = [torch.empty_like(flat) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(by_rank, flat, group=self.group)
        parts = zip(*(part.split([t.nbytes for t in kept]) for part in by_rank), strict=True)
        wholes = (torch.cat(part).view(t.dtype) for part, t in zip(parts, kept, strict=True))
        return [_named(p, [next(wholes) for _ in (p.master, *p.moments)]) for p in self.expected]


def mesh_of_hosts(group: dist.ProcessGroup, hosts: int) -> DeviceMesh:
    """Replicas on hosts, for parameters on a CPU. Collective, of all ranks of the world."""
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(hosts, -1)
    circles = (
        dist.new_subgroups_by_enumeration(each.tolist(), backend="gloo")[0] for each in (ranks.t(), ranks)
    )
    return DeviceMesh.from_group(list(circles), "cpu", ranks, mesh_dim_names=("replicas", "ranks"))


def only_the_first(name: str, parameter: torch.Tensor) -> bool:
    """For Communication(exactly=...)."""
    assert isinstance(parameter, torch.nn.Parameter)
    return name == "weight 0"


def _format_between_hosts(i: int, p: torch.Tensor, options: dict) -> str | None:
    """Of a parameter if blocks of the format divide its rows: of NVFP4 weights, or all but the first."""
    wire = options.get("between_hosts")
    cols = p.shape[-1] if p.dim() else 1
    divides = wire and cols % {"bf16": 1, "mxfp8": 32, "nvfp4": 16}[wire] == 0
    is_chosen = i != 0 if options.get("exactly") else isinstance(p, NVFP4Tensor)
    return wire if divides and is_chosen else None


def weight_of(p: torch.Tensor, expected: reference.ShardedParameter):
    """(name, of the parameter, of the reference) for all of a weight."""
    numel = expected.shape.numel()
    if not isinstance(p, NVFP4Tensor):
        yield "values", p.detach(), expected.weight.view(-1)[:numel].view(expected.shape)
        return
    rows, cols = expected.shape
    codes, scale = expected.weight.view(-1)[: numel // 2].view(rows, cols // 2), expected.scale
    yield "codes", p.rowwise_data, codes
    yield "scales", p.rowwise_scale, scale
    yield "amax", p.amax, expected.amax
    yield "columnwise codes", p.columnwise_data, reference.transpose_packed(codes)
    yield "columnwise scales", p.columnwise_scale, scale.t().contiguous()


def _named(p: reference.ShardedParameter, wholes: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """wholes: the master and the moments of all ranks, flat and with padding."""
    shape, shapes = p.shape, [p.shape] * 3
    names = ["master", "exp_avg", "exp_avg_sq"]
    if len(wholes) == 4:
        names = ["master", "exp_avg_codes", "exp_avg_sq_codes", "scales"]
        shapes.append(torch.Size([*shape[:-1], -(-shape[-1] // STATE_GROUP), 2]))
    state = {n: w[: s.numel()].view(s) for n, w, s in zip(names, wholes, shapes, strict=True)}
    return state | {"step": torch.tensor(float(p.step), dtype=torch.float32)}


def _moments(kept: dict[str, torch.Tensor], compact: bool) -> list[torch.Tensor]:
    """Whole moments in the kind of state that is asked for."""
    if compact and "exp_avg" in kept:
        exp_avg, exp_avg_sq = (kept[name].flatten(0, -2) for name in ("exp_avg", "exp_avg_sq"))
        return list(reference.encode_moments(exp_avg, reference.root(exp_avg_sq).clamp(max=2.0**64)))
    if not compact and "scales" in kept:
        names = "exp_avg_codes", "exp_avg_sq_codes", "scales"
        return list(reference.decode_moments(reference.CompactMoments(*map(kept.get, names))))
    return [kept[name] for name in kept if name not in ("master", "step")]


def _own(p: reference.ShardedParameter, whole: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a whole tensor, as large as the one before."""
    flat = before.new_zeros(len(p.weight) * before.numel())
    flat[: whole.numel()] = whole.flatten()
    return flat.view(len(p.weight), *before.shape)[p.start // len(p.master)].clone()
