"""How far a run of scripts/train.py is: its step, its clocks, and the checkpoints that it goes on from."""

import argparse
import math
from pathlib import Path

from checkpoints import Checkpoints, digest
from sharded import ByName
from text import Text

from zerofp4.launch.process_group import World


class Progress:
    """How far a run is, and what a checkpoint keeps of that beside model and optimizer."""

    def __init__(self, kind: str, options: argparse.Namespace, text: Text, world: World, parts: tuple):
        """parts: model, optimizer, scheduler and batches, which resume() brings to where they were."""
        self.model, self.optimizer, self.scheduler, self.batches = parts
        self.world = world
        is_sharded = options.parallel == "fsdp2"
        self.saved = ByName(self.model, self.optimizer) if is_sharded else self.optimizer
        names = ("preset", "optimizer", "lr", "sequence_length", "micro_batches", "clip", "seed")
        names += ("recipe", "tokenizer", "parallel")
        identity = {name: getattr(options, name) for name in names}
        identity |= {"weights": kind, "text": text.digest}
        if options.config is not None:
            layers = "" if options.layers is None else f" with {options.layers} layers"
            identity |= {"preset": None, "config": digest(Path(options.config)) + layers}
        identity["global batch"] = options.batch_size * world.world_size
        self.checkpoints = Checkpoints(options.out / f"checkpoints-{kind}", options.keep, identity, world)
        self.options = options
        self.step = 0
        # The first step loads kernels and opens connections, whatever the weights are: no part of the rate.
        self.seconds = self.first_seconds = self.training_seconds = 0.0
        self.left_out = 0  # steps that are no part of it either, since they were profiled

    def resume(self) -> None:
        """Go on where the last whole checkpoint was written, if that is asked for and there is one."""
        found = self.checkpoints.resume(self.model, self.saved) if self.options.resume else None
        if found is not None:
            self.scheduler.load_state_dict(found["scheduler"])
            self.batches.generator.set_state(found["batches"])
            self.step, clocks = found["step"], found["seconds"]
            self.seconds, self.first_seconds, self.training_seconds = clocks
            self.left_out = found.get("left_out", 0)  # earlier checkpoints have none
            if self.world.rank == 0:
                of, now = found.get("steps", self.options.steps), self.options.steps
                schedule = "" if of == now else f", with the learning rates of {now} steps in place of {of}"
                print(f"goes on from step {self.step}{schedule}", flush=True)

    def count(self, step: int, seconds: float, since_start: float, left_out: bool = False) -> None:
        self.step, self.seconds = step, since_start
        if left_out:
            self.left_out += 1
            return
        self.training_seconds += seconds
        self.first_seconds = self.first_seconds or seconds

    def summary(self, rows: list[dict], tokens: int) -> dict:
        """rows: of the last steps. tokens: in a step."""
        losses = [row["loss"] for row in rows]
        others = (self.training_seconds - self.first_seconds) or self.first_seconds
        return {
            "steps": self.step,
            "loss": sum(losses) / max(1, len(losses)),
            "validation_loss": rows[-1]["validation_loss"] if rows else math.nan,
            "seconds": self.seconds,
            "first_step_seconds": self.first_seconds,
            "tokens_per_second": tokens * max(self.step - self.left_out - 1, 1) / others,
        }

    def save_if_due(self, stop: bool) -> None:
        every = self.options.checkpoint_every
        if every and (self.step % every == 0 or self.step == self.options.steps or stop):
            clocks = [self.seconds, self.first_seconds, self.training_seconds]
            progress = {"step": self.step, "scheduler": self.scheduler.state_dict(), "seconds": clocks}
            progress |= {"left_out": self.left_out, "steps": self.options.steps}
            progress["batches"] = self.batches.generator.get_state()
            self.checkpoints.save(self.step, self.model, self.saved, progress)
