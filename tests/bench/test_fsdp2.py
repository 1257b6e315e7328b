"""python -m benchmarks fsdp2: training steps of several ranks. Never how fast anything is."""

from __future__ import annotations

import pytest
from cases.bench import check_ratio, measured, read_result, two_ranks, without_places
from early import waits_for

from benchmarks.session import Clock


@pytest.mark.heavy
@waits_for(two_ranks)
def test_both_ways_to_gather(early):
    run, folder = early(two_ranks)
    assert run.returncode == 0, run.stderr
    result = read_result(folder / "fsdp2_2_ranks_cpu.json")
    rows = without_places(result["rows"])
    cases = ["reshard", "keep", "1.5b"]
    assert result["settings"] == {"scale": 64, "repeats": 1, "cases": cases, "layers": 2, "tokens": 4}
    assert rows["link"]["gigabytes_per_second"] > 0
    shapes = {
        "layers": (2 * (4 * 64 * 64 + 3 * 64 * 224), 64),
        "1.5b": (2 * (4 * 24 * 24 + 3 * 24 * 140), 24),
    }
    for case, shape, gathers in (("reshard", "layers", 2), ("keep", "layers", 1), ("1.5b", "1.5b", 2)):
        converted, hidden = shapes[shape]  # gathers: in the forward and in the backward pass
        check_ratio(rows, f"{case}/tokens_over_bf16", f"{case}/tokens", f"{case}_bf16/tokens")
        rate = rows[f"{case}/tokens"]["tokens_per_second"]
        assert rate * rows[f"{case}/step"]["milliseconds"] == pytest.approx(8e3)
        for name, bits in ((case, 4), (f"{case}_bf16", 16)):
            moved = rows[f"{name}/gathered"]["megabytes"] * 1e6
            assert moved == pytest.approx(gathers * (converted * bits / 8 + 4 * hidden * 2)), name
    for name, nbytes in (("rows", 0.5 + 1 / 256), ("rows_and_columns", 1 + 1 / 128), ("bf16", 2)):
        held = rows[f"resident/{name}"]["bytes_per_parameter"]
        assert held == pytest.approx(nbytes, abs=1e-3), name


def test_one_rank(tmp_path, monkeypatch):
    """Which gathers nothing, and says what a layer that is kept costs the host."""
    monkeypatch.setattr(Clock, "copy_gbps", lambda self: 10.0)
    sizes = ["--scale", "64", "--layers", "1", "--tokens", "4", "--repeats", "1"]
    rows = without_places(measured(tmp_path, "fsdp2", "--cases", "keep", *sizes)["rows"])
    check_ratio(rows, "host_layer_over_bf16", "host_layer", "host_layer_bf16")
    assert rows["keep/gathered"]["megabytes"] == 0
