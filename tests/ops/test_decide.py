"""Whether a step writes: what a vote of the ranks means, word for word."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers import needs_gpu

from zerofp4 import ops, reference

EQUAL = [0.0, 1.0, 17.0, math.inf, -math.inf, math.nan, float(2**48 - 1)]


def vote_of(ranks):
    """The maximum over ranks of (presence flags, words that must be equal, flags)."""
    ballots = [[*present, *equal, *(-word for word in equal), *flags] for present, equal, flags in ranks]
    return torch.tensor(ballots, dtype=torch.float64).amax(0)


def rank_of(present=(1.0, 0.0, 1.0), equal=(1.0, math.inf, 2.0), word=0.0, failed=0.0):
    return present, equal, (0.0, 0.0, word, failed)


VOTES = {
    "taken": [rank_of(), rank_of((0.0, 0.0, 1.0))],
    "zeros of both signs": [rank_of(equal=(0.0, -0.0)), rank_of(equal=(-0.0, 0.0))],
    "infinities": [rank_of(equal=(math.inf, -math.inf))] * 2,
    "NaN on both ranks": [rank_of(equal=(math.nan, 1.0))] * 2,
    "other words": [rank_of(equal=(1.0, 2.0)), rank_of(equal=(1.0, math.inf))],
    "a NaN on one rank": [rank_of(word=4.0), rank_of()],
    "earlier on the other": [rank_of(word=4.0), rank_of(word=6.0)],
    "an error of a rank": [rank_of(), rank_of(equal=(0.0,) * 3, present=(0.0,) * 3, failed=2.0)],
    "an error and a NaN": [rank_of(word=6.0), rank_of(word=2.0, failed=1.0)],
    "many parameters": [rank_of((0.0, 1.0) * 400), rank_of((1.0, 0.0) * 399 + (0.0, 0.0), word=2.0)],
}
REFUSED = ("NaN on both ranks", "other words", "an error of a rank", "an error and a NaN")
FLAGS = ("looks", "counts", "goes_on", "keeps")


class Pair:
    """Decisions by the kernel, of which each is compared with the reference."""

    def __init__(self, device, count, has_failed=False):
        self.device = device
        self.failed = torch.zeros((), device=device) if has_failed else None
        self.kernel = ops.Decision(count, device, self.failed)
        self.found_inf = torch.zeros(1, device=device)
        self.expected = reference.Decision(0, 0, 0, 0.0, 0.0, torch.zeros(count, dtype=torch.float64), 0.0)

    def decide(self, vote, count=0, own=0, is_step=True, **flags):
        self.kernel.own.fill_(own)
        failed = 0.0 if self.failed is None else self.failed.item()
        self.expected = reference.decide(
            self.expected, vote, count, own=own, failed=failed, writes_found_inf=is_step, **flags
        )
        there = None if vote is None else vote.to(self.device)
        self.kernel.decide(there, count, found_inf=self.found_inf if is_step else None, **flags)
        found = {name: getattr(self.kernel, name, self.found_inf) for name in self.expected._fields}
        for name, value in self.expected._asdict().items():
            assert found[name].tolist() == (
                value.tolist() if name == "present" else [value] if name == "found_inf" else value
            ), name
        assert self.kernel.own.item() == own


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("name", VOTES)
@pytest.mark.parametrize("has_failed", [False, True])
def test_equals_the_reference(device, name, has_failed):
    """With each combination of flags, after each other decision."""
    vote, count = vote_of(VOTES[name]), len(VOTES[name][0][0])
    pair = Pair(device, count, has_failed)
    for n, flags in enumerate(itertools.product([True, False], repeat=len(FLAGS))):
        for before in ("taken", "a NaN on one rank", "other words"):
            # Of a bucket: the last presence flags are those of three parameters.
            pair.decide(vote_of(VOTES[before]), 3, is_step=n % 2 == 0)
            pair.decide(vote, count, is_step=n % 3 > 0, **dict(zip(FLAGS, flags, strict=True)))
    assert pair.kernel.refused.item() or name not in REFUSED
    if has_failed:
        pair.failed.fill_(1.0)
        pair.decide(vote, count, looks=False)
        assert pair.kernel.skip.item() == 1.0 and not pair.kernel.present.any()


@pytest.mark.parametrize("word", EQUAL)
def test_words_that_are_equal_refuse_nothing(device, word):
    """But a NaN is no number that ranks can have in common."""
    pair = Pair(device, 3)
    pair.decide(vote_of([rank_of(equal=(word,))] * 3), 3)
    assert bool(pair.kernel.refused) == math.isnan(word)
    assert pair.kernel.present.tolist() == ([0.0] * 3 if math.isnan(word) else [1.0, 0.0, 1.0])


def test_votes_that_nobody_has_read(device):
    """What one of a clip has refused, the one of its step does not bring back; the next step is taken."""
    pair = Pair(device, 3)
    taken, refused = vote_of(VOTES["taken"]), vote_of(VOTES["other words"])
    pair.decide(refused, 3, is_step=False)
    pair.decide(taken, 3, looks=False, keeps=True, counts=True)
    assert (pair.found_inf.item(), pair.kernel.skipped.item()) == (1.0, 0)
    pair.decide(taken, 3, counts=True)
    assert (pair.found_inf.item(), pair.kernel.present.tolist()) == (0.0, [1.0, 0.0, 1.0])


def test_a_clip_and_its_step_count_one_skip(device):
    pair = Pair(device, 3)
    pair.decide(vote_of(VOTES["a NaN on one rank"]), 3, is_step=False)
    assert (pair.found_inf.item(), pair.kernel.skipped.item()) == (0.0, 0)
    pair.decide(vote_of(VOTES["taken"]), 3, looks=False, counts=True)
    assert (pair.found_inf.item(), pair.kernel.skipped.item(), pair.kernel.first.item()) == (1.0, 1, 4)


def test_the_buckets_of_a_step_count_one_skip(device):
    """Each bucket is skipped or not; the first parameter of all, and found_inf, are the step's."""
    pair = Pair(device, 3)
    for name, word in (("taken", 0), ("a NaN on one rank", 4), ("taken", 4), ("earlier on the other", 6)):
        pair.decide(vote_of(VOTES[name]), 3, counts=True, goes_on=True)
        skips = name != "taken"
        assert (pair.kernel.skip.item(), pair.kernel.first.item()) == (skips, word)
    assert (pair.kernel.skipped.item(), pair.found_inf.item()) == (1, 1.0)


def test_a_world_of_one(device):
    """Without a vote the rank's own word decides."""
    pair = Pair(device, 0)
    for word, skipped in ((0, 0), (8, 1), (0, 1), (2, 2)):
        pair.decide(None, own=word, counts=True)
        assert (pair.kernel.first.item(), pair.kernel.skipped.item()) == (word, skipped)


@needs_gpu
def test_in_a_cuda_graph():
    """A replay decides anew, from the words that are there then."""
    decision, found_inf = ops.Decision(0, torch.device("cuda")), torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decision.decide(None, found_inf=found_inf, counts=True)
    for word, skipped in ((0, 0), (6, 1), (0, 1)):
        decision.own.fill_(word)
        graph.replay()
        assert (decision.skip.item(), decision.skipped.item()) == (word != 0, skipped)
        assert found_inf.item() == (word != 0)
