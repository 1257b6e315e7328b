"""How a step grows with the number of GPUs: the bytes of steps that nobody took, and tables of those."""

import json
import math

import bench
import pytest
from benchmarking import growth, model, session, tables
from benchmarking.traffic import Speeds, elements_of, phases, tiles_of
from benchmarking.workloads import llama_sizes

SHAPES = [(32, 64)]
"""2,048 elements in 8 tiles."""


def test_a_planned_step_sends_what_describe_says_of_a_real_one():
    result = json.loads((session.RESULTS / "step_2_ranks_cuda.json").read_text())
    said = {row["name"]: row.get("megabytes") for row in result["rows"]}
    shapes = [shape for shape, is_weight in llama_sizes(1) if is_weight]
    for transport in ("collective", "peer"):
        step = model.planned(shapes, 2, transport)
        for phase in ("gradients", "amaxes", "weights"):  # of amaxes each bucket has a header
            assert step.sent[phase] / 1e6 == pytest.approx(said[f"sent_{phase}/2xcuda"], rel=1e-4)
        assert set(step.across.values()) == {0}
        assert (step.transport, step.in_buckets, step.hosts) == (transport, True, 1)


def test_what_is_sent_on_two_hosts():
    """16 ranks, 128 elements each."""
    step = model.planned(SHAPES, 16, "collective")
    assert (step.hosts, step.transport) == (2, "collective")
    assert (step.sent["gradients"], step.across["gradients"]) == (2 * 7 * 128, 2 * 8 * 128)
    codes = 1024 * 15 / 16
    assert (step.sent["weights"], step.across["weights"]) == (codes * 7 / 8, codes / 8)
    amaxes = 2 * 2 * 8 * 15 / 16
    assert (step.sent["amaxes"], step.across["amaxes"]) == (amaxes * 7 / 8, amaxes / 8)
    step = model.planned(SHAPES, 16, "peer")
    assert step.transport == "hosts"
    assert (step.sent["gradients"], step.across["gradients"]) == (2 * 7 * 2 * 128, 4 * 128)
    assert phases(step)["adamw_reducing"].memory == (24 + 2 * 16 + 16 * 2 - 8) * 128


def test_a_world_of_one_sends_nothing():
    for way in model.WAYS:
        traffic = [t for part in model.phases_of(way, SHAPES, 1).values() for _, t in part]
        assert {t.link + t.network for t in traffic} == {0}
    assert model.planned(SHAPES, 1, "peer").transport == "none"


def test_hosts_are_alike():
    with pytest.raises(ValueError, match="12 GPUs are not on hosts of 8"):
        model.phases_of("peer", SHAPES, 12)


def test_bytes_of_a_bf16_step():
    found = model.bf16_phases(2048, 2)
    assert {name: (t.memory, t.link) for name, t in found.items()} == {
        "scatter": (2 * 2048 + 4 * 1024 + 2 * 1024, 2048),
        "widen": (6 * 1024, 0),
        "clip": (12 * 1024, 0),
        "adamw": (28 * 1024, 0),
        "cast": (6 * 1024, 0),
        "gather": (4 * 1024, 2048),
    }
    names = [name for name, _ in model.phases_of("bf16", SHAPES, 2)["step_clipped"]]
    assert names == ["scatter", "widen", "clip", "adamw", "cast", "gather"]
    assert [name for name, _ in model.phases_of("bf16", SHAPES, 1)["publish"]] == ["cast"]


def test_what_rows_are_called():
    assert model.row_of("peer", "step_clipped", 4) == "peer_step_clipped/4xcuda"
    assert model.row_of("peer", "step", 1) == "step/1xcuda"
    assert model.row_of("bf16", "step_clipped", 2) == "step_bf16_clipped/2xcuda"
    assert model.row_of("bf16", "publish", 2) == "publish_bf16/2xcuda"


# Files of steps


def result_of(ranks: int, scale: int = 64, device: str = "D", longer: float = 2.0, link=None) -> dict:
    """As a run would write it that takes `longer` than its floors. Without the peer transport."""
    shapes = [shape for shape, is_weight in llama_sizes(scale) if is_weight]
    speeds = Speeds(1e9, 1e9 * (link or growth.LINK_GBPS), 1e9)
    rows = [] if link is None else [row_of_kind(f"link/{ranks}xcuda", "gigabytes_per_second", link)]
    for way in ("collective", "bf16"):
        for part, of_part in model.phases_of(way, shapes, ranks).items():
            took = longer * sum(speeds.floor(traffic) for _, traffic in of_part)
            rows.append(row_of_kind(model.row_of(way, part, ranks), "milliseconds", took))
    settings = {"scale": scale}
    found = {"benchmark": f"step_{ranks}_ranks", "device": device, "threads": None, "copy_gbps": 1.0}
    return found | {"settings": settings, "rows": rows, "commit": None}


def row_of_kind(name: str, kind: str, value: float) -> dict:
    return {"name": name, "kind": kind, kind: value, "target": None, "rule": "r"}


