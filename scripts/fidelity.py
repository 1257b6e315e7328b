"""What compact optimizer state changes: final losses of paired runs, and errors on the same gradients."""

import argparse
import statistics
import tempfile
from types import SimpleNamespace

import torch
import train
from text import Text
from zerofp4_bench.ranks import Timer
from zerofp4_bench.session import Session

from zerofp4.launch import World
from zerofp4.optim import ZeroFP4Optimizer
from zerofp4.reference import CompactMoments, decode_moments

OPTIMIZERS = {"full": "fused_adamw", "compact": "compact_adamw"}
"""Of scripts/train.py, by the state that they keep."""
T_OF_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Of Student's distribution with 1, 2, ... degrees of freedom: half of a 95% interval in standard errors."""
SEEDS = range(2, len(T_OF_95) + 2)
LOOKS = 10
"""How often in a run errors are measured."""

Compared = dict[str, dict[str, torch.Tensor]]
"""Values by parameter and by what they are."""


def fidelity(session: Session, options: argparse.Namespace, world: World) -> None:
    """Losses of scripts/train.py with full and with compact state, and errors of compact state.

    The runs of a pair have one seed, so the same initial weights and batches. Their difference is the mean
    over the seeds, in percent of the loss, with a 95% interval of Student's distribution; it is held against
    the standard deviation over the seeds of the runs with full state.

    For errors two optimizers get the gradients of one model, which the one with full state trains. An error
    is the norm of the difference over the norm of the values of full state, of a parameter; rows have the
    median over parameters in compact state in the last step, and in the file all of them.
    """
    train.compute_deterministically()
    text, timer = Text.of_standard_library(), Timer(session, world, 0)
    compare_losses(timer, options, text)
    count_errors(timer, options, text)


def run_options(state: str, preset: str, steps: int, *more: object) -> argparse.Namespace:
    """Of scripts/train.py."""
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
    preset, steps, found = options.error_preset, options.error_steps, {}
    own = [run_options(state, preset, steps) for state in OPTIMIZERS]
    (model, full), (twin, compact) = (train.build("nvfp4", o, text.vocabulary, timer.world) for o in own)
    batches, optimizers = train.draw_batches(text.train, own[0], timer.world), (full, compact)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, train.warmup_cosine(steps)) for o in optimizers]
    for step in range(1, steps + 1):
        train.compute_loss(model, *batches.next(timer.device)).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()
        looks = step % max(1, steps // LOOKS) == 0 or step == steps
        before = [optimizer.gathered_masters() for optimizer in optimizers if looks]
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.clip_grad_norm_(own[0].clip)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if looks:
            found[step] = find_errors(*(values_of(o, old) for o, old in zip(optimizers, before, strict=True)))
            medians = {what: statistics.median(errors.values()) for what, errors in found[step].items()}
            words = ", ".join(f"{what} {error:.3g}%" for what, error in medians.items())
            timer.session.say(f"    {preset}, step {step}, errors of compact state: {words}")
    for what, errors in found[steps].items():
        over_steps = {s: statistics.median(then[what].values()) for s, then in found.items()}
        rule = f"after {steps} steps of {preset}, the median of {len(errors)} parameters in compact state"
        extra = {"by_layer": errors, "over_steps": over_steps}
        timer.count(f"error_{what}", "percent", over_steps[steps], rule, **extra)


def values_of(optimizer: ZeroFP4Optimizer, before: list[torch.Tensor]) -> Compared:
    """By the name of a parameter of at least two dimensions, what is compared, whole and in FP32. Collective.

    before: the masters in front of the last step.
    """
    groups, found = optimizer.param_groups, {}
    named = [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]
    for (name, p), master, old in zip(named, optimizer.gathered_masters(), before, strict=True):
        state = optimizer.state[p]
        if p.dim() < 2:  # its state is full
            continue
        if "scales" in state:
            names, rows = ("exp_avg_codes", "exp_avg_sq_codes", "scales"), p.shape[:-1].numel()
            codes, square_codes, scales = (state[key].full_tensor() for key in names)
            kept = codes.view(rows, -1), square_codes.view(rows, -1), scales.view(rows, -1, 2)
            m, v = (moment.view(p.shape) for moment in decode_moments(CompactMoments(*kept)))
        else:
            m, v = (state[key].full_tensor() for key in ("exp_avg", "exp_avg_sq"))
        found[name] = {"m": m, "v": v, "masters": master, "update": master - old}
    return found


def find_errors(full: Compared, compact: Compared) -> dict[str, dict[str, float]]:
    """Percent, by what is compared and by parameter."""

    def percent(values: torch.Tensor, others: torch.Tensor) -> float:
        return 100 * ((others - values).double().norm() / values.double().norm()).item()

    return {
        what: {name: percent(values[what], compact[name][what]) for name, values in full.items()}
        for what in ("m", "v", "masters", "update")
    }
