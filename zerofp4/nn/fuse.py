"""Fuses norms with the linear layers that an nn.Sequential calls right after them."""

import collections
from typing import NamedTuple

from torch import nn
from torch.nn import functional as F

from zerofp4.nn.choice import Chosen, ConversionReport, FilterFn, join
from zerofp4.nn.layer_norm import NORMALIZATIONS, LayerNormLinear, LayerNormMLP
from zerofp4.nn.linear import Linear


class _Part(NamedTuple):
    """A module of an nn.Sequential: its key there, and its name in the model."""

    key: str
    name: str
    module: nn.Module


class Fusions:
    """What convert_model fuses. filter_fn is asked before `chosen` are converted; fuse() follows."""

    def __init__(self, model: nn.Module, filter_fn: FilterFn, report: ConversionReport, chosen: list[Chosen]):
        self._filter, self._report = filter_fn, report
        self._chosen = {choice.name for choice in chosen}
        self._places = collections.Counter(id(m) for each in model.modules() for m in each._modules.values())
        self._found: list[tuple[nn.Module, list[_Part]]] = []
        for prefix, container in model.named_modules():
            if not isinstance(container, LayerNormLinear | LayerNormMLP):
                self._look_into(container, prefix)

    def fuse(self) -> None:
        for container, parts in self._found:
            self._replace(container, parts)

    def _look_into(self, container: nn.Module, prefix: str) -> None:
        parts = [_Part(key, join(prefix, key), module) for key, module in container._modules.items()]
        for index, part in enumerate(parts):
            if type(part.module) not in NORMALIZATIONS.values():
                continue
            reason = self._why_not(container, parts[index:])
            if reason is None:
                count = 4 if self._is_mlp(parts[index:]) else 2
                self._found.append((container, parts[index : index + count]))
            else:
                self._report.unfused[part.name] = reason

    def _why_not(self, container: nn.Module, parts: list[_Part]) -> str | None:
        if type(container) is not nn.Sequential:
            return (
                f"{type(container).__name__} has a forward of its own, which would have to call another layer"
            )
        if len(parts) < 2 or not self._is_chosen(parts[1]):
            return "no nn.Linear that is converted follows it"
        norm, linear = parts[0].module, parts[1].module
        if tuple(norm.normalized_shape) != (linear.in_features,):
            shape = tuple(norm.normalized_shape)
            return f"it normalizes {shape}, and {parts[1].name!r} takes {linear.in_features}"
        for part in parts[:2]:
            reason = self._why_not_moved(part)
            if reason is not None:
                return reason
        return None if self._filter(norm, parts[0].name) else "filter_fn is false for it"

    def _is_mlp(self, parts: list[_Part]) -> bool:
        """Whether the norm and linear layer begin a LayerNormMLP."""
        if len(parts) < 4 or activation_of(parts[2].module) is None or not self._is_chosen(parts[3]):
            return False
        fc1, fc2 = parts[1].module, parts[3].module
        fits = (fc1.out_features, fc1.in_features) == (fc2.in_features, fc2.out_features)
        if not fits or any(self._why_not_moved(part) is not None for part in parts[2:4]):
            return False
        return self._filter(parts[2].module, parts[2].name)

    def _is_chosen(self, part: _Part) -> bool:
        return type(part.module) in (nn.Linear, Linear) and part.name in self._chosen

    def _why_not_moved(self, part: _Part) -> str | None:
        """Why a module cannot move into a layer that calls it with other arguments, or not at all."""
        attributes = vars(part.module)
        if any(value for name, value in attributes.items() if name.endswith("_hooks")):
            return f"{part.name!r} has hooks"
        if "forward" in attributes:
            return f"{part.name!r} has a forward of its own"
        return f"{part.name!r} is used in several places" if self._places[id(part.module)] > 1 else None

    def _replace(self, container: nn.Module, parts: list[_Part]) -> None:
        """Put the fused layer at the first part and nn.Identity at the others, so that keys stay."""
        fused, moved = _fused(parts)
        first, report = parts[0], self._report
        for part in parts:
            made = fused if part is first else nn.Identity()
            made.training = container.training
            setattr(container, part.key, made)
        report.fused[first.name] = [part.name for part in parts]
        for name, part in moved.items():
            part.module.weight.record.name = join(first.name, name)
        names = {part.name: join(first.name, name) for name, part in moved.items()}
        weights = {join(old, "weight"): join(new, "weight") for old, new in names.items()}
        report.converted = [names.get(name, name) for name in report.converted]
        report.layers = [names.get(name, name) for name in report.layers]
        report.shares = {weights.get(name, name): share for name, share in report.shares.items()}


def _fused(parts: list[_Part]) -> tuple[LayerNormLinear | LayerNormMLP, dict[str, _Part]]:
    """The fused layer, and its linear layers by their names in it."""
    kind = LayerNormMLP if len(parts) == 4 else LayerNormLinear
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    moved = {"fc1": parts[1], "fc2": parts[3]} if kind is LayerNormMLP else {"linear": parts[1]}
    for name, part in moved.items():
        setattr(made, name, part.module)
    made.norm = parts[0].module
    if kind is LayerNormMLP:
        made.activation = activation_of(parts[2].module)
    return made, moved


def activation_of(module: nn.Module) -> str | None:
    """LayerNormMLP's name for the function of an activation module, or None."""
    kind = type(module)
    if kind is nn.GELU:
        return "gelu" if module.approximate == "none" else None
    if kind.__module__ != "transformers.activations":  # by name, so that transformers need not be there
        return None
    if kind.__name__ == "GELUActivation":
        return "gelu" if module.act is F.gelu else None
    return "relu2" if kind.__name__ == "ReLUSquaredActivation" else None
