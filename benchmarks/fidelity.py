"""What compact optimizer state changes: final losses of paired runs, and errors on the same gradients."""

import argparse
import statistics
import tempfile
from types import SimpleNamespace

import torch
from torch import nn

from benchmarks import peers
from benchmarks.ranks import Timer
from benchmarks.session import Session
from examples.training import train
from examples.training.data import Batches, Text
from zerofp4.launch import World
from zerofp4.optim import ZeroFP4Optimizer
from zerofp4.reference import CompactMoments, decode_moments

OPTIMIZERS = {"full": "fused_adamw", "compact": "compact_adamw"}
"""Of examples/training, by the state that they keep."""
T_OF_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Of Student's distribution with 1, 2, ... degrees of freedom: half of a 95% interval in standard errors."""
SEEDS = range(2, len(T_OF_95) + 2)
LOOKS = 10
"""How often in a run errors are measured."""

Compared = dict[str, dict[str, torch.Tensor]]
"""Values by parameter and by what they are."""
Errors = dict[str, dict[str, float]]
"""Percent, by what is compared and by parameter."""


def fidelity(session: Session, options: argparse.Namespace, world: World) -> None:
    """Losses of examples/training with full and with compact state, and errors of compact state.

    The runs of a pair have one seed, so the same initial weights and batches. Their difference is the mean
    over the seeds, in percent of the loss, with a 95% interval of Student's distribution; it is held against
    the standard deviation over the seeds of the runs with full state.

    For errors several optimizers get the gradients of one model, which the one with full state trains: one
    with compact state, and FlashAdamW on a GPU where flashoptim can be imported. An error is the norm of the
    difference over the norm of the values of full state, of a parameter; rows have the median over
    parameters of at least two dimensions in the last step, and in the file all of them.
    """
    train.compute_deterministically()
    text, timer = Text.of_standard_library(), Timer(session, world, 0)
    compare_losses(timer, options, text)
    count_errors(timer, options, text)


def run_options(state: str, preset: str, steps: int, *more: object) -> argparse.Namespace:
    """Of examples/training."""
    given = ["--optimizer", OPTIMIZERS[state], "--preset", preset, "--steps", steps, *more]
    return train.parse_options(list(map(str, given)))


