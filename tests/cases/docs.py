"""Code blocks of README.md and docs/, and the names that their readers bring."""

from __future__ import annotations

import ast
import copy
import os
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import zerofp4
from cases import te_stand_in

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int  # of its first line of code, from 1
    language: str
    code: str


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """All blocks of a page, or those of one language, in order."""
    text = page.read_text()
    found = [
        Block(page, text[: match.start(2)].count("\n") + 1, match[1], match[2])
        for match in BLOCK.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


# Python


def programs(page: Path) -> list[list[Block]]:
    """The Python blocks of a page. One that imports zerofp4 begins a program, the next ones continue it."""
    found: list[list[Block]] = []
    for block in blocks(page, "python"):
        if not found or _imports_zerofp4(block):
            found.append([])
        found[-1].append(block)
    return found


def _imports_zerofp4(block: Block) -> bool:
    return re.search(r"^(import|from) zerofp4\b", block.code, re.MULTILINE) is not None


def names_read(blocks: Iterable[Block]) -> set[str]:
    """Every name that occurs in the code, other than as a target of an assignment."""
    nodes = (node for block in blocks for node in ast.walk(ast.parse(block.code)))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def run(program: list[Block], brought: Brought) -> dict:
    """Run the blocks in one namespace, which is returned. A traceback names lines of the page. Variables of
    launchers that trainers leave in the environment go again.
    """
    names = {name: getattr(brought, name) for name in names_read(program) & BROUGHT}
    with mock.patch.dict(os.environ):
        for block in program:
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, str(block.page), "exec", dont_inherit=True), names)
    return names


class Experts(nn.Module):
    """Two experts, each stacked with the other in one parameter; every token goes to both."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(0.1 * torch.randn(2, 32, 32))
        self.down_proj = nn.Parameter(0.1 * torch.randn(2, 32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gate_up_proj, down_proj in zip(self.gate_up_proj, self.down_proj, strict=True):
            gate, up = nn.functional.linear(x, gate_up_proj).chunk(2, -1)
            x = x + nn.functional.linear(nn.functional.silu(gate) * up, down_proj)
        return x


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.experts = nn.LayerNorm(32), nn.Linear(32, 32), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x + self.attention(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Layer(), Layer()]), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Loss:
    """How far a model is from returning its input; keeps the values."""

    def __init__(self):
        self.values: list[float] = []

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = (model(batch) - batch).float().square().mean()
        self.values.append(loss.item())
        return loss


class Brought:
    """The names that a reader brings, the same for all pages. Each program of a page gets fresh ones.

    Every other name must come from the page.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    # A model and how it is trained

    @cached_property
    def model(self) -> Model:
        """A float32 model. `blocks` are its layers, `head` is its output."""
        return Model()

    @cached_property
    def attention(self) -> list[tuple[str, nn.Parameter]]:
        """Matrices of the model that tensor parallelism cuts."""
        return [named for named in self.model.named_parameters() if "attention" in named[0]]

    @cached_property
    def experts(self) -> list[tuple[str, nn.Parameter]]:
        """Experts of the model, as this rank has them."""
        return [named for named in self.model.named_parameters() if "experts" in named[0]]

    @cached_property
    def norms(self) -> list[tuple[str, nn.Parameter]]:
        """All other parameters."""
        others = {*self.attention, *self.experts}
        return [named for named in self.model.named_parameters() if named not in others]

    @cached_property
    def loss_of(self) -> Loss:
        """loss_of(model, batch) is the loss, with its graph."""
        return Loss()

    @cached_property
    def batch(self) -> torch.Tensor:
        return torch.randn(16, 32)

    @cached_property
    def batches(self) -> list[torch.Tensor]:
        """One after another: the same batch, so that its loss falls."""
        return [self.batch] * 20

    @cached_property
    def steps(self) -> list[list[torch.Tensor]]:
        """The micro-batches of each step."""
        return [[self.batch] * 2] * 10

    # The weights of an optimizer step of the reader's own

    @cached_property
    def weights(self) -> list[zerofp4.NVFP4Tensor]:
        """Five matrices."""
        return [zerofp4.empty((32, 64)) for _ in range(5)]

    @cached_property
    def te_weights(self) -> list[te_stand_in.NVFP4Tensor]:
        """As many of TransformerEngine's kind, of the same shape."""
        return [te_stand_in.make((32, 64)) for _ in range(5)]

    @cached_property
    def masters(self) -> list[torch.Tensor]:
        """Of each weight the elements that this rank owns: all of them."""
        return [torch.randn(32 * 64) for _ in range(5)]

    @cached_property
    def start_offsets(self) -> list[int]:
        """Where these begin in the weight."""
        return [0] * 5

    @staticmethod
    def update(masters: list[torch.Tensor], batch: torch.Tensor) -> None:
        """Another step of the reader's optimizer."""
        for master in masters:
            master.add_(0.1 * batch.mean())

    # Ranks

    tensor_ranks = 1
    """Ranks that share a matrix."""

    expert_ranks = 1
    """Ranks that hold different experts."""

    gpus_per_host = 1

    # Checkpoints

    @cached_property
    def folder(self) -> Path:
        """An empty one."""
        self._folder.mkdir(exist_ok=True)  # another rank may have made it
        return self._folder

    @cached_property
    def plain_folder(self) -> Path:
        """A checkpoint of plain torch: `model` and its torch.optim.AdamW after a step."""
        model, folder = copy.deepcopy(self.model), self.folder / "plain"
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.loss_of(model, self.batch).backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder)
        return folder

    @cached_property
    def zero_optimizer(self) -> zerofp4.optim.ZeroFP4Optimizer:
        """The ZeroFP4Optimizer of another run of the same model."""
        model = Model()
        zerofp4.convert_model(model)
        return zerofp4.optim.ZeroFP4Optimizer(model.named_parameters(), lr=1e-4)

    # Frameworks that train

    @cached_property
    def causal_model(self):
        """A model of transformers."""
        import transformers

        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).bfloat16()

    @cached_property
    def examples(self) -> list[dict[str, torch.Tensor]]:
        """The same tokens again and again."""
        return [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 80

    @cached_property
    def loader(self) -> torch.utils.data.DataLoader:
        """Ten batches."""
        return torch.utils.data.DataLoader(self.examples, batch_size=8)

    # Megatron-Core

    @cached_property
    def config(self):
        """A TransformerConfig."""
        from megatron.core.transformer import TransformerConfig

        return TransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            params_dtype=torch.bfloat16,
            bf16=True,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
        )


BROUGHT = {name for name in vars(Brought) if not name.startswith("_")}


class Ran(NamedTuple):
    """A program that has run."""

    names: dict[str, Any]  # at its end
    brought: Brought

    def __getitem__(self, name: str) -> Any:
        return self.names[name]


# Shell


def commands(page: Path) -> list[str]:
    """The command lines of a page's shell blocks, and those of its prose that run a program of ours."""
    lines = "".join(block.code for block in blocks(page, "shell")).splitlines()
    prose = BLOCK.sub("", page.read_text())
    ours = r"scripts/\w+\.sh\b|python -m (?:zerofp4|benchmarks|examples)\b|zerofp4 "
    inline = re.findall(rf"`(?:[A-Z0-9_]+=\S+ )?((?:torchrun [^`]*)?(?:{ours})[^`]*)`", prose)
    return [*lines, *(" ".join(line.split()) for line in inline)]
