"""The text that scripts/train.py learns: Python source or files of one's own, as bytes or in tokens."""

import copy
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from zerofp4.distributed import Stage
from zerofp4.launch.process_group import World

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
CHUNK_LINES = 512  # that a tokenizer takes at a time
VALIDATION_EVERY = 20  # every twentieth file is held out


class TextTooShortError(ValueError):
    """A sequence does not fit into the text."""


class Text:
    """Tokens to train on and tokens held out: uint8 tensors on the CPU where those are bytes, else int32.

    Whole files are held out, so that no validation window was seen in training. The text depends on the
    version of Python; `digest` (SHA-256 of both parts) says which text it was. vocabulary: the number of
    different tokens. bytes_per_token: of the text held out.
    """

    vocabulary, bytes_per_token = 256, 1.0

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
        return cls._of_folder(folder, SKIPPED_FOLDERS)

    @classmethod
    def of_installation(cls, folder: Path | None = None) -> "Text":
        """The same with everything that was installed below `folder`, and with tests."""
        return cls._of_folder(folder, {"__pycache__"})

    @classmethod
    def of_path(cls, path: Path) -> "Text":
        """A file, or all files below a folder in sorted order, but for those whose path has a name with a dot
        in front. Of fewer files than a split needs the last twentieth of all their bytes is held out. Raises
        TextTooShortError where that is nothing.
        """
        relative = [p.relative_to(path) for p in path.rglob("*") if p.is_file()] if path.is_dir() else []
        names = sorted(p.as_posix() for p in relative if not any(part.startswith(".") for part in p.parts))
        files = [path / name for name in names] if path.is_dir() else [path]
        if len(files) >= VALIDATION_EVERY:
            return cls._split(files)
        whole = b"\n".join(file.read_bytes() for file in files)
        end = len(whole) - len(whole) // VALIDATION_EVERY
        if end == len(whole):
            raise TextTooShortError(f"{path}: of {end} bytes none can be held out")
        return cls(whole[:end], whole[end:])

    @classmethod
    def _of_folder(cls, folder: Path | None, skipped: set[str]) -> "Text":
        folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
        names = sorted(path.relative_to(folder).as_posix() for path in _python_files(folder, skipped))
        if len(names) < VALIDATION_EVERY:
            raise RuntimeError(f"{folder}: {len(names)} Python files, at least {VALIDATION_EVERY} are needed")
        return cls._split([folder / name for name in names])

    @classmethod
    def _split(cls, files: Sequence[Path]) -> "Text":
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        for index, file in enumerate(files):
            parts[index % VALIDATION_EVERY == VALIDATION_EVERY - 1].append(file.read_bytes())
        return cls(b"\n".join(parts[0]), b"\n".join(parts[1]))

    def tokenizer(self, vocabulary: int) -> str:
        """A byte-level BPE tokenizer of that many tokens, trained on the text to train on, as JSON.

        Raises ImportError without the library tokenizers.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(chunks(self.train), trainer)
        return tokenizer.to_str()

    def tokenized(self, tokenizer: str) -> "Text":
        """The same text in tokens of a tokenizer, which is given as JSON."""
        from tokenizers import Tokenizer

        made, text = Tokenizer.from_str(tokenizer), copy.copy(self)
        for name in ("train", "validation"):
            encodings = made.encode_batch(list(chunks(getattr(self, name))))
            ids = [number for encoding in encodings for number in encoding.ids]
            setattr(text, name, torch.tensor(ids, dtype=torch.int32))
        text.vocabulary = made.get_vocab_size()
        text.bytes_per_token = len(self.validation) / len(text.validation)
        return text

    def check(self, sequence_length: int) -> None:
        """Raise TextTooShortError where a part is shorter than a window: the sequence and a token more."""
        for name in ("train", "validation"):
            size = getattr(self, name).numel()
            if sequence_length + 1 > size:
                raise TextTooShortError(
                    f"sequence_length: {sequence_length} + 1 tokens exceed the {name} text with {size} tokens"
                )


def _python_files(folder: Path, skipped: set[str]) -> Iterator[Path]:
    """Below it, but for what lies in a folder of a skipped name, into which nobody looks: there may be far
    more files than in all others.
    """
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped]
        paths = (Path(place, name) for name in files if name.endswith(".py"))
        yield from (path for path in paths if path.is_file())


def chunks(data: torch.Tensor) -> Iterator[str]:
    """The lines of a text of bytes, many at a time. What is no UTF-8 is replaced."""
    lines = bytes(data.numpy()).decode("utf-8", "replace").splitlines(keepends=True)
    for start in range(0, len(lines), CHUNK_LINES):
        yield "".join(lines[start : start + CHUNK_LINES])


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
        """Inputs and the tokens that follow them: two int64 tensors [batch_size, sequence_length]."""
        offsets = torch.randint(
            self.data.numel() - self.window.numel() + 1,
            (self.world_size, self.batch_size, 1),
            generator=self.generator,
        )[self.rank]
        windows = self.data[offsets + self.window].long().to(device)
        return windows[:, :-1], windows[:, 1:]


def in_tokens(text: Text, vocabulary: int | None, world: World) -> Text:
    """The text in tokens of a tokenizer that rank 0 trains, or in bytes. Collective."""
    if vocabulary is None:
        return text
    trained = [text.tokenizer(vocabulary) if world.rank == 0 else None]
    if world.world_size > 1:
        with Stage("sending the tokenizer", dist.group.WORLD):
            dist.broadcast_object_list(trained, src=0)
    return text.tokenized(trained[0])
