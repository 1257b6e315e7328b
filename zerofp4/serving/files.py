"""Files of safetensors that are written one after another, and then moved into their folder."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zerofp4.serving.plan import Served

SHARD_BYTES = 5 * 10**9
"""Of tensors in a file of safetensors, at most, unless one tensor has more."""

_INDEX = "model.safetensors.index.json"
_OLDER = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|hf_quant_config\.json|" + re.escape(_INDEX))
"""Names of files of an older export, of any format, that would be read instead of the new ones."""


class Export:
    """The files of an export, in a folder that may have an older one.

    begin() makes `draft`, a folder inside of that, to which all files are written; publish() moves them out.
    Tensors come one at a time. Those of a file are in memory until all of them have come.

    Raises ImportError without the libraries that write the files.
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
        """Raises OSError if the disk lacks the space. Call end() after an error too."""
        shutil.rmtree(self.draft, ignore_errors=True)  # of an export that was killed
        self.draft.mkdir(parents=True)
        free = shutil.disk_usage(self.draft).free
        if free < self._nbytes:
            raise OSError(
                f"No space left in {self._folder}: {self._nbytes} bytes are needed, {free} are free"
            )

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor, which must not change before its file is written: with the last tensor of it."""
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
        """Make this the export of the folder, and remove the older one."""
        if self._split.is_sharded:
            index = {"metadata": self._split.metadata, "weight_map": self._split.tensor_to_filename}
            self.write_json(_INDEX, index)
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
