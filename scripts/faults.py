#!/usr/bin/env python3
"""Makes ranks of a training run fail at random points; it must end with the bytes of an undisturbed one.

A rank is killed, stopped, or made to raise or to exit. torchrun's agent restarts the run after every fault,
and it goes on from its last checkpoint. Prints what happened, and exits with 1 unless every run ended with
the checkpoint that it has without a fault, byte for byte, no run hung, and no checkpoint was lost.

    scripts/faults.py --kills 200 --ranks 3
    scripts/faults.py --kills 5 --kinds kill,stop --out runs/faults -- --preset 1m --steps 300
"""

import argparse
import collections
import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import zerofp4
from zerofp4.launch.place import has_gpu_for_each

SCRIPTS = Path(__file__).parent
SMALL = ["--preset", "tiny", "--batch-size", "2", "--sequence-length", "32", "--steps", "60"]
KINDS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "raise": signal.SIGUSR1,  # scripts/faulty.py says so of both
    "exit": signal.SIGUSR2,
}
PER_RUN = 3  # faults, more or less
QUIET_SECONDS = 300.0  # without a new step: the run hangs
TIMEOUT = 10  # seconds that a rank waits for another
END_SECONDS = 60.0  # that the other ranks have, timeout included, to end after a fault


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kills", type=int, default=20, help="faults of any kind (default: 20)")
    add("--kinds", type=kinds, default=list(KINDS), help="of faults (default: kill,stop,raise,exit)")
    add("--ranks", type=int, default=2, help="default: 2")
    add("--every", type=int, default=5, help="steps between checkpoints (default: 5)")
    add("--seed", type=int, default=0, help="of the points where ranks fail (default: 0)")
    add("--out", type=Path, default=Path("runs/faults"), help="default: runs/faults; it is deleted first")
    add("train", nargs="*", help="arguments of train.py, after -- (default: 60 steps of the tiny preset)")
    return parser.parse_args(arguments)


def environment(ranks: int) -> dict[str, str]:
    """Of the ranks. They run on the CPU where there is no GPU for each."""
    found = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return found if has_gpu_for_each(ranks) else {**found, "CUDA_VISIBLE_DEVICES": ""}


def kinds(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(KINDS)}")
    return names


