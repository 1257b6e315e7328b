"""What few bits between hosts change in the gradients of a model in training."""

import argparse
import collections
import functools

import torch

from benchmarks import fidelity
from benchmarks.arms import travel, without_transform
from benchmarks.llama import PRESETS
from benchmarks.session import Session
from examples.training.options import at_least
from zerofp4.launch import World
from zerofp4.ops import MEANS_FORMATS

FORMATS = {format: functools.partial(travel, format) for format in MEANS_FORMATS}
FORMATS["nvfp4_plain"] = without_transform
OPTIONS = {
    "preset": {"choices": PRESETS, "default": "3m", "help": "of the model (default: 3m)"},
    "steps": {"type": at_least(1), "default": 40, "help": "before the measured one (default: 40)"},
}
WHOLE = "blocks"
"""The row of all weights of the blocks, which are those that could be NVFP4."""


def gradients(session: Session, options: argparse.Namespace, world: World) -> None:
    """Relative squared errors of one host's mean in few bits, for gradients of a model in training.

    The model of `fidelity` trains in bf16. The FP32 gradient of the next batch is sent by the kernels of
    between_hosts: a row has the sum of squared errors over the sum of squares, for all layers of a name. With
    nvfp4_plain scales are rounded to the nearest and nothing is transformed, which the library does not do.
    """
    fidelity.be_deterministic(True)
    tokens = fidelity.read_tokens(options.preset, fidelity.TEXT, session.device)
    run = fidelity.Run("bf16", 0, options.preset, options.steps, tokens, session.device)
    loss = run.train_segment(options.steps)
    session.count("loss", "loss", loss, f"mean of {options.steps} steps")
    run.backward_passes()
    sums = collections.defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    named = [(i, name, p.grad) for i, (name, p) in enumerate(run.model.named_parameters()) if p.dim() == 2]
    numbers, names, matrices = zip(*named, strict=True)
    for format, send in FORMATS.items():
        received = send(matrices, numbers, step=options.steps, host=0)
        for name, gradient, own in zip(names, matrices, received, strict=True):
            found = torch.stack([each.double().square().sum() for each in (own - gradient, gradient)]).cpu()
            for layer in {name.split(".")[-2]} | ({WHOLE} if name in run.quantized else set()):
                sums[f"{layer}/{format}"] += found
    for name, (error, squares) in sums.items():
        rule = "sum of squared errors over sum of squares"
        session.count(name, "squared_error", (error / squares).item(), rule)
