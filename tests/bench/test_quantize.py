"""The subcommands of python -m benchmarks on single tensors: their rows, and how bytes are counted."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from helpers import needs_gpu

import benchmarks.__main__ as bench
import zerofp4
from benchmarks.operations import OPERATIONS
from benchmarks.rules import KINDS, TARGETS
from benchmarks.session import Clock, Session

CPU = torch.device("cpu")
PACKAGES = ("torchao", "gemlite", "fouroversix")
RHT_ROWS = (
    "quantize_1d_rht",
    "quantize_1d_rht_two_layouts",
    "rht_two_layouts_over_compact",
    "quantize_1d_rht_then_swizzle",
    "rht_one_pass_over_two",
)


@pytest.fixture(autouse=True)
def quick_copies(monkeypatch):
    monkeypatch.setattr(Clock, "copy_gbps", lambda self: 10.0)


@pytest.fixture
def without_packages(monkeypatch):
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)


def measure(operation: str, folder, *options: str, device: str = "cpu") -> dict[str, dict]:
    """The rows of a run on something small, by name."""
    size = ["--size", "64"] if "square" in OPERATIONS[operation][1] else []
    small = ["--device", device, "--scale", "200", "--repeats", "1", "--output", str(folder)]
    assert bench.main([operation, *size, *small, *options]) == 0
    result = json.loads((folder / f"{operation}_{device}.json").read_text())
    for row in result["rows"]:
        assert row["kind"] in KINDS and row["rule"] and "target" in row
        assert row["ms"] > 0 if "ms" in row else row[row["kind"]] >= 0
    rows = {row["name"]: row for row in result["rows"]}
    assert len(rows) == len(result["rows"]), "a name stands for one row"
    return rows


# Rows


def test_quantize(tmp_path, monkeypatch, capsys, without_packages):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    rows = measure("quantize", tmp_path)
    square = (
        "quantize_1d quantize_1d_both quantize_2d quantize_2d_both "
        "quantize_1d_stochastic quantize_1d_four_over_six quantize_2d_four_over_six quantize_dequantize "
        "reference_compile_quantize_1d reference_compile_quantize_2d reference_compile_quantize_1d_rht"
    )
    expected = {f"{name}/64" for name in (*square.split(), *RHT_ROWS)}
    assert rows.keys() == expected
    n = 64 * 64
    assert rows["quantize_1d/64"]["bytes"] == 2 * n + n // 2 + n // 16 + 4
    assert rows["quantize_1d_both/64"]["bytes"] == 2 * n + 2 * (n // 2 + n // 16) + 4
    assert rows["quantize_2d/64"]["bytes"] == 2 * n + n // 2 + n // 256 + 4
    assert rows["quantize_1d_rht/64"]["bytes"] == 2 * n + 2 * (n // 2 + n // 16) + 8
    two_layouts = 2 * n + 2 * (n // 2 + n // 16 + 128 * 4) + 8
    assert rows["quantize_1d_rht_two_layouts/64"]["bytes"] == two_layouts
    assert rows["quantize_dequantize/64"]["bytes"] == 4 * n
    over = rows["quantize_1d_rht_then_swizzle/64"], rows["quantize_1d_rht_two_layouts/64"]
    assert rows["rht_one_pass_over_two/64"]["speedup"] == pytest.approx(over[0]["ms"] / over[1]["ms"])
    assert over[0]["bytes"] == over[1]["bytes"]
    peer = rows["reference_compile_quantize_1d/64"]
    assert peer["bytes"] == rows["quantize_1d/64"]["bytes"]
    assert peer["times_ours"] == pytest.approx(peer["ms"] / rows["quantize_1d/64"]["ms"])
    said = capsys.readouterr().out
    for package in PACKAGES:
        assert f"{package}_quantize_1d/64 is left out: " in said
    for operation in ("quantize_2d", "quantize_1d_four_over_six", "quantize_2d_four_over_six"):
        assert f"fouroversix_{operation}/64 is left out: " in said


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (
            "dequantize",
            "dequantize_1d dequantize_1d_swizzled dequantize_1d_swizzled_over_compact "
            "dequantize_1d_columnwise dequantize_1d_fp32 dequantize_2d dequantize_2d_swizzled "
            "dequantize_2d_swizzled_over_compact dequantize_2d_columnwise dequantize_2d_fp32",
        ),
        (
            "mxfp8",
            "quantize_mxfp8 quantize_mxfp8_two_layouts quantize_mxfp8_columnwise quantize_mxfp8_both "
            "dequantize_mxfp8 dequantize_mxfp8_columnwise",
        ),
    ],
)
def test_rows_of_a_square(operation, expected, tmp_path):
    rows = measure(operation, tmp_path, "--no-peers")
    assert list(rows) == [f"{name}/64" for name in expected.split()]
    if operation == "dequantize":
        assert rows["dequantize_1d/64"]["bytes"] == 64 * 64 * 2.5 + 64 * 4
        assert rows["dequantize_2d_swizzled/64"]["bytes"] == 64 * 64 * 2.5 + 128 * 4
        assert rows["dequantize_2d_fp32/64"]["bytes"] == 64 * 64 * 4.5 + 4 * 4


def test_swizzle(tmp_path):
    rows = measure("swizzle", tmp_path, "--no-peers")
    names = ("swizzle", "unswizzle", "clone", "swizzle_over_clone")
    expected = [f"{name}/654x32768" for name in names]
    expected += [f"{name}/llama3-8b-scale200" for name in (*names, "host_swizzle")]
    assert list(rows) == expected
    assert rows["swizzle/654x32768"]["bytes"] == (654 + 768) * 2048
    assert rows["clone/654x32768"]["bytes"] == 2 * 654 * 2048


def test_grouped(tmp_path):
    rows = measure("grouped", tmp_path)
    assert list(rows) == [
        "quantize_1d_rht/1280x10",
        "quantize_grouped_rht/64x20x10",
        "grouped_rht_over_one/64x20x10",
        "quantize_1d/1280x10",
        "quantize_grouped/64x20x10",
        "grouped_over_one/64x20x10",
        "quantize_grouped_host_splits/64x20x10",
    ]


@pytest.mark.parametrize("operation", ["dequantize", "mxfp8", "swizzle"])
def test_peers_of_an_operation(operation, tmp_path, monkeypatch, without_packages, capsys):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    workload = ["--workload", "268mb-scales"] if operation == "swizzle" else []
    rows = measure(operation, tmp_path, *workload)
    found = {name.split("/")[0] for name, row in rows.items() if "times_ours" in row}
    compiled = {name.replace("reference_compile_", "") for name in found if "compile" in name}
    assert (
        compiled
        == {
            "dequantize": {"dequantize_1d"},
            "mxfp8": {"quantize_mxfp8", "dequantize_mxfp8"},
            "swizzle": {"swizzle"},
        }[operation]
    )
    others = {name for name in found if "compile" not in name}
    assert others == {"swizzle": {"clone"}}.get(operation, set())
    left_out = capsys.readouterr().out.count("torchao_")
    assert left_out == {"mxfp8": 2, "swizzle": 1}.get(operation, 0)


def test_what_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.delattr(zerofp4, "quantize_grouped")
    with pytest.raises(AttributeError, match="'zerofp4' has no attribute 'quantize_grouped'"):
        measure("grouped", tmp_path)
    assert not list(tmp_path.glob("*.json"))


@needs_gpu
@pytest.mark.parametrize("operation", ["quantize", "dequantize", "swizzle", "mxfp8", "grouped"])
def test_rows_on_a_gpu(operation, tmp_path):
    rows = measure(operation, tmp_path, "--no-peers", device="cuda")
    on_cpu = measure(operation, tmp_path, "--no-peers")
    launches = {name for name in rows if name.startswith(("launches/", "tensor_amax/", "amax_rht/"))}
    assert rows.keys() - launches == on_cpu.keys()
    if operation == "quantize":
        assert {"tensor_amax/64", "amax_rht/64"} <= rows.keys()
    if operation == "grouped":
        assert rows["launches/quantize_grouped/64x20x10"]["launches"] == 1
    measured = Session(operation, torch.device("cuda"), 1)
    measured.count("swizzle_over_clone/131072x32768", "ratio", 1.0, "a ratio")
    assert measured.rows[0]["target"] == TARGETS["swizzle_over_clone/131072x32768"][1]
