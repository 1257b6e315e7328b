"""The torch optimizers that update the masters, and the options of their parameter groups."""

import contextlib
import hashlib
import inspect
import math
import numbers
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zerofp4 import ops

NOT_ELEMENTWISE = {
    "Muon": "it orthogonalizes whole matrices",
    "Adafactor": "its second moments are sums over rows and columns: whole_matrices=True gives it matrices",
    "LBFGS": "its update takes inner products over all parameters",
    "SparseAdam": "it needs sparse gradients, and gradients are reduced as dense ones",
}
"""Optimizers that update a slice in another way than the whole parameter, and why."""

OF_MATRICES = ("Muon", "Adafactor")  # the ones that may run on whole matrices


def is_muon(optimizer_class: type) -> bool:
    return any(base.__name__ == "Muon" for base in optimizer_class.__mro__)


class InnerClass(NamedTuple):
    """The class that updates the masters of a parameter group."""

    optimizer_class: type[torch.optim.Optimizer]
    defaults: dict[str, Any]  # options of groups that lack them
    whole: bool  # whether the optimizer gets whole matrices; otherwise it gets 1D slices
    number: int  # of the optimizer of this class, in the order in which the groups name them

    @property
    def name(self) -> str:
        return f"{self.optimizer_class.__module__}.{self.optimizer_class.__qualname__}"


def inner_classes(
    param_groups: Sequence[dict], optimizer_class: type, whole_matrices: bool | None, defaults: dict
) -> list[InnerClass]:
    """The class of each group: its own entry `optimizer_class`, or the argument of that name, to which alone
    whole_matrices and defaults apply. Raises TypeError for a class of another kind, ValueError for a class
    that cannot be sharded, and for a group that has its own class but lacks one of the defaults.
    """
    chosen = [group.get("optimizer_class", optimizer_class) for group in param_groups]
    order, classes = list(dict.fromkeys(chosen)), []
    for g, (group, own) in enumerate(zip(param_groups, chosen, strict=True)):
        is_main = own is optimizer_class
        where = "optimizer_class" if is_main else f"param_groups[{g}]['optimizer_class']"
        if not (isinstance(own, type) and issubclass(own, torch.optim.Optimizer)):
            raise TypeError(f"{where} must be a subclass of torch.optim.Optimizer, got {own!r}")
        whole = is_muon(own) if whole_matrices is None or not is_main else whole_matrices
        for base in own.__mro__:
            reason = NOT_ELEMENTWISE.get(base.__name__)
            if reason is not None and not (whole and base.__name__ in OF_MATRICES):
                raise ValueError(f"{where}: {own.__name__} cannot run on shards of parameters, {reason}")
        lacking = () if is_main else inspect.signature(own).parameters.keys() - group.keys()
        missing = [name for name in defaults if name in lacking]
        if missing:
            raise ValueError(
                f"{where} is {own.__name__}, and {', '.join(missing)} was given for "
                f"{optimizer_class.__name__}: a group with a class of its own needs its own"
            )
        classes.append(InnerClass(own, defaults if is_main else {}, whole, order.index(own)))
    if optimizer_class not in chosen and (defaults or whole_matrices):
        given = [*defaults, *(["whole_matrices"] if whole_matrices else [])]
        raise ValueError(
            f"{', '.join(given)}: given for {optimizer_class.__name__}, which is the class of no group"
        )
    return classes


def try_options(classes: Sequence[InnerClass], param_groups: Sequence[dict], device: torch.device) -> None:
    """Build an optimizer of one element for each group, with its options as defaults, too, since torch
    checks only these. Raises the constructors' errors for wrong options, and ValueError for a NaN or Inf.
    """
    check_finite([inner.defaults | group for inner, group in zip(classes, param_groups, strict=True)])
    for inner, group in zip(classes, param_groups, strict=True):
        trial = {"params": [torch.zeros(1, 1, dtype=torch.float32, device=device)]}
        known = inspect.signature(inner.optimizer_class).parameters.keys() - {"params"}
        own = {key: value for key, value in group.items() if key in known}
        inner.optimizer_class([options(group) | trial], **(inner.defaults | own))


@contextlib.contextmanager
def on_trial(device: torch.device) -> Iterator[None]:
    """Steps inside leave no trace: torch's global hooks do not see them, and later random numbers are the
    same. (The function that torch has wrapped would be seen: a class may call the step() of its base.)
    """
    with contextlib.ExitStack() as at_the_end:
        at_the_end.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else ()))
        for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
            at_the_end.callback(hooks.update, dict(hooks))
            hooks.clear()
        yield


