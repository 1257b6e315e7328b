"""What a step's phases move, what they take at least, and how that grows: counted by hand for small steps."""

import json
from types import SimpleNamespace

import pytest
import torch
from zerofp4_bench import output, session, step, traffic
from zerofp4_bench.ranks import Timer
from zerofp4_bench.rules import KINDS
from zerofp4_bench.traffic import Speeds, Step, Traffic, parts, phases, step_of
from zerofp4_bench.workloads import weight_shapes

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


def test_the_slower_way_is_the_floor():
    speeds = Speeds(memory=1e6, link=1e5)
    assert speeds.milliseconds(Traffic("", 1000, 50)) == {"memory": 1.0, "link": 0.5}
    assert speeds.floor(Traffic("", 1000, 50)) == 1.0
    assert speeds.floor(Traffic("", 1000, 200)) == 2.0
    assert Speeds(1e6).floor(Traffic("", 1000)) == 1.0


def test_what_describe_says():
    bucket = {"ranks": 2, "gradients_travel_as": "bfloat16"}
    said = {"buckets": [bucket, bucket], "transport": "peer", "in_buckets": True, "bytes_sent": SENT}
    assert step_of(SHAPES, said) == two_ranks("peer")
    assert step_of([(32, 17)], said).tiles == 4
    other = bucket | {"gradients_travel_as": "float32"}
    with pytest.raises(ValueError, match="in several ways"):
        step_of(SHAPES, said | {"buckets": [bucket, other]})


# Rows


class Rows:
    """As a session, of what is counted."""

    def __init__(self):
        self.rows, self.said = {}, []

    def count(self, name, kind, value, rule):
        assert kind in KINDS and name not in self.rows
        self.rows[name] = SimpleNamespace(value=value, rule=rule)


def a_timer(device: str = "cuda", prefix: str = "peer_") -> Timer:
    timer = Timer.__new__(Timer)
    timer.session, timer.prefix, timer.places = Rows(), prefix, f"2x{device}"
    timer.device, timer.world = torch.device(device), SimpleNamespace(world_size=2)
    return timer


def test_rows_of_floors():
    timer = a_timer()
    measured = {"step": 7.2, "step_clipped": 9.0, "reduce": 4.0, "update": 3.0, "publish": 1.0}
    speeds = Speeds(memory=28 * 1024e3, link=1024e3)
    traffic.count_floors(timer, two_ranks("peer"), speeds, measured)
    rows = timer.session.rows
    scan, publish = 4096 / 28672, max((4.5 * 1024 + 48 + 3072) / 28672, 536 / 1024)
    assert rows["peer_floor_adamw_reducing/2xcuda"].value == 2.0  # the link
    assert "24n + 2Wn bytes" in rows["peer_floor_adamw_reducing/2xcuda"].rule
    assert rows["peer_floor_adamw/2xcuda"].value == 1.0
    assert rows["peer_floor_step/2xcuda"].value == pytest.approx(scan + 2.0 + publish)
    over = rows["peer_step_over_floor/2xcuda"].value
    assert over == pytest.approx(7.2 / (scan + 2.0 + publish))
    assert rows["peer_reduce_over_floor/2xcuda"].value == 2.0


def test_what_has_no_room_is_left_out(monkeypatch):
    timer = a_timer("cpu")
    assert timer.has_room("step", 1e30)
    monkeypatch.setattr(timer, "has_room", lambda name, nbytes: nbytes < 1e4)
    assert step.measure_bf16(timer, SHAPES) is None and not timer.session.rows


# How a step grows


def test_a_planned_step_sends_what_describe_says_of_a_real_one():
    result = json.loads((session.RESULTS / "step_2_ranks_cuda.json").read_text())
    said = {row["name"]: row.get("megabytes") for row in result["rows"]}
    for transport in ("collective", "peer"):
        planned = traffic.planned(weight_shapes(1), 2, transport)
        for phase in ("gradients", "amaxes", "weights"):  # of amaxes each bucket has a header
            assert planned.sent[phase] / 1e6 == pytest.approx(said[f"sent_{phase}/2xcuda"], rel=1e-4)
        assert (planned.transport, planned.in_buckets) == (transport, True)


def test_a_world_of_one_sends_nothing():
    for way in traffic.WAYS:
        found = [t for part in traffic.phases_of(way, SHAPES, 1).values() for t in part]
        assert {t.link for t in found} == {0}
    assert traffic.planned(SHAPES, 1, "peer").transport == "none"


