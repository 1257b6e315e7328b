"""The subcommands of python -m benchmarks on one device: their rows, and how bytes are counted."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest
import torch
from cases.bench import measured, read_result
from helpers import needs_gpu

import benchmarks.__main__ as bench
import zerofp4
from benchmarks import session
from benchmarks.operations import OPERATIONS, SHOWN
from benchmarks.rules import TARGETS
from benchmarks.session import Clock, Session
from benchmarks.workloads import llama

PACKAGES = ("torchao", "gemlite", "fouroversix")
SMALL = ["--device", "cpu", "--size", "64", "--scale", "200", "--repeats", "1", "--threads", "1"]


@pytest.fixture(scope="module")
def of_all(tmp_path_factory) -> tuple[dict[str, dict[str, dict]], str]:
    """Rows by operation, and what was printed. Copies cost nothing and caches are soon cold, nothing is
    compiled, and nothing of others is installed.
    """
    folder, said, ceilings = tmp_path_factory.mktemp("all"), io.StringIO(), iter([10.0, 20.0] * len(SHOWN))
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(session, "CPU_FLUSH_BYTES", 1 << 20)
        patch.setattr(Clock, "copy_gbps", lambda self: next(ceilings))
        patch.setattr(torch, "compile", lambda function, **_: function)
        for name in PACKAGES:
            patch.setitem(sys.modules, name, None)
        assert bench.main(["all", *SMALL, "--output", str(folder)]) == 0
    results = {path.name.removesuffix("_cpu.json"): read_result(path) for path in folder.iterdir()}
    assert results.keys() == set(SHOWN), "a file for each operation"
    for result in results.values():
        assert (result["copy_gbps_before"], result["copy_gbps_after"]) == (10.0, 20.0)
    return {name: result["rows"] for name, result in results.items()}, said.getvalue()


N, SCALES, SWIZZLED, TILES = 64 * 64, 64 * 4, 128 * 4, 4 * 4
"""Elements of the square, and bytes of its scales: of blocks of 1x16, of these swizzled, of 16x16."""
LLAMA = "llama3-8b-scale200"
BYTES = {
    "quantize_1d/64": 2 * N + N // 2 + SCALES + 4,
    "quantize_1d_both/64": 2 * N + 2 * (N // 2 + SCALES) + 4,
    "quantize_2d/64": 2 * N + N // 2 + TILES + 4,
    "quantize_1d_rht/64": 2 * N + 2 * (N // 2 + SCALES) + 8,
    "quantize_1d_rht_two_layouts/64": 2 * N + 2 * (N // 2 + SCALES + SWIZZLED) + 8,
    "quantize_1d_rht_then_swizzle/64": 2 * N + 2 * (N // 2 + SCALES + SWIZZLED) + 8,
    "quantize_dequantize/64": 4 * N,
    "reference_compile_quantize_1d/64": 2 * N + N // 2 + SCALES + 4,
    "dequantize_1d/64": 2.5 * N + SCALES,
    "dequantize_2d_swizzled/64": 2.5 * N + SWIZZLED,
    "dequantize_2d_fp32/64": 4.5 * N + TILES,
    "round_means_nvfp4/64": 4.5 * N + SCALES + 4 * 16,  # an amax and padding in each message
    "average_means_mxfp8/64": N + N // 32 + N,
    "swizzle/654x32768": (654 + 768) * 2048,
    "clone/654x32768": 2 * 654 * 2048,
    f"transpose/{LLAMA}": llama(200).elements,
    f"adamw_compact/{LLAMA}": 12.25 * (llama(200).owned // 4096 * 4096),
}


COMPARED = {
    "reference_eager_local_step/64": "local_step/64",
    "reference_compile_quantize_1d/64": "quantize_1d/64",
    f"torch_adamw_then_cast/{LLAMA}": f"adamw_then_cast/{LLAMA}",
}


@pytest.mark.heavy
def test_bytes_and_ratios(of_all):
    rows = {name: row for found in of_all[0].values() for name, row in found.items()}
    assert {name: rows[name]["bytes"] for name in BYTES} == BYTES
    two, one = "quantize_1d_rht_then_swizzle/64", "quantize_1d_rht_two_layouts/64"
    assert rows["rht_one_pass_over_two/64"]["speedup"] == pytest.approx(rows[two]["ms"] / rows[one]["ms"])
    for name in ("bf16_copy/64", "bf16_copy/10-small", "reference_compile_local_step/64"):
        assert rows[name]["times_ours"] > 0
    for name, ours in COMPARED.items():
        assert rows[name]["bytes"] == rows[ours]["bytes"]
        assert rows[name]["times_ours"] == pytest.approx(rows[name]["ms"] / rows[ours]["ms"])
    both = rows[f"adamw_then_cast/{LLAMA}"]
    assert both["speedup"] == rows[f"torch_adamw_then_cast/{LLAMA}"]["times_ours"]
    assert rows["host_step/10"]["host_us"] > 0 and "host_us_per_weight" in rows["host_function/10"]
    for name in ("post/1", "all_gather/1", "quantize_rht_swizzled", "swizzle_scales_new/448"):
        assert rows[f"host_{name}"]["host_us"] > 0
    assert rows["host_linear"]["plain_us"] > 0 and rows["host_zero_step/1"]["inner_us"] > 0


SQUARE = {
    "quantize": "quantize_1d quantize_1d_both quantize_2d quantize_2d_both quantize_1d_stochastic "
    "quantize_1d_rht quantize_1d_rht_two_layouts rht_two_layouts_over_compact "
    "quantize_1d_rht_then_swizzle rht_one_pass_over_two "
    "quantize_1d_four_over_six quantize_2d_four_over_six quantize_dequantize "
    "reference_compile_quantize_1d reference_compile_quantize_2d reference_compile_quantize_1d_rht",
    "dequantize": "dequantize_1d dequantize_1d_swizzled dequantize_1d_swizzled_over_compact "
    "dequantize_1d_columnwise dequantize_1d_fp32 dequantize_2d dequantize_2d_swizzled "
    "dequantize_2d_swizzled_over_compact dequantize_2d_columnwise dequantize_2d_fp32 "
    "reference_compile_dequantize_1d",
    "mxfp8": "quantize_mxfp8 quantize_mxfp8_two_layouts quantize_mxfp8_columnwise quantize_mxfp8_both "
    "dequantize_mxfp8 dequantize_mxfp8_columnwise "
    "reference_compile_quantize_mxfp8 reference_compile_dequantize_mxfp8",
    "means": "round_means_bf16 round_means_mxfp8 round_means_nvfp4 average_means_bf16 average_means_mxfp8 "
    "average_means_nvfp4 means_mxfp8_over_saved means_nvfp4_over_saved",
}
REARRANGED = ("swizzle", "unswizzle", "clone", "swizzle_over_clone")
ROWS = {operation: {f"{name}/64" for name in names.split()} for operation, names in SQUARE.items()}
ROWS["swizzle"] = {f"{name}/654x32768" for name in (*REARRANGED, "reference_compile_swizzle")}
ROWS["swizzle"] |= {f"{name}/{LLAMA}" for name in (*REARRANGED, "host_swizzle")}
ROWS["grouped"] = {f"quantize_1d{kind}/1280x10" for kind in ("", "_rht")}
ROWS["grouped"] |= {f"quantize_grouped{kind}/64x20x10" for kind in ("", "_rht", "_host_splits")}
ROWS["grouped"] |= {f"grouped{kind}_over_one/64x20x10" for kind in ("", "_rht")}
LEFT_OUT = [f"{package}_quantize_1d/64" for package in PACKAGES]
LEFT_OUT += [f"fouroversix_quantize_{name}/64" for name in ("2d", "1d_four_over_six", "2d_four_over_six")]
LEFT_OUT += ["torchao_swizzle/654x32768", "torchao_quantize_mxfp8/64", "torchao_dequantize_mxfp8/64"]


@pytest.mark.heavy
def test_rows_of_single_tensors(of_all):
    found, said = of_all
    assert {operation: found[operation].keys() for operation in ROWS} == ROWS
    for operation in ROWS:
        for name, row in found[operation].items():
            compared = "reference_compile" in name or name.startswith("clone")
            assert ("times_ours" in row) == compared, name
    for name in LEFT_OUT:
        assert f"{name} is left out: " in said


def test_an_error_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.delattr(zerofp4, "quantize_grouped")
    with pytest.raises(AttributeError, match="'zerofp4' has no attribute 'quantize_grouped'"):
        measured(tmp_path, "grouped", "--device", "cpu", "--scale", "200")
    assert not list(tmp_path.glob("*.json"))


@needs_gpu
@pytest.mark.parametrize("operation", ROWS)
def test_rows_on_a_gpu(operation, tmp_path, monkeypatch):
    small = ["--device", "cuda", "--scale", "200", "--repeats", "1", "--no-peers"]
    small += ["--size", "64"] if "square" in OPERATIONS[operation][1] else []
    rows = measured(tmp_path, operation, *small)["rows"]
    launches = {name for name in rows if name.startswith(("launches/", "tensor_amax/", "amax_rht/"))}
    assert rows.keys() - launches == {name for name in ROWS[operation] if "reference" not in name}
    if operation == "quantize":
        assert {"tensor_amax/64", "amax_rht/64"} <= rows.keys()
    if operation == "grouped":
        assert rows["launches/quantize_grouped/64x20x10"]["launches"] == 1
    timed = Session(operation, torch.device("cuda"), 1)
    timed.count("swizzle_over_clone/131072x32768", "ratio", 1.0, "a ratio")
    assert timed.rows[0]["target"] == TARGETS["swizzle_over_clone/131072x32768"][1]


@needs_gpu
def test_launches_and_memory_on_a_gpu(tmp_path):
    options = ["--device", "cuda", "--scale", "16", "--repeats", "5"]
    rows = measured(tmp_path, "host", *options)["rows"]
    for count in (1, 14, 125):
        for name in ("local_step", "transpose"):
            row = rows[f"launches/{name}/{count}"]
            assert row["launches"] == sum(row["kernels"].values()) >= 1
    assert rows["device_memory/llama3-8b-scale16"]["percent_of_shard"] >= 0
    rows = measured(tmp_path, "local_step", *options, "--workload", "square", "--size", "64")["rows"]
    assert {f"{stage}/64" for stage in ("begin", "amax", "scale", "cast")} <= rows.keys()
