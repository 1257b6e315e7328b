"""The text that scripts/train.py learns: the source of the Python standard library, as bytes."""

import hashlib
import sysconfig
from pathlib import Path

import torch

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
VALIDATION_EVERY = 20  # every twentieth file is held out


class Text:
    """Bytes to train on and bytes held out, both uint8 tensors on the CPU.

    Whole files are held out, so that no validation window was seen in training. The text depends on the
    version of Python; `digest` (SHA-256 of both parts) says which text it was.
    """

    def __init__(self, train: bytes, validation: bytes):
        self.digest = hashlib.sha256(train + validation).hexdigest()
        self.train = torch.frombuffer(bytearray(train), dtype=torch.uint8)
        self.validation = torch.frombuffer(bytearray(validation), dtype=torch.uint8)

    @classmethod
    def of_standard_library(cls, folder: Path | None = None) -> "Text":
        """Concatenate the *.py files below `folder` (default: the standard library) in sorted order.

        Test folders are left out: distributions differ in whether they ship them. Raises RuntimeError when
        there are fewer files than a split needs (a Python that keeps its library in a zip archive).
        """
        folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
        relative = (path.relative_to(folder) for path in folder.rglob("*.py"))
        names = sorted(path.as_posix() for path in relative if not SKIPPED_FOLDERS.intersection(path.parts))
        if len(names) < VALIDATION_EVERY:
            raise RuntimeError(f"{folder}: {len(names)} Python files, at least {VALIDATION_EVERY} are needed")
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        for index, name in enumerate(names):
            parts[index % VALIDATION_EVERY == VALIDATION_EVERY - 1].append((folder / name).read_bytes())
        return cls(b"\n".join(parts[0]), b"\n".join(parts[1]))

    def check(self, sequence_length: int) -> None:
        """Raise ValueError when a window (the sequence and the byte after it) is longer than either part."""
        for name in ("train", "validation"):
            size = getattr(self, name).numel()
            if sequence_length + 1 > size:
                raise ValueError(
                    f"sequence_length: {sequence_length} + 1 bytes exceed the {name} text with {size} bytes"
                )


class Batches:
    """Random windows of a text: the same for every kind of weight, different on every rank.

    One generator, equal on all ranks, draws the offsets of the whole global batch, and a rank takes its part.
    So the global batch depends on the seed and on its size only, not on how many ranks share it.
    """

    def __init__(
        self, data: torch.Tensor, batch_size: int, sequence_length: int, rank: int, world_size: int, seed: int
    ):
        self.data = data
        self.batch_size = batch_size
        self.window = torch.arange(sequence_length + 1)
        self.rank = rank
        self.world_size = world_size
        self.generator = torch.Generator().manual_seed(seed)

    def next(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and the bytes that follow them: two int64 tensors [batch_size, sequence_length]."""
        offsets = torch.randint(
            self.data.numel() - self.window.numel() + 1,
            (self.world_size, self.batch_size, 1),
            generator=self.generator,
        )[self.rank]
        windows = self.data[offsets + self.window].long().to(device)
        return windows[:, :-1], windows[:, 1:]
