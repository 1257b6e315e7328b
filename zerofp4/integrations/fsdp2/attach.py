"""attach: casts all masters of a sharded model at once, after every optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from zerofp4.cast import CastPlan
from zerofp4.distributed import OwnError, attempt, exchange
from zerofp4.integrations.fsdp2.state import prepared_weights
from zerofp4.integrations.fsdp2.torch_private import Sharded, check_dtypes, placement_of
from zerofp4.integrations.fsdp2.weight import Weight
from zerofp4.optim import FusedAdamW
from zerofp4.storage import NVFP4Storage


def attach(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> Attachment:
    """Cast the masters of a model, now and after each step of its optimizer, and gather the codes.

    model: the model given to prepare, or a module around it, once fully_shard and the optimizer have it; a
        training loop calls its forward.
    optimizer: of its parameters, also as accelerate prepares it, or the list of those that share them.

    Collective: every rank of the mesh must call it. A step makes one all-reduce over the ranks that the
    weights are sharded over. Frozen weights are cast once. After load_state_dict of the model, or of modules
    in it, which every rank calls alike, the next forward of the model casts what was loaded. Call refresh()
    after any other write to masters. A FusedAdamW leaves the amaxes for the cast.

    Raises RuntimeError if prepare, fully_shard, values or the optimizer are missing or the model is attached
    already, ValueError for an unsupported way of sharding, TypeError for another kind of argument. An error
    of one rank is raised on all.
    """
    given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    if not isinstance(given, Sequence) or not all(isinstance(one, torch.optim.Optimizer) for one in given):
        raise TypeError(f"optimizer must be an optimizer or a list of them, got {type(optimizer).__name__}")
    # accelerate's wrapper is an Optimizer without hooks.
    optimizers = [one if hasattr(one, "_optimizer_step_post_hooks") else one.optimizer for one in given]
    sharded = Sharded(model)
    weights, error = attempt(_place, model, sharded)
    shares, error = (None, error) if error else attempt(_shares, optimizers, weights)
    for group in sharded.process_groups():
        _, error = attempt(exchange, None, error, group, "agreeing to attach a model")
    try:
        error.raise_if_any()
        return Attachment(model, weights, shares)
    except Exception:
        for weight in weights or ():
            weight.leave()
        raise


def _place(model: nn.Module, sharded: Sharded) -> list[Weight]:
    """The prepared weights of a model, each with its place. Changes nothing if it raises."""
    found = list(prepared_weights(model))
    if not found:
        raise RuntimeError("model has no prepared weight: call prepare(model) before fully_shard")
    attached = next((weight for *_, weight in found if weight.placement is not None), None)
    if attached is not None:
        raise RuntimeError(f"{attached.name!r} is attached already: call detach() of what attach returned")
    placements = [
        placement_of(sharded.params.get((id(module), name)), weight.name, weight.dtype)
        for module, name, weight in found
    ]
    check_dtypes(sharded)
    for (*_, weight), placement in zip(found, placements, strict=True):
        weight.place(placement)
    return [weight for *_, weight in found]


class Attachment:
    """The casts of a model's weights, from attach until detach().

    found_inf: float32 [1] by device, 1 if a cast has met a master with a NaN or Inf. Such a weight, and those
        that share its amax, keep their codes.
    """

    def __init__(self, model: nn.Module, weights: list[Weight], shares: list[Share]):
        self._model, self._weights = model, weights
        held = [optimizer for optimizer, *_ in shares]
        self._casters = [Caster(*share, leaves_amaxes=held.count(share[0]) == 1) for share in shares]
        self.refresh()
        options = {"prepend": True, "with_kwargs": True}
        self._handles = [model.register_forward_pre_hook(self._before_forward, **options)]
        for caster in self._casters:
            self._handles += caster.register_hooks()

    def __repr__(self) -> str:
        casts = ""
        for caster in self._casters:
            kind = "frozen" if caster.optimizer is None else type(caster.optimizer).__name__
            casts += f"\n  {kind}: {caster.plan}"
        return f"Attachment({len(self._weights)} weights of {type(self._model).__name__}{casts})"

    @property
    def found_inf(self) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = {}
        for caster in self._casters:
            flag = caster.plan.found_inf
            found[flag.device] = torch.maximum(found.get(flag.device, flag), flag)
        return found

    def refresh(self) -> None:
        """Cast the masters as they are now. Collective: every rank calls it after any write to masters other
        than the optimizer's and load_state_dict's, such as a dcp.load into model.state_dict().
        """
        _cast(self._casters)

    def check(self) -> None:
        """Wait for the last casts. Raises RuntimeError if some rank kept all from casting."""
        for caster in self._casters:
            caster.plan.check()

    def detach(self) -> None:
        """Stop casting. The model cannot be gathered until it is attached again."""
        for handle in self._handles:
            handle.remove()
        for weight in self._weights:
            weight.leave()

    @torch.compiler.disable
    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        _cast([c for c in self._casters if any(weight.was_loaded for weight in c.weights)])
        if any(weight.is_gathered_before_cast() for weight in self._weights):
            for module in self._model.modules():
                if hasattr(module, "reshard"):
                    module.reshard()


class Caster:
    """The cast of the weights of one optimizer, or of frozen ones, over one group of ranks. leaves_amaxes:
    whether the optimizer, if it can, leaves the amaxes of its updates for the cast.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        weights: list[Weight],
        amax_groups: list[list[NVFP4Storage]],
        leaves_amaxes: bool,
    ):
        self.optimizer, self.weights = optimizer, weights
        self._places = [weight.master().data_ptr() for weight in weights]
        codes = [weight.own_codes() if weight.placement.rows else None for weight in weights]
        self.plan = CastPlan(
            [weight.record for weight in weights],
            self._flat_masters(),
            [weight.placement.start for weight in weights],
            weights[0].placement.group,
            fsdp_shard_model_weights=codes,
            amax_groups=amax_groups,
        )
        self._leaves_amaxes = leaves_amaxes and isinstance(optimizer, FusedAdamW)
        self._offer()

    def _flat_masters(self) -> list[torch.Tensor | None]:
        masters = [weight.master() for weight in self.weights]
        return [master.detach().view(-1) if master.numel() else None for master in masters]

    def _offer(self) -> None:
        if self._leaves_amaxes:
            self.optimizer.offer_amaxes(self.plan)

    def register_hooks(self) -> list:
        if self.optimizer is None:
            return []
        handles = [self.optimizer.register_step_post_hook(lambda *_: self.cast())]
        if self._leaves_amaxes:  # it knows masters by address
            handles.append(self.optimizer.register_step_pre_hook(self._before_update))
        return handles

    def _before_update(self, *_) -> None:
        self._follow_masters()

    @torch.no_grad()
    def cast(self) -> None:
        """Collective. Raises RuntimeError as CastPlan.step."""
        masters, error = attempt(self._follow_masters)
        for weight in self.weights:
            weight.wait_for_copy()
        if self._leaves_amaxes and self.optimizer.amaxes_outdated():
            self.plan.begin_update()  # discards them
        late = self.plan.run(error)
        for weight, master in zip(self.weights, masters, strict=True):
            weight.note_cast(master)
        late.raise_if_any()

    def _follow_masters(self) -> list[torch.Tensor]:
        """The masters. FSDP2 moves them when it pads a shard, and a load with assign=True replaces them."""
        masters = [weight.master() for weight in self.weights]
        places = [master.data_ptr() for master in masters]
        if places != self._places:
            self.plan.refresh(self._flat_masters())
            self._places = places
            self._offer()
        return masters


