"""zerofp4 inspect: what it says of each kind of checkpoint, and of what is none."""

from __future__ import annotations

import collections
import json
import math
import sys
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import zerofp4
from zerofp4.inspect import main
from zerofp4.optim import AveragedMasters, FusedAdamW, ZeroFP4Optimizer

STEPS = 3


@pytest.fixture(scope="module")
def trained():
    """A model with one weight in NVFP4 and a frozen layer in bf16, and its optimizer, after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 3)).bfloat16()
    zerofp4.convert_model(model, columnwise=True)
    model[1].requires_grad_(False)
    optimizer = ZeroFP4Optimizer(model.named_parameters(), FusedAdamW, lr=0.1)
    for _ in range(STEPS):
        for p in model[0].parameters():
            p.grad = torch.randn(p.shape).bfloat16()
        optimizer.step()
    return model, optimizer


def inspected(capsys, path) -> dict:
    assert main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    found["tensors"] = {row["name"]: row for row in found["tensors"]}
    return found


def check_whole(found, model, optimizer):
    """What every checkpoint of the model and its optimizer holds."""
    weight, tensors = model[0].weight, found["tensors"]
    size = 2 * (32 * 64 // 2 + 2 * 4) + 4
    assert tensors["model.0.weight"] == {
        "name": "model.0.weight",
        "kind": "NVFP4 16x16, rows and columns",
        "dtype": "bfloat16",
        "shape": [32, 64],
        "elements": 2048,
        "bytes": size,
        "amax": weight.amax.item(),
        "is_weight": True,
    }
    frozen, master = tensors["model.1.weight"], tensors["optimizer.state.0.weight.master"]
    assert (frozen["kind"], frozen["bytes"], frozen["amax"]) == ("bf16", 2 * 96, model[1].weight.abs().max())
    gathered = optimizer.gathered_masters()[0]
    expected = ("master, fp32", 4 * 2048, gathered.abs().max(), False)
    assert tuple(master[key] for key in ("kind", "bytes", "amax", "is_weight")) == expected
    assert tensors["optimizer.state.0.bias.exp_avg_sq"]["kind"] == "moment, fp32"
    assert len(tensors) == 4 + 2 * 4  # of the two that are trained: master, two moments, step
    assert found["optimizers"] == {"optimizer": {"steps": STEPS, "steps_of_parameters": [STEPS]}}
    assert found["parameters"] == 2048 + 32 + 96 + 3
    assert found["totals"] == {
        "NVFP4 16x16, rows and columns": {"tensors": 1, "elements": 2048, "bytes": size},
        "bf16": {"tensors": 3, "elements": 131, "bytes": 262},
        "master, fp32": {"tensors": 2, "elements": 2080, "bytes": 8320},
        "moment, fp32": {"tensors": 4, "elements": 4160, "bytes": 16640},
        "step": {"tensors": 2, "elements": 2, "bytes": 8},
    }


def test_a_folder_of_distributed_checkpoint(trained, tmp_path, capsys):
    model, optimizer = trained
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    found = inspected(capsys, tmp_path)
    assert (found["format"], found["ranks"]) == ("torch.distributed.checkpoint", 1)
    check_whole(found, model, optimizer)


def test_a_file_of_torch_save(trained, tmp_path, capsys):
    model, optimizer = trained
    path = tmp_path / "all.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    found = inspected(capsys, path)
    assert (found["format"], found["ranks"]) == ("torch.save", None)
    check_whole(found, model, optimizer)


@pytest.mark.parametrize("place", [".", "model.safetensors"])
def test_safetensors(trained, tmp_path, capsys, place):
    pytest.importorskip("safetensors")
    model, optimizer = trained
    zerofp4.save_safetensors(model, tmp_path, optimizer, torch.bfloat16)
    found = inspected(capsys, tmp_path / place)
    expected = trained[1].gathered_masters()[0].bfloat16()
    row = found["tensors"]["0.weight"]
    assert (found["format"], row["kind"], row["amax"]) == ("safetensors", "bf16", expected.abs().max())
    assert found["totals"]["bf16"] == {"tensors": 4, "elements": 2179, "bytes": 4358}


@pytest.mark.parametrize("with_inputs", [False, True], ids=["weights", "inputs too"])
@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
def test_an_nvfp4_weight_of_an_export_is_one_row(tmp_path, capsys, monkeypatch, format, with_inputs):
    """Also if its parts are in several files, and with an amax that its own scales give."""
    serving = pytest.importorskip("cases.serving")
    monkeypatch.setattr("zerofp4.serving.files.SHARD_BYTES", 4000)
    model, optimizer = serving.trained("Qwen3Moe")
    modules = serving.served_modules(model)
    amaxes = dict.fromkeys(modules, 1.0) if with_inputs else None
    zerofp4.serving.save_pretrained(model, tmp_path, optimizer, format=format, input_amaxes=amaxes)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    capsys.readouterr()
    found = inspected(capsys, tmp_path)
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    for name, (matrix, rows) in modules.items():
        row, values = found["tensors"][f"{name}.weight"], matrix.dequantize(torch.float32)[rows]
        has_scale = with_inputs or ".experts." in name
        assert (row["kind"], row["shape"]) == (f"NVFP4 1x16, {format}", list(values.shape))
        assert row["elements"] == values.numel() and row["is_weight"]
        assert row["bytes"] == values.numel() * 9 // 16 + 4 + 4 * has_scale
        assert row["amax"] == pytest.approx(values.abs().max().item(), rel=2**-22)
    assert len(found["tensors"]) == len(modules) + found["totals"]["bf16"]["tensors"]


def test_only_files_of_the_index_are_read(tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.torch")
    for name in ("old", "new"):
        safetensors.save_file({name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"new": "new.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert list(inspected(capsys, tmp_path)["tensors"]) == ["new"]


def test_averages(trained, tmp_path, capsys):
    averages = AveragedMasters(trained[1])
    dcp.save({"averages": averages}, checkpoint_id=tmp_path, no_dist=True)
    found = inspected(capsys, tmp_path)
    assert found["totals"] == {"average, fp32": {"tensors": 2, "elements": 2080, "bytes": 8320}}
    assert (found["parameters"], found["optimizers"]) == (2080, {})


def test_an_optimizer_of_torch(tmp_path, capsys):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        model.bias.requires_grad_(False).grad = None
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    found = inspected(capsys, tmp_path / "o.pt")
    entries = ("step", "exp_avg", "exp_avg_sq")
    assert set(found["tensors"]) == {f"state.{number}.{entry}" for number in "01" for entry in entries}
    steps = found["optimizers"]["optimizer"]
    assert (steps["steps"], sorted(steps["steps_of_parameters"])) == (None, [1, 2])
    assert main(["inspect", str(tmp_path / "o.pt")]) == 0
    assert capsys.readouterr().out.endswith(
        "torch.save; 10 parameters\noptimizer: step of each parameter: 1 to 2\n"
    )


OTHERS = {
    "rows": (lambda x: zerofp4.quantize(x, block=(1, 16)), "NVFP4 1x16, rows", 34 * 16 + 34 * 2 + 4, 1077.0),
    "columns": (
        lambda x: zerofp4.quantize(x, rowwise=False, columnwise=True),
        "NVFP4 16x16, columns",
        32 * 17 + 2 * 3 + 4,
        1077.0,
    ),
    "mxfp8": (zerofp4.quantize_mxfp8, "MXFP8, rows", 34 * 32 + 34, 1024.0),
    "float8": (lambda x: x.clamp(max=448).to(torch.float8_e4m3fn), "float8_e4m3fn", 34 * 32, 448.0),
    "nan": (lambda x: x.where(x > -9, math.nan).double(), "fp64", 8 * 34 * 32, "nan"),
    "negative": (lambda x: -x, "fp32", 4 * 34 * 32, 1077.0),
    "integers": (lambda x: x.long(), "int64", 8 * 34 * 32, None),
    "empty": (lambda x: x[:0], "fp32", 0, None),
}
"""What makes a tensor of values from -10 to 1077, its kind, its bytes, its amax."""


@pytest.mark.parametrize("case", OTHERS)
def test_other_formats(tmp_path, capsys, case):
    make, *expected = OTHERS[case]
    tensor = make(torch.arange(34 * 32.0).view(34, 32) - 10)
    torch.save([tensor], tmp_path / "t")
    row = inspected(capsys, tmp_path / "t")["tensors"]["0"]
    assert [row["kind"], row["bytes"], row["amax"]] == expected
    assert row["shape"] == list(tensor.shape)


def test_what_is_printed(tmp_path, capsys):
    layers = {f"layers.{i}.weight": torch.full((2, 4), i + 1.0) for i in (10, 2)}
    torch.save(layers | {"ids": torch.arange(3)}, tmp_path / "m.pt")
    assert main(["inspect", str(tmp_path / "m.pt")]) == 0
    assert (
        capsys.readouterr().out
        == """\
