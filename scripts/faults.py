#!/usr/bin/env python3
"""Kills ranks of a training run at random points; it must end with the bytes of an undisturbed one.

torchrun restarts the run after every kill, and it goes on from its last checkpoint. Prints what happened, and
exits with 1 unless the run ended, with the checkpoint that it has without a kill, byte for byte.

    scripts/faults.py --kills 200 --ranks 3
    scripts/faults.py --kills 5 --out runs/faults -- --preset 1m --steps 300
"""

import argparse
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
QUIET_SECONDS = 300.0  # without a new step: the run hangs


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kills", type=int, default=20, help="default: 20")
    add("--ranks", type=int, default=2, help="default: 2")
    add("--every", type=int, default=5, help="steps between checkpoints (default: 5)")
    add("--seed", type=int, default=0, help="of the points where ranks are killed (default: 0)")
    add("--out", type=Path, default=Path("runs/faults"), help="default: runs/faults; it is deleted first")
    add("train", nargs="*", help="arguments of train.py, after -- (default: 60 steps of the tiny preset)")
    return parser.parse_args(arguments)


def environment(ranks: int) -> dict[str, str]:
    """Of the ranks. They run on the CPU where there is no GPU for each."""
    found = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return found if has_gpu_for_each(ranks) else {**found, "CUDA_VISIBLE_DEVICES": ""}


class Run:
    """train.py under torchrun, in a folder of its own."""

    def __init__(self, out: Path, options: argparse.Namespace, restarts: int):
        self.out, self.steps = out, out / "metrics-nvfp4.jsonl"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        launcher += [f"--nproc-per-node={options.ranks}", f"--max-restarts={restarts}"]
        train = [str(SCRIPTS / "train.py"), *(options.train or SMALL), "--out", str(out)]
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


def kill_one(run: Run, generator: random.Random, longest: float) -> int | None:
    """A rank that was killed at a random time within `longest` seconds; None where the run ended before."""
    deadline = time.monotonic() + generator.uniform(0.0, longest)
    while time.monotonic() < deadline or not run.workers():
        if run.process.poll() is not None:
            return None
        time.sleep(0.01)
    pid = generator.choice(run.workers())
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return pid


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
    longest = 0.9 * (time.monotonic() - start)
    generator, killed = random.Random(options.seed), 0
    rounds = 0
    while killed < options.kills:
        out = options.out / f"killed-{rounds}"
        rounds += 1
        run = Run(out, options, options.kills)
        try:
            while killed < options.kills and kill_one(run, generator, longest) is not None:
                killed += 1
            status = run.wait()
        finally:
            run.end()
        if status != 0:
            return [f"{out}: status {status} after {killed} kills, see {run.log.name}"]
        if losses(out) != losses(calm.out):
            return [f"{out}: other losses than {calm.out}"]
        if last_state(out) != last_state(calm.out):
            return [f"{out}: another last checkpoint than {calm.out}"]
    print(f"{killed} kills in {rounds} runs of {options.ranks} ranks: every run ended with the same bytes")
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
