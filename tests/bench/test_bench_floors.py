"""What a step's phases move, and what they take at least: counted by hand for small steps."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarking import floors, steps, zero_redundancy
from benchmarking.session import ROOT
from benchmarking.targets import KINDS
from benchmarking.timer import Timer
from benchmarking.traffic import Speeds, Step, Traffic, parts, phases, step_of
from early import waits_for

SENT = {"gradients": 2048, "amaxes": 24, "weights": 512}
SHAPES = [(32, 32), (32, 32)]
"""2,048 elements in 8 tiles: two ranks own 1,024 each."""


def two_ranks(transport: str, **more) -> Step:
    return Step(2048, 8, 2, 2, transport, True, SENT, **more)


def test_bytes_of_ranks_that_share_memory():
    """By owned element 24 + 2W, of which 2(W-1) are served to others, who serve as many through the link."""
    found = phases(two_ranks("peer"))
    assert {name: (t.memory, t.link) for name, t in found.items()} == {
        "scan": (2 * 2048, 0),
        "norm": (2 * 2048, 0),
        "reduce": (8 * 1024, 2048),
        "adamw": (28 * 1024, 0),
        "adamw_reducing": (28 * 1024, 2048),
        "publish": (4.5 * 1024 + 6 * 8 + 1024 + 2048, 536),
        "publish_alone": (8.5 * 1024 + 4 * 4 + 6 * 8 + 1024 + 2048, 536),
        "gather": (1024, 512),
    }
    assert found["adamw_reducing"].formula == "24n + 2Wn"
    assert all(traffic.network == 0 for traffic in found.values())


def test_bytes_of_collectives_pass_through_a_buffer():
    peer, found = phases(two_ranks("peer")), phases(two_ranks("collective"))
    for phase in ("reduce", "adamw_reducing"):  # 2(W-1) read to be sent, as many written as they arrive
        assert found[phase].memory - peer[phase].memory == 4 * 1024
        assert found[phase].link == peer[phase].link
    assert {found[phase] == peer[phase] for phase in ("scan", "adamw", "publish", "publish_alone")} == {True}


def test_bytes_of_a_world_of_one():
    nothing = dict.fromkeys(SENT, 0)
    step = Step(2048, 8, 1, 2, "none", True, nothing)
    assert {name: t.memory for name, t in phases(step).items()} == {
        "scan": 2 * 2048,
        "reduce": 6 * 2048,
        "adamw": 28 * 2048,
        "norm": 2 * 2048,
        "adamw_reducing": 26 * 2048,
        "publish": 5.5 * 2048 + 48,
        "publish_alone": 9.5 * 2048 + 80,
        "gather": 0,
    }
    assert "gather" not in parts(step)
    assert parts(step)["step"] == ("scan", "adamw_reducing", "publish")
    assert parts(step)["step_clipped"] == ("scan", "norm", "adamw_reducing", "publish")
    assert parts(step._replace(in_buckets=False))["step"] == ("scan", "reduce", "adamw", "publish")
    assert {traffic.link for traffic in phases(step).values()} == {0}


def test_bytes_of_two_hosts():
    """Of 2 x 1 ranks nothing is served, and means travel in FP32: 4H made, 4 read, 4 arriving, 4H read."""
    step = two_ranks("hosts", across={"gradients": 4096, "amaxes": 1, "weights": 2}, hosts=2)
    assert phases(step)["reduce"] == Traffic(
        "4n + (2W + 16H - 8)n", (4 + 4 + 8 + 4 + 4 + 8) * 1024, 2048, 4096
    )
    assert phases(step)["publish"].network == 3
    with pytest.raises(ValueError, match="no formula for transport 'pigeons'"):
        phases(two_ranks("pigeons"))


def test_a_step_that_updates_in_buckets_reduces_in_the_update():
    found = parts(two_ranks("peer"))
    assert found["step"] == ("scan", "adamw_reducing", "publish")
    assert found["step_clipped"] == ("scan", "reduce", "adamw", "publish")
    assert parts(two_ranks("peer")._replace(in_buckets=False))["step"] == found["step_clipped"]


def test_the_slowest_way_is_the_floor():
    speeds = Speeds(memory=1e6, link=1e5, network=1e4)
    assert speeds.milliseconds(Traffic("", 1000, 50)) == {"memory": 1.0, "link": 0.5}
    assert speeds.floor(Traffic("", 1000, 50)) == 1.0
    assert speeds.floor(Traffic("", 1000, 200)) == 2.0
    assert speeds.floor(Traffic("", 1000, 200, 30)) == 3.0
    assert Speeds(1e6).floor(Traffic("", 1000)) == 1.0


def described(**more) -> dict:
    bucket = {"ranks": 2, "gradients_travel_as": "bfloat16"}
    found = {
        "buckets": [bucket, bucket],
        "transport": "peer",
        "hosts": None,
        "in_buckets": True,
        "bytes_sent": SENT,
    }
    return found | more


def test_what_describe_says():
    assert step_of(SHAPES, described()) == two_ranks("peer")
    assert step_of([(32, 17)], described()).tiles == 4
    other = {"ranks": 2, "gradients_travel_as": "float32"}
    with pytest.raises(ValueError, match="in several ways"):
        step_of(SHAPES, described(buckets=[*described()["buckets"], other]))
    with pytest.raises(ValueError, match=r"hosts: what \(2, 1\) of them send"):
        step_of(SHAPES, described(hosts=(2, 1)))


class Rows:
    """As a session, of what is counted."""

    def __init__(self):
        self.rows, self.said = {}, []

    def count(self, name, kind, value, rule, target=None):
        assert kind in KINDS and name not in self.rows
        self.rows[name] = SimpleNamespace(value=value, rule=rule, target=target)

    def say(self, line):
        self.said.append(line)


def test_rows_of_floors():
    session = Rows()
    timer = SimpleNamespace(session=session, places="2xcuda", device=torch.device("cuda"))
    speeds = Speeds(memory=28 * 1024e3, link=1024e3)
    measured = {"step": 7.2, "step_clipped": 9.0, "reduce": 4.0, "update": 3.0, "publish": 1.0, "gather": 1.0}
    floors.count_floors(timer, SHAPES, described(), speeds, "peer_", measured)
    rows = session.rows
    scan, publish = 4096 / 28672, (4.5 * 1024 + 48 + 3072) / 28672
    publish = max(publish, 536 / 1024)
    assert rows["peer_floor_adamw_reducing/2xcuda"].value == 2.0  # the link
    assert "24n + 2Wn bytes" in rows["peer_floor_adamw_reducing/2xcuda"].rule
    assert rows["peer_floor_adamw/2xcuda"].value == 1.0
    assert rows["peer_floor_step/2xcuda"].value == pytest.approx(scan + 2.0 + publish)
    over = rows["peer_step_over_floor/2xcuda"]
    assert over.value == pytest.approx(7.2 / (scan + 2.0 + publish)) and over.target == 1.15
    assert rows["peer_reduce_over_floor/2xcuda"].value == 2.0
    assert rows["peer_gather_over_floor/2xcuda"].value == 2.0
    targets = [name for name, row in rows.items() if row.target is not None]
    assert targets == ["peer_step_over_floor/2xcuda"]


def test_targets_by_the_number_of_gpus():
    session = Rows()
    timer = SimpleNamespace(session=session, places="4xcuda", device=torch.device("cuda"))
    said = described(buckets=[{"ranks": 4, "gradients_travel_as": "bfloat16"}])
    measured = dict.fromkeys(("step", "step_clipped", "reduce", "update", "publish", "gather"), 1.0)
    floors.count_floors(timer, SHAPES, said, Speeds(1e9, 1e9), "peer_", measured)
    floors.count_floors(timer, SHAPES, said | {"transport": "collective"}, Speeds(1e9, 1e9), "", measured)
    targets = {name: row.target for name, row in session.rows.items() if row.target is not None}
    assert targets == {"peer_step_over_floor/4xcuda": 1.15, "peer_gather_over_floor/4xcuda": 1.05}


class FakePeers:
    """Rank 1 of 3, with its copies of what the others have."""

    others = (2, 0)

    def __init__(self):
        self.of_others = {}

    def zeros(self, shape, dtype):
        self.own = torch.zeros(shape, dtype=dtype)
        self.of_others = {rank: torch.zeros(shape, dtype=dtype) for rank in self.others}
        return self.own

    def at(self, rank, own):
        assert own.is_contiguous()
        row = own.storage_offset() // own.numel()
        return self.of_others[rank][row]

    def start_copies(self, first, second):
        for target, source in (*first, *second):
            target.copy_(source + 1)
        return SimpleNamespace(wait=lambda: None)


def test_a_link_is_measured_with_every_byte_for_every_other_rank():
    peers, world = FakePeers(), SimpleNamespace(world_size=3, rank=1)
    timer = SimpleNamespace(world=world, device=torch.device("cpu"), time=lambda run: run() or 2.0)
    ms, rule = floors._time_copies(timer, peers, 96)
    assert ms == 2.0 and rule == "every rank copies into the memory of all others"
    for received in peers.of_others.values():
        assert received.tolist() == [[0] * 96, [1] * 96, [0] * 96]
    assert not peers.own.any()


def test_what_has_no_room_is_said_to_be_left_out(monkeypatch):
    session = Rows()
    timer = Timer.__new__(Timer)
    timer.session, timer.device = session, torch.device("cpu")
    assert timer.has_room("step", 1e30) and not session.said
    monkeypatch.setattr(zero_redundancy.Timer, "has_room", lambda self, name, nbytes: nbytes < 1e4)
    timer.world = SimpleNamespace(world_size=1)
    assert steps.measure_bf16(timer, SHAPES) is None
    zero_redundancy.measure_zero_redundancy(timer, [(64, 64)], {})
    assert not session.rows


def test_a_zero_redundancy_optimizer_that_cannot_be_built_is_said_to_be_left_out(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("no such optimizer")

    monkeypatch.setattr(zero_redundancy, "_build", fails)
    monkeypatch.setattr(zero_redundancy, "exchange", raise_error)
    session = Rows()
    world = SimpleNamespace(world_size=1)
    has_room = {"has_room": lambda name, nbytes: True}
    timer = SimpleNamespace(session=session, world=world, device=torch.device("cpu"), **has_room)
    zero_redundancy.measure_zero_redundancy(timer, SHAPES, {"step": 1.0})
    assert session.said == ["step_zero_redundancy is left out: no such optimizer"] and not session.rows


def raise_error(payload, error, group, stage):
    raise error


def step_of_one(folder: Path) -> tuple[subprocess.CompletedProcess, Path]:
    command = [sys.executable, "scripts/bench.py", "step", "--scale", "256", "--repeats", "1"]
    command += ["--transport", "collective", "peer", "--output", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300), folder


@pytest.mark.heavy
@waits_for(step_of_one)
def test_a_step_of_one_rank(early):
    run, folder = early(step_of_one)
    assert run.returncode == 0, run.stderr
    (path,) = folder.glob("step_1_ranks_*.json")
    names = [row["name"].split("/")[0] for row in json.loads(path.read_text())["rows"]]
    assert len(set(names)) == len(names), "a name stands for one row"
    assert not any(name.startswith("peer_") or name in ("link", "exposed", "gather") for name in names)
    assert {"floor_norm", "floor_adamw_reducing"} <= set(names)
    assert not {"reduce", "floor_reduce", "floor_adamw"} & set(names), "gradients stay where they are"
    for part in ("step", "step_clipped", "update", "publish"):
        assert {part, f"{part}_over_floor"} <= set(names)
    assert {"step_bf16", "floor_step", "step_over_bf16", "step_zero_redundancy"} <= set(names)
    assert "nothing travels" in run.stdout