def test_the_smallest_number_of_gpus_above_one_says_how_much_longer_parts_take():
    results = [result_of(4, longer=3.0), result_of(1, longer=4.0), result_of(2)]
    found = growth.growth_of(results)
    assert found.base.ranks == 2 and found.ranks == [1, 2, 4, 8, 64]
    for way in ("collective", "bf16"):
        for part in model.PARTS:
            ratios = [found.cell(way, part, ranks).ratio for ranks in (1, 2, 4)]
            alone = None if (way, part) == ("collective", "reduce") else 2.0  # gradients of one are means
            assert ratios == pytest.approx([alone, 1.0, 1.5])
            assert (found.cell(way, part, 1).predicted is None) == (alone is None)
            assert found.cell(way, part, 8).measured is None
            assert found.cell(way, part, 8).predicted == pytest.approx(
                2 * found.floor(way, part, 8, scale=64)
            )
    assert found.cell("peer", "step", 2) == growth.Cell(None, None, 64)


def test_what_is_assumed_and_what_is_measured():
    found = growth.growth_of([result_of(2)])
    assert found.link_gbps == growth.LINK_GBPS
    assert "375 GB/s to other GPUs of a host of 8 (assumed)" in growth.words(found)
    found = growth.growth_of([result_of(2, link=200.0)], network_gbps=25.0)
    assert found.speeds == Speeds(1e9, 2e11, 2.5e10)
    assert "200 GB/s to other GPUs of a host of 8 (measured) and at 25 GB/s" in growth.words(found)
    slower, faster = (growth.growth_of([result_of(2)], network_gbps=gbps) for gbps in (0.01, 1e3))
    assert slower.cell("bf16", "step", 64).predicted > faster.cell("bf16", "step", 64).predicted
    assert slower.limit("bf16", 64) == "scatter: network"
    assert faster.limit("bf16", 64) == "scatter: memory"


def test_a_file_of_another_device_or_of_the_cpu_is_not_compared():
    other = result_of(4, device="E")
    cpu = result_of(2) | {"threads": 2}
    found = growth.growth_of([result_of(2), other, cpu])
    assert list(found.measured) == [2] and not found.holds(other)
    assert "Not compared, being of another device: step_4_ranks on E." in growth.words(found)
    assert growth.growth_of([cpu]) is None and growth.growth_of([result_of(1)]) is None
    assert growth.growth_of([result_of(2) | {"benchmark": "fsdp2_2_ranks"}]) is None


def test_a_file_of_another_scale_is_compared_at_its_own():
    found = growth.growth_of([result_of(2), result_of(1, scale=128)])
    cell = found.cell("collective", "step", 1)
    assert cell.scale == 128 and cell.ratio == pytest.approx(1.0)
    assert growth.shown(found, cell).endswith(" = 1.00, scale 128")
    shapes = [shape for shape, is_weight in llama_sizes(128) if is_weight]
    least = Speeds(1e9).floor(phases(model.planned(shapes, 1, "peer"))["adamw"])
    assert least == pytest.approx(28e-6 * elements_of(shapes)) and tiles_of(shapes) > 0
    assert math.isfinite(cell.predicted) and cell.predicted > least


def test_the_chart_and_the_table_of_the_page(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "results"
    folder.mkdir()
    for ranks in (1, 2, 4):
        (folder / f"step_{ranks}_ranks_cuda.json").write_text(json.dumps(result_of(ranks)))
    for place in (tables, session):
        monkeypatch.setattr(place, "ROOT", tmp_path)
        monkeypatch.setattr(place, "RESULTS", folder)
    bench.draw(folder)
    path = folder / "step_growth_cuda.png"
    assert path.read_bytes().startswith(b"\x89PNG") and f"wrote {path}" in capsys.readouterr().out
    lines = tables.docs_section(25.0).splitlines()
    place = lines.index("![A step of several GPUs, measured and predicted](../results/step_growth_cuda.png)")
    assert place > max(i for i, line in enumerate(lines) if "step_4_ranks_cuda.json" in line)
    assert "25 GB/s of each GPU to other hosts (assumed)" in lines[place + 2]
    assert lines[place + 4] == "|  | 1 GPU | 2 GPUs | 4 GPUs | 8 GPUs | 64 GPUs |"
    row = next(line for line in lines if line.startswith("| collective: step |"))
    measured, predicted = row.split("|")[3].split("=")[0].split("/")
    assert float(measured) == float(predicted)
    assert len(lines) == place + 6 + (len(model.PARTS) + 1) * len(model.WAYS)
    assert "| bf16: longest | adamw: memory |" in "\n".join(lines)


def test_the_network_is_an_option(capsys):
    assert bench.parse_options(["docs"]).network == 50
    assert bench.parse_options(["docs", "--network", "25"]).network == 25
    for wrong in ("0", "1.5", "fast"):
        with pytest.raises(SystemExit):
            bench.parse_options(["docs", "--network", wrong])
    assert "argument --network: must be at least 1, got 0" in capsys.readouterr().err
