"""What examples/ holds runs, alone and on several ranks."""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import json
import re
import runpy
import sys
import warnings
from pathlib import Path

import megatron_wheel
import pytest
import torch
import torch.distributed as dist
from cases import trainers
from cases.docs import Brought, Ran, programs, run
from cases.train import read_numbers, train_here
from helpers import needs_gpu
from torch.nn.parallel import DistributedDataParallel

import zerofp4
from distributed.cases import shared_folder
from distributed.processes import ROOT
from distributed.run import on_ranks
from zerofp4 import launch
from zerofp4.distributed import PHASES


@on_ranks(1, 2)
def test_own_optimizer_step(world):
    """It compares its bytes itself. Its group is that of the ranks, and ends with it."""
    names = runpy.run_path(str(ROOT / "examples" / "own_optimizer_step.py"))
    assert names["world"] == world and not dist.is_initialized()
    assert names["y"].shape == (4, 256) and names["y"].dtype == torch.bfloat16
    launch.init_process_group()


def test_models_are_built_in_bfloat16():
    """Module.to() of a dtype rounds buffers too, such as rotary frequencies."""
    for path in (ROOT / "examples").glob("*.py"):
        assert not re.search(r"\.to\(.*torch\.b?float16", path.read_text()), path.name


PACKAGES = {
    **dict.fromkeys(["fsdp2", "experts", "muon", "ema", "recipe"], ()),
    "hugging_face_trainer": ["transformers", "accelerate"],
    "accelerate_loop": ["accelerate"],
    "lightning_module": ["lightning"],
    "lora": ["peft", "transformers"],
    "lora_on_nvfp4": ["peft", "transformers", "safetensors"],
}
"""By the example, what it needs beside torch."""
GRAPH, MEGATRON = "cuda_graph_step", "megatron_gpt"


@on_ranks(1, 2, time_limit=120.0)
@pytest.mark.parametrize("example", PACKAGES)
def test_training(world, example):
    """They assert what they show."""
    for package in PACKAGES[example]:
        pytest.importorskip(package, reason=f"{package} is not installed")
    if example == "hugging_face_trainer" and world.world_size > 1 and world.device.type == "cpu":
        pytest.importorskip("transformers", "5.24", reason="an older Trainer has its ranks load to cpu:0")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("error", "torch.nn.utils.clip_grad_norm_ clips")  # also called by frameworks
        names = run_in_group(patch, example)
    assert names["world"] == world
    if example == "lora_on_nvfp4" and importlib.util.find_spec("compressed_tensors"):
        check_tokens(names)
        dist.barrier()  # rank 0 removes the folders with its names


def check_tokens(names: dict) -> None:
    """transformers generates the live model's tokens with the export of merged adapters, and others with the
    checkpoint from before.
    """
    live, prompt = names["merged"], names["tokens"][:, :4]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = live.generate(prompt, **options)
    load = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained
    merged, published = (load(names[f]).to(live.device) for f in ("merged_folder", "published"))
    assert torch.equal(merged.generate(prompt, **options), expected)
    assert not torch.equal(published.generate(prompt, **options), expected)


@needs_gpu
def test_a_step_in_a_cuda_graph(monkeypatch):
    """Its assertion compares the losses; this test also compares that they are those of a changing lr."""
    monkeypatch.setattr(sys, "argv", [GRAPH])
    names = runpy.run_path(str(ROOT / "examples" / f"{GRAPH}.py"))
    assert names["replayed"] == names["eager"] and len(set(names["eager"])) == names["STEPS"] == 20
    lr = names["optimizer"].param_groups[0]["lr"]
    assert lr.is_cuda and lr.item() == pytest.approx(0.0, abs=1e-8)  # what a cosine ends with, in float32


def test_a_step_in_a_cuda_graph_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(sys, "argv", [GRAPH])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="a CUDA graph needs a GPU"):
        runpy.run_path(str(ROOT / "examples" / f"{GRAPH}.py"))


def wrappers() -> set[int]:
    """The ids of all DistributedDataParallel, after garbage is collected."""
    gc.collect()
    return {id(one) for one in gc.get_objects() if type(one) is DistributedDataParallel}


def run_in_group(patch, example, *arguments) -> dict:
    """The names of an example that was run. It leaves the group of the ranks, which it would end, and has let
    go of what would keep gloo's threads by then.
    """
    ended, before = [], wrappers()
    patch.setattr(launch, "destroy_process_group", lambda: ended.append(wrappers() <= before))
    patch.setattr(sys, "argv", [example, *map(str, arguments)])
    names = runpy.run_path(str(ROOT / "examples" / f"{example}.py"))
    assert ended == [True] and dist.is_initialized()
    return names


