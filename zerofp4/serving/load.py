"""load_pretrained: a model gets the codes of a published NVFP4 checkpoint."""

import dataclasses
import itertools
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from zerofp4.format import BLOCK, E4M3_MAX, WEIGHT_DTYPES, FourOverSix
from zerofp4.layout import ceil_div
from zerofp4.nn import Linear
from zerofp4.serving.checkpoint import Checkpoint, amax_of, are_tiles
from zerofp4.serving.fused import fused_groups
from zerofp4.serving.plan import Rows, all_values, check_model, checkpoint_names, rows_as_saved
from zerofp4.serving.sources import amaxes_of
from zerofp4.storage import NVFP4Storage, Scheme, Side
from zerofp4.tensors import BEGINS_WITH_CODES, NVFP4Tensor, QuantizedTensor, quantize

_ROOM_FOR_FOUR = 256
"""The e4m3_max of four over six that leaves room for 1.5 times as large scales."""

_CHOICES: dict[int, tuple[FourOverSix | None, ...]] = {
    _ROOM_FOR_FOUR: (FourOverSix(_ROOM_FOR_FOUR, "mae"), FourOverSix(_ROOM_FOR_FOUR, "mse")),
    int(E4M3_MAX): (None, FourOverSix(int(E4M3_MAX), "mae"), FourOverSix(int(E4M3_MAX), "mse")),
}
"""By e4m3_max, how the scales of a checkpoint may have been chosen."""

_TRIED = 4
"""The number of groups on which each of these is tried."""


@dataclasses.dataclass
class LoadReport:
    """What load_pretrained found and did. str() is a table.

    format: of the checkpoint, as save_pretrained takes it.
    loaded: names of the NVFP4 weights in the model.
    unquantized: names of the other parameters and buffers that were loaded.
    dequantized: those of them that the checkpoint has in FP8.
    missing: names of the model that the checkpoint lacks; they stay as they were.
    unexpected: tensors of the checkpoint that the model has no name for.
    kv_scales: scales of a KV cache in the checkpoint, which are not used.
    share: the share of the model's parameter elements that is in NVFP4.
    input_amaxes: the largest magnitude of each module's inputs, for save_pretrained, or None.
    amax_groups: the weights that engines fuse and that share an amax, for ZeroFP4Optimizer.
    block, four_over_six: how the weights seem to have been quantized.
    changed: with masters="codes", by name, the share of a weight's elements whose code or scale a step at
        learning rate 0 would change, unless it is 0.
    warnings: also given by warnings.warn.
    """

    format: str
    loaded: list[str] = dataclasses.field(default_factory=list)
    unquantized: list[str] = dataclasses.field(default_factory=list)
    dequantized: list[str] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    kv_scales: list[str] = dataclasses.field(default_factory=list)
    share: float = 0.0
    input_amaxes: dict[str, float] | None = None
    amax_groups: list[list[torch.Tensor]] = dataclasses.field(default_factory=list)
    block: tuple[int, int] = (1, BLOCK)
    four_over_six: FourOverSix | None = None
    changed: dict[str, float] = dataclasses.field(default_factory=dict)
    warnings: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        options = f"blocks of {self.block[0]}x{self.block[1]}"
        options += f", {self.four_over_six}" if self.four_over_six else ""
        lines = [
            f"{len(self.loaded)} NVFP4 weights of a {self.format} checkpoint, {self.share:.1%} of the "
            f"model's parameters; quantized in {options}"
        ]
        others = {
            "unquantized": self.unquantized,
            "from FP8": self.dequantized,
            "missing": self.missing,
            "unexpected": self.unexpected,
            "not used": self.kv_scales,
        }
        for kind, names in others.items():
            shown = ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
            lines += [f"  {kind:11}  {shown}"] * bool(names)
        return "\n".join([*lines, *(f"  warning      {text}" for text in self.warnings)])


@torch.no_grad()
def load_pretrained(model: nn.Module, folder: str | os.PathLike, *, masters: str | None = None) -> LoadReport:
    """Load an NVFP4 checkpoint of ModelOpt or compressed-tensors, or an export of save_pretrained, into a
    model of transformers, with the codes and scales in the files.

    model: of the checkpoint's architecture, in the dtype to compute in, on any device. Parameters on the meta
        device get memory on torch's default device.
    folder: with config.json and safetensors, one file or several with an index.
    masters: None freezes the NVFP4 weights, as a base for adapters. "codes" trains them: ZeroFP4Optimizer
        begins with the values of the codes, and should get report.amax_groups.

    NVFP4 in the files becomes NVFP4 parameters in blocks of 1x16, or 16x16 with masters="codes" if they were
    quantized so. FP8 weights are dequantized. Everything else keeps its values, in the model's dtypes. Each
    rank reads all files, one tensor at a time. docs/serving.md says which codes training changes.

    Before the model is changed, raises ValueError for other formats, AWQ, SVDQuant and swizzled scales, for
    shapes other than the model's, and for a model with NVFP4 or sharded parameters; TypeError for a model
    that is not of transformers; FileNotFoundError without files.
    """
    if masters not in (None, "codes"):
        raise ValueError(f"masters must be None or 'codes', got {masters!r}")
    checkpoint = Checkpoint(Path(folder))
    loader = _Loader(check_model(model), checkpoint, trains=masters == "codes")
    report = loader.report
    loader.load_weights()
    loader.load_others()
    if masters == "codes":
        loader.find_changes()
    for text in report.warnings:
        warnings.warn(f"load_pretrained: {text}", stacklevel=3)
    return report


