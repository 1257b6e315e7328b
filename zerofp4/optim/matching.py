"""Which entry of a state dict is whose, and whether it has the form of one."""

from collections.abc import Mapping, Sequence
from typing import Any

from zerofp4.optim.checkpoint import own_name


def check_form(state_dict: Any) -> None:
    """Raises TypeError or ValueError for what is not torch's form of a state dict."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
    for key, kind in {"state": Mapping, "param_groups": list | tuple}.items():
        if key not in state_dict:
            raise ValueError(f"state_dict is not one of an optimizer: it has no {key}")
        if not isinstance(state_dict[key], kind):
            raise ValueError(f"state_dict: {key} is a {type(state_dict[key]).__name__}")
    for g, group in enumerate(state_dict["param_groups"]):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise ValueError(f"state_dict: param_groups[{g}] must be a dict with a list of params")
        names = group.get("param_names")
        if names is not None and len(names) != len(group["params"]):
            raise ValueError(
                f"state_dict: param_groups[{g}] has {len(group['params'])} params, {len(names)} param_names"
            )
    for key, entries in state_dict["state"].items():
        if not isinstance(entries, Mapping):
            raise ValueError(f"state_dict: state[{key!r}] must be a dict, got {type(entries).__name__}")
    steps = state_dict.get("steps", 0)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"state_dict: steps must be an int, 0 or more, got {steps!r}")


class Match:
    """Which entry of a state dict is whose: by name where both sides have names, else by place."""

    def __init__(self, state_dict: Mapping, names: Sequence[Sequence[str | None]]):
        self._state = state_dict["state"]
        self._groups = state_dict["param_groups"]
        saved = [self._saved_names(group) for group in self._groups]
        named = all(name is not None for group in [*names, *saved] for name in group)
        self.by_name = named and bool(self._groups)
        if self.by_name:
            self._places = {n: (g, i) for g, group in enumerate(saved) for i, n in enumerate(group)}
        elif [len(group) for group in saved] != [len(group) for group in names]:
            counts = [[len(group) for group in side] for side in (saved, names)]
            raise ValueError(
                f"state_dict: param_groups have {counts[0]} parameters, and these {counts[1]}; other groups "
                "are loaded where both optimizers were built with named_parameters()"
            )
        own = {key: getattr(key, "name", key) for key in self._state}
        self._keys = {own_name(name): key for key, name in own.items() if isinstance(name, str)}
        known = [p for group in self._groups for p in group["params"]]
        for key in own.keys() - self._keys.values():
            if key not in known:
                raise ValueError(f"state_dict: state[{key!r}] is of no parameter of its param_groups")

    @staticmethod
    def _saved_names(group: Mapping) -> list[str | None]:
        if group.get("param_names") is not None:
            return [own_name(str(name)) for name in [*group["param_names"], *group.get("elsewhere", ())]]
        return [own_name(p) if isinstance(p, str) else None for p in group["params"]]

    def place(self, g: int, i: int, name: str | None) -> tuple[int, int] | None:
        """Group and position; None where there is nothing of it."""
        if not self.by_name:
            return g, i
        place = self._places.get(name)
        # What another rank had is there if it was read by name.
        elsewhere = place is not None and place[1] >= len(self._groups[place[0]]["params"])
        return None if elsewhere and name not in self._keys else place

    def entries(self, place: tuple[int, int], name: str | None) -> Mapping:
        """A checkpoint that was read into state_dict() has the numbers of this optimizer in `state`, whatever
        those in its groups.
        """
        if self.by_name and name in self._keys:
            return self._state[self._keys[name]]
        g, i = place
        return self._state.get(self._groups[g]["params"][i], {})

    def group(self, g: int) -> Mapping:
        return self._groups[g]