@on_ranks(1, 2)
def test_a_run_that_goes_on(world):
    """Ten steps of examples/resume.py at a time."""
    folder = shared_folder(world)
    for step in (10, 20):
        with pytest.MonkeyPatch.context() as patch:
            assert run_in_group(patch, "resume", folder)["state"]["step"] == step


@pytest.mark.parametrize("arguments", [[], ["--help"]], ids=str)
def test_resume_needs_a_folder(arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["resume.py", *arguments])
    with pytest.raises(SystemExit, match=r"usage: resume\.py FOLDER"):
        runpy.run_path(str(ROOT / "examples" / "resume.py"))


@on_ranks(2, time_limit=120.0)
def test_megatron(world):
    if (reason := megatron_wheel.why_no_megatron()) is not None:
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch, megatron_wheel.groups_forgotten():
        assert run_in_group(patch, MEGATRON)["world"] == world


FINETUNE = "quantization_aware_finetune"
FEW_STEPS = ["--pretrain-steps", 110, "--steps", 30]
TRAININGS = {
    "zero": ["--four-over-six", "--block", "16x16", "--control", "--format", "modelopt"],
    "fsdp": ["--fsdp", "--four-over-six", "--teacher"],
}


@on_ranks(2, nightly=[1], time_limit=180.0)
@pytest.mark.parametrize("training", TRAININGS)
def test_quantization_aware_finetune(world, training):
    """The losses are what each training is for, and the folder has the codes that were trained."""
    for package in ("transformers", "safetensors"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    folder = shared_folder(world)
    told = folder / "told.json"
    batch = ["--batch-size", 16 // world.world_size]  # of a rank
    arguments = [folder / "served", "--json", told, *FEW_STEPS, *batch, *TRAININGS[training]]
    with pytest.MonkeyPatch.context() as patch:
        names = run_in_group(patch, FINETUNE, *arguments)
    losses, format = names["losses"], names["options"].format
    whole = dict(zerofp4.serving.weights(names["model"], format).whole())
    assert losses["bfloat16"] <= losses["start"] / 2
    assert losses["rounded once"] != losses["bfloat16"]
    if "--teacher" in TRAININGS[training]:  # the text itself, as in the other training, teaches more
        assert abs(losses["fine-tuned"] - losses["bfloat16"]) < 0.01
    else:
        assert losses["fine-tuned"] < losses["rounded once"] - 0.01
    assert ("bfloat16, as long" in losses) == (training == "zero")
    dist.barrier()  # rank 0 has written the table
    result = json.loads(told.read_text())
    assert result["losses"] == losses and result["ranks"] == world.world_size
    written = importlib.import_module("safetensors.torch").load_file(folder / "served" / "model.safetensors")
    quantized = {name: tensor for name, tensor in whole.items() if "_proj.weight" in name}
    assert len(quantized) == 3 * 2 * 7
    for name, tensor in quantized.items():
        assert torch.equal(as_bytes(written[name]), as_bytes(tensor.cpu())), name


def as_bytes(tensor):
    return tensor.flatten().view(torch.uint8)


WRONG = {
    "--model": ["--model", "nowhere"],
    "no file nowhere": ["--text", "nowhere"],
    "--json": ["--json", "nowhere/table.json"],
    "--steps": ["--steps", "0"],
    "--four-over-six": ["--fsdp", "--four-over-six", "--block", "16x16"],
    "at most 2048 tokens": ["--sequence-length", "4096"],
}


@pytest.mark.parametrize("what", WRONG)
def test_quantization_aware_finetune_refuses(what, tmp_path, monkeypatch, capsys):
    """Before anything is trained."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [FINETUNE, "served", *WRONG[what]])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "examples" / f"{FINETUNE}.py"))
    assert what in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert not dist.is_initialized()


def test_examples_end_with_what_they_have_shown():
    """A sentence that rank 0 prints when all assertions have held."""
    for path in (ROOT / "examples").glob("[!_]*.py"):
        said = [node for node in ast.walk(ast.parse(path.read_text())) if is_print(node)]
        last = max(said, key=lambda node: node.lineno)
        after = path.read_text().splitlines()[last.end_lineno :]
        assert all("destroy" in line for line in after), path.name
        assert re.search(r"[a-z]\.['\"]\)$", ast.unparse(last)), f"{path.name}: {ast.unparse(last)}"


def is_print(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("print", "say")


def test_no_example_is_left_out():
    """And each fits on a screen or two, but for the whole recipe of a fine-tuning."""
    examples = {path.stem: path for path in (ROOT / "examples").glob("[!_]*.py")}
    assert examples.keys() == {"own_optimizer_step", "resume", FINETUNE, GRAPH, MEGATRON, *PACKAGES}
    lines = {name: len(path.read_text().splitlines()) for name, path in examples.items()}
    assert lines.pop(FINETUNE) < 220 and max(lines.values()) < 80


def test_no_example_hides_a_package_that_another_imports():
    """Python looks in the folder of the program first: examples/megatron.py would hide megatron.core."""
    examples = {path.stem: ast.parse(path.read_text()) for path in (ROOT / "examples").glob("[!_]*.py")}
    nodes = [node for tree in examples.values() for node in ast.walk(tree)]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "megatron.core" in imported
    assert not examples.keys() & {name.partition(".")[0] for name in imported}


# The programs of docs/trainers.md on two ranks of torchrun, which are in no process group yet


@on_ranks(2, time_limit=120.0, new_group=True)
@pytest.mark.heavy
@pytest.mark.parametrize(
    "number", range(len(trainers.CHECKS)), ids=[check.__name__ for check in trainers.CHECKS]
)
def test_the_program_runs_on_two_ranks(world, number):
    """It joins them by itself, or its framework does, and leaves one model."""
    for package in trainers.PACKAGES:
        pytest.importorskip(package, reason=f"{package} is not installed")
    if world.device.type != "cpu":
        pytest.skip("the model of these programs is on the CPU")
    brought = Brought(shared_folder(world) / "folder")
    launch.destroy_process_group()
    torch.manual_seed(world.rank)
    with pytest.MonkeyPatch.context() as patch, trainers.with_fsdp_on_cpus(patch):
        ran = Ran(run(programs(ROOT / "docs" / "trainers.md")[number], brought), brought)
        dist.barrier()  # rank 0 has written its files
        trainers.CHECKS[number](ran)
        losses = [None] * world.world_size
        dist.all_gather_object(losses, trainers.causal_loss(ran))
    assert len(losses) == 2 and losses[0] == losses[1]
    dist.destroy_process_group()
    launch.init_process_group()


# examples/training on ranks that share their start with other tests: checkpoints and folders


def train(world, out: Path, *options: str, status: int = 0) -> str:
    """A run of all ranks, behind what each of them did before; what rank 0 printed, others print nothing."""
    dist.barrier()
    said = [train_here(out, *options, world=world, status=status)]
    dist.broadcast_object_list(said)
    return said[0]


@pytest.mark.nightly
@on_ranks(2, time_limit=120.0)
def test_phases_that_overlap_passes(world):
    """Whatever travels when, each has its time, and the bytes that describe() says."""
    out, more = shared_folder(world), ["--overlap", "both", "--micro-batches", "2"]
    train(world, out, "--steps", "6", "--profile-steps", "1", "--optimizer", "fused_adamw", *more)
    run = json.loads((out / "summary.json").read_text())["runs"]["nvfp4"]
    found, sent = run["phases_of_step"], run["sent_bytes_per_step"]
    assert found.keys() == set(PHASES) and min(sent.values()) > 0
    assert all(row["milliseconds"] > 0 for row in found.values())
    assert {name: row["sent_bytes"] for name, row in found.items() if row["sent_bytes"]} == sent


@pytest.mark.nightly
@on_ranks(2, time_limit=120.0)
def test_a_folder_in_use(world):
    out = shared_folder(world)
    train(world, out, "--steps", "2", "--checkpoint-every", "1")
    metrics = out / "metrics-nvfp4.jsonl"
    before = metrics.read_bytes()
    said = train(world, out, "--steps", "3", status=1)
    assert "--resume auto goes on with it, --overwrite deletes it" in said
    said = train(world, out, "--steps", "2", "--seed", "3", "--resume", "auto", status=1)
    assert "is of another run: its seed is 0 and this run's 3" in said
    assert metrics.read_bytes() == before
    said = train(world, out, "--steps", "3", "--resume", "auto")
    assert "goes on from step 2, with the learning rates of 3 steps instead of 2" in said
    assert len(read_numbers(out)) == 3
    train(world, out, "--steps", "1", "--overwrite")
    assert len(read_numbers(out)) == 1 and not (out / "checkpoints-nvfp4").exists()
