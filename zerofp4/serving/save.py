"""save_pretrained writes a folder for serving engines; weights gives the same tensors to a live engine."""

import copy
import itertools
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofp4.distributed import OwnError, attempt, exchange, rank_and_size, resolve_group
from zerofp4.optim import AveragedMasters, ZeroFP4Optimizer, gather_masters
from zerofp4.serving.files import Export
from zerofp4.serving.fused import fused_groups
from zerofp4.serving.plan import Part, Plan, QuantizedWeight
from zerofp4.serving.report import Comparison, ExportReport, make_report
from zerofp4.serving.sources import Averaged, Source, find_sources
from zerofp4.tensors import NVFP4Tensor

_TOKENIZER_FILES = (
    "*token*.json",
    "tokenizer.model",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "*processor_config.json",
)
"""Files of transformers' tokenizers and processors."""


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike,
    optimizer: ZeroFP4Optimizer | AveragedMasters | None = None,
    *,
    format: str = "compressed-tensors",
    dtype: torch.dtype | None = None,
    input_amaxes: Mapping[str, float] | None = None,
    tokenizer: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write a transformers model, with its trained codes, as a folder for vLLM, SGLang and transformers.

    Collective over the optimizer's process group, or else the default one. Rank 0 writes, and holds one
    file's tensors, at most 5 GB; the others hold one whole tensor. An older export in the folder stays until
    the new one is written, and is then deleted; other files stay.

    model: with NVFP4 weights of convert_model, or prepared and attached by integrations.fsdp2.
    optimizer: of the weights. With AveragedMasters instead, codes are made of the averages.
    format: "compressed-tensors" (nvfp4-pack-quantized) or "modelopt" (W4A16_NVFP4, or NVFP4 with
        input_amaxes).
    dtype: of unquantized floating-point parameters; None keeps each one's.
    input_amaxes: by quantized module, under its name in the export, the largest magnitude of its inputs:
        engines quantize activations then. None quantizes weights only.
    tokenizer: a tokenizer or processor, with save_pretrained(folder). None copies the files of the folder
        that the model was loaded from, if there is one.
    progress: called on the rank that writes as progress(bytes written, bytes in all).

    Returns the same report on every rank. Rank 0 warns of blocks that Marlin makes zeros (docs/serving.md).

    Before anything is written, raises ValueError for fused weights with unequal amaxes (amax_groups), a
    number of columns that is not a multiple of 16, a name that exists twice, ranks with other models;
    TypeError for a model that is not of transformers, ImportError without the extra `serving`, OSError if the
    disk lacks the space. If rank 0 raises while it writes, the others raise a RuntimeError.
    """
    group = resolve_group(None) if optimizer is None else _group_of(optimizer)
    plan, error = attempt(_make_plan, model, optimizer, format, dtype, input_amaxes)
    signatures = exchange(None if plan is None else plan.signature(), error, group, "save_pretrained()")
    other = next((rank for rank, signature in enumerate(signatures) if signature != signatures[0]), None)
    if other is not None:
        raise ValueError(
            f"rank {other} has another model than rank 0, or other amaxes: an export needs the whole model "
            "on each rank, or fully_shard over all of them"
        )
    export = None
    if rank_and_size(group)[0] == 0:
        export, error = attempt(Export, Path(folder), plan.served)
    try:
        if export is not None:
            with error:
                export.begin()
                _write_configurations(plan, model, export, tokenizer)
        exchange(None, error, group, "save_pretrained()")
        compared = _write(plan, export, error, progress)
        if export is not None and not error:
            _, error = attempt(export.publish)
    finally:
        if export is not None:
            export.end()
    report = make_report(compared, sum(served.nbytes for served in plan.served))
    if report.flushed and not error:
        warnings.warn(f"save_pretrained: {report.flushed_blocks()}", stacklevel=2)
    return exchange(report, error, group, "save_pretrained()")[0]


def _group_of(optimizer: Any) -> Any:
    owner = optimizer.optimizer if isinstance(optimizer, AveragedMasters) else optimizer
    if not isinstance(owner, ZeroFP4Optimizer):
        raise TypeError(
            f"optimizer must be a ZeroFP4Optimizer or AveragedMasters, got {type(owner).__name__}: with "
            "another one leave it out"
        )
    return owner.process_group()


def _make_plan(model: nn.Module, optimizer: ZeroFP4Optimizer | AveragedMasters | None, *options: Any) -> Plan:
    if optimizer is not None:
        gather_masters(optimizer, ())  # raises for a broken one
    sources = find_sources(model)
    if isinstance(optimizer, AveragedMasters):
        _take_averages(model, sources, optimizer)
    return Plan(model, sources, *options)


def _take_averages(model: nn.Module, sources: dict[str, Source], averages: AveragedMasters) -> None:
    """Let trained weights be made of their averages. Collective."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, NVFP4Tensor):
            (average,) = gather_masters(averages, [parameter])
            if average is not None:
                sources[name] = Averaged(parameter, averages)
    modules = {name.removesuffix(".weight"): source for name, source in sources.items()}
    for group in fused_groups(modules):
        averaged = [modules[name] for name in group if isinstance(modules[name], Averaged)]
        for source, other in itertools.product(averaged, repeat=2):
            source.amax = torch.maximum(source.amax, other.amax)


