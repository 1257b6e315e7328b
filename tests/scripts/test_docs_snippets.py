"""Every Python block of README.md and docs/ runs as it stands, in a world of one on the CPU.

cases/docs.py says which blocks are one program, and has the names that a reader brings.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from cases import te_stand_in, torchtitan_stand_in, trainers
from cases import transformer_engine as te_cases
from cases.docs import BROUGHT, PAGES, Brought, Ran, blocks, names_read, programs, run
from cases.trainers import causal_loss
from helpers import needs_gpu
from megatron_wheel import megatron_groups, why_no_megatron
from torch.distributed.fsdp import FSDPModule

import zerofp4
from zerofp4 import serving
from zerofp4.integrations import megatron, transformer_engine
from zerofp4.testing import assert_bytes_equal

# What must hold after a program, beyond that it raised nothing.


def has_trained(ran: Ran) -> None:
    """The program's own loop has made the loss less."""
    losses = ran.brought.loss_of.values
    assert len(losses) >= 10 and losses[-1] < losses[0]


def trains(ran: Ran) -> None:
    """The model and the optimizer that the program leaves go on for ten steps."""
    for _ in range(10):
        ran.brought.loss_of(ran.brought.model, ran.brought.batch).backward()
        ran["optimizer"].step()
        ran["optimizer"].zero_grad()
    has_trained(ran)


def trains_the_first_model(ran: Ran) -> None:
    assert ran["loss"] < 0.1 and isinstance(ran["model"][0].weight, zerofp4.NVFP4Tensor)


def quantizes(ran: Ran) -> None:
    assert ran["values"].shape == (256, 512) and len(ran["experts"]) == 3
    assert ran["y"].shape == (256, 256) and ran["dw"].shape == (512, 512)


def calls_all_layers(ran: Ran) -> None:
    assert ran["report"].layers == ["0.fc1", "0.fc2"] and ran["loss"] > 0
    assert ran["recipe"].modules[0][1] is ran["attention"]
    assert ran["layer"].weight.grad.shape == (256, 512)
    assert ran["hidden"].grad.shape == (32, 64) and isinstance(ran["shared"], zerofp4.NVFP4Tensor)


def has_saved(ran: Ran) -> None:
    assert list(ran["folder"].glob("*.distcp"))


def has_exported_averages(ran: Ran) -> None:
    from safetensors.torch import load_file

    has_trained(ran)
    (file,) = ran["folder"].glob("*.safetensors")
    saved = load_file(file)
    averages = dict(zerofp4.master_state_dict(ran["model"], ran["averages"], torch.float32))
    assert saved.keys() == averages.keys()
    for name, value in averages.items():
        assert torch.equal(saved[name], value.to(saved[name].dtype)), name


def has_stacks(ran: Ran) -> None:
    assert ran["y"].shape == (64, 256)
    assert ran["third"].rowwise_data.data_ptr() == ran["t"].rowwise_data[3].data_ptr()
    assert len(ran["report"].converted) == 4


def exchanges_checkpoints(ran: Ran) -> None:
    assert isinstance(ran["model"], FSDPModule)
    has_trained(ran)
    exchanged = ran["zero_optimizer"].gathered_masters()
    for parameter, master in zip(ran["model"].parameters(), exchanged, strict=True):
        assert torch.equal(parameter.full_tensor(), master)


def hands_over_to_megatron(ran: Ran) -> None:
    assert len(ran["report"].converted) == 8
    assert ran["optimizer"].chained_optimizers


def gives_muon_its_matrices(ran: Ran) -> None:
    names, others = ([name for name, _ in group] for group in (ran["matrices"], ran["others"]))
    assert names == ["blocks.0.attention.weight", "blocks.1.attention.weight"] and "head.weight" in others
    trains(ran)


def casts_its_piece(ran: Ran) -> None:
    assert torch.equal(ran["weight"].rowwise_data, ran["expected"].rowwise_data)


def shares_amaxes(ran: Ran) -> None:
    own = torch.stack([master.bfloat16().float().abs().max() for master in ran["masters"]])
    shared = [own[:3].max()] * 3 + [own[3:].max()] * 2
    assert torch.equal(torch.cat([weight.amax for weight in ran["weights"]]), torch.stack(shared))


def casts_for_transformer_engine(ran: Ran) -> None:
    te_cases.check(ran["te_weights"], ran["masters"])
    utils = sys.modules["transformer_engine.pytorch.tensor.utils"]
    assert utils.quantize_master_weights.__module__.startswith("zerofp4.")


def has_served(ran: Ran) -> None:
    from safetensors.torch import load_file

    assert causal_loss(ran) < 4.1
    assert ran["report"].loaded and not ran["report"].missing
    found = load_file(ran["folder"] / "model.safetensors")
    source = ran["ServedSource"](ran.brought.causal_model)
    assert [meta.name for meta in source.metadata] == [name for name, _ in source.iter_local()]
    for name, tensor in source.iter_full():
        assert_bytes_equal(tensor, found[name], name)


def replays_lower_the_loss(ran: Ran) -> None:
    assert ran["loss"].item() < ran["first"]


def changes_a_config(ran: Ran) -> None:
    config = ran["llama3_8b_nvfp4"]()
    assert [group.optimizer_name for group in config.optimizer.param_groups] == ["FusedAdamW"]