def test_bytes_of_a_bf16_step():
    found = traffic.bf16_phases(2048, 2, 2)
    assert {name: (t.memory, t.link) for name, t in found.items()} == {
        "scatter": (2 * 2048 + 4 * 1024 + 2 * 1024, 2048),
        "widen": (6 * 1024, 0),
        "clip": (12 * 1024, 0),
        "adamw": (28 * 1024, 0),
        "cast": (6 * 1024, 0),
        "gather": (4 * 1024, 2048),
    }
    assert traffic.bf16_parts(2)["step_clipped"] == tuple(found)
    assert traffic.bf16_parts(1)["publish"] == ("cast",)


def test_what_rows_are_called():
    assert traffic.row_of("peer", "step_clipped", 4) == "peer_step_clipped/4xcuda"
    assert traffic.row_of("peer", "step", 1) == "step/1xcuda"
    assert traffic.row_of("bf16", "step_clipped", 2) == "step_bf16_clipped/2xcuda"


def result_of(ranks: int, scale: int = 64, device: str = "D", longer: float = 2.0, link=200.0) -> dict:
    """As a run would write it that takes `longer` than its floors. Without the peer transport."""
    speeds, shapes = Speeds(1e9, 1e9 * link), weight_shapes(scale)
    rows = [row_of_kind(f"link/{ranks}xcuda", "gigabytes_per_second", link)]
    for way in ("collective", "bf16"):
        for part, of_part in traffic.phases_of(way, shapes, ranks).items():
            took = longer * sum(speeds.floor(each) for each in of_part)
            rows.append(row_of_kind(traffic.row_of(way, part, ranks), "milliseconds", took))
    found = {"benchmark": f"step_{ranks}_ranks", "device": device, "threads": None, "copy_gbps": 1.0}
    return found | {"settings": {"scale": scale}, "rows": rows}


def row_of_kind(name: str, kind: str, value: float) -> dict:
    return {"name": name, "kind": kind, kind: value, "target": None, "rule": "r"}


def test_the_smallest_number_of_gpus_above_one_says_how_much_longer_parts_take():
    found = traffic.growth_of([result_of(4, longer=3.0), result_of(1, longer=4.0), result_of(2)])
    assert found.base.ranks == 2 and found.ranks == [1, 2, 4, 8]
    for way in ("collective", "bf16"):
        for part in traffic.PARTS:
            ratios = [found.cell(way, part, ranks).ratio for ranks in (1, 2, 4)]
            alone = None if (way, part) == ("collective", "reduce") else 2.0  # gradients of one are means
            assert ratios == pytest.approx([alone, 1.0, 1.5])
            assert (found.cell(way, part, 1).predicted is None) == (alone is None)
            eight = found.cell(way, part, 8)
            assert eight == (None, pytest.approx(2 * found.floor(way, part, 8)))
    assert found.cell("peer", "step", 2) == traffic.Cell(None, None)


def test_the_link_is_that_of_the_file():
    slower, faster = (traffic.growth_of([result_of(2, link=link)]) for link in (0.1, 1e3))
    assert slower.speeds == Speeds(1e9, 1e8)
    assert slower.floor("bf16", "step", 8) > faster.floor("bf16", "step", 8)


def test_a_file_of_another_device_or_scale_or_of_the_cpu_is_not_compared():
    cpu, others = result_of(2) | {"threads": 2}, [result_of(4, device="E"), result_of(1, scale=128)]
    found = traffic.growth_of([result_of(2), *others, cpu])
    assert list(found.measured) == [2] and found.left_out == others
    expected = "Not compared, being of another device or scale: step_4_ranks on E; step_1_ranks on D."
    assert expected in output.growth_words(found)
    assert traffic.growth_of([cpu]) is None and traffic.growth_of([result_of(1)]) is None
    assert traffic.growth_of([result_of(2) | {"benchmark": "fsdp2_2_ranks"}]) is None