class Run:
    """train.py under torchrun's agent, in a folder of its own."""

    def __init__(self, out: Path, options: argparse.Namespace, restarts: int):
        self.out, self.steps, self.ranks = out, out / "metrics-nvfp4.jsonl", options.ranks
        launcher = [sys.executable, str(SCRIPTS / "faulty.py"), str(options.ranks), str(restarts)]
        train = [*(options.train or SMALL), "--out", str(out), "--timeout", str(TIMEOUT)]
        train += ["--checkpoint-every", str(options.every), "--resume", "auto"]
        self.log = (out.parent / f"{out.name}.log").open("wb")
        self.process = subprocess.Popen(
            [*launcher, *train],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=environment(options.ranks),
        )

    def workers(self) -> list[int]:
        """Process ids of the ranks."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                # The name of a program may have spaces in it: fields count from the bracket after it.
                state, parent = path.read_text().rpartition(")")[2].split()[:2]
            except OSError:  # ended
                continue
            if int(parent) == self.process.pid and state != "Z":
                found.append(int(path.parent.name))
        return sorted(found)

    def wait(self) -> int:
        """The exit status. Raises TimeoutError when no step comes for long."""
        seen, since = None, time.monotonic()
        while self.process.poll() is None:
            time.sleep(0.2)
            now = self.steps.stat().st_size if self.steps.exists() else 0
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > QUIET_SECONDS:
                self.end()
                raise TimeoutError(f"{self.out}: no step for {QUIET_SECONDS:g} s, see {self.log.name}")
        return self.process.returncode

    def end(self) -> None:
        """Ends the launcher first, which would start new ranks, then the ranks."""
        workers = self.workers()
        self.process.kill()
        self.process.wait()
        for pid in workers:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def fail_once(run: Run, kind: str, generator: random.Random, longest: float, steps: int) -> bool:
    """Make a rank fail at a random time within `longest` seconds, and see that all ranks end. steps: of the
    whole run.

    False where the run ended before, or its Python swallowed the error. Raises TimeoutError for a rank that
    is still there long after.
    """
    deadline = time.monotonic() + generator.uniform(0.0, longest)
    while time.monotonic() < deadline or len(workers := run.workers()) < run.ranks:
        if run.process.poll() is not None:
            return False
        time.sleep(0.01)
    pid = generator.choice(workers)
    if not send(pid, KINDS[kind]):
        return False
    deadline = time.monotonic() + END_SECONDS
    ended: set[int] = set()
    while len(ended) < len(workers) and run.process.poll() is None:
        ended = set(workers) - set(run.workers())
        late = time.monotonic() > deadline - END_SECONDS / 2
        if kind == "stop" and (len(ended) == len(workers) - 1 or (late and last_step(run.out) == steps)):
            send(pid, signal.SIGCONT)  # the agent would kill it later; after the last step nobody misses it
        if kind in ("raise", "exit") and not ended and time.monotonic() > deadline - END_SECONDS + TIMEOUT:
            return False
        if time.monotonic() > deadline:
            for worker in workers:
                send(worker, signal.SIGQUIT)
            time.sleep(1.0)
            raise TimeoutError(f"{run.out}: ranks live on after {kind}, see {run.log.name}")
        time.sleep(0.01)
    return True


def send(pid: int, number: int) -> bool:
    """Whether there was such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def last_step(out: Path) -> int:
    """Of which there is a whole line: each step has one."""
    metrics = out / "metrics-nvfp4.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def losses(out: Path) -> list[tuple]:
    rows = [json.loads(line) for line in (out / "metrics-nvfp4.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def compare(options: argparse.Namespace) -> list[str]:
    """What is wrong with the disturbed run; prints what happened."""
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    if torch.cuda.is_available() and not has_gpu_for_each(options.ranks):
        gpus = torch.cuda.device_count()
        print(f"{options.ranks} ranks and {gpus} GPU{'s' * (gpus > 1)}: they run on the CPU", flush=True)
    start = time.monotonic()
    calm = Run(options.out / "calm", options, 0)
    if calm.wait() != 0:
        return [f"the run without kills failed, see {calm.log.name}"]
    longest = 2 * (time.monotonic() - start) / PER_RUN
    generator, failed = random.Random(options.seed), collections.Counter()
    rounds = resumed = 0
    while failed.total() < options.kills:
        out = options.out / f"failed-{rounds}"
        rounds += 1
        run = Run(out, options, 2 * options.kills + 10)
        try:
            while run.process.poll() is None and failed.total() < options.kills:
                kind = generator.choice(options.kinds)
                failed[kind] += fail_once(run, kind, generator, longest, last_step(calm.out))
            status = run.wait()
        finally:
            run.end()
        log = Path(run.log.name).read_text(errors="replace")
        resumed += log.count("goes on from step")
        if status != 0:
            return [f"{out}: status {status} after {failed.total()} faults, see {run.log.name}"]
        if "is passed over" in log:
            return [f"{out}: a checkpoint was lost, see {run.log.name}"]
        if losses(out) != losses(calm.out):
            return [f"{out}: other losses than {calm.out}"]
        if last_state(out) != last_state(calm.out):
            return [f"{out}: another last checkpoint than {calm.out}"]
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(failed.items()))
    print(
        f"{failed.total()} faults ({counts}) in {rounds} runs of {options.ranks} ranks, which went on from "
        f"{resumed} checkpoints: every run ended with the same bytes"
    )
    return []


def last_state(out: Path) -> dict[str, object]:
    """What the last checkpoint has, tensors as bytes; its progress has clocks, which differ between runs."""
    last = max((out / "checkpoints-nvfp4").glob("step-*"))
    path = out / "last.pt"
    with contextlib.redirect_stdout(io.StringIO()):
        dcp_to_torch_save(last, path)
    state = torch.load(path, weights_only=False)  # a file of our own
    del state["progress"]
    return {key: as_bytes(value) for key, value in state.items()}


def as_bytes(value: object) -> object:
    if isinstance(value, dict):
        return {key: as_bytes(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_bytes(entry) for entry in value]
    if isinstance(value, zerofp4.NVFP4Tensor):
        return {name: as_bytes(buffer) for name, buffer in value.record.buffers()}
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return value


def main() -> int:
    problems = compare(parse_options())
    for problem in problems:
        print(f"faults.py: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