PROGRAMS: dict[str, list[tuple[int, Callable[[Ran], None]]]] = {
    "README.md": [(1, trains_the_first_model)],
    "checkpoints.md": [(1, has_saved), (2, has_exported_averages)],
    "experts.md": [(2, has_stacks)],
    "fsdp2.md": [(2, exchanges_checkpoints)],
    "groups.md": [(1, trains), (1, trains)],
    "index.md": [(1, trains_the_first_model)],
    "layers.md": [(5, calls_all_layers), (2, quantizes)],
    "megatron.md": [(1, hands_over_to_megatron)],
    "muon.md": [(1, gives_muon_its_matrices)],
    "optimizer.md": [(1, has_trained), (1, has_trained), (1, has_trained), (1, replays_lower_the_loss)],
    "own-step.md": [(1, casts_its_piece), (5, shares_amaxes)],
    "serving.md": [(4, has_served)],
    "trainers.md": [(1, check) for check in (*trainers.CHECKS, changes_a_config)],
    "transformer_engine.md": [(2, casts_for_transformer_engine)],
}
"""Pages with Python blocks: of each program the number of blocks, and what must hold afterwards."""
PATHS = {path.name: path for path in PAGES}


def test_no_snippet_is_left_out():
    """A block is counted by its first line, in whatever way it is indented or closed."""
    found, written = {}, {}
    for name, path in PATHS.items():
        if lines := re.findall(r"^\s*(?:```+|~~~+)\s*(?:python|py\b)", path.read_text(), re.MULTILINE):
            written[name] = len(lines)
            found[name] = [len(program) for program in programs(path)]
    assert found == {name: [count for count, _ in listed] for name, listed in PROGRAMS.items()}
    assert {name: sum(counts) for name, counts in found.items()} == written


def test_a_reader_brings_no_more_than_pages_read():
    read = {name for path in PAGES for program in programs(path) for name in names_read(program)}
    assert read >= BROUGHT, f"no page reads {sorted(BROUGHT - read)}"


def why_not(page: str) -> str | None:
    """The reason why this page cannot run here, or None."""
    if page == "megatron.md":
        return "there is a GPU, and this runs on the CPU" if torch.cuda.is_available() else why_no_megatron()
    needed = {
        "checkpoints.md": ["safetensors"],
        "serving.md": ["transformers", "safetensors"],
        "trainers.md": trainers.PACKAGES,
    }
    missing = [package for package in needed.get(page, ()) if importlib.util.find_spec(package) is None]
    return f"{', '.join(missing)} not installed" if missing else None


@pytest.fixture
def cpu(monkeypatch) -> Iterator[None]:
    """torch sees no GPU. A program has random numbers and a process group of its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # which Lightning asks
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cpu"))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def framework(page: str, monkeypatch) -> Iterator[None]:
    """What a page presupposes: Megatron's groups, or a package with TransformerEngine's two functions."""
    with contextlib.ExitStack() as stack:
        if page == "megatron.md":
            zerofp4.launch.init_process_group()
            stack.enter_context(megatron_groups())
            megatron.uninstall()  # the page installs it
        if page == "transformer_engine.md":
            for name, module in te_stand_in.package("2.20.0", print, print).items():
                monkeypatch.setitem(sys.modules, name, module)
            stack.callback(transformer_engine.uninstall)
        if page == "serving.md":
            for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
            base = types.ModuleType("vllm.distributed.weight_transfer.base")
            base.WeightSource, base.ParamMeta = object, serving.Served
            monkeypatch.setitem(sys.modules, base.__name__, base)
        if page == "trainers.md":
            stack.enter_context(torchtitan_stand_in.torchtitan_stands_in())
            stack.enter_context(trainers.with_fsdp_on_cpus(monkeypatch))
            zerofp4.launch.init_process_group()
        yield


CASES = [
    pytest.param(page, number, check, marks=[pytest.mark.heavy] * (page in ("megatron.md", "trainers.md")))
    for page, listed in PROGRAMS.items()
    for number, (_, check) in enumerate(listed)
    if check is not replays_lower_the_loss
]


@pytest.mark.filterwarnings("ignore")  # Megatron's import warns, and torch about checkpoints of one process
@pytest.mark.parametrize(["page", "number", "check"], CASES)
def test_the_program_runs(page, number, check, cpu, monkeypatch, tmp_path):
    if (reason := why_not(page)) is not None:
        pytest.skip(reason)
    program = programs(PATHS[page])[number]
    brought = Brought(tmp_path / "folder")
    with framework(page, monkeypatch):
        check(Ran(run(program, brought), brought))


def test_the_first_program_prints_what_the_page_says(cpu, tmp_path, capsys):
    """A loss may differ by a tenth: CPUs add up products in different orders."""
    page = PATHS["README.md"]
    run(programs(page)[0], Brought(tmp_path / "folder"))
    printed, said = capsys.readouterr().out, blocks(page, "text")[0].code
    loss = re.compile(r"loss (\d\.\d+)")
    assert loss.sub("", printed) == loss.sub("", said)
    found, shown = ([float(value) for value in loss.findall(text)] for text in (printed, said))
    assert found == pytest.approx(shown, rel=0.1)


@needs_gpu
def test_the_program_of_a_cuda_graph_runs(tmp_path):
    """The only one that needs a GPU. Its reader's loss does not wait for the GPU, as the others' does."""
    program = next(one for one in programs(PATHS["optimizer.md"]) if "CUDAGraph" in one[-1].code)
    brought = Brought(tmp_path / "folder")
    brought.loss_of = lambda model, batch: (model(batch) - batch).float().square().mean()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = brought.loss_of(brought.model, brought.batch).item()
        replays_lower_the_loss(Ran(run(program, brought) | {"first": first}, brought))
