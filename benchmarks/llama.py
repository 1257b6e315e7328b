"""The model of the fidelity benchmark: Llama's blocks, an untied head, and batches of tokens."""

import dataclasses
import hashlib
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.text import PARTS
from examples.training.data import Text


@dataclasses.dataclass(frozen=True)
class Preset:
    """A shape of the model, and how it is trained."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    sequence: int  # tokens
    batch: int  # sequences of a step
    micro_batches: int  # of a step, whose gradients are added up in FP32
    lr: float
    validated: int  # sequences of each validation set at the end, an eighth of them before


PRESETS = {
    "tiny": Preset(2, 128, 2, 256, 256, 64, 16, 8, 3e-3, 48),
    "3m": Preset(4, 256, 4, 704, 32_000, 128, 16, 4, 2e-3, 96),
    "30m": Preset(6, 640, 5, 1792, 32_000, 512, 256, 2, 1.2e-3, 8192),
    "100m": Preset(8, 1024, 8, 2816, 32_000, 512, 256, 4, 1.2e-3 * 640 / 1024, 8192),
}


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, preset: Preset):
        super().__init__()
        width, hidden = preset.width, preset.hidden
        self.heads = preset.heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            each(normed).unflatten(2, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        q, k = (rotate(each, cosines, sines) for each in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary positions. x: [batch, heads, tokens, head]; cosines and sines: float32 [tokens, head / 2]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1).to(x.dtype)


class Llama(nn.Module):
    """Tokens [batch, length] to the loss of predicting targets [batch, length]."""

    def __init__(self, preset: Preset):
        super().__init__()
        self.preset = preset
        self.tokens = nn.Embedding(preset.vocabulary, preset.width)
        self.blocks = nn.ModuleList(Block(preset) for _ in range(preset.layers))
        self.norm = nn.RMSNorm(preset.width, 1e-5)
        self.lm_head = nn.Linear(preset.width, preset.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds = name.endswith((".o.weight", ".down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * preset.layers) ** 0.5 if adds else 0.02)
        half = preset.width // preset.heads // 2
        angles = torch.outer(torch.arange(preset.sequence), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, float32 [], in nats per token."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = run_block(block, x, self.cosines, self.sines)
        return head_loss(self.norm, self.lm_head, x, targets)


def compiled_on_gpu(function: Callable) -> Callable:
    """Compiles calls with tensors of a GPU, once for all blocks, and all models with weights of a kind."""
    compiled = torch.compile(function, dynamic=False)

    def run(module: nn.Module, *arguments) -> torch.Tensor:
        return (compiled if arguments[-1].is_cuda else function)(module, *arguments)

    return run


@compiled_on_gpu
def run_block(block: Block, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    return block(x, cosines, sines)


@compiled_on_gpu
def head_loss(norm: nn.Module, head: nn.Module, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(norm(x)).flatten(0, 1).float(), targets.flatten())


def make_model(preset: Preset, seed: int, device: torch.device) -> Llama:
    """In bfloat16, the same on every device. Rotary angles stay in FP32."""
    torch.manual_seed(seed)
    model = Llama(preset)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model.to(device)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices of linear layers decay; the embedding and norms do not."""
    named = list(model.named_parameters())
    decays = [pair for pair in named if pair[1].dim() == 2 and pair[0] != "tokens.weight"]
    stays = [pair for pair in named if pair[1].dim() != 2 or pair[0] == "tokens.weight"]
    return [{"params": decays, "weight_decay": weight_decay}, {"params": stays, "weight_decay": 0.0}]


class Tokens:
    """The parts of a text (benchmarks.text.PARTS) as int32 tensors on a device."""

    def __init__(self, parts: dict[str, bytes], device: torch.device):
        """parts: uint16 tokens."""
        self.digests = {name: hashlib.sha256(content).hexdigest() for name, content in parts.items()}
        as_numbers = {
            name: torch.frombuffer(bytearray(own), dtype=torch.uint16) for name, own in parts.items()
        }
        self.parts = {name: numbers.to(device, torch.int32) for name, numbers in as_numbers.items()}

    @classmethod
    def read(cls, folder: Path, device: torch.device) -> "Tokens":
        """What benchmarks.text wrote. Raises ValueError for tokens of another digest."""
        about = json.loads((folder / "tokens.json").read_text())["parts"]
        files = sorted(folder.glob("tokens-*.xz"))
        content = memoryview(b"".join(lzma.decompress(file.read_bytes()) for file in files))
        parts, begin = {}, 0
        for name in PARTS:
            end = begin + 2 * about[name]["tokens"]
            parts[name], begin = content[begin:end], end
        found = cls(parts, device)
        for name, digest in found.digests.items():
            if digest != about[name]["sha256"]:
                raise ValueError(f"{folder}: another digest of {name!r} than tokens.json has")
        return found

    @classmethod
    def of_standard_library(cls, device: torch.device) -> "Tokens":
        """Bytes of the text that examples.training reads, for small models."""
        text = Text.of_standard_library()
        half = len(text.validation) // 2
        parts = dict(zip(PARTS, (text.train, text.validation[:half], text.validation[half:]), strict=True))
        return cls({name: bytes(own.to(torch.uint16).numpy()) for name, own in parts.items()}, device)

    def windows(self, part: str, length: int) -> int:
        """How many windows of length + 1 tokens a part has, each of which ends where the next one begins."""
        return (len(self.parts[part]) - 1) // length

    def batch(self, part: str, windows: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 tokens and targets, [windows, length] each."""
        places = windows[:, None] * length + torch.arange(length + 1, device=windows.device)
        found = self.parts[part][places].long()
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()


class Order:
    """Which windows a step reads: every epoch in another order, which the seed decides."""

    def __init__(self, windows: int, batch: int, seed: int, device: torch.device):
        self.windows, self.batch, self.seed, self.device = windows, batch, seed, device
        self._epochs: dict[int, torch.Tensor] = {}

    def of_step(self, step: int) -> torch.Tensor:
        """int64 [batch] of step 0, 1, ..."""
        first, last = step * self.batch, (step + 1) * self.batch
        found = []
        while first < last:
            epoch, begin = divmod(first, self.windows)
            found.append(self._epoch(epoch)[begin : begin + last - first])
            first += len(found[-1])
        return torch.cat(found)

    def _epoch(self, epoch: int) -> torch.Tensor:
        if epoch not in self._epochs:
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
            self._epochs[epoch] = torch.randperm(self.windows, generator=generator).to(self.device)
        return self._epochs[epoch]
