"""Files with quantized tensors in which something was changed: torch.load refuses them, or what it returns
has buffers that are what its shape says. Nothing crashes.
"""

from __future__ import annotations

import functools
import io
import pickletools
import random
import zipfile
from collections.abc import Iterator

import torch
from cases.mxfp8 import make as make_mxfp8
from hypothesis import given
from hypothesis import strategies as st
from tensor_helpers import make

import zerofp4
from zerofp4.storage import Storage, record_of

FILES = 10  # of an example: 500 in the normal lane


@functools.cache
def contents(name: str) -> dict[str, bytes]:
    """What a file of torch.save consists of."""
    if name == "model":
        model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 8))
        zerofp4.convert_model(model)
        saved = model.state_dict()
        assert any(isinstance(value, zerofp4.NVFP4Tensor) for value in saved.values())
    else:
        saved = {"nvfp4": make, "mxfp8": make_mxfp8}[name]("cpu")
    file = io.BytesIO()
    torch.save(saved, file)
    with zipfile.ZipFile(file) as archive:
        return {entry: archive.read(entry) for entry in archive.namelist()}


def zipped(entries: dict[str, bytes]) -> io.BytesIO:
    """With right checksums, which would show every change at once."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for entry, data in entries.items():
            archive.writestr(entry, data)
    file.seek(0)
    return file


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(changed))
        kind = draw.randrange(4)
        if kind == 0:
            changed[at] = draw.randrange(256)
        elif kind == 1:
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 2:
            del changed[at : at + draw.choice((1, 2, 8))]
        else:
            changed[at:at] = changed[at : at + draw.choice((1, 2, 8))]
        if not changed:
            break
    return bytes(changed)


def changed_number(data: bytes, draw: random.Random) -> bytes:
    """Another integer of one byte in the pickle: sizes, strides, offsets, lengths of storages."""
    numbers = [at for opcode, _, at in pickletools.genops(data) if opcode.name == "BININT1"]
    changed = bytearray(data)
    changed[draw.choice(numbers) + 1] = draw.randrange(256)
    return bytes(changed)


def mutated(name: str, draw: random.Random) -> dict[str, bytes]:
    entries = dict(contents(name))
    pickled = next(entry for entry in entries if entry.endswith("data.pkl"))
    storages = [entry for entry in entries if "/data/" in entry]
    kind = draw.randrange(7)
    if kind < 2:
        entries[pickled] = changed_bytes(entries[pickled], draw)
    elif kind < 4:
        entries[pickled] = changed_number(entries[pickled], draw)
    elif kind == 4:  # a storage that is shorter or longer
        entry = draw.choice(storages)
        entries[entry] = draw.choice((entries[entry][:-1], b"", entries[entry] * 2, entries[entry][: 1 << 6]))
    elif kind == 5:  # other codes, scales or amaxes
        entry = draw.choice(storages)
        entries[entry] = draw.randbytes(len(entries[entry]))
    else:  # one storage for another
        first, second = draw.choice(storages), draw.choice(storages)
        entries[first], entries[second] = entries[second], entries[first]
    return entries


def records(value) -> Iterator[Storage]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from records(item)
    elif (record := record_of(value)) is not None:
        yield record


def load_and_use(entries: dict[str, bytes]) -> bool:
    """Whether the file was accepted; what came of it is right then, and can be used."""
    try:
        loaded = torch.load(zipped(entries), weights_only=True)
    except Exception:
        return False
    for record in records(loaded):
        record.check_context()
        record.check()
    tensors = loaded.values() if isinstance(loaded, dict) else [loaded]
    for tensor in tensors:
        if record_of(tensor) is not None and tensor.record.device.type == "cpu":
            assert tensor.shape == tensor.record.shape
            tensor.detach().clone().dequantize()
    return True


def test_whole_files_are_accepted():
    for name in ("nvfp4", "mxfp8", "model"):
        assert load_and_use(contents(name))


@given(name=st.sampled_from(["nvfp4", "mxfp8", "model"]), seed=st.integers(0, 2**63))
def test_mutated_files(name, seed):
    for file in range(FILES):
        load_and_use(mutated(name, random.Random(seed + file)))


def test_some_mutations_are_refused_and_some_are_accepted():
    """Else the changes would be too coarse, or none."""
    accepted = [load_and_use(mutated("nvfp4", random.Random(seed))) for seed in range(100)]
    assert 10 <= sum(accepted) <= 90
