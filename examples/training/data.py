"""The text to learn: Python's standard library, byte by byte, and random windows of it."""

import argparse
import hashlib
import os
import sysconfig
from pathlib import Path

import torch

from zerofp4.launch import World

VOCABULARY = 256  # a token is a byte
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
VALIDATION_EVERY = 20  # every twentieth file is held out


class Text:
    """Two uint8 tensors on the CPU: bytes to train on, and bytes that are held out.

    Whole files are held out, so no validation window was seen in training. The text depends on the version of
    Python; `digest`, the SHA-256 of both parts, identifies it.
    """

    def __init__(self, train: bytes, validation: bytes):
        self.digest = hashlib.sha256(train + validation).hexdigest()
        self.train = torch.frombuffer(bytearray(train), dtype=torch.uint8)
        self.validation = torch.frombuffer(bytearray(validation), dtype=torch.uint8)

    @classmethod
    def of_standard_library(cls, folder: Path | None = None) -> "Text":
        """All *.py files below `folder` (default: the standard library) in sorted order.

        Test folders are skipped, because distributions differ in whether they have them. Raises RuntimeError
        if there are too few files to hold one out, as in a Python whose library is a zip archive.
        """
        folder = folder or Path(sysconfig.get_path("stdlib"))
        files: list[Path] = []
        for place, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
            files += [Path(place, name) for name in names if name.endswith(".py")]
        files.sort(key=lambda path: path.relative_to(folder).as_posix())
        if len(files) < VALIDATION_EVERY:
            raise RuntimeError(f"{folder}: {len(files)} Python files, at least {VALIDATION_EVERY} are needed")
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        for index, file in enumerate(files):
            parts[index % VALIDATION_EVERY == VALIDATION_EVERY - 1].append(file.read_bytes())
        return cls(*(b"\n".join(part) for part in parts))


class Batches:
    """Random windows of a text: the same for every kind of weight, different on every rank.

    One generator, equal on all ranks, draws the offsets of the whole global batch, and each rank takes its
    part. So the global batch depends on the seed and on its size, not on the number of ranks.
    """

    def __init__(self, data: torch.Tensor, options: argparse.Namespace, world: World):
        self.data, self.world, self.batch_size = data, world, options.batch_size
        self.window = torch.arange(options.sequence_length + 1)
        self.generator = torch.Generator().manual_seed(options.seed)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and the tokens that follow them: two int64 tensors [batch_size, sequence_length]."""
        starts = self.data.numel() - self.window.numel() + 1
        size = (self.world.world_size, self.batch_size, 1)
        offsets = torch.randint(starts, size, generator=self.generator)[self.world.rank]
        windows = self.data[offsets + self.window].long().to(self.world.device)
        return windows[:, :-1], windows[:, 1:]