class _Loader:
    """One call of load_pretrained. The constructor checks everything; the methods write."""

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, trains: bool):
        self.model, self.checkpoint, self.trains = model, checkpoint, trains
        self.report = LoadReport(checkpoint.format_name, kv_scales=checkpoint.kv_scales)
        self.values = all_values(model)
        self.weights: dict[str, list[Rows]] = {}
        """By key of the model, the matrices of a weight that is in NVFP4 in the checkpoint."""
        self.others: dict[str, list[Rows]] = {}
        """Of parameters and buffers that are not."""
        self._sort()
        if not self.weights:
            raise ValueError("the checkpoint has no NVFP4 weight with a name that the model has")
        self.zeros: set[str] = set()
        """Modules whose scales are all 0."""
        self._find_options()
        self.amaxes: dict[str, float] = {}
        """By the name of a module in the checkpoint, that of its weight."""
        self._find_amaxes()

    def _sort(self) -> None:
        """Find each value of the model in the checkpoint, and check its shape."""
        names, tied = checkpoint_names(self.model, self.values), set()
        for key, value in self.values.items():
            is_tied, name = id(value) in tied, names[key]
            tied.add(id(value))
            if hasattr(value, "to_local") or isinstance(value, QuantizedTensor):
                raise ValueError(
                    f"{key} is a {type(value).__name__}: load a model before it is converted or sharded"
                )
            rows = [Rows(name, 0, value.shape[:-1].numel())] if name else self._rows(key, value)
            packed = [self.checkpoint.is_packed(each.module) for each in rows]
            if all(packed):
                self._check_weight(key, rows, value)
                self.weights[key] = rows
            elif is_tied:  # loaded under the other name
                self.checkpoint.unread.pop(name, None)
            elif any(packed) or 0 < sum(each.name in self.checkpoint for each in rows) < len(rows):
                raise ValueError(
                    f"{key} is one parameter, of which the checkpoint has only a part, or only a part in "
                    "NVFP4"
                )
            elif rows[0].name not in self.checkpoint:
                self.report.missing.append(key)
            else:
                for each in rows:
                    shape = tuple(value.shape) if len(rows) == 1 else (each.count, value.shape[-1])
                    if self.checkpoint.check_plain(each.name, shape):
                        self.report.dequantized.append(key)
                self.others[key] = rows

    def _rows(self, key: str, value: torch.Tensor) -> list[Rows]:
        try:
            return rows_as_saved(self.model, key, value.shape)
        except ValueError as error:
            raise ValueError(
                f"{key} is made of tensors of a checkpoint in a way that is not known here"
            ) from error

    def _check_weight(self, key: str, matrices: list[Rows], value: torch.Tensor) -> None:
        module = self.model.get_submodule(key.rpartition(".")[0])
        if value.dim() != 3 and not isinstance(module, nn.Linear | Linear):
            kind = type(module).__name__
            raise ValueError(f"{key} is in NVFP4 in the checkpoint, and {kind} is not an nn.Linear")
        if not isinstance(module._parameters, dict):  # compressed-tensors' copies into the old parameter
            kept = type(module._parameters).__name__
            raise ValueError(f"{key} is in a {kept}: load a model that no library offloads")
        if value.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"{key} has the dtype {value.dtype}, not one of {WEIGHT_DTYPES}")
        for rows in matrices:
            self.checkpoint.check_packed(rows.module, (rows.count, value.shape[-1]))

    def _find_options(self) -> None:
        """Find the blocks of the quantization, and the largest scale it can make, from all scales."""
        largest, tiles = 0.0, True
        for rows in self._matrices():
            scales = self.checkpoint.read(f"{rows.module}.weight_scale")
            top = scales.float().max().item()
            self.zeros |= {rows.module} if top == 0 else set()
            largest = max(largest, top)
            tiles = tiles and rows.first % BLOCK == 0 and are_tiles(scales)
        self.report.block = (BLOCK if tiles else 1, BLOCK)
        has_room = 0 < largest <= 1.5 * _ROOM_FOR_FOUR
        self.e4m3_max = _ROOM_FOR_FOUR if has_room else int(E4M3_MAX)
        self.report.four_over_six = _CHOICES[self.e4m3_max][0]

    def _matrices(self) -> Iterator[Rows]:
        return itertools.chain.from_iterable(self.weights.values())

    def _find_amaxes(self) -> None:
        """Find the amaxes of weights and inputs from global scales.

        A global scale s multiplies codes and scales in dequantization (compressed-tensors has 1 / s). Here
        s = amax / (6 * e4m3_max). Raises ValueError for different ones in one matrix of the model.
        """
        inexact, inputs = [], {}
        for rows in self._matrices():
            name = rows.module
            global_scale = self.checkpoint.read(f"{name}.{self.checkpoint.format.global_scale}")
            self.amaxes[name], is_exact = self._amax(name, global_scale, self.e4m3_max)
            if name in self.zeros and float(global_scale) == 1:  # as in exports
                self.amaxes[name] = 0.0
            inexact += [name] * (not is_exact)
            input_scale = f"{name}.{self.checkpoint.format.input_scale}"
            if input_scale in self.checkpoint:
                scale = self.checkpoint.read(input_scale)
                if self.checkpoint.has_inputs:
                    inputs[name], _ = self._amax(name, scale, int(E4M3_MAX))
        self.report.input_amaxes = inputs or None
        if inexact:
            self.report.warnings.append(
                f"no amax has exactly the global scale of {len(inexact)} weights ({inexact[0]}): an export "
                "of them differs from it in the last bit"
            )
        for key, matrices in self.weights.items():
            of_matrices: dict[int, str] = {}
            for rows in matrices:
                other = of_matrices.setdefault(self._matrix_of(key, rows), rows.module)
                if self.amaxes[rows.module] != self.amaxes[other]:
                    raise ValueError(
                        f"{other} and {rows.module} have different global scales, and are one matrix of {key}"
                    )

    def _amax(self, name: str, global_scale: torch.Tensor, e4m3_max: int) -> tuple[float, bool]:
        try:
            return amax_of(self.checkpoint.format, global_scale, e4m3_max)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def _matrix_of(self, key: str, rows: Rows) -> int:
        """The number of the stack's matrix with these rows."""
        value = self.values[key]
        return rows.first // value.shape[-2] if value.dim() == 3 else 0

    # Weights in NVFP4

    def load_weights(self) -> None:
        elements = 0
        for key in self.weights:
            value = self.values[key]
            record = self._read(key, value)
            record.name = key
            if self.trains:
                record.attachments[BEGINS_WITH_CODES] = True
            parameter = nn.Parameter(NVFP4Tensor(record), value.requires_grad and self.trains)
            self._put(key, parameter)
            self.values[key] = parameter  # frees the old one
            self.report.loaded.append(key)
            elements += value.numel()
        self.report.share = elements / sum(p.numel() for p in self.model.parameters())
        self._find_groups()

    def _read(self, key: str, value: torch.Tensor) -> NVFP4Storage:
        block = self.report.block if self.trains else (1, BLOCK)
        scheme = Scheme(block=block, four_over_six=self.report.four_over_six, stacked=value.dim() == 3)
        record = scheme.allocate(value.shape, value.dtype, _device(value))
        codes = record.rowwise.data.flatten(0, -2)
        scales = record.rowwise.scales["compact"].view(torch.uint8).flatten(0, -2)
        for rows in self.weights[key]:
            packed = self.checkpoint.read(f"{rows.module}.{self.checkpoint.format.codes}")
            codes[rows.first :][: rows.count].copy_(packed)
            found = self.checkpoint.read(f"{rows.module}.weight_scale").view(torch.uint8)[:: block[0]]
            scales[rows.first // block[0] :][: found.shape[0]].copy_(found)
            record.amax[self._matrix_of(key, rows)] = self.amaxes[rows.module]
        return record

    def _find_groups(self) -> None:
        """Find the weights that engines fuse, and those of them with unequal global scales."""
        weights = [(key, matrices) for key, matrices in self.weights.items() if self.values[key].dim() == 2]
        keys = {rows.module: key for key, matrices in weights for rows in matrices}
        unequal = []
        for group in fused_groups(keys):
            if len({self.amaxes[name] for name in group}) > 1:
                unequal.append(group)
            else:
                self.report.amax_groups.append([self.model.get_parameter(keys[name]) for name in group])
        if unequal:
            self.report.warnings.append(
                f"{len(unequal)} groups of weights that engines fuse have unequal global scales "
                f"({', '.join(unequal[0])}): save_pretrained refuses them as they are"
            )

    # Everything else

    def load_others(self) -> None:
        report = self.report
        for key, pieces in self.others.items():
            value = self.values[key]
            if value.is_meta:
                value = torch.empty_like(value, device=_device(value))
                self._replace_tied(key, value)
            if len(pieces) == 1:
                value.copy_(self.checkpoint.read_plain(pieces[0].name))
            else:
                flat = value.view(-1, value.shape[-1])
                for rows in pieces:
                    flat[rows.first :][: rows.count].copy_(self.checkpoint.read_plain(rows.name))
            report.unquantized.append(key)
        _fill_meta_buffers(self.model)
        report.unexpected += self.checkpoint.unread
        if report.missing:
            report.warnings.append(
                f"the checkpoint has no values for {len(report.missing)} names of the model "
                f"({report.missing[0]})"
            )

    def _replace_tied(self, key: str, tensor: torch.Tensor) -> None:
        """Give a value on the meta device memory, under all of its names."""
        old = self.values[key]
        if isinstance(old, nn.Parameter):
            tensor = nn.Parameter(tensor, old.requires_grad)
        for name in [name for name, value in self.values.items() if value is old]:
            if name not in self.report.loaded:
                self._put(name, tensor)

    def _put(self, key: str, tensor: torch.Tensor) -> None:
        prefix, _, name = key.rpartition(".")
        setattr(self.model.get_submodule(prefix), name, tensor)

    # Training from the codes

    def find_changes(self) -> None:
        """Find how the scales were chosen, and the weights that a step at learning rate 0 changes.

        The choice with the fewest changes in the first weights wins: trying each on all takes minutes.
        """
        report, groups = self.report, self._groups()
        fewest = float("inf")
        for choice in _CHOICES[self.e4m3_max]:
            count = sum(share for _, share in self._changes(groups[:_TRIED], choice))
            if count < fewest:
                fewest, report.four_over_six = count, choice
            if not count:
                break
        for key in self.weights:
            self.model.get_parameter(key).record.four_over_six = report.four_over_six
        shares = self._changes(groups, report.four_over_six)
        report.changed = {key: share for key, share in shares if share}
        if report.changed:
            key, share = max(report.changed.items(), key=lambda item: item[1])
            report.warnings.append(
                f"a step at learning rate 0 would change codes or scales of {len(report.changed)} weights, "
                f"for {share:.1%} of the elements of {key}: a cast of their values has other scales"
            )

    def _groups(self) -> list[list[NVFP4Tensor]]:
        """The weights that share an amax; each other weight alone."""
        grouped = {id(weight) for group in self.report.amax_groups for weight in group}
        weights = map(self.model.get_parameter, self.weights)
        return [*self.report.amax_groups, *([weight] for weight in weights if id(weight) not in grouped)]

    @staticmethod
    def _changes(groups: list[list[NVFP4Tensor]], choice: FourOverSix | None) -> Iterator[tuple[str, float]]:
        """By name, the share of a weight's elements that change when its values are quantized again."""
        for group in groups:
            amaxes = [amaxes_of(weight.dequantize(), weight.record) for weight in group]
            amax = torch.stack(amaxes).amax(dim=0)
            for weight in group:
                options = {"block": weight.block, "four_over_six": choice, "stacked": weight.dim() == 3}
                again = quantize(weight.dequantize(), amax=amax, **options)
                yield weight.record.name, _share_of_changes(weight.record.rowwise, again.record.rowwise)


def _share_of_changes(old: Side, new: Side) -> float:
    """The share of elements with other codes or scales in two rowwise copies."""
    difference = old.data ^ new.data  # [N, K/2], of a stack [E, N, K/2]
    low, high = (difference & 15).bool(), (difference >> 4).bool()
    scales = old.scales["compact"].view(torch.uint8) != new.scales["compact"].view(torch.uint8)
    (rows, halves), blocks = difference.shape[-2:], scales.shape[-2]
    scales = scales.repeat_interleave(ceil_div(rows, blocks), dim=-2)[..., :rows, :]
    scales = scales.repeat_interleave(BLOCK // 2, dim=-1)[..., :halves]
    return ((low | scales).sum() + (high | scales).sum()).item() / (2 * difference.numel())


def _device(value: torch.Tensor) -> torch.device:
    return torch.get_default_device() if value.is_meta else value.device


def _fill_meta_buffers(model: nn.Module) -> None:
    """Give buffers that no checkpoint has, such as rotary frequencies, memory and their class's values."""
    for module in model.modules():
        names = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if not names:
            continue
        for name in names:
            module._buffers[name] = torch.empty_like(module._buffers[name], device=torch.get_default_device())
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        for parameter in own:
            parameter._is_hf_initialized = True  # or _init_weights() would write to it
        model._init_weights(module)
        for parameter in own:
            del parameter._is_hf_initialized