tensor            kind   shape  bytes  amax
ids               int64      3     24     -
layers.2.weight   fp32   2 x 4     32     3
layers.10.weight  fp32   2 x 4     32    11

kind   tensors  bytes  bytes per parameter
fp32         2     64                4.000
int64        1     24                1.500
all          3     88                5.500

torch.save; 16 parameters
"""
    )


# Wrong input


def save(folder, numel=1):
    dcp.save({"x": torch.ones(numel)}, checkpoint_id=folder, no_dist=True)
    return folder / "__0_0.distcp"


def cut(folder):
    part = save(folder, 1000)
    part.write_bytes(part.read_bytes()[:2000])


WITH_OBJECTS = {"model": torch.ones(1), "x": collections.UserDict()}
WRONG = {
    "none": (".", lambda folder: None, "a folder without .metadata of torch.distributed.checkpoint and "),
    "missing": ("nowhere", lambda folder: None, "there is no such file or folder"),
    "several": (".", lambda folder: [save(folder / f"step-{n}") for n in (1, 2)], "step-2 is a checkpoint"),
    "lost": (".", lambda folder: save(folder).unlink(), "cannot be read: FileNotFoundError: "),
    "cut": (".", cut, "cannot be read: "),
    "text": ("x", lambda folder: (folder / "x").write_text("no"), "damaged, no file of torch.save, or "),
    "objects": ("x", lambda folder: torch.save(WITH_OBJECTS, folder / "x"), "objects other than tensors and"),
    "numbers": ("x", lambda folder: torch.save({"lr": 0.1}, folder / "x"), "a checkpoint without tensors"),
    "bytes": (
        "x.safetensors",
        lambda folder: (folder / "x.safetensors").write_bytes(b"\xff" * 100),
        "cannot be read: SafetensorError: ",
    ),
}
"""What is inspected, what makes it in a folder, and what is said of it."""


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_inspected_gives_one_line(tmp_path, capsys, what):
    place, make, message = WRONG[what]
    if place == "x.safetensors":
        pytest.importorskip("safetensors")
    make(tmp_path)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / place)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"zerofp4 inspect: {tmp_path}") and err.count("\n") == 1
    assert message in err


def test_safetensors_without_the_package(tmp_path, capsys):
    (tmp_path / "x.safetensors").touch()
    with mock.patch.dict(sys.modules, safetensors=None):
        assert main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith(
        "x.safetensors: safetensors is not installed, pip install zerofp4[serving]\n"
    )
