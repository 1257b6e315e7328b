"""The subcommand `inspect`: the tensors of a checkpoint, read on the CPU and without a process group."""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import pickle
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zerofp4.format import BLOCK, E2M1_VALUES
from zerofp4.inspect.table import print_table
from zerofp4.storage import NVFP4Storage, record_of

SUMMARY = "list the tensors of a checkpoint: format, shape, bytes, amax"
DESCRIPTION = """\
List the tensors of a checkpoint with their format, shape, bytes and amax (the largest magnitude), then the
bytes of each kind, in all and for each parameter, and how many steps the optimizers have taken. An NVFP4
weight is one row, also if an export has its codes and scales under several names.

CHECKPOINT is a folder of torch.distributed.checkpoint, a safetensors file or a folder of them, or a file of
torch.save. It is read on the CPU, a tensor at a time.
"""

Keys = tuple[Any, ...]
"""Keys of nested dicts that lead to a value, the outermost first."""

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
"""Short names in the table."""

EXPORTED = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
}
"""By serving format, an NVFP4 weight's codes, scales, global scale, and global scale of inputs."""


class CheckpointError(Exception):
    """A checkpoint cannot be inspected. The message is one line."""


@dataclasses.dataclass
class Row:
    """A tensor of a checkpoint. amax: None for some dtypes. is_weight: neither state nor integers."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    bytes: int
    amax: float | None
    is_weight: bool


@dataclasses.dataclass
class Contents:
    """The contents of a checkpoint.

    ranks: how many ranks wrote it, None if the files do not say.
    optimizers: by the keys that lead to each, the steps of a ZeroFP4Optimizer, and of its parameters.
    """

    format: str
    ranks: int | None = None
    rows: dict[str, Row] = dataclasses.field(default_factory=dict)
    optimizers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Elements of the weights; without weights, of the parameters with state."""
        if any(row.is_weight for row in self.rows.values()):
            return sum(row.elements for row in self.rows.values() if row.is_weight)
        found: dict[str, int] = {}
        for row in self.rows.values():
            parameter = row.name.rpartition(".")[0]
            found[parameter] = max(found.get(parameter, 0), row.elements)
        return sum(found.values())

    def totals(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for row in self.rows.values():
            total = found.setdefault(row.kind, {"tensors": 0, "elements": 0, "bytes": 0})
            for key, more in zip(total, (1, row.elements, row.bytes), strict=True):
                total[key] += more
        return found

    def add(self, keys: Keys, tensor: torch.Tensor, shape: Sequence[int], is_state: bool) -> None:
        """Add a tensor of this shape, or a chunk of it. Keys of state end in parameter and entry names."""
        kind, size, amax = _measure(tensor)
        is_weight = not is_state and tensor.dtype in DTYPES
        if is_state:
            kind = _kind_of_state(keys[-1], shape, kind)
            if keys[-1] == "step":
                steps = self.optimizer(keys[:-3])["steps_of_parameters"]
                steps.extend(step for step in set(tensor.reshape(-1).tolist()) if step not in steps)
        name, dtype = ".".join(map(str, keys)), str(tensor.dtype).removeprefix("torch.")
        row = self.rows.setdefault(name, Row(name, kind, dtype, tuple(shape), 0, 0, None, is_weight))
        row.elements, row.bytes = row.elements + tensor.numel(), row.bytes + size
        row.amax = _larger(row.amax, amax)

    def add_exported(self, module: str, format: str, tensors: Sequence[torch.Tensor]) -> None:
        """Add an exported weight with the amax of its values. tensors: as in EXPORTED."""
        codes, scales, global_scale = tensors[:3]
        largest = torch.maximum(codes & 7, codes >> 4 & 7).unflatten(-1, (-1, BLOCK // 2)).amax(-1)
        values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device="cpu")
        amax = (values[largest.long()] * scales.float()).max()
        amax = amax / global_scale if format == "compressed-tensors" else amax * global_scale
        kind, shape = f"NVFP4 1x{BLOCK}, {format}", (codes.shape[0], 2 * codes.shape[1])
        size = sum(tensor.nbytes for tensor in tensors)
        row = Row(f"{module}.weight", kind, "uint8", shape, math.prod(shape), size, amax.max().item(), True)
        self.rows[row.name] = row

    def optimizer(self, keys: Keys) -> dict[str, Any]:
        name = ".".join(map(str, keys)) or "optimizer"
        return self.optimizers.setdefault(name, {"steps": None, "steps_of_parameters": []})


def _kind_of_state(entry: str, shape: Sequence[int], dtype: str) -> str:
    if entry in ("master", "master_high", "master_low", "average"):
        return f"{entry}, {dtype}"
    if len(shape) == 0:
        return "step" if entry == "step" else "scalar"
    return f"moment, {dtype}"


def _larger(one: float | None, other: float | None) -> float | None:
    """NaN if either is."""
    given = [value for value in (one, other) if value is not None]
    return max(given, key=lambda value: (math.isnan(value), value), default=None)


def _measure(tensor: torch.Tensor) -> tuple[str, int, float | None]:
    """Kind, bytes and amax."""
    record = record_of(tensor)
    if record is None:
        kind = DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        return kind, tensor.numel() * tensor.itemsize, _amax(tensor)
    size = sum(buffer.nbytes for _, buffer in record.buffers())
    names = {"rowwise": "rows", "columnwise": "columns"}
    sides = " and ".join(names[side] for side, _ in record.sides())
    if isinstance(record, NVFP4Storage):
        return f"NVFP4 {record.block[0]}x{record.block[1]}, {sides}", size, record.amax.max().item()
    return f"MXFP8, {sides}", size, _amax(tensor.dequantize(torch.float32))


def _amax(tensor: torch.Tensor) -> float | None:
    if str(tensor.dtype).startswith("torch.float8"):
        tensor = tensor.float()
    if not tensor.numel() or tensor.dtype not in DTYPES:
        return None
    low, high = tensor.detach().aminmax()  # both are NaN if any element is
    return max(-low.item(), high.item())


# Reading


def read(path: Path) -> Contents:
    """Raises CheckpointError for a file that is no checkpoint, or cannot be read."""
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder")
    try:
        if (path / ".metadata").is_file():
            contents = _read_distributed(path)
        elif path.is_dir():
            contents = _read_safetensors(_files_of_safetensors(path))
        elif path.suffix == ".safetensors":
            contents = _read_safetensors([path])
        else:
            contents = _read_torch_file(path)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: damaged, no file of torch.save, or one with objects other than tensors and plain "
            "values, which are not loaded"
        ) from error
    except Exception as error:  # a damaged file can raise anything
        first = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}: {first}") from error
    if not contents.rows:
        raise CheckpointError(f"{path}: a checkpoint without tensors")
    return contents


