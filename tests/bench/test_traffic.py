"""What a step's phases move, and what they take at least: counted by hand for small steps."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import step, traffic
from benchmarks.ranks import Timer
from benchmarks.traffic import Step, parts, phases, step_of

SENT = {"gradients": 2048, "amaxes": 24, "weights": 512}
SHAPES = [(32, 32), (32, 32)]
"""2,048 elements in 8 tiles: two ranks own 1,024 each."""


def two_ranks(transport: str) -> Step:
    return Step(2048, 8, 2, 2, transport, True, SENT)


# Bytes of a step


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
    }
    assert found["adamw_reducing"].formula == "24n + 2Wn"


def test_bytes_of_collectives_pass_through_a_buffer():
    peer, found = phases(two_ranks("peer")), phases(two_ranks("collective"))
    for phase in ("reduce", "adamw_reducing"):  # 2(W-1) read to be sent, as many written as they arrive
        assert found[phase].memory - peer[phase].memory == 4 * 1024
        assert found[phase].link == peer[phase].link
    assert {found[phase] == peer[phase] for phase in ("scan", "adamw", "publish", "publish_alone")} == {True}


def test_bytes_of_a_world_of_one():
    one = Step(2048, 8, 1, 2, "none", True, dict.fromkeys(SENT, 0))
    assert {name: t.memory for name, t in phases(one).items()} == {
        "scan": 2 * 2048,
        "reduce": 6 * 2048,
        "adamw": 28 * 2048,
        "norm": 2 * 2048,
        "adamw_reducing": 26 * 2048,
        "publish": 5.5 * 2048 + 48,
        "publish_alone": 9.5 * 2048 + 80,
    }
    assert parts(one)["step"] == ("scan", "adamw_reducing", "publish")
    assert parts(one)["step_clipped"] == ("norm", "adamw_reducing", "publish")
    assert parts(one._replace(in_buckets=False))["step"] == ("scan", "reduce", "adamw", "publish")
    assert {traffic.link for traffic in phases(one).values()} == {0}


def test_a_step_that_updates_in_buckets_reduces_in_the_update():
    found = parts(two_ranks("peer"))
    assert found["step"] == ("scan", "adamw_reducing", "publish")
    assert found["step_clipped"] == ("scan", "reduce", "adamw", "publish")
    assert parts(two_ranks("peer")._replace(in_buckets=False))["step"] == found["step_clipped"]


def test_what_describe_says():
    bucket = {"ranks": 2, "gradients_travel_as": "bfloat16"}
    said = {"buckets": [bucket, bucket], "transport": "peer", "in_buckets": True, "bytes_sent": SENT}
    assert step_of(SHAPES, said) == two_ranks("peer")
    assert step_of([(32, 17)], said).tiles == 4
    other = bucket | {"gradients_travel_as": "float32"}
    with pytest.raises(ValueError, match="in several ways"):
        step_of(SHAPES, said | {"buckets": [bucket, other]})


# Rows


def a_timer(device: str = "cuda") -> tuple[Timer, dict]:
    """Of two ranks; and the rows that are counted, by name."""
    timer, rows = Timer.__new__(Timer), {}
    timer.session = SimpleNamespace(count=lambda name, kind, *row: rows.update({name: row}))
    timer.prefix, timer.places = "peer_", f"2x{device}"
    timer.device, timer.world = torch.device(device), SimpleNamespace(world_size=2)
    return timer, rows


def test_rows_of_floors():
    timer, rows = a_timer()
    measured = {"step": 7.2, "step_clipped": 9.0, "reduce": 4.0, "update": 3.0, "publish": 1.0}
    speeds = {"memory": 28 * 1024e3, "link": 1024e3}
    traffic.count_floors(timer, two_ranks("peer"), speeds, measured)
    scan, publish = 4096 / 28672, max((4.5 * 1024 + 48 + 3072) / 28672, 536 / 1024)
    values = {name: value for name, (value, _) in rows.items()}
    assert "24n + 2Wn bytes" in rows["peer_floor_adamw_reducing/2xcuda"][1]
    assert values["peer_floor_adamw_reducing/2xcuda"] == 2.0  # the link
    assert values["peer_floor_adamw/2xcuda"] == 1.0
    assert values["peer_floor_step/2xcuda"] == pytest.approx(scan + 2.0 + publish)
    assert values["peer_step_over_floor/2xcuda"] == pytest.approx(7.2 / (scan + 2.0 + publish))
    assert values["peer_reduce_over_floor/2xcuda"] == 2.0


def test_what_has_no_room_is_left_out(monkeypatch):
    timer, rows = a_timer("cpu")
    assert timer.has_room("step", 1e30)
    monkeypatch.setattr(timer, "has_room", lambda name, nbytes: nbytes < 1e4)
    assert step.measure_bf16(timer, SHAPES) is None and not rows