def _cast(casters: list[Caster]) -> None:
    """Every rank runs all casts, whatever goes wrong with one, and raises the first error at the end."""
    first = OwnError()
    for caster in casters:
        with first:
            caster.cast()
    first.raise_if_any()


Share = tuple[torch.optim.Optimizer | None, list[Weight], list[list[NVFP4Storage]]]
"""Of one cast: the optimizer, or None; its weights, sharded over one group of ranks; their amax groups."""


def _shares(optimizers: list[torch.optim.Optimizer], weights: list[Weight]) -> list[Share]:
    holders = {
        id(p): k for k, opt in enumerate(optimizers) for group in opt.param_groups for p in group["params"]
    }
    shares: dict[tuple, list[Weight]] = {}
    for weight in weights:
        param = weight.placement.param.sharded_param
        if param.requires_grad and id(param) not in holders:
            raise RuntimeError(
                f"{weight.name!r} is not a parameter of the optimizer: build it after fully_shard, from the "
                "model's parameters, or freeze the weight"
            )
        ranks = tuple(dist.get_process_group_ranks(weight.placement.group))
        device = weight.master().device
        shares.setdefault((holders.get(id(param)), ranks, device), []).append(weight)
    return [
        (None if k is None else optimizers[k], share, _amax_groups(share))
        for (k, *_), share in shares.items()
    ]


def _amax_groups(weights: list[Weight]) -> list[list[NVFP4Storage]]:
    """As records of weights that are cast together. Raises ValueError if a group has others, too."""
    named = {weight.name: weight for weight in weights}
    groups = {id(weight.amax_group): weight.amax_group for weight in weights if weight.amax_group is not None}
    for group in groups.values():
        apart = next((name for name in group if name not in named), None)
        if apart is not None:
            raise ValueError(
                f"amax_groups: {apart!r} and {group[0]!r} are not cast together: they must belong "
                "to one optimizer and be sharded over the same ranks"
            )
    return [[named[name].record for name in group] for group in groups.values()]
