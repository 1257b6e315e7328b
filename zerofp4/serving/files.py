"""Safetensors that are written tensor by tensor, and a folder that has the older export or the new one."""

import contextlib
import ctypes
import itertools
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

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls them."""

METADATA = "__metadata__"
"""In the header of safetensors, beside the names of tensors."""

_INDEX = "model.safetensors.index.json"
_OLDER = re.compile(r"model(-\d+)?(-\d{5}-of-\d{5})?\.safetensors|hf_quant_config\.json|" + re.escape(_INDEX))
"""Names of files of an older export, of any format, that would be read in place of the new ones."""


class Shard:
    """A file of safetensors of given tensors, which may come in any order. At most one is in memory.

    The package safetensors writes a file from all of its tensors at once. The header only needs their shapes,
    so that it can be written first.
    """

    def __init__(self, path: Path, tensors: Sequence[Served]):
        # A reader views bytes of the file in their dtype: so offsets must be multiples of its size.
        ordered = sorted(tensors, key=lambda served: -served.dtype.itemsize)
        header: dict[str, Any] = {METADATA: {"format": "pt"}}
        self._places: dict[str, tuple[int, Served]] = {}
        end = 0
        for served in ordered:
            start, end = end, end + served.nbytes
            header[served.name] = {
                "dtype": _DTYPES[served.dtype],
                "shape": list(served.shape),
                "data_offsets": [start, end],
            }
            self._places[served.name] = start, served
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data, self.missing = 8 + len(text), set(self._places)
        self._file = open(path, "wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        start, served = self._places[name]
        if (tensor.dtype, tuple(tensor.shape)) != served[1:]:
            raise RuntimeError(f"{name} is a {tensor.dtype} {tuple(tensor.shape)}, announced was {served}")
        if tensor.numel():
            values = tensor.detach().to("cpu").contiguous()
            self._file.seek(self._data + start)
            self._file.write((ctypes.c_char * served.nbytes).from_address(values.data_ptr()))
        self.missing.discard(name)

    def close(self) -> None:
        """Its contents are on the disk when it returns, also where the machine fails."""
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class Export:
    """The files of an export, in a folder that may have an older one.

    All of them are written to `draft`, a folder inside of that. publish() moves them out. The last move, of
    the index or of the only file, makes the export the new one; files of the older one go after that. So
    readers find one of the two, whole, whenever this process ends, if both have the same configuration.

    Raises ValueError for a name or dtype that safetensors has not, OSError where the disk has not the space.
    """

    def __init__(self, folder: Path, tensors: Sequence[Served]):
        bad = next((served for served in tensors if served.dtype not in _DTYPES), None)
        if bad is not None:
            raise ValueError(f"{bad.name} is of dtype {bad.dtype}, which safetensors has not")
        if any(served.name == METADATA for served in tensors):
            raise ValueError(f"a tensor is called {METADATA}, which safetensors keeps for itself: rename it")
        self._folder, self.draft, self._is_new = folder, folder / ".export-draft", not folder.exists()
        self._shards = _split(tensors)
        self._written, self._open = 0, None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove(self.draft)  # of an export that was killed
            self.draft.mkdir()
            self._paths = [self.draft / name for name in _shard_names(len(self._shards), folder)]
            self._check_space()
        except BaseException:
            self.end()
            raise

    def _check_space(self) -> None:
        needed = sum(served.nbytes for shard in self._shards for served in shard)
        free = shutil.disk_usage(self.draft).free
        if free < needed:
            raise OSError(f"No space left in {self._folder}: {needed} bytes are needed, {free} are free")

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor. Those of one shard come before those of the next."""
        if self._open is None:
            self._open = Shard(self._paths[self._written], self._shards[self._written])
        self._open.write(name, tensor)
        if not self._open.missing:
            self._open.close()
            self._open, self._written = None, self._written + 1

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        (self.draft / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _write_index(self) -> None:
        pairs = list(zip(self._paths, self._shards, strict=True))
        total = sum(served.nbytes for _, shard in pairs for served in shard)
        weight_map = {served.name: path.name for path, shard in pairs for served in shard}
        self.write_json(_INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})

    def publish(self) -> None:
        """Make this the export of the folder, and remove the older one. Where a file cannot be moved, all are
        as before.
        """
        if self._written != len(self._shards):
            raise RuntimeError(f"shard {self._written + 1} of {len(self._shards)} was not written")
        if len(self._shards) > 1:
            self._write_index()
        last = self.draft / (self._paths[0].name if len(self._shards) == 1 else _INDEX)
        configurations = [path for path in self.draft.iterdir() if path not in (last, *self._paths)]
        for path in (*configurations, last):
            _sync(path)
        older = self.draft / "older"
        older.mkdir()
        for path in configurations:
            if (self._folder / path.name).exists():
                shutil.copy2(self._folder / path.name, older / path.name)
        moves = [*(path for path in self._paths if path != last), *configurations, last]
        moved: list[Path] = []
        try:
            for path in moves:
                os.replace(path, self._folder / path.name)
                moved.append(path)
        finally:
            if last.exists():  # it was not moved
                for path in moved:
                    kept, place = older / path.name, self._folder / path.name
                    os.replace(kept, place) if kept.exists() else place.unlink()
        self._is_new = False
        self._remove_older({path.name for path in moves})

    def _remove_older(self, names: set[str]) -> None:
        """An older index goes before its shards."""
        for path in sorted(self._folder.iterdir(), key=lambda path: path.name != _INDEX):
            if _OLDER.fullmatch(path.name) and path.name not in names and not path.is_dir():
                path.unlink()

    def end(self) -> None:
        """Remove what is of no export."""
        if self._open is not None:
            self._open.abandon()
        shutil.rmtree(self.draft, ignore_errors=True)
        if self._is_new:
            with contextlib.suppress(OSError):
                self._folder.rmdir()


def _shard_names(count: int, folder: Path) -> list[str]:
    """Of the only shard, or names that no file of the folder has."""
    if count == 1:
        return ["model.safetensors"]
    for prefix in itertools.chain([""], map("-{}".format, itertools.count(1))):
        names = [f"model{prefix}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if not any(os.path.lexists(folder / name) for name in names):
            break
    return names


def _split(tensors: Sequence[Served]) -> list[list[Served]]:
    shards: list[list[Served]] = [[]]
    filled = 0
    for served in tensors:
        if shards[-1] and filled + served.nbytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(served)
        filled += served.nbytes
    return shards


def _remove(path: Path) -> None:
    """A folder, or what lies in its way: of a link the link alone."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
