"""Programs of random events on random options, in worlds of 1 to 3: after each step and each load an
optimizer has the bytes of reference.zero_step().

Rank 0 draws the programs and tells the other ranks each event. The ranks that an event concerns are among its
arguments.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import assert_values_equal
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn

from distributed.engine.file_peers import sharing_files
from distributed.optim.step_cases import TINY, Pair, gradient_values, only_the_first
from distributed.run import on_ranks
from zerofp4 import reference
from zerofp4.optim import master_state_dict

SPECIFICATIONS = [
    ((18, 64), torch.bfloat16, True),
    ((16, 34), torch.float32, True),
    ((6, 66), torch.bfloat16, False),
    ((320,), torch.bfloat16, False),
    ((), torch.float32, False),
]
RANKS, COUNT = 3, len(SPECIFICATIONS)

WIRES = [None, "bf16", "mxfp8", "nvfp4"]
SEEDS = st.integers(0, 999)
PLACES = st.tuples(st.integers(0, RANKS - 1), st.integers(0, COUNT - 1))
MISSING = st.frozensets(PLACES, max_size=8)
NONFINITE = st.none() | st.tuples(PLACES, st.sampled_from([math.nan, math.inf, -math.inf]))
PASSES = st.tuples(SEEDS, MISSING, NONFINITE)
MAX_NORMS = st.sampled_from([0.0, 0.01, 1.0, 30.0, sys.float_info.max, math.inf])
NORM_TYPES = st.sampled_from([2.0, math.inf, 1.0, 3.0, 0.5])


@st.composite
def worlds(draw) -> tuple[int, dict]:
    """The size of a world, and options that do not exclude each other."""
    size = draw(st.integers(1, RANKS))
    options = {
        "transport": draw(st.sampled_from(["collective", "peer"] if size > 1 else ["collective"])),
        "overlap": draw(st.sampled_from([None, "backward", "forward", "both", "update"])),
        "state": draw(st.sampled_from(["full", "compact"])),
        "gradient_dtype": draw(st.sampled_from([None, torch.float32])),
        "gradient_wire": draw(st.sampled_from([None, torch.float32, torch.bfloat16])),
        "bucket_mb": TINY,
        "betas": draw(st.sampled_from([(0.9, 0.99), (0.4, 0.95)])),
        "maximize": draw(st.booleans()),
        "offload": draw(st.sampled_from([0.0, 0.5, 1.0])),
    }
    if options["offload"] == 1 and options["overlap"] in (None, "forward"):
        options["offload_gradients"] = draw(st.booleans())
    if options.get("offload_gradients"):
        options["transport"] = "collective"
    if options["transport"] == "collective":
        options["reduction"] = draw(st.sampled_from(["ordered", "reduce_scatter"]))
        is_possible = size > 1 and options["reduction"] == "ordered" and not options.get("offload_gradients")
        options["between_hosts"] = draw(st.sampled_from(WIRES)) if is_possible else None
        if options["between_hosts"]:
            options["exactly"] = draw(st.sampled_from([None, only_the_first]))
    if options["overlap"] != "update":
        options["bucket_mb"] = draw(st.sampled_from([None, 0.001, TINY]))
        options["on_nonfinite"] = draw(st.sampled_from(["skip", "raise"]))
    return size, options


class ProgramFailed(AssertionError):
    """What went wrong on which rank."""


def event(function: Callable) -> Callable:
    """A method of Program that rank 0 calls, and with it all ranks, unless another event calls it there."""

    @functools.wraps(function)
    def call(self, *given, **drawn):
        if self.is_inside:
            return function(self, *given, **drawn)
        self.tell(function.__name__, drawn)
        self.is_inside = True
        try:
            function(self, **drawn)
        finally:
            self.is_inside = False

    return call


class Program(RuleBasedStateMachine):
    """One optimizer at a time, from its first step through loads into others.

    What is true of every rank is in the attributes of all of them, those outside of the world too.
    """

    def __init__(self, rank: int, groups: dict[int, dist.ProcessGroup]):
        super().__init__()
        self.rank, self.groups, self.size = rank, groups, 0
        self.pair: Pair | None = None
        self.is_loaded = False  # and there was no step since
        self.is_on_its_way = False  # what backward passes have sent, perhaps not all of it on all ranks
        self.error: str | None = None
        self.is_inside = False  # an event
        self.tell("begin", {})
        if not groups:
            for size in range(1, RANKS + 1):
                groups[size] = dist.new_group(list(range(size)), timedelta(seconds=20), "gloo")

    def tell(self, name: str, drawn: dict) -> None:
        if self.rank == 0:
            print(name, drawn, flush=True)  # for the case that a rank dies
            dist.broadcast_object_list([(name, drawn)], src=0)

    @initialize(world=worlds())
    @event
    def build(self, world):
        self._build(*world)
        self._all(self._check)

    def _build(self, size: int, options: dict) -> None:
        self.size, self.options = size, options
        self.overlap = options["overlap"]
        self.sums = options.get("offload_gradients", False)
        self.uses_up = self.sums or self.overlap == "update"
        self.raises = options.get("on_nonfinite") == "raise"
        self.is_loaded = False
        self.sends = self.overlap in ("backward", "both") and size > 1
        self._forget()

        def call():
            self.pair = Pair(SPECIFICATIONS, self.groups[size], **options)

        self._here(call)

    def _forget(self) -> None:
        self.is_clipped = self.has_sent = self.is_nonfinite = self.is_open = False

    # Calls

    def _here(self, call: Callable[[], None]) -> None:
        """On the ranks of the world. All raise an error in the next _all(): until then, other ranks may wait
        for this one in their backward pass.
        """
        if self.rank < self.size and self.error is None:
            try:
                call()
            except BaseException:
                self.error = traceback.format_exc()

    def _all(self, call: Callable[[], None]) -> None:
        """On the ranks of the world. All raise what one has raised."""
        self._here(call)
        errors: list[str | None] = [None] * RANKS
        dist.all_gather_object(errors, self.error)
        found = [f"rank {rank} of {self.size}: {error}" for rank, error in enumerate(errors) if error]
        if found:
            self.groups.clear()  # ranks may be anywhere in their collectives
            self.error = None
            raise ProgramFailed("\n".join(found))

    def _check(self) -> None:
        self.pair.check("weights and state")

    def _gradients(self, seed: int, missing, nonfinite) -> list[torch.Tensor | None]:
        exact, gradients = self.options.get("reduction") == "reduce_scatter", []
        for i, (shape, dtype, _) in enumerate(SPECIFICATIONS):
            gradient = gradient_values(10 * (seed + 1000 * self.rank) + i, shape, dtype, exact)
            if nonfinite is not None and nonfinite[0] == (self.rank, i):
                gradient.view(-1)[seed % gradient.numel()] = nonfinite[1]
            gradients.append(None if (self.rank, i) in missing else gradient)
        return gradients

    def _note_nonfinite(self, missing, nonfinite) -> None:
        if nonfinite is not None and nonfinite[0] not in missing and nonfinite[0][0] < self.size:
            self.is_nonfinite = True

    def _joined(self, missing: frozenset) -> frozenset:
        """A rank without a gradient would not join the others in a backward pass."""
        return missing - {(rank, COUNT - 1) for rank in range(RANKS)} if self.uses_up else missing

    # Events

    @precondition(lambda self: not (self.is_clipped or self.has_sent or self.is_open))
    @rule(seed=SEEDS, missing=MISSING, nonfinite=NONFINITE)
    @event
    def backward(self, seed, missing, nonfinite):
        missing = self._joined(missing)
        self._note_nonfinite(missing, nonfinite)
        self.has_sent, self.is_open = self.sends, self.overlap == "update"
        self.is_on_its_way |= self.sends

        def call():
            loss = self.pair.loss(self._gradients(seed, missing, nonfinite))
            if torch.is_tensor(loss):
                loss.backward()

        self._here(call)

    @precondition(lambda self: not (self.is_clipped or self.has_sent) and self.overlap != "update")
    @rule(seed=SEEDS, missing=MISSING, nonfinite=NONFINITE)
    @event
    def accumulate(self, seed, missing, nonfinite):
        missing = self._joined(missing)
        self._note_nonfinite(missing, nonfinite)

        def call():
            with self.pair.optimizer.no_sync():
                loss = self.pair.loss(self._gradients(seed, missing, nonfinite))
                if torch.is_tensor(loss):
                    loss.backward()

        self._here(call)

    @precondition(lambda self: not (self.is_clipped or self.has_sent or self.is_open))
    @rule(
        dropped=st.none() | PASSES,
        passes=st.lists(PASSES, min_size=1, max_size=2),
        clips=st.lists(st.tuples(MAX_NORMS, NORM_TYPES), max_size=2),
    )
    @event
    def iteration(self, dropped, passes, clips):
        """Micro-batches, clips and a step: seldom drawn in this order one by one."""
        if self.overlap == "update":
            dropped, passes, clips = None, passes[-1:], []
        if dropped is not None:
            self.backward(*dropped)
            self.zero_grad(True)
        for each in passes[:-1]:
            self.accumulate(*each)
        self.backward(*passes[-1])
        for each in clips:
            self.clip(*each)
        self.step()
        self.zero_grad(True)

    @precondition(lambda self: self.overlap != "update")
    @rule(max_norm=MAX_NORMS, norm_type=NORM_TYPES)
    @event
    def clip(self, max_norm, norm_type):
        self.is_on_its_way = False
        if self.raises and self.is_nonfinite:
            self._all(lambda: self._refused(lambda: self.pair.clip(max_norm, norm_type)))
            return self._forget()
        self.is_clipped = True
        self._all(lambda: self.pair.clip(max_norm, norm_type))

    @rule()
    @event
    def step(self):
        self.is_on_its_way = False
        if self.raises and self.is_nonfinite:
            self._all(lambda: self._refused(self.pair.optimizer.step))
            return self._forget()

        def call():
            self.pair.optimizer.step()
            assert self.pair.step() == self.is_nonfinite
            self.pair.clips, self.pair.norms = [], []
            if self.uses_up:
                self.pair.forget()
            self._check()

        self._all(call)
        self.is_clipped = self.has_sent = self.is_open = self.is_loaded = False
        self.is_nonfinite &= not self.uses_up

    def _refused(self, call: Callable[[], None]) -> None:
        with pytest.raises(FloatingPointError, match="holds a NaN or Inf"):
            call()
        self._check()
        self.pair.optimizer.zero_grad()
        self.pair.forget()

    @precondition(lambda self: not self.is_open)
    @rule(lr=st.sampled_from([0.0, 1e-3, 0.5]))
    @event
    def change_lr(self, lr):
        def call():
            self.pair.optimizer.param_groups[0]["lr"] = self.pair.hypers["lr"] = lr

        self._here(call)

    @precondition(lambda self: not self.is_open)
    @rule(set_to_none=st.booleans())
    @event
    def zero_grad(self, set_to_none):
        def call():
            self.pair.optimizer.zero_grad(set_to_none)
            self.pair.forget(zeros=not (set_to_none or self.sums))

        self._here(call)
        self._forget()

    @precondition(lambda self: self.overlap in (None, "forward") and not self.sums)
    @rule(
        seed=SEEDS,
        nonfinite=NONFINITE,
        exponent=st.integers(-3, 8),
        max_norm=st.none() | st.sampled_from([0.1, math.inf]),
    )
    @event
    def scaled_step(self, seed, nonfinite, exponent, max_norm):
        """A step with a GradScaler."""
        self.zero_grad(True)
        self._note_nonfinite((), nonfinite)

        def call():
            pair, scaler = self.pair, torch.amp.GradScaler("cpu", init_scale=2.0**exponent)
            scaler.scale(pair.loss(self._gradients(seed, (), nonfinite))).backward()
            if max_norm is not None:
                scaler.unscale_(pair.optimizer)
                pair.clip(max_norm)
            scaler.step(pair.optimizer)
            scaler.update()
            assert pair.step() == self.is_nonfinite
            self._check()
            pair.optimizer.zero_grad()
            pair.forget()

        is_refused = self.raises and self.is_nonfinite
        self._all((lambda: self._refused(call)) if is_refused else call)
        self.is_loaded &= is_refused
        self._forget()

    @precondition(lambda self: not (self.is_open or (self.is_loaded and self.is_on_its_way)))
    @rule(seed=SEEDS, i=st.integers(0, COUNT - 1))
    @event
    def write(self, seed, i):
        """No rank takes a step after a write to a weight, and a load takes what was written for its master.
        From a load to the next step weights follow masters instead, but for those that are their own.
        """
        shape, dtype, _ = SPECIFICATIONS[i]
        values = gradient_values(seed, shape, dtype, exact=False)

        def copy():
            with torch.no_grad():
                self.pair.parameters[i].copy_(values)
            if self.is_loaded and self._is_own_master(i):
                state = self.pair.state()
                self._write(state, i, values)
                self.pair.restore(state)

        self._here(copy)
        if self.is_loaded:
            if self.raises:  # no step follows masters that raises
                self.zero_grad(True)
            return self.step()
        self.is_on_its_way = False

        def call():
            optimizer = self.pair.optimizer
            if self.overlap != "update":  # there the step that raises has weights follow masters
                with pytest.raises(RuntimeError, match="was written to since the last step"):
                    optimizer.step()
            optimizer.zero_grad()
            self.pair.forget()

        self._all(call)
        self._forget()
        self._load(lambda state: self._write(state, i, values))

    def _is_own_master(self, i: int) -> bool:
        """Whether the memory of a parameter is that of its masters, or of their plane of bfloat16."""
        _, dtype, quantized = SPECIFICATIONS[i]
        is_offloaded = i in self.pair.optimizer._shards.offloaded
        is_shared = dtype == torch.float32 or self.pair.expected[i].number is not None
        return is_shared and not (quantized or is_offloaded)

    def _write(self, state: list[dict[str, torch.Tensor]], i: int, values: torch.Tensor) -> None:
        """Make the master that was written. It stays where it would make the same weight."""
        master, p = state[i]["master"], self.pair.parameters[i]
        if SPECIFICATIONS[i][2]:
            made = p.dequantize(torch.float32)
        elif p.dtype != torch.float32 and self._is_own_master(i):  # of the old bfloat16 plane nothing is left
            made = reference.join_master(values.bfloat16(), reference.split_master(master)[1])
        else:
            made = torch.where(values == master.to(p.dtype), master, values)
        state[i]["master"] = made

    @precondition(lambda self: not self.is_open)
    @rule(world=worlds())
    @event
    def load_in_a_world(self, world):
        self._arrive()
        self._load(lambda state: None, world)

    @precondition(lambda self: not (self.is_open or self.is_on_its_way))
    @rule()
    @event
    def load(self):
        self.zero_grad(True)
        self._load(lambda state: None)

    def _load(self, change: Callable[[list], None], world: tuple[int, dict] | None = None) -> None:
        """Save, and load into the same optimizer or one of another world."""
        saved = []

        def save():
            self.pair.optimizer.consolidate_state_dict()
            state_dict, state, file = self.pair.optimizer.state_dict(), self.pair.state(), io.BytesIO()
            if self.rank == 0:
                torch.save(state_dict, file)
            saved.extend([file.getvalue(), state, self.pair.hypers])

        self._all(save)
        there = saved if self.rank == 0 else [None] * 3
        dist.broadcast_object_list(there, src=0)
        if world is not None:
            self.pair = None
            self._build(*world)

        def load():
            content, state, self.pair.hypers = there
            change(state)
            self.pair.optimizer.load_state_dict(torch.load(io.BytesIO(content), weights_only=True))
            self.pair.restore(state)
            self._check()

        self._all(load)
        self.is_clipped, self.is_loaded = False, True

    @precondition(lambda self: not (self.is_open or self.is_on_its_way))
    @rule()
    @event
    def export(self):
        def call():
            model = nn.ParameterList(self.pair.parameters)
            exported = master_state_dict(model, self.pair.optimizer)
            for (name, found), kept in zip(exported, self.pair.state(), strict=True):
                assert_values_equal(found, kept["master"], f"exported {name}")

        self._all(call)

    def teardown(self):
        if self.groups:  # otherwise it has failed
            self.end()

    @event
    def end(self):
        self._arrive()
        self._all(lambda: None)

    def _arrive(self) -> None:
        """Only a step or a clip sends the rest; until then no other collective may run in the group."""
        if self.is_on_its_way:
            self.step()


def follow(rank: int, groups: dict[int, dist.ProcessGroup]) -> None:
    """What rank 0 tells this rank to do."""
    program, told = None, [None]
    while True:
        dist.broadcast_object_list(told, src=0)
        name, drawn = told[0]
        if name == "done":
            assert not drawn["failed"], "rank 0 says what has failed"
            return
        if name == "begin":
            program = Program(rank, groups)
        else:
            with contextlib.suppress(ProgramFailed):
                getattr(program, name)(**drawn)


@on_ranks(RANKS, time_limit=120.0)
@pytest.mark.parametrize(
    "first", [0, 1, *(pytest.param(number, marks=pytest.mark.nightly) for number in range(2, 200))]
)
def test_programs(world, first):
    """25 programs. first: hypothesis's seed. Of ranks that share memory the odd ones copy late."""
    chosen = settings(
        max_examples=25,
        stateful_step_count=12,
        phases=[Phase.generate],  # with Phase.shrink what fails gets shorter, in minutes
        suppress_health_check=list(HealthCheck),
        deadline=None,
        database=None,
    )
    groups: dict[int, dist.ProcessGroup] = {}
    with sharing_files(world, late=first % 2 > 0):
        if world.rank > 0:
            return follow(world.rank, groups)
        failed = True
        try:
            run_state_machine_as_test(seed(first)(lambda: Program(0, groups)), settings=chosen)
            failed = False
        finally:
            dist.broadcast_object_list([("done", {"failed": failed})], src=0)
