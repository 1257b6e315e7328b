"""The model, optimizers and gradients of what is saved and loaded."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from optim_cases import OPTIMIZERS, assert_all_equal, make_gradients
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

import zerofp4
from distributed.checks_optim import Injected, model_bytes
from zerofp4.optim import FusedAdamW

CASES = {name: OPTIMIZERS[name] for name in ("adamw", "amsgrad", "sgd", "nadam", "adagrad")}
CASES |= {
    "fused": (FusedAdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "plain sgd": (torch.optim.SGD, {"lr": 0.1}),
    "muon": (torch.optim.Muon, {"lr": 0.02}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.02, "whole_matrices": True}),
}
MATRICES = "muon", "adafactor"
"""Those whose groups are of matrices, and the rest is with FusedAdamW."""


class Model(nn.Module):
    """Of every kind of parameter: cut inside rows, without an element, without dimensions, unused, frozen."""

    def __init__(self, filter_fn=None):
        super().__init__()
        self.first = nn.Linear(48, 34, dtype=torch.bfloat16)
        self.second = nn.Linear(66, 130, bias=False, dtype=torch.float16)
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.gain = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.zeros(0, 4, dtype=torch.bfloat16))
        self.unused = nn.Parameter(torch.randn(40, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        zerofp4.convert_model(self, filter_fn)


def make_model(world, seed=0, filter_fn=None) -> Model:
    torch.manual_seed(seed)
    return Model(filter_fn).to(world.device)


def build(model, case="adamw", group=None, groups=None, **options):
    optimizer_class, defaults = CASES[case]
    params = groups or model.named_parameters()
    if case in MATRICES and groups is None:
        params = matrix_groups(model)
    return Injected(params, optimizer_class, process_group=group, **{**defaults, **options})


def matrix_groups(model) -> list[dict]:
    """The matrices, and all else."""
    named = list(model.named_parameters())
    others = [(name, p) for name, p in named if p.dim() < 2]
    beside = {"params": others, "optimizer_class": FusedAdamW, "lr": 0.01}
    return [{"params": [(name, p) for name, p in named if p.dim() > 1]}, beside]


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


def assert_same_model(one, other) -> None:
    """All that is trained."""
    sides = [model_bytes([p for p in model.parameters() if p.requires_grad]) for model in (one, other)]
    assert_all_equal(*sides, "buffer")


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# Checkpoints of models and optimizers that are not ours


def save_plain(model, optimizer, path) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)


def convert_loaded(model, path) -> None:
    """The model is loaded before it is converted."""
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    zerofp4.convert_model(model)


def load_moments(model, optimizer, path) -> None:
    """And options; masters, of which there are none, stay."""
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
