"""python -m benchmarks fsdp2: training steps of several ranks. Never how fast anything is."""

from __future__ import annotations

import json

import pytest
from cases.bench import two_ranks
from early import waits_for

import benchmarks.__main__ as bench
from benchmarks.rules import KINDS
from benchmarks.session import Clock


@pytest.mark.heavy
@waits_for(two_ranks)
def test_both_ways_to_gather(early):
    run, folder = early(two_ranks)
    assert run.returncode == 0, run.stderr
    result = json.loads((folder / "fsdp2_2_ranks_cpu.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    cases = ["reshard", "keep", "1.5b"]
    assert result["settings"] == {"scale": 64, "repeats": 1, "cases": cases, "layers": 2, "tokens": 4}
    assert rows["link/2xcpu"]["gigabytes_per_second"] > 0
    shapes = {
        "layers": (2 * (4 * 64 * 64 + 3 * 64 * 224), 64),
        "1.5b": (2 * (4 * 24 * 24 + 3 * 24 * 140), 24),
    }
    for case, shape, gathers in (("reshard", "layers", 2), ("keep", "layers", 1), ("1.5b", "1.5b", 2)):
        converted, hidden = shapes[shape]  # gathers: in the forward and in the backward pass
        ours, theirs = (rows[f"{name}/tokens/2xcpu"] for name in (case, f"{case}_bf16"))
        expected = ours["tokens_per_second"] / theirs["tokens_per_second"]
        assert rows[f"{case}/tokens_over_bf16/2xcpu"]["speedup"] == pytest.approx(expected)
        assert ours["tokens_per_second"] * rows[f"{case}/step/2xcpu"]["milliseconds"] == pytest.approx(8e3)
        for name, bits in ((case, 4), (f"{case}_bf16", 16)):
            moved = rows[f"{name}/gathered/2xcpu"]["megabytes"] * 1e6
            assert moved == pytest.approx(gathers * (converted * bits / 8 + 4 * hidden * 2)), name
    for name, nbytes in (("rows", 0.5 + 1 / 256), ("rows_and_columns", 1 + 1 / 128), ("bf16", 2)):
        held = rows[f"resident/{name}/2xcpu"]["bytes_per_parameter"]
        assert held == pytest.approx(nbytes, abs=1e-3), name
    assert all(row["kind"] in KINDS and row["rule"] and row["target"] is None for row in result["rows"])


def test_one_rank(tmp_path, monkeypatch):
    """Which gathers nothing, and says what a layer that is kept costs the host."""
    monkeypatch.setattr(Clock, "copy_gbps", lambda self: 10.0)
    sizes = ["--scale", "64", "--layers", "1", "--tokens", "4", "--repeats", "1"]
    bench.main(["fsdp2", "--cases", "keep", *sizes, "--output", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    rows = {row["name"].rpartition("/")[0]: row for row in json.loads(path.read_text())["rows"]}
    ours, bf16 = (rows[name]["host_us"] for name in ("host_layer", "host_layer_bf16"))
    assert rows["host_layer_over_bf16"]["ratio"] == pytest.approx(ours / bf16)
    assert rows["keep/gathered"]["megabytes"] == 0
