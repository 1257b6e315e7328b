"""python -m benchmarks step, fsdp2, hosts and states: one rank and two. Never how fast anything is."""

import os
from types import SimpleNamespace

import pytest
import torch
from cases.bench import check_ratio, measured, read_result, two_ranks, without_places
from early import waits_for
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval

import zerofp4
from benchmarks import ranks
from benchmarks.hosts import WAYS, emulate
from benchmarks.ranks import Timer
from benchmarks.step import Ours
from zerofp4.distributed import PREFIX
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer


@pytest.mark.heavy
@waits_for(two_ranks)
def test_a_step_of_two_ranks(early):
    run, folder = early(two_ranks)
    assert run.returncode == 0, run.stderr
    rows = without_places(read_result(folder / "step_2_ranks_cpu.json")["rows"])
    assert {"backward", "backward_step", "exposed_step_over_bf16", "host_step", "sent_weights"} <= rows.keys()
    assert rows["scan"]["milliseconds"] > 0
    for part in ("step", "step_clipped", "publish", "update"):
        theirs = "step_bf16_clipped" if part == "step_clipped" else f"{part}_bf16"
        check_ratio(rows, f"{part}_over_bf16", part, theirs)
    check_ratio(rows, "step_over_zero_redundancy", "step", "step_zero_redundancy")
    if "step_flash" not in rows:
        assert run.stdout.count("step_flash is left out: ") == 1
    assert rows["link"]["gigabytes_per_second"] > 0
    assert rows["link"]["rule"].startswith("an all-to-all of gloo, 1 x ")
    for phase in ("scan", "reduce", "adamw", "adamw_reducing", "publish", "publish_alone"):
        assert rows[f"floor_{phase}"]["milliseconds"] > 0
    for part in ("step", "step_clipped", "reduce", "update", "publish"):
        assert rows[part]["milliseconds"] > 0 and rows[f"{part}_over_floor"]["ratio"] > 0
    assert run.stdout.count("step_2_ranks: copy ceiling") == 1  # rank 0 alone speaks


@pytest.mark.heavy
def test_a_step_of_one_rank(tmp_path, monkeypatch, capsys):
    options = ["--scale", "256", "--repeats", "1", "--transport", "collective", "peer"]
    names = without_places(measured(tmp_path, "step", *options)["rows"]).keys()
    assert not any(name.startswith("peer_") or name in ("link", "backward") for name in names)
    assert {"floor_norm", "floor_adamw_reducing", "step_bf16", "floor_step", "step_over_bf16"} <= names
    assert not {"reduce", "floor_reduce", "floor_adamw"} & names, "gradients stay where they are"
    for part in ("step", "step_clipped", "update", "publish"):
        assert {part, f"{part}_over_floor"} <= names
    assert "nothing travels" in capsys.readouterr().out


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


@pytest.mark.heavy
@waits_for(two_ranks)
def test_two_emulated_hosts(early):
    """Means of hosts take the bytes of their formats, so NCCL_HOSTID was heeded."""
    run, folder = early(two_ranks)
    assert run.returncode == 0, run.stderr
    result = read_result(folder / "hosts_2_ranks_cpu.json")
    rows = without_places(result["rows"])
    assert result["settings"]["hosts"] == 2 and result["settings"]["ways"] == list(WAYS)
    assert rows["link"]["gigabytes_per_second"] > 0 and "emulated" in rows["link"]["rule"]
    assert rows["ring"]["gigabytes_per_second"] > 0
    converted, norms = 2 * (4 * 64 * 64 + 3 * 64 * 224), 4 * 64
    wires = {"reduce_scatter": (2, 2), "bf16": (2, 4), "mxfp8": (33 / 32, 4), "nvfp4": (9 / 16, 4)}
    for way, (of_weights, of_norms) in wires.items():
        half = (converted * (of_weights + 0.5) + norms * (of_norms + 2)) / 2
        # Slices end between tiles or strips, and amaxes travel, too.
        assert rows[f"{way}/sent"]["megabytes"] * 1e6 == pytest.approx(half, rel=0.07), way
    for way in WAYS:
        rate = rows[f"{way}/tokens"]["tokens_per_second"]
        assert rate * rows[f"{way}/step"]["milliseconds"] == pytest.approx(8e3)
        assert 0 < rows[f"{way}/loss"]["loss"] < 2
        if way != "reduce_scatter":
            check_ratio(rows, f"{way}/step_over_reduce_scatter", f"{way}/step", "reduce_scatter/step")


def test_emulated_hosts_need_ranks(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"--hosts 2: each needs as many ranks of torchrun, which starts 0"):
        measured(tmp_path, "hosts")
    monkeypatch.setattr(os, "environ", {"RANK": "3", "WORLD_SIZE": "4"})
    with pytest.raises(ValueError, match=r"--hosts 3: .*, which starts 4"):
        emulate(SimpleNamespace(hosts=3))
    emulate(SimpleNamespace(hosts=2))
    assert os.environ["NCCL_HOSTID"] == "emulated 1" and os.environ["NCCL_MAX_NCHANNELS"] == "1"


