"""The model, optimizers and gradients of what is saved and loaded."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from cases.optim import OPTIMIZERS, assert_all_equal, keywords, make_gradients
from torch import nn

import zerofp4
from distributed.cases import shared_folder
from distributed.optim.cases import model_bytes
from zerofp4 import FourOverSix
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

CASES = {name: OPTIMIZERS[name] for name in ("adamw", "amsgrad", "sgd", "nadam", "adagrad")}
CASES |= {
    "fused": (FusedAdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "plain sgd": (torch.optim.SGD, {"lr": 0.1}),
    "muon": (torch.optim.Muon, {"lr": 0.02}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.02, "whole_matrices": True}),
}
FUSED = CASES["fused"]
CASES["compact"] = FusedAdamW, {**FUSED[1], "state": "compact"}
KINDS = {
    "rows": {"block": (1, 16), "columnwise": None},
    "rows, four over six": {"block": (1, 16), "columnwise": None, "four_over_six": FourOverSix()},
    "tiles, four over six": {"four_over_six": FourOverSix(448, "mse")},
}
"""Cases of other weights, with FusedAdamW."""

CASES |= dict.fromkeys(KINDS, FUSED)
MATRICES = "muon", "adafactor"
"""Those whose groups are of matrices, and the rest is with FusedAdamW."""


class Model(nn.Module):
    """Of every kind of parameter: cut inside rows, without an element, without dimensions, unused, frozen.

    wide: with bfloat16 ones that are large enough for compact state, quantized or not.
    """

    def __init__(self, filter_fn=None, wide=False, **kind):
        super().__init__()
        self.first = nn.Linear(48, 34, dtype=torch.bfloat16)
        self.second = nn.Linear(66, 130, bias=False, dtype=torch.float16)
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.gain = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.zeros(0, 4, dtype=torch.bfloat16))
        self.unused = nn.Parameter(torch.randn(40, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        if wide:
            self.wide = nn.Linear(130, 6, bias=False, dtype=torch.bfloat16)
            self.table = nn.Embedding(5, 130, dtype=torch.bfloat16)
        zerofp4.convert_model(self, filter_fn, **({"columnwise": True} | kind))


def make_model(world, seed=0, filter_fn=None, case="adamw") -> Model:
    torch.manual_seed(seed)
    return Model(filter_fn, wide=case == "compact", **KINDS.get(case, {})).to(world.device)


def build(model, case="adamw", group=None, groups=None, **options):
    optimizer_class, defaults = CASES[case]
    params = groups or model.named_parameters()
    if case in MATRICES and groups is None:
        named = list(model.named_parameters())
        others = [(name, p) for name, p in named if p.dim() < 2]
        beside = {"params": others, "optimizer_class": FusedAdamW, "lr": 0.01}
        params = [{"params": [(name, p) for name, p in named if p.dim() > 1]}, beside]
    return ZeroFP4Optimizer(params, optimizer_class, process_group=group, **keywords({**defaults, **options}))


def run(model, optimizer, steps) -> None:
    """Gradients that depend on the step alone."""
    parameters = list(model.parameters())
    for step in steps:
        gradients = make_gradients(parameters, step)
        for p, gradient in zip(parameters, gradients, strict=True):
            used = p.requires_grad and p is not model.unused
            p.grad = gradient.to(p.dtype) if used else None
        optimizer.step()
        optimizer.zero_grad()


def trained(world, steps=2, case="adamw", seed=0, group=None, **options):
    """A model and its optimizer after some steps."""
    model = make_model(world, seed, case=case)
    optimizer = build(model, case, group, **options)
    run(model, optimizer, range(steps))
    return model, optimizer


def assert_same_model(one, other) -> None:
    """All that is trained."""
    sides = [model_bytes([p for p in model.parameters() if p.requires_grad]) for model in (one, other)]
    assert_all_equal(*sides, "buffer")


def assert_goes_on(one, other, steps=range(2, 4)) -> None:
    """Two models with their optimizers are the same, and stay so in further steps."""
    assert_same_model(one[0], other[0])
    run(*one, steps)
    run(*other, steps)
    assert_same_model(one[0], other[0])


def contents(model, optimizer) -> list:
    """All that a load may change: steps, options, and the bytes of each piece and each trained buffer."""
    state = optimizer.state_dict()
    values = [piece.values for entries in state["state"].values() for piece in entries.values()]
    tensors = [*values, *model_bytes([p for p in model.parameters() if p.requires_grad])]
    options = repr([dict(group) for group in state["param_groups"]])
    return [int(state["steps"]), options, *(t.detach().cpu().numpy().tobytes() for t in tensors)]


def saved(world, optimizer, **beside) -> Path:
    """A checkpoint of an optimizer, or of a state dict of one."""
    path = shared_folder(world)
    dcp.save({"optimizer": optimizer, **beside}, checkpoint_id=path)
    return path


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
