"""Folders of safetensors that replace an older export only once they are complete; save_safetensors."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofp4 import optim
from zerofp4.distributed import OwnError, exchange, rank_and_size, resolve_group
from zerofp4.serving.plan import Served

SHARD_BYTES = 5 * 10**9
"""The most that a file of safetensors holds, unless one tensor is larger."""

INDEX = "model.safetensors.index.json"
_OLDER = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|hf_quant_config\.json|" + re.escape(INDEX))
"""Files of an older export, of any format, that would be read instead of the new ones."""


class Export:
    """The files of an export. begin() makes `draft` in the folder, all files are written there, and publish()
    moves them out. Tensors come one at a time; a file's tensors stay in memory until all have come. Raises
    ImportError without the libraries that write the files.
    """

    def __init__(self, folder: Path, tensors: Sequence[Served]):
        try:
            from huggingface_hub import split_state_dict_into_shards_factory
            from safetensors import SafetensorError
            from safetensors.torch import save_file
        except ImportError as error:
            raise ImportError(
                f"{error}: exports need the extra `serving` (pip install zerofp4[serving])"
            ) from error
        self._save_file, self._file_error = save_file, SafetensorError
        self._split = split_state_dict_into_shards_factory(
            {served.name: served for served in tensors},
            get_storage_size=lambda served: served.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=SHARD_BYTES,
        )
        self._missing = {file: set(names) for file, names in self._split.filename_to_tensors.items()}
        self._held: dict[str, dict[str, torch.Tensor]] = {file: {} for file in self._missing}
        self._folder, self.draft = folder, folder / ".export-draft"
        self._nbytes = sum(served.nbytes for served in tensors)

    def begin(self) -> None:
        """Raises OSError if the disk lacks the space. Call end() even after an error."""
        shutil.rmtree(self.draft, ignore_errors=True)  # of an export that was killed
        self.draft.mkdir(parents=True)
        free = shutil.disk_usage(self.draft).free
        if free < self._nbytes:
            raise OSError(
                f"No space left in {self._folder}: {self._nbytes} bytes are needed, {free} are free"
            )

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor, which must not change until its file is written, with that file's last tensor."""
        file = self._split.tensor_to_filename[name]
        self._held[file][name] = tensor.detach().to("cpu").contiguous()
        self._missing[file].remove(name)
        if not self._missing[file]:
            try:
                self._save_file(self._held.pop(file), self.draft / file, metadata={"format": "pt"})
            except self._file_error as error:
                raise OSError(f"{self.draft / file} cannot be written: {error}") from error

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        (self.draft / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def publish(self) -> None:
        """Replace the folder's older export."""
        if self._split.is_sharded:
            index = {"metadata": self._split.metadata, "weight_map": self._split.tensor_to_filename}
            self.write_json(INDEX, index)
        names = {path.name for path in self.draft.iterdir()}
        for name in names:
            os.replace(self.draft / name, self._folder / name)
        for path in list(self._folder.iterdir()):
            if _OLDER.fullmatch(path.name) and path.name not in names and not path.is_dir():
                path.unlink()

    def end(self) -> None:
        """Remove the draft, and the folder if it is empty."""
        shutil.rmtree(self.draft, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike,
    optimizer: optim.ZeroFP4Optimizer | optim.AveragedMasters | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a model with the values of its FP32 masters as safetensors, as transformers reads them.

    model, dtype: as for master_state_dict.
    folder: gets files of at most 5 GB, and an index if there are several.
    optimizer: of the weights, or AveragedMasters of it. Without one, an NVFP4 weight has its value from
        before the conversion, if it is still kept, else that of its codes.

    Examples:
        >>> zerofp4.save_safetensors(model, folder, optimizer)

    Collective. Rank 0 of the optimizer's group writes, and holds one file's tensors. An older export in the
    folder stays until the new one is written, and is then deleted.

    If rank 0 raises (OSError if the disk lacks the space, ImportError without the extra `serving`), the
    others raise a RuntimeError. Raises ValueError if ranks train different parameters, RuntimeError without
    the optimizer of trained parameters.
    """
    error = OwnError()
    if optimizer is None:
        tensors, group = optim.own_values(model, dtype), resolve_group(None)
    else:
        tensors = optim.master_state_dict(model, optimizer, dtype)
        owner = optimizer.optimizer if isinstance(optimizer, optim.AveragedMasters) else optimizer
        optim.check_one_rank_has_all(owner, "save_safetensors()")
        group = owner.process_group()
    if rank_and_size(group)[0] == 0:
        with error:
            _write(model, dtype, Path(folder), tensors)
    for _ in tensors:  # after an error too, since the other ranks wait in the gathers
        pass
    exchange(None, error, group, "save_safetensors()")


def _write(
    model: nn.Module, dtype: torch.dtype, folder: Path, tensors: Iterator[tuple[str, torch.Tensor]]
) -> None:
    served = [
        Served(key, dtype if is_parameter else value.dtype, tuple(value.shape))
        for key, value, is_parameter in optim.named_tensors(model)
    ]
    export = Export(folder, served)
    try:
        export.begin()
        for key, tensor in tensors:
            export.add(key, tensor)
        export.publish()
    finally:
        export.end()