def _read_distributed(folder: Path) -> Contents:
    """A folder of torch.distributed.checkpoint: each chunk, in the order of the files."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = FileSystemReader(folder).read_metadata()
    stored = sorted(metadata.storage_data.items(), key=lambda item: (item[1].relative_path, item[1].offset))
    nested = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    optimizers = {keys[: keys.index("param_groups")] for keys in nested.values() if "param_groups" in keys}
    ranks = {match[1] for _, at in stored if (match := re.match(r"__(\d+)_\d+\.distcp$", at.relative_path))}
    contents = Contents("torch.distributed.checkpoint", len(ranks) or None)
    for index, at in stored:
        keys, of = tuple(nested.get(index.fqn, (index.fqn,))), metadata.state_dict_metadata[index.fqn]
        is_count = keys[-1] == "steps" and keys[:-1] in optimizers
        if not is_count and not isinstance(of, TensorStorageMetadata):
            continue
        with (folder / at.relative_path).open("rb") as file:
            file.seek(at.offset)
            value = torch.load(io.BytesIO(file.read(at.length)), map_location="cpu", weights_only=True)
        if is_count:
            contents.optimizer(keys[:-1])["steps"] = int(value)
        else:
            contents.add(keys, value, of.size, _is_state(keys, optimizers))
    return contents


def _is_state(keys: Keys, optimizers: set[Keys]) -> bool:
    """Whether the keys lead to state of an optimizer, or to averages, which have no parameter groups."""
    return keys[-3:-2] == ("state",) and (keys[:-3] in optimizers or keys[-1] == "average")


def _files_of_safetensors(folder: Path) -> list[Path]:
    for index in sorted(folder.glob("*.safetensors.index.json")):
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        inner = sorted(path.parent for path in folder.glob("*/.metadata"))
        raise CheckpointError(
            f"{folder}: a folder without .metadata of torch.distributed.checkpoint and without *.safetensors"
            + (f"; {inner[-1]} is a checkpoint" if inner else "")
        )
    return files


def _read_safetensors(files: Sequence[Path]) -> Contents:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise CheckpointError(
            f"{files[0]}: safetensors is not installed, pip install zerofp4[serving]"
        ) from error
    contents = Contents("safetensors")
    with contextlib.ExitStack() as stack:
        file_of: dict[str, Any] = {}
        for path in files:
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            file_of |= dict.fromkeys(file.keys(), file)
        exported = dict(_exported(file_of))
        for module, (format, names) in exported.items():
            contents.add_exported(module, format, [file_of[name].get_tensor(name) for name in names])
        merged = {name for _, names in exported.values() for name in names}
        for name in [name for name in file_of if name not in merged]:
            tensor = file_of[name].get_tensor(name)
            contents.add((name,), tensor, tensor.shape, is_state=False)
    return contents


def _exported(names: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, list[str]]]]:
    """Modules with an NVFP4 weight, the serving format, and the names of its tensors in order."""
    for format, fields in EXPORTED.items():
        codes = f".{fields[0]}"
        for module in [name.removesuffix(codes) for name in names if name.endswith(codes)]:
            found = [name for field in fields if (name := f"{module}.{field}") in names]
            if all(f"{module}.{field}" in names for field in fields[:3]):
                yield module, (format, found)


def _read_torch_file(path: Path) -> Contents:
    value = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    contents = Contents("torch.save")
    for keys, leaf, is_state in _leaves(value):
        if not isinstance(leaf, torch.Tensor):
            contents.optimizer(keys[:-1])["steps"] = leaf
            continue
        shape = leaf.shape
        # A file of ZeroFP4Optimizer may have a rank's part of a tensor, with 1D values.
        contents.add(keys or (path.stem,), vars(leaf).get("values", leaf), shape, is_state)
    return contents


def _leaves(value: Any, keys: Keys = (), is_state: bool = False) -> Iterator[tuple[Keys, Any, bool]]:
    """(keys, value, whether it is optimizer state) of tensors and step counts, by parameter name if known."""
    if isinstance(value, torch.Tensor):
        yield keys, value, is_state
    elif isinstance(value, Mapping):
        state, groups = value.get("state"), value.get("param_groups")
        is_optimizer = groups is not None and isinstance(state, Mapping)
        for key, inner in value.items():
            if is_optimizer and key == "state":
                names = _names(groups)
                for number, entries in state.items():
                    yield from _leaves(entries, (*keys, key, names.get(number, number)), True)
            elif is_optimizer and key == "steps":
                yield (*keys, key), int(inner), False
            else:
                yield from _leaves(inner, (*keys, key), is_state)
    elif isinstance(value, list | tuple):
        for key, inner in enumerate(value):
            yield from _leaves(inner, (*keys, key), is_state)


def _names(groups: Sequence[Mapping]) -> dict[Any, str]:
    """By the numbers of parameters, their names, or else the numbers."""
    names = {}
    for group in groups:
        numbers = group["params"]
        names |= zip(numbers, group.get("param_names") or [str(int(n)) for n in numbers], strict=True)
    return names


# Showing


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a folder or a file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, for programs")


def run(options: argparse.Namespace) -> int:
    try:
        contents = read(options.checkpoint)
    except CheckpointError as error:
        print(f"zerofp4 inspect: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(as_json(contents), indent=2, allow_nan=False))
    else:
        show(contents)
    return 0


def as_json(contents: Contents) -> dict[str, Any]:
    """All that is shown. A non-finite amax is the string "nan" or "inf"."""
    tensors = [dataclasses.asdict(row) for row in _in_order(contents)]
    for row in tensors:
        if row["amax"] is not None and not math.isfinite(row["amax"]):
            row["amax"] = str(row["amax"])
    return {
        "format": contents.format,
        "ranks": contents.ranks,
        "parameters": contents.parameters,
        "totals": contents.totals(),
        "optimizers": contents.optimizers,
        "tensors": tensors,
    }


def _in_order(contents: Contents) -> list[Row]:
    """By name, layer 2 before layer 10."""

    def order(row: Row) -> list[tuple[bool, int | str]]:
        return [(part.isdigit(), int(part) if part.isdigit() else part) for part in row.name.split(".")]

    return sorted(contents.rows.values(), key=order)


def show(contents: Contents) -> None:
    rows = [["tensor", "kind", "shape", "bytes", "amax"]]
    for row in _in_order(contents):
        shape = " x ".join(map(str, row.shape)) or "-"
        if row.elements < math.prod(row.shape):
            shape += f" ({row.elements} elements of it)"
        amax = "-" if row.amax is None else f"{row.amax:.4g}"
        rows.append([row.name, row.kind, shape, f"{row.bytes:,}", amax])
    print_table(rows, "<<>>>")
    print()
    parameters, totals = contents.parameters, contents.totals()
    totals["all"] = {key: sum(t[key] for t in totals.values()) for key in ("tensors", "elements", "bytes")}
    rows = [["kind", "tensors", "bytes", "bytes per parameter"]]
    for kind, total in totals.items():
        share = f"{total['bytes'] / parameters:.3f}" if parameters else "-"
        rows.append([kind, f"{total['tensors']:,}", f"{total['bytes']:,}", share])
    print_table(rows, "<>>>")
    print()
    files = "" if contents.ranks is None else f", files of {_count(contents.ranks, 'rank')}"
    print(f"{contents.format}{files}; {parameters:,} parameters")
    for name, found in contents.optimizers.items():
        print(f"{name}: {_shown_steps(**found)}")


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _shown_steps(steps: int | None, steps_of_parameters: list[float]) -> str:
    taken = [] if steps is None else [_count(steps, "step")]
    if steps_of_parameters:
        low, high = min(steps_of_parameters), max(steps_of_parameters)
        taken.append(f"step of each parameter: {low:g}" + (f" to {high:g}" if high > low else ""))
    return "; ".join(taken)
