"""Checks before a ZeroFP4Optimizer is built: of one rank's arguments, then between all ranks."""

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerofp4.cast import check_castable, number_groups
from zerofp4.distributed import attempt, first_difference, rank_and_size
from zerofp4.engine import Trained, find_bucket_mb, find_hosts, gradient_dtype, host_name
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.nn import converted_model_of
from zerofp4.ops import MEANS_FORMATS, cpu_cores
from zerofp4.optim.adamw import FusedAdamW
from zerofp4.optim.groups import FOR_BUILDING, Ranks, find_names, find_places, parameter_name
from zerofp4.optim.inner import (
    OF_MATRICES,
    InnerClass,
    inner_classes,
    is_muon,
    matrix_work,
    on_trial,
    options,
    try_options,
)
from zerofp4.optim.moments import suits_compact
from zerofp4.optim.state_dict import own_name
from zerofp4.tensors import NVFP4Tensor

HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
"""Whether this torch makes gradients in another dtype than a tensor's own."""

ELEMENTWISE = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
KNOWN = {FusedAdamW, *(getattr(torch.optim, name) for name in [*ELEMENTWISE, *OF_MATRICES])}
"""Classes that need no trial. Their subclasses are tried, as they may override step()."""

_CHOICES = {
    "transport": ("auto", "collective", "peer"),
    "reduction": (None, "ordered", "reduce_scatter"),
    "overlap": (None, "backward", "forward", "both", "update"),
    "gradient_dtype": (None, torch.float32),
    "gradient_wire": (None, *WEIGHT_DTYPES),
    "between_hosts": (None, *MEANS_FORMATS),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communication:
    """How gradients and weights travel. The same on every rank.

    transport: "peer" shares memory between the GPUs of one host, "collective" uses NCCL or gloo. "auto" is
        peer if every rank can, and the reduction is ordered.
    reduction: "ordered" adds up gradients in FP32 and in rank order. "reduce_scatter" is the backend's, which
        adds in the dtype that is sent; its result may differ between world sizes. None is "ordered" if each
        parameter is sharded over ranks of one host, else "reduce_scatter".
    overlap: "backward" sends gradients during backward passes, "forward" lets weights arrive during the next
        forward pass, "both", or None. "update" has backward passes update each weight as soon as its gradient
        is there, and free the gradient (page on the optimizer).
    bucket_mb: megabytes of gradients that are sent at once; None is a 14th of all, from 256 to 1024.
    gradient_dtype: torch.float32 to add up micro-batches in FP32; None is the parameter's dtype.
    gradient_wire: the dtype that gradients are rounded to before they are sent; None keeps their own.
    between_hosts: "bf16", "mxfp8" or "nvfp4" averages gradients inside each host and rounds these means once,
        at random, to that format for the other hosts. Sums are ordered.
    exactly: a function of a name and a parameter, which is true if means of this parameter travel between
        hosts in FP32. None is true for parameters that are not NVFP4. Those whose last dimension the blocks
        of the format do not divide travel in FP32 in any case.

    Examples:
        >>> communication = zerofp4.optim.Communication(overlap="backward", bucket_mb=256)
        >>> optimizer = zerofp4.ZeroFP4Optimizer(model.parameters(), lr=1e-3, communication=communication)

    Raises ValueError or TypeError for options that are not among these, or exclude each other.
    """

    transport: str = "auto"
    reduction: str | None = None
    overlap: str | None = None
    bucket_mb: float | None = None
    gradient_dtype: torch.dtype | None = None
    gradient_wire: torch.dtype | None = None
    between_hosts: str | None = None
    exactly: Callable[[str, torch.Tensor], bool] | None = None

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        mb = self.bucket_mb
        if mb is not None:
            if isinstance(mb, bool) or not isinstance(mb, int | float) or not 0 < mb < math.inf:
                raise ValueError(f"bucket_mb must be a positive number of megabytes, got {mb!r}")
            object.__setattr__(self, "bucket_mb", float(mb))  # 1 and 1.0 are the same
        if self.exactly is not None:
            if not callable(self.exactly):
                raise TypeError(f"exactly must be a function of a name and a parameter, got {self.exactly!r}")
            if self.between_hosts is None:
                raise ValueError("exactly is for between_hosts, which is None")
        excluding = {
            "reduction='reduce_scatter'": self.reduction == "reduce_scatter",
            "transport='peer'": self.transport == "peer",
            f"between_hosts={self.between_hosts!r}": self.between_hosts is not None,
        }
        first, second, *_ = [*(name for name, is_used in excluding.items() if is_used), None, None]
        if second is not None:
            raise ValueError(f"{first} is not supported with {second}")


# One rank


class Checked:
    """The checked arguments of ZeroFP4Optimizer, and this rank's announcement to the others. Raises TypeError
    or ValueError for errors that one rank can see; changes nothing.
    """

    def __init__(
        self,
        param_groups: Sequence[dict],
        group: dist.ProcessGroup | None,
        *,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: dict[str, Any],
        amax_groups: Sequence[Sequence[torch.Tensor]] | None,
        communication: Communication,
        state: str,
        whole_matrices: bool | None,
        masters_from: Any,
        on_nonfinite: str,
        offload: float,
        offload_gradients: bool,
        offload_threads: int | None,
    ):
        if on_nonfinite not in ("skip", "raise"):
            raise ValueError(f'on_nonfinite must be "skip" or "raise", got {on_nonfinite!r}')
        if not isinstance(communication, Communication):
            raise TypeError(f"communication must be a Communication, got {type(communication).__name__}")
        for name in defaults.keys() & Communication.__dataclass_fields__.keys():
            raise TypeError(f"{name} is an option of communication: Communication({name}={defaults[name]!r})")
        self.amax_groups, self.communication = amax_groups, communication
        # By parameter group, the class that updates its masters, and the ranks that hold its parameters:
        self.classes = inner_classes(param_groups, optimizer_class, whole_matrices, defaults)
        self.places = find_places(param_groups, group)
        self.param_groups = [
            {key: value for key, value in param_group.items() if key not in FOR_BUILDING}
            for param_group in param_groups
        ]
        _choose_state(self.param_groups, self.classes, state)
        self.has_names = find_names(self.param_groups)  # by which checkpoints call the parameters
        groups = self.param_groups
        positions = [(g, i) for g, own in enumerate(groups) for i in range(len(own["params"]))]
        self.parameters = [groups[g]["params"][i] for g, i in positions]
        self.names = [parameter_name(g, i, groups[g]) for g, i in positions]  # their names in messages
        saved_as = [own_name(groups[g]["param_names"][i]) if self.has_names else None for g, i in positions]
        self._listed = list(zip(positions, self.parameters, self.names, saved_as, strict=True))
        """By parameter, its group and position there, itself, and its names in messages and checkpoints."""
        _check_parameters(self.parameters, self.names)
        try_options(self.classes, self.param_groups, self.parameters[0].device)
        _check_parts(self.classes, self.param_groups, rank_and_size(group)[1])
        self.trained = self._find_trained()
        self.why_at_once = _find_why_at_once(self.classes)  # why not bucket by bucket; or None
        if communication.overlap == "update":
            _check_updates_early(self.why_at_once, on_nonfinite)
        _check_offload(offload, offload_gradients, offload_threads, self.why_at_once)
        self.offload, self.offload_threads = float(offload), offload_threads
        self.offload_gradients = offload_gradients
        _check_gradients(communication, self.trained, self.classes)
        self.why_collective = self._find_why_collective(group)
        self.held: Mapping = {}  # the masters of an earlier optimizer, by parameter
        self.values_of: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Returns the value that a parameter begins with, if masters_from is a folder or a function."""
        if isinstance(masters_from, str | Path) or callable(masters_from):
            if not self.has_names:
                raise ValueError("masters_from finds values by name: pass model.named_parameters()")
            self.values_of = _by_name(masters_from, {id(p): name for _, p, _, name in self._listed})
        elif masters_from is not None:
            self.held = getattr(masters_from, "_saved", None)
            if self.held is None:
                raise TypeError(
                    "masters_from must be a ZeroFP4Optimizer, a folder or a function, got "
                    f"{type(masters_from).__name__}"
                )
            self.held.check_continued(self.trained)
        trainable = [one.parameter for one in self.trained]
        made_as = communication.gradient_wire or communication.gradient_dtype
        float16 = (o.name for o in self.trained if (made_as or gradient_dtype(o.parameter)) == torch.float16)
        self.announcement = Announcement(
            members=self._announce(),
            common=[
                ("optimizer_class of param_groups", [inner.name for inner in self.classes]),
                ("on_nonfinite", on_nonfinite),
                ("offload", self.offload),
                ("offload_gradients", offload_gradients),
                *((name, value) for name, value in vars(communication).items() if name != "exactly"),
            ],
            bucket_mb=communication.bucket_mb or find_bucket_mb(trainable, made_as),
            host=host_name(),
            cores=cpu_cores(),
            sends_float16=next(float16, None),
        )

    def doubts(self, rank: int, coarse: Sequence[int]) -> list[str]:
        """The warnings of a built optimizer. rank: in its process group. coarse: of ShardedParameters."""
        found, count = [], len(self.parameters)
        model = converted_model_of(self.parameters)  # may have frozen NVFP4 weights that are not among them
        beside = self.parameters if model is None else model.parameters()
        if rank == 0 and not any(isinstance(parameter, NVFP4Tensor) for parameter in beside):
            found.append(
                f"none of the {count} parameters is NVFP4, so all keep their dtypes: call "
                "zerofp4.convert_model(model) before the optimizer is built"
            )
        if rank == 0 and not self.has_names:
            found.append(
                f"the {count} parameters have no names: a checkpoint has them by position, as '0', '1' and "
                "so on, and fits only an optimizer of the same parameters in the same order. Pass "
                "model.named_parameters()"
            )
        if coarse:
            first = f"{self.trained[coarse[0]].name}{', ...' * (len(coarse) > 1)}"
            advice = "Load the model before convert_model, which keeps them"
            if not self.held:
                advice += (
                    "; to go on with an earlier ZeroFP4Optimizer, give it as masters_from, or its "
                    "state_dict() to load_state_dict() before the first step"
                )
            found.append(
                f"the masters of {len(coarse)} weights ({first}) begin with 4-bit values, since nothing kept "
                f"those from before the quantization. {advice}"
            )
        return found

    def _find_trained(self) -> list[Trained]:
        """The trainable parameters. Raises ValueError for weights that share an amax, but not a bucket."""
        found = []
        for (g, _), p, name, saved_as in self._listed:
            if p.requires_grad:
                inner = self.classes[g]
                work = matrix_work(inner, p, name)
                state, sharding = "full", self.places[g].sharding
                if self.param_groups[g].get("state") == "compact" and suits_compact(p.shape):
                    state = "compact24" if p.dtype == torch.bfloat16 else "compact"
                between = _format_between_hosts(self.communication, saved_as or name, p)
                found.append(Trained(p, name, sharding, inner.number, work, len(found), state, between))
        weights = [i for i, one in enumerate(found) if isinstance(one.parameter, NVFP4Tensor)]
        leaders: dict[int, int] = {}  # by number of an amax group
        numbers = number_groups([found[i].parameter.record for i in weights], self.amax_groups)
        for i, number in zip(weights, numbers, strict=True):
            leader = leaders.setdefault(number, i)
            first = found[leader]
            one = found[i] = found[i]._replace(leader=leader)
            if (one.key, one.sharding) != (first.key, first.sharding):  # an amax group is in one bucket
                raise ValueError(
                    f"amax_groups: {first.name} and {one.name} share an amax, so they must have the same "
                    "optimizer_class, block, four_over_six, dtype, `state`, process_group and, with "
                    "between_hosts, format and rows"
                )
        return found

    def _find_why_collective(self, group: dist.ProcessGroup | None) -> str | None:
        """Why parameters keep ranks from sharing memory, or None. Raises ValueError if an option needs it."""
        is_of_all = all(place.sharding.group is group for place in self.places)
        why = "parameter groups name a process_group of some ranks"
        if self.offload_gradients:
            if not is_of_all:
                raise ValueError(f"offload_gradients is not supported because {why}")
            if self.communication.between_hosts is not None:
                raise ValueError("offload_gradients is not supported with between_hosts")
            why = "offload_gradients brings the mean of each backward pass to the host"
        elif is_of_all:
            return None
        for name, refused in (("overlap", ("backward", "both", "update")), ("transport", ("peer",))):
            value = getattr(self.communication, name)
            if value in refused:
                raise ValueError(f"{name}={value!r} is not supported because {why}")
        return why

    def _announce(self) -> list["Member"]:
        """All parameters, frozen ones too."""
        numbers = {id(one.parameter): number for number, one in enumerate(self.trained)}
        members = []
        for (g, i), p, label, name in self._listed:
            place = self.places[g]
            parts = rank_and_size(place.sharding.group)[1]
            number = numbers.get(id(p))
            one = Trained(p, label) if number is None else self.trained[number]
            # The number decides the random bytes of compact state, so it must be equal on all ranks.
            facts = {
                "frozen": number is None,
                f"gradients {gradient_dtype(p)}": gradient_dtype(p) != p.dtype,
                "updated whole": one.work is not None,
                f"in amax_groups with {self.trained[one.leader].name}": number not in (None, one.leader),
                f"in compact state as number {number}": one.state != "full",
                f"in {one.between_hosts} between hosts as number {number}": one.between_hosts is not None,
                "of masters_from": p in self.held,
                f"in {parts} parts": place.sharding.replicas is not None,
            }
            facts = [f"{kind_of(p)} in group {g}", *(fact for fact, holds in facts.items() if holds)]
            held_by = place.ranks, place.copies, parts
            members.append(Member(g, i, label, name, ", ".join(facts), number is not None, *held_by))
        return members


def _by_name(
    source: str | Path | Callable[..., torch.Tensor], names: Mapping[int, str]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that returns the values of a parameter. source: as masters_from. names: by id()."""
    read = _read_folder(Path(source)) if isinstance(source, str | Path) else source

    def values_of(parameter: torch.Tensor) -> torch.Tensor:
        name = names[id(parameter)]
        values = read(name, parameter)
        if values.shape != parameter.shape:
            shapes = f"{tuple(values.shape)}, and the parameter {tuple(parameter.shape)}"
            raise ValueError(f"masters_from: {name!r} has the shape {shapes}")
        return values

    return values_of


def _read_folder(folder: Path) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """A function that reads a tensor of safetensors in a folder. Opens no file before its first call."""
    files: dict[str, Path] = {}

    def read(name: str, _: torch.Tensor) -> torch.Tensor:
        from safetensors import safe_open

        for file in () if files else folder.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                files.update(dict.fromkeys(opened.keys(), file))
        if name not in files:
            raise ValueError(f"masters_from: no *.safetensors in {folder} has {name!r}")
        with safe_open(files[name], "pt") as opened:
            return opened.get_tensor(name)

    return read


def _format_between_hosts(options: Communication, name: str, parameter: torch.Tensor) -> str | None:
    """The format in which means of a parameter travel between hosts; None if exactly, or not at all."""
    wire, exactly = options.between_hosts, options.exactly
    cols = parameter.shape[-1] if parameter.dim() else 1
    if wire is None or cols == 0 or cols % MEANS_FORMATS[wire]:
        return None
    is_exact = exactly(name, parameter) if exactly else not isinstance(parameter, NVFP4Tensor)
    return None if is_exact else wire


def _choose_state(param_groups: Sequence[dict], classes: Sequence[InnerClass], state: str) -> None:
    """Write the option `state` into the groups of FusedAdamW. state: of groups that do not choose. Raises
    ValueError for compact state of classes that do not have it. Muon keeps its own.
    """
    for g, (group, inner) in enumerate(zip(param_groups, classes, strict=True)):
        chosen, is_fused = group.get("state", state), issubclass(inner.optimizer_class, FusedAdamW)
        if is_fused:
            group["state"] = chosen  # which FusedAdamW looks at
        has_own = is_muon(inner.optimizer_class) and "state" not in group
        if chosen != "full" and not (has_own or (is_fused and not inner.whole)):
            raise ValueError(
                f"param_groups[{g}]: state={chosen!r} is of FusedAdamW without whole_matrices, and its class "
                f"is {inner.optimizer_class.__name__}"
            )


def kind_of(parameter: torch.Tensor) -> str:
    """The format, dtype and shape of a parameter, as text."""
    dtype = str(parameter.dtype).removeprefix("torch.")
    if isinstance(parameter, NVFP4Tensor):
        record = parameter.record
        choice = "" if record.four_over_six is None else f" with {record.four_over_six}"
        dtype = f"nvfp4{' 1x16' * (record.block[0] == 1)}{choice} {dtype}"
    return f"{dtype} {tuple(parameter.shape)}"


def _check_parameters(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raise TypeError or ValueError for parameters that an optimizer does not take."""
    spans = []
    for parameter, name in zip(parameters, names, strict=True):
        if hasattr(parameter, "to_local") or hasattr(parameter, "zerofp4_master"):
            raise TypeError(
                f"{name} is a DTensor or was prepared for FSDP2, and ZeroFP4Optimizer takes whole ones: "
                "leave out fully_shard and prepare(model), or train with an optimizer of torch.optim and "
                "zerofp4.integrations.fsdp2.attach(model, optimizer)"
            )
        if parameter.requires_grad and parameter.dtype not in WEIGHT_DTYPES:
            raise TypeError(
                f"{name} is trained and must have one of the dtypes {WEIGHT_DTYPES}, got {parameter.dtype}"
            )
        if parameter.device.type == "meta":
            raise ValueError(f"{name} is on the meta device: give it storage first")
        if parameter.device != parameters[0].device:
            raise ValueError(f"{name} is on {parameter.device}, {names[0]} on {parameters[0].device}")
        if isinstance(parameter, NVFP4Tensor) and parameter.requires_grad:
            check_castable(name, parameter.record)
        data = parameter.rowwise_data if isinstance(parameter, NVFP4Tensor) else parameter
        if data is not None and data.numel():
            spans.append((data.data_ptr(), data.data_ptr() + data.numel() * data.element_size(), name))
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError("params: no parameter requires a gradient")
    # Parameters become views of flat buffers, which would part two that share memory.
    for (_, end, first), (start, _, second) in itertools.pairwise(sorted(spans)):
        if start < end:
            raise ValueError(f"{first} and {second} share memory: pass tied weights as one parameter")


LAYOUTS: dict[str, Callable[[torch.Tensor], list[list[torch.Tensor]]]] = {
    "whole": lambda pair: [[*pair]],
    "matrices": lambda pair: [[matrix] for matrix in pair],
    "flat": lambda pair: [[*pair.flatten(1)]],
    "pieces": lambda pair: [[pair[0].flatten()[:10]], [pair[0].flatten()[10:], pair[1].flatten()]],
}
"""Ways to divide two matrices, [2, 4, 6], in order: by optimizer, its tensors."""


def _check_parts(classes: Sequence[InnerClass], param_groups: Sequence[dict], world_size: int) -> None:
    """Raise ValueError for a class that computes other values from parts of parameters than from whole ones,
    as a trial with a few elements shows. Warns about one that cannot be tried on a CPU.
    """
    for g, (inner, group) in enumerate(zip(classes, param_groups, strict=True)):
        if inner.optimizer_class in KNOWN or (inner.whole and world_size == 1):
            continue
        try:
            expected, again = (_take_steps(inner, group, LAYOUTS["whole"], seed) for seed in range(2))
        except Exception as error:
            unit = "a matrix" if inner.whole else "an element"
            warnings.warn(
                f"{inner.name} cannot be tried on the CPU ({type(error).__name__}: {error}). It is right on "
                f"shards of parameters only if its update of {unit} depends on no other",
                stacklevel=5,
            )
            continue
        # Random numbers, of stochastic rounding, fall on other elements in parts.
        noise = 1e-8 + 1e-6 * expected.abs().max() + 10 * (again - expected).abs().max()
        names = "pieces" if world_size > 1 else "flat", "matrices"
        # An error: the class takes no tensors of such a shape. A NaN says nothing.
        found = [attempt(_take_steps, inner, group, LAYOUTS[name]) for name in names]
        most = noise + 0.01 * expected.abs()
        are_right = [not error and not ((own - expected).abs() > most).any() for own, error in found]
        if not are_right[inner.whole]:
            remedy = "whole_matrices=True gives it whole matrices"
            raise ValueError(
                f"param_groups[{g}]: {inner.name} cannot run on shards of parameters, from which it computes "
                f"other values: {remedy if are_right[True] else 'its update depends on other parameters'}"
            )


def _take_steps(inner: InnerClass, group: dict, layout: Callable, seed: int = 0) -> torch.Tensor:
    """The changes of two matrices, 1D, by three steps. Norms of the gradients differ much between parts and
    steps, and one matrix has a steady gradient. seed: of the random numbers that steps draw.
    """
    own = options(group)
    if "lr" in inner.defaults | own:
        own["lr"] = 1.0  # schedules may begin with 0
    generator = torch.Generator("cpu").manual_seed(0)
    values = torch.randn((4, 2, 4, 6), generator=generator, dtype=torch.float32, device="cpu")
    values[0] *= 0.01
    values[1:] **= 3
    values[2:, 1] = values[1, 1]
    before, (masters, *gradients) = values[0], [layout(v * 4**t) for t, v in enumerate(values)]
    with torch.device("cpu") as cpu, torch.compiler.set_stance("force_eager"), on_trial(cpu):
        torch.default_generator.manual_seed(seed)
        for mine, *parts in zip(masters, *gradients, strict=True):
            optimizer = inner.optimizer_class([own | {"params": mine}], **inner.defaults)
            for gradient in parts:
                for master, part in zip(mine, gradient, strict=True):
                    master.grad = part
                optimizer.step()
    return torch.cat([master.flatten() for mine in masters for master in mine]) - before.flatten()


def _find_why_at_once(classes: Sequence[InnerClass]) -> str | None:
    for own in (one.optimizer_class for one in classes):
        if own is not FusedAdamW:
            return f"{own.__name__} updates all masters at once, and FusedAdamW can in buckets"
    return "whole matrices are updated all at once" if any(one.whole for one in classes) else None


def _check_updates_early(why_at_once: str | None, on_nonfinite: str) -> None:
    """Raise ValueError for classes and options that overlap="update" does not support."""
    if why_at_once is not None:
        raise ValueError(f'overlap="update" updates one bucket after the other: {why_at_once}')
    if on_nonfinite == "raise":
        raise ValueError(
            'on_nonfinite="raise" is not supported with overlap="update": other weights are updated by '
            'then. "skip" leaves out the bucket with a NaN or Inf, and skipped_steps counts the step'
        )


def _check_offload(share: float, gradients: Any, threads: Any, why_at_once: str | None) -> None:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(f"offload must be a number from 0 to 1, got {share!r}")
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"offload_threads must be None or at least 1, got {threads!r}")
    if not isinstance(gradients, bool):
        raise TypeError(f"offload_gradients must be a bool, got {gradients!r}")
    if gradients and share < 1:
        raise ValueError(f"offload_gradients needs offload=1.0, got {share!r}")
    if share and why_at_once is not None:
        raise ValueError(f"offload={share} needs FusedAdamW: {why_at_once}")


def _check_gradients(
    options: Communication, trained: Sequence[Trained], classes: Sequence[InnerClass]
) -> None:
    """Raise ValueError for gradients of a dtype that this torch cannot make."""
    dtype = options.gradient_dtype
    others = [inner.optimizer_class.__name__ for inner in classes if inner.optimizer_class is not FusedAdamW]
    for one in trained:
        own = gradient_dtype(one.parameter)
        is_changed = dtype not in (None, own)
        if not HAS_GRAD_DTYPE and (is_changed or (others and one.state == "compact24")):
            option = f"gradient_dtype={dtype}" if is_changed else f'state="compact" beside {others[0]}'
            raise ValueError(
                f"{option} gives {one.name} or its master gradients of another dtype, which torch "
                f"{torch.__version__} does not make: torch 2.11 has grad_dtype"
            )
        if is_changed and one.parameter.grad is not None:
            raise ValueError(
                f"gradient_dtype={dtype}: {one.name} has a gradient of {one.parameter.grad.dtype} by now; "
                "call zero_grad() first"
            )


# All ranks


class Member(NamedTuple):
    """A parameter that a rank announces."""

    group: int  # the number of its parameter group
    position: int  # in that group
    label: str  # its name in error messages
    name: str | None  # its name in checkpoints
    kind: str  # equal on all ranks that share the parameter
    is_trainable: bool
    ranks: Ranks  # as in the Place of its group
    copies: Ranks
    parts: int  # the number of ranks that it is sharded over, consecutive ones of `ranks`


class Announcement(NamedTuple):
    """The facts that one rank tells all others."""

    members: list[Member]
    common: list[tuple[str, Any]]  # names and values that must be equal on all ranks
    bucket_mb: float  # the size of buckets that suits this rank
    host: str
    cores: set[int]  # that this rank may use there
    sends_float16: str | None  # the first parameter whose gradients are sent in float16


def check_announcements(by_rank: Sequence[Announcement]) -> None:
    """Raise ValueError, the same on every rank, for options or parameters that differ between ranks."""
    _check_equal("options", range(len(by_rank)), [rank.common for rank in by_rank])
    for field, how in (("ranks", "sharded"), ("copies", "replicated")):
        members = [[(getattr(m, field), m.label, m.kind) for m in rank.members] for rank in by_rank]
        for ranks in dict.fromkeys(ranks for own in members for ranks, *_ in own):
            kinds = [[rest for own, *rest in members[r] if own == ranks] for r in ranks]
            _check_equal(f"parameters {how} over ranks {list(ranks)}", ranks, kinds)


def _check_equal(kind: str, ranks: Sequence[int], pairs: Sequence[Sequence[tuple[str, Any]]]) -> None:
    """Raise ValueError unless ranks have equal values. pairs: by rank, a list of names and values."""
    difference = first_difference([[value for _, value in own] for own in pairs])
    if difference is None:
        return
    other, i = difference
    if i is None:
        name, values = f"the number of {kind}", [len(own) for own in pairs]
    else:
        name, values = pairs[0][i][0], [own[i][1] for own in pairs]
    raise ValueError(f"{name} is {values[0]} on rank {ranks[0]} and {values[other]} on rank {ranks[other]}")


def choose_way(checked: Checked, by_rank: Sequence[Announcement]) -> tuple[str, str, str | None]:
    """Returns, the same on every rank, the transport to try, the reduction, and why "auto" does not try to
    share memory, or None. Raises TypeError, on every rank, for gradients whose sums may overflow.
    """
    options, names = checked.communication, [rank.host for rank in by_rank]
    is_across = any(
        names[one.ranks[i]] != names[one.ranks[i // one.parts * one.parts]]
        for rank in by_rank
        for one in rank.members
        for i in range(len(one.ranks))
    )
    reduction = options.reduction or ("reduce_scatter" if is_across else "ordered")
    if options.between_hosts is not None:
        given, hosts = f"between_hosts={options.between_hosts!r}", find_hosts(names)
        if hosts is None or hosts[0] == 1:
            raise ValueError(
                f"{given} needs two hosts or more, and as many consecutive ranks on each; the ranks are on "
                f"{names}"
            )
        for one in (one for rank in by_rank for one in rank.members if one.is_trainable):
            own = find_hosts([names[r] for r in one.ranks])
            if own is None or own[0] != hosts[0] or one.parts not in (own[1], len(one.ranks)):
                raise ValueError(
                    f"{given} needs parameters that are sharded over as many consecutive ranks of each host, "
                    f"or within each host and replicated over all: {one.label} is sharded over {one.parts} "
                    f"of ranks {list(one.ranks)}, on {names}"
                )
        return "collective", "ordered", f"{given} uses collectives"
    why, origin = checked.why_collective, "" if options.reduction else ", the default over several hosts,"
    if reduction == "reduce_scatter":
        why = why or f"reduction='reduce_scatter'{origin} is a collective"
        for name in filter(None, (rank.sends_float16 for rank in by_rank)):
            raise TypeError(
                f"{name} has gradients of torch.float16, whose sums may overflow: "
                f'reduction="reduce_scatter"{origin} needs gradient_wire=torch.float32 or torch.bfloat16; '
                'reduction="ordered" takes them'
            )
    why = why if options.transport == "auto" and len(by_rank) > 1 else None
    return "collective" if why else options.transport, reduction, why