def _write_configurations(plan: Plan, model: Any, export: Export, tokenizer: Any) -> None:
    model.config.save_pretrained(export.draft)
    config = json.loads((export.draft / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    config["dtype"] = str(plan.dtype).removeprefix("torch.")
    config["quantization_config"], other_files = plan.configuration
    for name, content in {"config.json": config, **other_files}.items():
        export.write_json(name, content)
    if model.can_generate():
        copy.deepcopy(model.generation_config).save_pretrained(export.draft)
    if tokenizer is not None:
        tokenizer.save_pretrained(export.draft)
        return
    origin = getattr(model.config, "_name_or_path", None)  # a folder, a name on the hub, or nothing
    for path in (path for pattern in _TOKENIZER_FILES if origin for path in Path(origin).glob(pattern)):
        if path.is_file():
            shutil.copyfile(path, export.draft / path.name)


@torch.no_grad()
def _write(
    plan: Plan, export: Export | None, error: OwnError, progress: Callable | None
) -> dict[str, Comparison]:
    """Write all tensors, if this rank has an export; join all gathers, even after errors. Returns counts."""
    sizes, done = {served.name: served.nbytes for served in plan.served}, 0
    compared: dict[str, Comparison] = {}
    for part in plan.parts:
        if export is None and not part.is_collective:
            continue
        with error:
            written: dict[str, torch.Tensor] = {}
            for name, tensor in part.tensors():
                if export is None or error:
                    break
                export.add(name, tensor)
                written[name] = tensor
                done += sizes[name]
                if progress is not None:
                    progress(done, sum(sizes.values()))
            if written and isinstance(part, QuantizedWeight):
                compared |= {matrix.module: matrix.compare(written) for matrix in part.matrices}
    return compared


# For a live engine


class ServedWeights:
    """The tensors of an export. Iterating gives (name, tensor, part) for this rank's pieces.

    served: name, dtype and shape of each whole tensor, in order; the same on every rank.
    """

    def __init__(self, plan: Plan):
        self._plan, self.served = plan, plan.served

    @property
    def names(self) -> list[str]:
        return [served.name for served in self.served]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor, Part]]:
        for part in self._plan.parts:
            yield from part.pieces()

    @torch.no_grad()
    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) on every rank. Collective if ranks have pieces: one gather per weight."""
        for part in self._plan.parts:
            yield from part.tensors()


def weights(
    model: nn.Module, format: str = "compressed-tensors", *, dtype: torch.dtype | None = None
) -> ServedWeights:
    """The tensors of an export of the model, under the same names, where each rank has them: codes and scales
    as they are, nothing gathered and nothing quantized again.

    After a step of ZeroFP4Optimizer every rank has all codes; with fully_shard its rows of them. An
    unquantized parameter that checkpoints cut into several tensors is gathered. Call it again after each
    step, since it reads amaxes.

    model, format, dtype, and errors: as for save_pretrained.
    """
    return ServedWeights(Plan(model, find_sources(model), format, dtype))