def matrix_work(inner: InnerClass, parameter: torch.Tensor, name: str) -> int | None:
    """The cost of updating whole matrices, for any class: Muon's operations in one iteration. None if the
    class takes any slice.

    Raises ValueError, with this name, for a parameter that is neither a matrix nor a stack of them.
    """
    if not inner.whole:
        return None
    if parameter.dim() not in (2, 3):
        raise ValueError(
            f"{name} has shape {tuple(parameter.shape)}, and {inner.name} gets whole matrices: of 2D "
            "parameters and of stacks in 3D ones. Give it a group with another optimizer_class"
        )
    *stack, rows, columns = parameter.shape
    short, long = sorted((rows, columns))
    return math.prod(stack) * (4 * short**2 * long + 2 * short**3)


class InnerOptimizers:
    """The optimizers of the masters, one for each class. Their groups are the parameter groups, with masters.

    classes: by parameter group.
    masters: by id(parameter), this rank's part of its master as its class takes it; missing or empty if this
        rank owns nothing.
    """

    def __init__(
        self,
        classes: Sequence[InnerClass],
        param_groups: Sequence[dict],
        masters: Mapping[int, Sequence[torch.Tensor]],
    ):
        self.classes, self._outer_groups = classes, param_groups
        self.all: tuple[torch.optim.Optimizer, ...] = ()
        for inner in {one.number: one for one in classes}.values():  # numbered as they come
            groups = []
            for group in self._of(inner.number, param_groups):
                own = [m for p in group["params"] for m in masters.get(id(p), ())]
                groups.append(options(group) | {"params": own})
            self.all += (inner.optimizer_class(groups, **inner.defaults),)
        self._copies: list[dict] = []
        """Copies of the parameter groups and of the groups here, from the last sync_options()."""
        self._checked: list[dict] = []
        """The copies that check_options() last passed. The hash of their numbers, and their tensors:"""
        self._number_hash, self._tensors = 0, []
        self.sync_options()

    def _of(self, number: int, by_group: Sequence) -> list:
        """Select the entries of one optimizer from a list by parameter group."""
        return [value for value, own in zip(by_group, self.classes, strict=True) if own.number == number]

    @property
    def param_groups(self) -> list[dict]:
        """The groups of all optimizers, in the order of the parameter groups."""
        groups = [iter(optimizer.param_groups) for optimizer in self.all]
        return [next(groups[one.number]) for one in self.classes]

    def sync_options(self) -> None:
        """Copy options both ways: those that a parameter group has changed since the last copy to the
        optimizers, all others from the optimizers, which may change their own.
        """
        param_groups, inner_groups = self._outer_groups, self.param_groups
        if are_unchanged([*param_groups, *inner_groups], self._copies):
            return
        copies = self._copies or param_groups  # after a load only the optimizers' options count
        for group, inner_group, before in zip(param_groups, inner_groups, copies, strict=False):
            inner_group |= {k: value for k, value in options(group).items() if value is not before.get(k)}
            for key in options(before).keys() - group.keys():
                inner_group.pop(key, None)
            group |= options(inner_group)
        self._copies = list(map(dict, [*param_groups, *inner_groups]))

    def check_options(self) -> None:
        """Before a vote: sync_options(). Raises ValueError for a NaN or Inf in an option that was replaced,
        not written in place.
        """
        self.sync_options()
        if self._checked is not self._copies:
            check_finite(self._copies)
            items = [(name, item) for name, own in compared_options(self.param_groups) for item in own]
            values = [(name, None if torch.is_tensor(i) else float(i)) for name, i in items]
            digest = hashlib.sha256(repr(values).encode()).digest()
            self._number_hash = int.from_bytes(digest[: HASH_BITS // 8], "big")
            self._tensors = [item.detach() for _, item in items if torch.is_tensor(item)]
            self._checked = self._copies

    def hash_options(self, device: torch.device) -> tuple[int, torch.Tensor | None]:
        """After check_options(): the hash of compared_options() that are numbers, and that of the values of
        tensors, float64 [] on the device, for which the host does not wait; None without tensors.
        """
        if not self._tensors:
            return self._number_hash, None
        moved = [t.to(device, torch.float64, non_blocking=True).reshape(-1) for t in self._tensors]
        words = (torch.cat(moved) + 0.0).view(torch.int64)  # -0.0 is 0.0
        factors = torch.full_like(words, _ODD).cumprod(0)  # modulo 2**64
        word = ((words ^ (words >> 32)) * factors).sum()  # the low bits of a number like 1.0 are zeros
        return self._number_hash, ((word ^ (word >> 32)) & ((1 << HASH_BITS) - 1)).double()

    # A step

    def heed_found_inf(self) -> bool:
        """Whether a step changes and counts nothing if the attribute `found_inf`, float32 [] on the device,
        is 1: in FusedAdamW, and in torch's classes with fused=True, on which GradScaler relies.
        """
        for one in self.all:
            # torch's fused SGD that skips its first step leaves momentum buffers uninitialized.
            are_fused = all(group.get("fused") and not group.get("momentum") for group in one.param_groups)
            torch_does = are_fused and getattr(one, "_step_supports_amp_scaling", False)
            if not (torch_does or hasattr(type(one), "found_inf")):
                return False
        return True

    def found_inf(self) -> torch.Tensor | None:
        """The sum of the flags that a user has set as `found_inf` of the optimizers; None without one."""
        given = [vars(one)["found_inf"] for one in self.all if vars(one).get("found_inf") is not None]
        return sum(flag.reshape(()) for flag in given) if given else None

    def step(
        self,
        masters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        found_inf: torch.Tensor | None,
    ) -> None:
        """Step each optimizer, with `found_inf` instead of a user's own."""
        # Gradients are the same views in every step, and assigning one costs more than comparing it.
        if not all(map(operator.is_, ops.gradients_of(masters), gradients)):
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient
        for optimizer in self.all:
            own = vars(optimizer)
            before = own.get("found_inf")
            try:
                own["found_inf"] = found_inf
                optimizer.step()
            finally:
                own["found_inf"] = before
        self.sync_options()

    # State

    def state_of(self, master: torch.Tensor) -> dict[str, Any]:
        """The state of a master; empty if it has none yet."""
        return next((o.state[master] for o in self.all if master in o.state), {})

    @contextlib.contextmanager
    def restored_by_errors(self) -> Iterator[None]:
        """An error inside undoes a load(), which replaces options, state and groups by other objects."""
        copies, before = self._copies, [(one.state, one.param_groups) for one in self.all]
        try:
            yield
        except BaseException:
            self._copies = copies
            for one, (state, groups) in zip(self.all, before, strict=True):
                one.state, one.param_groups = state, groups
            raise

    def load(self, param_groups: Sequence[dict], states: Mapping[int, dict], device: torch.device) -> None:
        """Load options and state, by id(master), with the optimizers' errors. The next sync_options() copies
        all options to the parameter groups.
        """
        try_options(self.classes, param_groups, device)
        self._copies = []
        for number, optimizer in enumerate(self.all):
            masters, groups = [], []
            for new, own in zip(self._of(number, param_groups), optimizer.param_groups, strict=True):
                numbers = range(len(masters), len(masters) + len(own["params"]))
                groups.append(options(new) | {"params": list(numbers)})
                masters += own["params"]
            state = {i: states[id(m)] for i, m in enumerate(masters) if states.get(id(m))}
            optimizer.load_state_dict({"state": state, "param_groups": groups})


# Options

MUST_BE_FINITE = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "alpha", "lr_decay", "rho")
"""Options of torch's classes that reach every master of a group."""

HASH_BITS = 48  # a float64 holds a hash of this many bits exactly

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd factor, as an int64: products with it and with its powers stay distinct modulo 2**64."""


def options(group: dict) -> dict:
    """The entries of a parameter group that the group of its masters has, too."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def are_unchanged(param_groups: Sequence[dict], copies: Sequence[dict]) -> bool:
    """Whether every entry of the groups is the same object as in earlier copies. The loop runs in C."""
    return len(param_groups) == len(copies) and all(
        group.keys() == before.keys() and all(map(operator.is_, group.values(), before.values()))
        for group, before in zip(param_groups, copies, strict=True)
    )


def check_finite(param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for a NaN or Inf in MUST_BE_FINITE. The host does not wait for tensors on a GPU."""
    for g, group in enumerate(param_groups):
        for name in MUST_BE_FINITE:
            for value in _items(group.get(name)):
                is_here = value.is_cpu if torch.is_tensor(value) else isinstance(value, numbers.Real)
                if is_here and not math.isfinite(value):
                    raise ValueError(f"param_groups[{g}]['{name}'] must be finite, got {group[name]!r}")


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def compared_options(param_groups: Sequence[dict]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Names and values of options that ranks must have in common: numbers, tensors, lists of these."""
    for g, group in enumerate(param_groups):
        for name, value in sorted(options(group).items()):
            if all(isinstance(item, numbers.Real | torch.Tensor) for item in _items(value)):
                yield f"param_groups[{g}]['{name}']", _items(value)


def show_options(param_groups: Sequence[dict]) -> list[str]:
    """compared_options() as text. Waits for the device of a tensor."""
    shown = []
    for name, items in compared_options(param_groups):
        texts = (f"tensor({i.tolist()})" if torch.is_tensor(i) else str(float(i)) for i in items)
        shown.append(f"{name} {' '.join(texts)}")
    return shown