def compare_losses(timer: Timer, options: argparse.Namespace, text: Text) -> None:
    found: dict[str, list[float]] = {state: [] for state in OPTIMIZERS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for state, losses in found.items():
                more = "--seed", seed, "--profile-steps", 0, "--out", folder
                own = run_options(state, options.preset, options.steps, *more)
                run = train.train("nvfp4", own, text, timer.world, SimpleNamespace(asked=False))
                losses.append(run["validation_loss"])
                timer.session.say(f"    seed {seed}, {state} state: validation loss {losses[-1]:.4f}")
    full, compact = found.values()
    percent = [100 * (c / f - 1) for f, c in zip(full, compact, strict=True)]
    mean = statistics.mean(percent)
    half = T_OF_95[len(percent) - 2] * statistics.stdev(percent) / len(percent) ** 0.5
    spread = 100 * statistics.stdev(full) / statistics.mean(full)
    rule = f"|mean| of compact over full state less 1; 95% interval {mean - half:+.3f} to {mean + half:+.3f}%"
    extra = {"mean": mean, "interval": [mean - half, mean + half], **found}
    timer.count("loss_difference", "percent", abs(mean), rule, **extra)
    rule = f"standard deviation over {options.seeds} seeds with full state, of their mean"
    timer.count("loss_spread", "percent", spread, rule)
    timer.count("loss_difference_over_spread", "ratio", abs(mean) / spread, "of these two")


def count_errors(timer: Timer, options: argparse.Namespace, text: Text) -> None:
    preset, steps = options.error_preset, options.error_steps
    own = [run_options(state, preset, steps) for state in OPTIMIZERS]
    (model, full), (_, compact) = (train.build("nvfp4", o, timer.world) for o in own)
    batches = Batches(text.train, own[0], timer.world)
    schedule = torch.optim.lr_scheduler.LambdaLR(full, train.warmup_cosine(steps))
    others: dict[str, ZeroFP4Optimizer | Flash] = {"error": compact}
    try:
        others["flash_error"] = Flash(full)
    except (ImportError, ValueError) as error:
        timer.session.say(f"FlashAdamW is left out: {error}")
    optimizers = (full, *others.values())
    found: dict[str, dict[int, Errors]] = {name: {} for name in others}
    for step in range(1, steps + 1):
        model.loss(*batches.next()).backward()
        for other in others.values():
            for group, twin in zip(full.param_groups, other.param_groups, strict=True):
                twin["lr"] = group["lr"]
                for p, q in zip(group["params"], twin["params"], strict=True):
                    q.grad = p.grad.clone()
        looks = step % max(1, steps // LOOKS) == 0 or step == steps
        before = [optimizer.gathered_masters() for optimizer in optimizers if looks]
        for optimizer in optimizers:
            optimizer.clip_grad_norm_(own[0].clip)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        if looks:
            names = [name for group in full.param_groups for name in group["param_names"]]
            exact, *rest = (values_of(o, names, old) for o, old in zip(optimizers, before, strict=True))
            for name, values in zip(others, rest, strict=True):
                found[name][step] = find_errors(exact, values)
                medians = {what: statistics.median(e.values()) for what, e in found[name][step].items()}
                words = ", ".join(f"{what} {error:.3g}%" for what, error in medians.items())
                timer.session.say(f"    {preset}, step {step}, {name}: {words}")
    for name, by_step in found.items():
        for what, errors in by_step[steps].items():
            over_steps = {s: statistics.median(then[what].values()) for s, then in by_step.items()}
            rule = f"after {steps} steps of {preset}, the median of {len(errors)} parameters"
            extra = {"by_layer": errors, "over_steps": over_steps}
            timer.count(f"{name}_{what}", "percent", over_steps[steps], rule, **extra)


class Flash:
    """FlashAdamW of bfloat16 parameters, with as much of ZeroFP4Optimizer's interface as errors need.

    It has no clipping of its own: gradients are clipped in bfloat16. Raises ImportError without flashoptim,
    ValueError without a GPU, where it would keep state in FP32.
    """

    def __init__(self, other: ZeroFP4Optimizer):
        masters = iter(other.gathered_masters())
        groups = [
            {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            | {"params": [nn.Parameter(next(masters).bfloat16()) for _ in group["params"]]}
            for group in other.param_groups
        ]
        self._optimizer = peers.flash_adamw(groups)
        self.param_groups, self.state = self._optimizer.param_groups, self._optimizer.state
        self.step, self.zero_grad = self._optimizer.step, self._optimizer.zero_grad
        self._parameters = [p for group in groups for p in group["params"]]
        if not self._parameters[0].is_cuda:
            raise ValueError("it keeps state in FP32 without a GPU")

    def gathered_masters(self) -> list[torch.Tensor]:
        from flashoptim import reconstruct_fp32_param

        states = [self.state.get(p, {}) for p in self._parameters]
        return [
            reconstruct_fp32_param(p.detach(), state["error_bits"]) if state else p.detach().float()
            for p, state in zip(self._parameters, states, strict=True)
        ]

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self._parameters, max_norm)


def values_of(optimizer: ZeroFP4Optimizer | Flash, names: list[str], before: list[torch.Tensor]) -> Compared:
    """By the name of a parameter of at least two dimensions, what is compared, whole and in FP32. Collective.
    names: of all parameters. before: the masters in front of the last step.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found, masters = {}, optimizer.gathered_masters()
    for name, p, master, old in zip(names, parameters, masters, before, strict=True):
        if p.dim() < 2:  # its state is full
            continue
        m, v = moments_of(optimizer, p)
        found[name] = {"m": m, "v": v, "masters": master, "update": master - old}
    return found


def moments_of(optimizer: ZeroFP4Optimizer | Flash, p: nn.Parameter) -> list[torch.Tensor]:
    state = optimizer.state[p]
    if isinstance(optimizer, Flash):
        return [state[key].materialize() for key in ("exp_avg", "exp_avg_sq")]
    if "scales" not in state:
        return [state[key].full_tensor() for key in ("exp_avg", "exp_avg_sq")]
    names, rows = ("exp_avg_codes", "exp_avg_sq_codes", "scales"), p.shape[:-1].numel()
    codes, square_codes, scales = (state[key].full_tensor() for key in names)
    kept = codes.view(rows, -1), square_codes.view(rows, -1), scales.view(rows, -1, 2)
    return [moment.view(p.shape) for moment in decode_moments(CompactMoments(*kept))]


def find_errors(full: Compared, others: Compared) -> Errors:

    def percent(values: torch.Tensor, others: torch.Tensor) -> float:
        return 100 * ((others - values).double().norm() / values.double().norm()).item()

    return {
        what: {name: percent(values[what], others[name][what]) for name, values in full.items()}
        for what in ("m", "v", "masters", "update")
    }
