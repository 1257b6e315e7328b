"""python -m benchmarks layers: its rows, and that what is counted as saved or swizzled is that."""

from __future__ import annotations

import pytest
import torch
from cases.bench import check_ratio, measured
from helpers import needs_gpu
from tensor_helpers import values
from torch import nn

import zerofp4
from benchmarks import layers
from benchmarks.rules import TARGETS
from benchmarks.session import Clock
from zerofp4.nn import Linear, NVFP4Recipe, autocast

SHAPES = ("64x32x96", "96x64x64", "64x32x32")
EXPERTS = "2x32x32x32"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "SLOW_ON_CPU", (torch.bfloat16,))
    monkeypatch.setattr(layers, "CPU_SHAPE", (8, 32, 64))
    small = ["--device", "cpu", "--scale", "200", "--repeats", "1", "--threads", "1"]
    rows = measured(tmp_path, "layers", *small)["rows"]
    for name in SHAPES:
        for ours in ("linear", "converted_linear"):
            check_ratio(rows, f"{ours}_over_bf16/{name}", f"{ours}/{name}", f"bf16_linear/{name}")
        assert 0.28 <= rows[f"saved_over_bf16/{name}"]["ratio"] <= 0.30
        assert 0.5 < rows[f"converted_weight/{name}"]["bytes_per_parameter"] < 0.52
    over = f"grouped_linear_over_bf16/{EXPERTS}"
    check_ratio(rows, over, f"grouped_linear/{EXPERTS}", f"bf16_grouped_mm/{EXPERTS}")
    assert rows[f"grouped_saved_over_bf16/{EXPERTS}"]["ratio"] <= 0.30
    ours, *others = (f"cpu_{kind}_linear/8x32x64" for kind in ("converted", "bf16", "float32"))
    for kind, other in zip(("bf16", "float32"), others, strict=True):
        check_ratio(rows, f"cpu_converted_linear_over_{kind}/8x32x64", ours, other)
    assert rows["host_layer_linear_both"]["host_us"] > 0
    assert rows["host_layer_linear"]["plain_us"] > 0 and "host_us" in rows["host_quantizer_update"]


def test_targets_are_those_of_the_rows_at_full_size():
    for tokens, *sizes in layers.SHAPES:
        name = f"{tokens}x{sizes[0]}x{sizes[1]}"
        assert {f"linear_over_bf16/{name}", f"saved_over_bf16/{name}"} <= TARGETS.keys()
    name = "x".join(map(str, layers.CPU_SHAPE))
    assert {f"cpu_converted_linear_over_{other}/{name}" for other in ("bf16", "float32")} <= TARGETS.keys()
    rows = layers.EXPERT_TOKENS // layers.EXPERTS
    name = f"{layers.EXPERTS}x{rows}x{layers.EXPERT_SHAPE[0]}x{layers.EXPERT_SHAPE[1]}"
    assert {f"grouped_linear_over_bf16/{name}", f"grouped_saved_over_bf16/{name}"} <= TARGETS.keys()
    assert all(layers.scaled(size, 1) == size for shape in layers.SHAPES for size in shape)


def test_what_is_saved_is_counted_once_and_without_weights():
    plain, x = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16), values(32, 64)
    assert layers.saved_bytes(plain, x) == x.nbytes
    assert layers.saved_bytes(lambda given: plain(given) + plain(given), x) == x.nbytes
    layer = Linear(64, 48, bias=False, dtype=torch.bfloat16)
    columns = 64 * 32 // 2 + 64 * 32 // 16 + 4
    with autocast(NVFP4Recipe()):
        layer(x, True)
        assert layers.saved_bytes(lambda given: layer(given, False), x) == columns
        assert layers.saved_bytes(layer, x) > columns  # the weight of the call


@needs_gpu
def test_swizzles_are_known_by_the_names_of_their_kernels():
    device = torch.device("cuda")
    tensor = zerofp4.quantize(values(256, 256, device=device))
    kernels = Clock(device, 1).kernels(lambda: zerofp4.swizzle_scales([tensor]))
    assert any(part in name for name in kernels for part in layers.SWIZZLES)