def test_the_tables_of_the_page(tmp_path, monkeypatch):
    folder = tmp_path / "results"
    folder.mkdir()
    for ranks in (1, 2, 4):
        (folder / f"step_{ranks}_ranks_cuda.json").write_text(json.dumps(result_of(ranks)))
    monkeypatch.setattr(output, "ROOT", tmp_path)
    monkeypatch.setattr(output, "RESULTS", folder)
    lines = output.docs_section().splitlines()
    place = lines.index("|  | 1 GPU | 2 GPUs | 4 GPUs | 8 GPUs |")
    assert place > max(i for i, line in enumerate(lines) if "step_4_ranks_cuda.json" in line)
    assert "200 GB/s to other GPUs of the host (measured)" in lines[place - 2]
    row = next(line for line in lines if line.startswith("| collective: step |"))
    measured, predicted = row.split("|")[3].split("=")[0].split("/")
    assert float(measured) == float(predicted)
    end = place + 2 + len(traffic.PARTS) * len(traffic.WAYS)
    assert "no step of several hosts was measured" in lines[end + 1]
    assert "collective 2.00, bf16 2.00." in lines[end + 1], "the peer transport was not measured"
    assert lines[end + 3] == "|  | 8 GPUs | 64 GPUs | 512 GPUs | 4,096 GPUs |"
    assert len(lines) == end + 5 + len(traffic.HOST_WAYS) * (1 + len(traffic.HOST_GBPS))
    row = next(line for line in lines if line.startswith("| default: step at 50 GB/s |"))
    assert row.split("|")[2] == " - " and row.split("|")[3].endswith((", met ", ", missed "))


# Steps of several hosts


def sent_by(way: str) -> dict[str, tuple[float, float]]:
    """By what it is, bytes that a rank of 2 x 2 sends in all and to the other host. It owns 512 elements."""
    step = traffic.planned(SHAPES, 4, way, of_host=2)
    return {kind: (step.sent[kind], step.across[kind]) for kind in ("gradients", "amaxes", "weights")}


def test_bytes_that_ranks_send_to_other_hosts():
    rings = {"amaxes": (32 * 3 / 4, 32 * 3 / 4 / 2), "weights": (1024 * 3 / 4, 1024 * 3 / 4 / 2)}
    assert sent_by("collective") == rings | {"gradients": (3 * 1024, 2 * 1024)}
    # To the other rank of the host what it averages for both hosts, and an FP32 mean to the other host.
    assert sent_by("default") == rings | {"gradients": (2 * 1024 + 4 * 512, 4 * 512)}
    assert sent_by("reduce_scatter") == rings | {"gradients": (4096 * 3 / 4, 4096 * 3 / 4 / 2)}


def test_a_phase_of_several_hosts_waits_for_the_network_too():
    step = traffic.planned(SHAPES, 4, "default", of_host=2)
    reduce = phases(step)["reduce"]
    # By owned element 2W of gradients and 16H - 8 of means.
    assert reduce == ("4n + (2W+16H-8)n", (4 + 8 + 24) * 512, 2 * 1024, 4 * 512)
    assert Speeds(1e9, 1e9, 1e3).floor(reduce) == 1e3 * reduce.network / 1e3
    found = traffic.bf16_phases(2048, 4, 2)
    assert {(t.link, t.network) for t in (found["scatter"], found["gather"])} == {(1536, 1536)}
    found = traffic.fsdp2_phases(2048, 4, 2)
    assert [(t.link, t.network) for t in found.values()] == [(1536, 1536), (1536, 1536), (3072, 3072)]


@pytest.mark.parametrize("way", traffic.HOST_WAYS)
def test_one_host_sends_nothing_to_others(way):
    found = [traffic.phases_of(way, SHAPES, 8, of_host)["step"] for of_host in (8, 16, None)]
    assert found[0] == found[1] == found[2]
    assert {t.network for t in found[0]} == {0}


def test_hosts_take_the_measured_factor_of_a_way_of_one_host():
    growth = traffic.growth_of([result_of(2, longer=3.0)])
    for way, factor in (("default", 3), ("reduce_scatter", 3), ("collective", 3), ("bf16", 3), ("fsdp2", 1)):
        ms, sent = growth.on_hosts(way, 64, 0.001)
        slow, _ = growth.on_hosts(way, 64, 0.0005)
        across = sum(t.network for t in traffic.phases_of(way, growth.shapes, 64, 8)["step"])
        assert sent == across / 1e9
        assert slow - ms == pytest.approx(factor * 1e3 * across / 1e6), "the network is the slowest"
    assert growth.on_hosts("default", 8, 50)[0] is None, "the peer transport of one host was not measured"
    assert growth.on_hosts("collective", 8, 50)[0] == growth.cell("collective", "step", 8).predicted