def test_one_rank_of_fsdp2(tmp_path):
    """Which gathers nothing, and says what a layer that is kept costs the host."""
    sizes = ["--scale", "64", "--layers", "1", "--tokens", "4", "--repeats", "1"]
    rows = without_places(measured(tmp_path, "fsdp2", "--cases", "keep", *sizes)["rows"])
    check_ratio(rows, "host_layer_over_bf16", "host_layer", "host_layer_bf16")
    assert rows["keep/gathered"]["megabytes"] == 0


@pytest.mark.heavy
def test_steps_of_full_and_of_compact_state(tmp_path, monkeypatch, capsys):
    """With a larger scale rows would be too short for compact state."""
    rows = without_places(measured(tmp_path, "states", "--scale", "64", "--repeats", "1")["rows"])
    kept = {"full": 2 + 12, "compact": 2 + 5.125, "in_backward": 5.125}
    for name, size in kept.items():
        found = rows[f"kept_{name}"]["bytes_per_parameter"]
        assert found == pytest.approx(0.5 + 1 / 256 + size, abs=0.01), name
    for other in ("full", "torch_bf16"):
        check_ratio(rows, f"step_compact_over_{other}", "step_compact", f"step_{other}")
    if "step_flash" not in rows:
        assert "step_flash is left out: " in capsys.readouterr().out


def test_a_part_of_a_step_lasts_from_its_first_work_to_its_last():
    """On a GPU on whatever stream; on the CPU as long as the host is in it."""

    def event(phase: str, begin: float, end: float, kind: DeviceType) -> SimpleNamespace:
        return SimpleNamespace(name=PREFIX + phase, time_range=Interval(begin, end), device_type=kind)

    host = [("amaxes", 0, 1000), ("update", 1000, 2000), ("cast", 2000, 4000)]
    gpu = [("amaxes", 5e3, 6e3), ("update", 1e3, 9e4), ("cast", 7e3, 7.5e3), ("cast", 8e3, 11e3)]
    events = [event(*one, DeviceType.CPU) for one in host] + [event(*one, DeviceType.CUDA) for one in gpu]
    names = {PREFIX + "amaxes", PREFIX + "cast"}
    assert ranks.span(events, names, on_gpu=True) == 6.0
    assert ranks.span(events, names, on_gpu=False) == 3.0
    assert ranks.span(events, {PREFIX + "weights"}, on_gpu=True) == 0.0


def test_what_is_done_before_a_call_is_done_before_every_call(monkeypatch):
    calls = []
    timer = Timer.__new__(Timer)
    timer.repeats, timer._warm_up, timer._longest = 2, 3, sum
    monkeypatch.setattr(timer, "_once", lambda run, *how: run() or 1.0)
    assert timer.time(lambda: calls.append("run"), before=lambda: calls.append("before")) == 2.0
    assert calls == ["before", "run"] * (3 + 2)


def test_what_a_peak_has_above_the_state():
    """And what it may have: 1% of the masters, two buckets."""
    weights = [zerofp4.quantize(torch.randn(64, 64).bfloat16(), columnwise=True) for _ in range(2)]
    parameters = [torch.nn.Parameter(weight) for weight in weights]
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, communication=Communication(bucket_mb=0.5))
    for parameter in parameters:
        parameter.grad = torch.ones(64, 64, dtype=torch.bfloat16)
    optimizer.step()
    elements = 2 * 64 * 64
    held = sum(weight.nbytes for weight in weights) + elements * (2 + 3 * 4)  # gradients, masters and moments
    counted, ours = [], Ours.__new__(Ours)
    world = SimpleNamespace(world_size=1)
    ours.shapes = [(64, 64)] * 2
    ours.timer = SimpleNamespace(world=world, count=lambda *a, **k: counted.append((a, k)))
    ours.count_above("memory_above", [held / 1e6 + 7.0], optimizer.describe()["bucket_mb"], parameters, False)
    (((name, kind, above, _), target),) = counted
    assert (name, kind) == ("memory_above", "megabytes") and above == pytest.approx(7.0)
    assert target["target"] == pytest.approx(0.01 * 4 * elements / 1e6 + 2 * 0.5 * 2**20 / 1e6)
    ours.count_above("memory_above", [(held + 4 * elements) / 1e6 + 7.0], 0.5, parameters, True)
    assert counted.pop()[0][2] == pytest.approx(7.0)
    ours.count_above("memory_above", [], 0.5, parameters, False)  # on the CPU nobody counts
    assert len(counted) == 1
