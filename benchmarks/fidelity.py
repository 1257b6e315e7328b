"""Trains one model in many ways from the same start over the same batches, and writes their losses."""

import argparse
import contextlib
import copy
import fcntl
import gc
import hashlib
import itertools
import json
import math
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerofp4
from benchmarks.arms import ARMS, Values, doubled_codes
from benchmarks.flash import Flash
from benchmarks.llama import PRESETS, Order, Tokens, make_model, parameter_groups
from benchmarks.session import RESULTS
from benchmarks.text import PARTS
from benchmarks.workloads import ROOT
from examples.training.options import at_least
from examples.training.train import compute_deterministically
from zerofp4.nn import autocast
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer
from zerofp4.tensors import NVFP4Tensor

FOLDER = RESULTS / "fidelity"
TEXT = ROOT / ".dev" / "tokens"
"""Where benchmarks/text.py leaves tokens."""
SEGMENTS = 20
"""Of a run: after each it is evaluated, and may stop."""
WATCHED = 16
"""Steps at the end of a segment in which changes of codes are counted."""
HOSTS = 8
BETAS = (0.9, 0.95)
FP32_SUMS = Communication(gradient_dtype=torch.float32)
OPTIONS = {
    "arms": {
        "nargs": "+",
        "choices": ARMS,
        "default": [name for name, arm in ARMS.items() if arm.other_optimizer is None],
        "metavar": "ARM",
        "help": "default: all but flash, which needs flashoptim",
    },
    "seeds": {"nargs": "+", "type": int, "default": [0], "help": "each seed runs all arms (default: 0)"},
    "preset": {"choices": PRESETS, "default": "30m", "help": "of the model (default: 30m)"},
    "tokens": {"type": float, "default": 200.0, "help": "millions to train on (default: 200)"},
    "steps": {"type": at_least(SEGMENTS), "help": "instead of --tokens"},
    "seconds": {"type": float, "default": math.inf, "help": "the time in which the call should end"},
    "text": {"type": Path, "default": TEXT, "help": "tokens (default: .dev/tokens)"},
    "checkpoints": {
        "type": Path,
        "default": ROOT / "runs" / "fidelity",
        "help": "of stopped runs (default: runs/fidelity)",
    },
    "fork": {
        "type": int,
        "choices": range(0, 100, 100 // SEGMENTS),
        "default": 0,
        "metavar": "PERCENT",
        "help": "of the steps, in which all arms of a seed are one run in bf16 (default: 0)",
    },
    "any_order": {"action": "store_true", "help": "let sums take any order: to see what a fixed one costs"},
}


def fidelity(options: argparse.Namespace) -> None:
    """Losses of arms: models of one initialization, order of batches and schedule, with other weights.

    benchmarks/arms.py lists the arms. A run of an arm and a seed writes
    OUTPUT/<preset>-<millions of tokens>/<arm>-<seed>.json when it has ended. One that is there, or in
    benchmarks/results/fidelity, is not run again. --seconds stops a run after the evaluation behind which the
    next segment might not end in time, and the next call goes on from its checkpoint, to the bit. Several
    processes may share a folder: each takes runs that no other one has.

    With --fork 20 arms leave the run in bf16 of their seed after a fifth of the steps. Their results are in
    <preset>-<millions of tokens>-fork-20, those of bf16 where they are without it.

    Raises ValueError for results of another text.

    The preset `tiny` trains on Python's standard library; others need the tokens of benchmarks/text.py.
    """
    deadline = time.monotonic() + options.seconds
    be_deterministic(not options.any_order)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = read_tokens(options.preset, options.text, device)
    preset = PRESETS[options.preset]
    steps = options.steps or round(options.tokens * 1e6 / (preset.batch * preset.sequence))
    whole = f"{options.preset}-{steps * preset.batch * preset.sequence / 1e6:.0f}M"
    for place in (FOLDER, options.output):
        check_text(place.glob(f"{whole}*/*.json"), tokens)
    lasted = 0.0
    for seed, name in itertools.product(options.seeds, options.arms):
        forks = options.fork > 0 and name != "bf16"
        folder = f"{whole}-fork-{options.fork}" if forks else whole
        there, file = (place / folder / f"{name}-{seed}.json" for place in (FOLDER, options.output))
        with claimed(options.checkpoints / folder / name / str(seed)) as own:
            if own is None or there.exists() or file.exists():
                continue
            begun, checkpoint = time.monotonic(), own / "checkpoint.pt"
            is_new = not checkpoint.exists()
            if is_new and lasted < options.seconds and begun + lasted > deadline:
                print(f"{name} {seed}: not begun, the last run took {lasted:.0f} s", flush=True)
                return
            of_seed = (seed, options.preset, steps, tokens, device)
            run = Run(name, *of_seed)
            if is_new and options.fork:
                trunk = options.checkpoints / f"{whole}-fork-{options.fork}" / "trunk" / str(seed)
                made = made_trunk(trunk / "checkpoint.pt", steps * options.fork // 100, *of_seed)
                run.fork(made) if forks else shutil.copyfile(made, checkpoint)
            if not run.train(checkpoint, deadline):
                return
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(run.record, indent=1) + "\n")
            checkpoint.unlink(missing_ok=True)
            lasted = time.monotonic() - begun
            print(f"{name} {seed}: {lasted:.0f} s in this call", flush=True)
            del run
            gc.collect()  # models and optimizers refer to one another


def made_trunk(checkpoint: Path, until: int, *of_seed: Any) -> Path:
    """The checkpoint of bf16 at that step. One process trains it, others wait."""
    with claimed(checkpoint.parent, waits=True):
        if not checkpoint.exists():
            Run("bf16", *of_seed).train(checkpoint, math.inf, until)
    return checkpoint


def read_tokens(preset: str, folder: Path, device: torch.device) -> Tokens:
    """What a preset trains on. folder: of the tokens of benchmarks/text.py."""
    return Tokens.of_standard_library(device) if preset == "tiny" else Tokens.read(folder, device)


def check_text(results: Iterable[Path], tokens: Tokens) -> None:
    """Raise ValueError if a result is of another text: losses would not compare."""
    for path in sorted(results):
        if json.loads(path.read_text())["text"] != tokens.digests:
            raise ValueError(f"{path} is of another text: give another --output, or the tokens that it had")


def be_deterministic(asked: bool) -> None:
    """The same sums in every process from now on, if asked; and attention by one algorithm."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    if asked:
        compute_deterministically()
        torch._inductor.config.deterministic = True  # chooses no kernel by its time
    torch._dynamo.config.recompile_limit = 64  # one for each kind of weight, with gradients and without
    warnings.filterwarnings("ignore", r"none of the \d+ parameters is NVFP4")
    warnings.filterwarnings("ignore", r".*torch\.save.*")


@contextlib.contextmanager
def claimed(folder: Path, waits: bool = False) -> Iterator[Path | None]:
    """The folder, made if there is none, for this process alone. If another one has it: None, or wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
        else:
            yield folder


def learning_rate(step: int, steps: int) -> float:
    """Factor of the peak in step 0, 1, ...: up over a tenth of the steps, then a cosine down to zero."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / (steps - warm_up))


class Run:
    """One arm with one seed. Steps are counted from 0; `step` is the next one."""

    def __init__(self, arm: str, seed: int, preset: str, steps: int, tokens: Tokens, device: torch.device):
        self.name, self.seed, self.steps, self.tokens, self.step = arm, seed, steps, tokens, 0
        self.arm, self.preset = ARMS[arm], PRESETS[preset]
        own = self.preset
        self.order = Order(tokens.windows("train", own.sequence), own.batch, seed, device)
        self.model = make_model(own, seed, device)
        self.plain = copy.deepcopy(self.model)
        """Evaluated with the masters in bf16."""
        modules = [name for name, module in self.model.named_modules() if isinstance(module, nn.Linear)]
        self.quantized = [f"{name}.weight" for name in modules if self.arm.takes(name, own.layers)]
        """Names of the weights that are NVFP4 or rounded; all that could be in an arm without."""
        changes = self.arm.convert is not None or self.arm.rounding is not None
        self.is_quantized = changes and bool(self.quantized)
        if self.arm.convert is not None:
            taken = lambda module, name: f"{name}.weight" in self.quantized  # noqa: E731
            zerofp4.convert_model(self.model, taken, **self.arm.convert)
        self.rounding = self.arm.rounding and self.arm.rounding()
        self.ends_at = round(self.arm.until * steps) if self.arm.until < 1 else steps + 1
        """The step before which weights become ordinary ones again."""
        self.context = autocast(self.arm.recipe) if self.arm.recipe else contextlib.nullcontext()
        self.optimizer = self.make_optimizer()
        self.round_weights()
        torch.manual_seed(seed)  # of stochastic rounding
        blocks = sum(p.numel() for name, p in self.model.named_parameters() if name.startswith("blocks."))
        count = steps * own.batch * own.sequence
        self.record = {
            "arm": arm,
            "seed": seed,
            "preset": preset,
            "steps": steps,
            "tokens": count,
            "parameters_of_blocks": blocks,
            "tokens_per_parameter": count / blocks,
            "epochs": steps * own.batch / self.order.windows,
            "text": tokens.digests,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": str(torch.__version__),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "seconds": 0.0,
            "curve": [],
        }
        """The result file, as far as the run is; what identifies it comes before `seconds`."""

    def make_optimizer(self) -> ZeroFP4Optimizer | Flash:
        groups, own = parameter_groups(self.model, 0.1), {"lr": self.preset.lr * self.arm.lr, "betas": BETAS}
        if self.arm.other_optimizer is not None:
            return self.arm.other_optimizer(self.model, groups, **own)
        own |= {} if self.arm.one_micro_batch else {"communication": FP32_SUMS}
        return ZeroFP4Optimizer(groups, FusedAdamW, **own | self.arm.optimizer)

    # Training

    def train(self, checkpoint: Path, deadline: float, until: int | None = None) -> bool:
        """Go on from the checkpoint if there is one; False for a run that has stopped and left one.

        until: a step that ends a segment, to stop before; None trains to the end.
        """
        if checkpoint.exists():
            self.load(checkpoint)
        ends = [self.steps * (n + 1) // SEGMENTS for n in range(SEGMENTS)]
        for end in ends[ends.index(self.step) + 1 if self.step else 0 :]:
            begun = time.monotonic()
            loss = self.train_segment(end)
            lasted = time.monotonic() - begun
            self.record["seconds"] += lasted
            row = {
                "step": end,
                "train": loss,
                **self.evaluate(self.model, self.preset.validated // 8),
                **self.watcher.shares(),
            }
            row |= self.measure_weights()
            self.record["curve"].append(row)
            rate = (end - self.begun_at) * self.preset.batch * self.preset.sequence / lasted
            print(f"{self.name} {self.seed}: step {end}, {rate:,.0f} tokens/s, {words(row)}", flush=True)
            if not math.isfinite(loss):
                raise FloatingPointError(f"{self.name} {self.seed}: the loss is {loss} before step {end}")
            is_late = time.monotonic() + 1.3 * (time.monotonic() - begun) > deadline
            if end < self.steps and (is_late or end == until):
                self.save(checkpoint)
                print(f"{self.name} {self.seed}: stopped after step {end}", flush=True)
                return False
        self.finish()
        return True

    def train_segment(self, end: int) -> float:
        """Steps up to `end`; returns the mean of their losses."""
        device = self.tokens.parts["train"].device
        total, begin = torch.zeros((), device=device), self.step
        self.begun_at, self.watcher = begin, Watcher()
        while self.step < end:
            if self.step == self.ends_at:
                self.end_quantization()
            if self.is_quantized and self.step >= end - WATCHED - 1:
                self.watcher.look(self.codes())
            for group in self.optimizer.param_groups:
                group["lr"] = self.preset.lr * self.arm.lr * learning_rate(self.step, self.steps)
            total += self.backward_passes()
            self.change_gradients()
            if self.arm.clip:
                self.optimizer.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.round_weights()
        return (total / (end - begin)).item()

    def backward_passes(self) -> torch.Tensor:
        """Gradients of a step, in p.grad; returns the loss."""
        own, arm = self.preset, self.arm
        count = 1 if arm.one_micro_batch else HOSTS if arm.hosts else own.micro_batches
        windows, loss = self.order.of_step(self.step).chunk(count), 0.0
        sums: Values = {}
        for host, micro in enumerate(windows):
            with self.context:
                part = self.model(*self.tokens.batch("train", micro, own.sequence)) / count
            part.backward()
            loss = loss + part.detach()
            if arm.hosts:
                self.send_gradients(sums, host)
        for name, p in self.model.named_parameters() if arm.hosts else ():
            p.grad = sums[name]
        return loss

    def send_gradients(self, sums: Values, host: int) -> None:
        """Add what one host sends of its gradients, which are in p.grad: exactly, but for those of weights
        that could be NVFP4.
        """
        sent = {name: p.grad for name, p in self.model.named_parameters()}
        numbers = {name: number for number, name in enumerate(sent) if name in self.quantized}
        gradients = [sent[name] for name in numbers]
        received = self.arm.hosts(gradients, [*numbers.values()], step=self.step, host=host)
        sent |= zip(numbers, received, strict=True)
        if sums:
            torch._foreach_add_([*sums.values()], [*sent.values()])
        else:
            sums |= sent
        for p in self.model.parameters():
            p.grad = None

    @torch.no_grad()
    def change_gradients(self) -> None:
        """As the arm's rounding does."""
        parameters = dict(self.model.named_parameters())
        for name in self.quantized if self.rounding is not None else ():
            self.rounding.change_gradient(name, parameters[name].grad)

    # Weights

    @torch.no_grad()
    def masters(self) -> Values:
        """Of all parameters, whole."""
        names = [name for group in self.optimizer.param_groups for name in group["param_names"]]
        return dict(zip(names, self.optimizer.gathered_masters(), strict=True))

    @torch.no_grad()
    def round_weights(self) -> None:
        """Give parameters the values of the arm's rounding. Writes through .data leave no mark, and the next
        step overwrites them.
        """
        if self.rounding is None:
            return
        parameters = dict(self.model.named_parameters())
        for name in self.quantized:
            master = self.optimizer.state[parameters[name]]["master"].whole()
            parameters[name].data.copy_(self.rounding(name, master, self.step))

    def end_quantization(self) -> None:
        """Ordinary weights with the values of their masters, whose moments stay."""
        state = self.optimizer.state_dict()
        zerofp4.unconvert_model(self.model, self.optimizer)
        self.optimizer = self.make_optimizer()
        self.optimizer.load_state_dict(state)
        self.is_quantized = False

    @torch.no_grad()
    def codes(self) -> Values:
        """int8, twice the E2M1 value of each element of quantized weights."""
        found = {name: p for name, p in self.model.named_parameters() if name in self.quantized}
        if self.rounding is not None:
            return {name: self.rounding.codes(name, p.detach()) for name, p in found.items()}
        return {name: doubled_codes(p) for name, p in found.items()}

    # Measurements

    @torch.no_grad()
    def evaluate(self, model: nn.Module, sequences: int) -> dict[str, float]:
        """Mean losses of held-out documents and packages, over so many sequences of each, or all it has, in
        whole micro-batches.
        """
        own, found = self.preset, {}
        micro = own.batch // own.micro_batches
        for part in PARTS[1:]:
            there = self.tokens.windows(part, own.sequence)
            count = max(1, min(sequences, there) // micro) * micro
            windows = torch.arange(count, device=self.tokens.parts[part].device) * (there // count)
            with self.context:
                batches = (self.tokens.batch(part, some, own.sequence) for some in windows.split(micro))
                losses = [model(*batch).double() for batch in batches]
            found[part] = (sum(losses) / len(losses)).item()
        return found

    @torch.no_grad()
    def errors(self) -> dict[str, float]:
        """By quantized weight, the norm of its distance from its master over the master's."""
        masters, parameters = self.masters(), dict(self.model.named_parameters())
        found = {}
        for name in self.quantized if self.is_quantized else ():
            p, master = parameters[name].detach(), masters[name]
            value = p.dequantize(torch.float32) if isinstance(p, NVFP4Tensor) else p.float()
            found[name] = (value - master).norm() / master.norm()
        return {name: error.item() for name, error in found.items()}

    def measure_weights(self) -> dict[str, float]:
        """The mean error, and the share of blocks whose scales underflow, if weights are NVFP4 tensors."""
        errors, found = self.errors(), {}
        if errors:
            found["error"] = sum(errors.values()) / len(errors)
        if self.is_quantized and self.arm.convert is not None:
            records = zerofp4.quantization_error(self.model).records
            block_rows, columns = self.arm.convert["block"]
            blocks = sum(math.prod(record["shape"]) for record in records) / (block_rows * columns)
            found["underflowing"] = sum(record["underflows"] for record in records) / blocks
        return found

    def finish(self) -> None:
        record, masters = self.record, self.masters()
        record["final"] = self.evaluate(self.model, self.preset.validated)
        if self.is_quantized:
            with torch.no_grad():
                for name, p in self.plain.named_parameters():
                    p.copy_(masters[name])
            record["masters"] = self.evaluate(self.plain, self.preset.validated)
            record["errors"] = self.errors()
        digest = hashlib.sha256()
        for master in masters.values():
            digest.update(master.cpu().numpy().tobytes())
        record["digest"] = digest.hexdigest()
        print(f"{self.name} {self.seed}: ended, {words(record['final'])}", flush=True)

    # Checkpoints

    def identity(self) -> dict[str, Any]:
        return {key: value for key, value in self.record.items() if key not in ("seconds", "curve")}

    def save(self, path: Path) -> None:
        parameters = dict(self.model.named_parameters())
        written = self.quantized if self.rounding is not None else ()
        content = {
            "step": self.step,
            "record": self.record,
            "optimizer": self.optimizer.state_dict(),
            "weights": {name: parameters[name].detach() for name in written},
            "kept": self.rounding.kept if self.rounding is not None else {},
            "generators": [torch.get_rng_state(), *torch.cuda.get_rng_state_all()],
        }
        torch.save(content, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def fork(self, trunk: Path) -> None:
        """Go on from the checkpoint of the run in bf16 with this seed."""
        content = torch.load(trunk, weights_only=True)
        self.step, before = content["step"], content["record"]
        self.record |= {"fork": self.step, "seconds": before["seconds"], "curve": before["curve"]}
        self.optimizer.load_state_dict(content["optimizer"])
        self.rounding = self.arm.rounding and self.arm.rounding()  # without what it kept of first masters
        self.round_weights()
        torch.manual_seed(self.seed)

    def load(self, path: Path) -> None:
        """Raises ValueError for the checkpoint of another run."""
        content = torch.load(path, weights_only=True)
        record, own = content["record"], self.identity()
        other = {key: record.get(key) for key, value in own.items() if record.get(key) != value}
        if other:
            raise ValueError(f"{path} is of another run: {other}")
        self.record, self.step = record, content["step"]
        if self.step > self.ends_at:
            self.end_quantization()
        self.optimizer.load_state_dict(content["optimizer"])
        parameters = dict(self.model.named_parameters())
        for name, values in content["weights"].items():
            parameters[name].data.copy_(values)
        if self.rounding is not None:
            self.rounding.kept = content["kept"]
        cpu, *others = content["generators"]
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state_all(others)


class Watcher:
    """How often the codes of weights change from step to step."""

    def __init__(self):
        self._last: Values = {}
        self._changes: dict[str, torch.Tensor] = {}
        self._looks = 0

    def look(self, codes: Values) -> None:
        for name, last in self._last.items():
            changed = (codes[name] != last).to(torch.uint8)
            self._changes[name] = self._changes[name] + changed if name in self._changes else changed
        self._last, self._looks = codes, self._looks + 1

    def shares(self) -> dict[str, float]:
        """flipped: of the codes in a step. oscillating: of those that changed at least twice."""
        if not self._changes:
            return {}
        count = sum(changes.numel() for changes in self._changes.values())
        flips = sum(changes.sum() for changes in self._changes.values()).item()
        twice = sum((changes >= 2).sum() for changes in self._changes.values()).item()
        return {"flipped": flips / count / (self._looks - 1), "oscillating": twice / count}


def words(losses: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.5g}" for name, value in losses.items() if name != "step")
