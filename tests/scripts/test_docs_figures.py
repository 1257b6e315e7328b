"""Figures in the prose of README.md and docs/ are those of benchmarks/results, rounded as they are written.

The tables of docs/performance.md and docs/measurements.md are made from these files; test_docs.py compares
them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from functools import cache

import pytest
from cases.docs import BLOCK, PAGES, ROOT

from benchmarks import losses, output, pages, ranks, session
from benchmarks.workloads import llama

HISTORY = "CHANGELOG.md"
"""Says what was measured when something changed."""

MEASURED = re.compile(r"\d[\d.,]*(?: ?(?:ms|us|GB/s)\b| s\b|x\b| ?%)|\b0\.\d+ of\b")
"""How a time, a rate or a ratio is written. Sizes and counts are the code's."""


@cache
def result(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def figure(file: str, row: str, kind: str | None = None) -> float:
    """A figure of a row: of this kind, or the one that the row is about."""
    (found,) = (each for each in result(file)["rows"] if each["name"] == row)
    return found[kind or found["kind"]]


def of_step(row: str, gpus: int = 2) -> float:
    return figure(f"step_{gpus}_ranks_cuda", f"{row}/{gpus}xcuda")


def train_options() -> dict:
    """Of the runs of large models, which are alike but for the configuration."""
    first, second = (result(f"train/{name}")["options"] for name in pages.CARDS)
    assert {**first, "config": None} == {**second, "config": None} and first["recompute"]
    return first


def tokens_of_step() -> int:
    """Of these runs."""
    options = train_options()
    return options["batch_size"] * options["sequence_length"] * options["micro_batches"]


def speed(run: pages.Run) -> str:
    return f"peak {run.peak / 1e9:.1f} GB, {run.tokens_per_second:,.0f} tokens per second"


def predictions() -> list[str]:
    """What the model was given."""
    memory, link = result("step_2_ranks_cuda")["copy_gbps"], of_step("link")
    return [f"at {memory:,.0f} GB/s (the copy ceiling)", f"at {link:.0f} GB/s (measured)"]


def readme() -> list[str]:
    assert result("step_1_ranks_cuda")["device"] == result("step_2_ranks_cuda")["device"] == "NVIDIA H200"
    assert result("step_4_ranks_cuda")["device"].startswith("NVIDIA H100")

    def measured(prefix: str, gpus: int) -> str:
        ours, bf16 = (of_step(name, gpus) / 1e3 for name in (f"{prefix}memory", "memory_bf16"))
        ms, ratio = of_step(f"{prefix}step", gpus), of_step(f"{prefix}step_over_bf16", gpus)
        return f"{ms:.1f} ms | {ratio:.2f} | {ours:.1f} GB instead of {bf16:.1f} |"

    linear = figure("layers_cuda", "linear_over_bf16/16384x8192x8192")
    gather, tokens, kept = (
        figure("fsdp2_2_ranks_cuda", f"{name}_over_bf16/2xcuda")
        for name in ("reshard/gather", "reshard/tokens", "keep/tokens")
    )
    small, large = pages.runs()
    trained = losses.results()["30m-200M-fork-25"]
    assert len(trained["w16x16"]) == 4
    return [
        f"loss ended {losses.gap(trained, 'w16x16', losses.DOCUMENTS)[0]:.1f}% higher",
        f"{small.model} trained in full ({speed(small)})",
        f"a Llama with {large.parameters / 1e9:.2f} billion parameters ({speed(large)})",
        f"| 1 H200 | {measured('', 1)}",
        f"| 2 H200s, shared memory | {measured('peer_', 2)}",
        f"| 4 H100s, shared memory | {measured('peer_', 4)}",
        f"it takes {of_step('peer_step_clipped_over_bf16'):.2f} of the time in bf16 on two GPUs",
        f"A linear layer takes {linear:.2f} times as long as in bf16",
        f"take {gather:.2f} of the time in bf16, on two GPUs; a step trains {tokens:.2f}x as many tokens, "
        f"{kept:.2f}x if none reshards",
    ]


def bytes_page() -> list[str]:
    everything = llama()
    behind = of_step("peer_backward_step") - of_step("peer_backward")
    alone = of_step("peer_step")
    return [
        f"for the {everything.elements / 1e9:.2f} billion elements of Llama-3-8B's linear weights",
        f"| 1/128 | {2 * everything.tiles / 1e9:.2f} GB |",
        f"| 1/64 | {4 * everything.tiles / 1e9:.2f} GB |",
        f"| 1/2 | {everything.elements / 2 / 1e9:.2f} GB |",
        f"| 2 | {2 * everything.elements / 1e9:.2f} GB |",
        f"a step adds {behind:.1f} ms to them, and one that nothing hides takes {alone:.1f} ms.",
    ]


def checkpoints() -> list[str]:
    """The bound is that of tests/distributed/state/test_checkpoint.py."""
    measured = [figure("checkpoint_2_ranks_cuda", f"zerofp4_save_{kind}/2xcuda") for kind in ("host", "gpu")]
    assert max(measured) < 5
    return ["less than 5% of the state"]


def fsdp2() -> list[str]:
    fast, slow, slowest = "fsdp2_2_ranks_cuda", "slow_links/p2p_off", "slow_links/shm_off"
    tokens = result(fast)["settings"]["tokens"]
    kept, resharded, *gained = (
        figure(file, f"{case}/tokens_over_bf16/2xcuda")
        for file, case in ((fast, "keep"), (fast, "reshard"), (slow, "reshard"), (slowest, "reshard"))
    )
    rates = [figure(file, "link/2xcuda") for file in (slow, fast, slowest)]
    four = [figure("fsdp2_4_ranks_cuda", f"{case}/tokens_over_bf16/4xcuda") for case in ("keep", "reshard")]
    return [
        f"with {tokens:,} tokens a rank the benchmark had {kept:.2f}x of the",
        f"tokens per second of bf16, and {resharded:.2f}x where layers reshard;",
        f"on four H100s it had {four[0]:.2f}x and {four[1]:.2f}x.",
        f"{rates[0]:.0f} GB/s instead of {rates[1]:.0f}), the resharding benchmark had {gained[0]:.2f}x of",
        f"{rates[2]:.0f} GB/s) {gained[1]:.2f}x",
    ]


def large_models() -> list[str]:
    pytest.importorskip("transformers")
    small, large = pages.runs()
    early, plain = (
        {f"{sum(pages.kept(run, way).values()):.1f}" for run in pages.runs()}
        for way in (pages.EARLY, next(iter(pages.WAYS)))
    )
    assert len(early) == len(plain) == 1
    guesses = " and ".join(f"{math.log(run.vocabulary):.2f}" for run in pages.runs())
    return [
        f"keep {early.pop()} bytes per parameter.** AdamW",
        f"with FP32 state and bf16 > weights keeps {plain.pop()}.",
        f"Both ran {train_options()['steps']} steps of {tokens_of_step():,} tokens",
        f"ended at {small.loss:.2f} for {small.model} and at {large.loss:.2f} for the other",
        f"of the vocabulary give {guesses}.",
    ]


def layers() -> list[str]:
    """Codes and scales of blocks of 1 x 16, over the bytes of bfloat16."""
    return [f"{(1 / 2 + 1 / 16) / 2:.2f} of its bytes in bfloat16"]


def optimizer() -> list[str]:
    plain, compact = (of_step(f"{name}", 4) / of_step(f"peer_{name}", 4) for name in ("step", "step_compact"))
    assert of_step("peer_step_clipped", 4) < of_step("step_clipped", 4)
    return [
        f"took {plain:.2f} of the time of",
        f"does not clip, and {compact:.2f} with",
    ]


def performance() -> list[str]:
    copies = {device: size >> 20 for device, size in session.COPY_BYTES.items()}
    settings = [result.get("settings", {}) for _, result in output.load(session.RESULTS)]
    repeats = max(each.get("repeats", 0) for each in settings)
    clock = 1.98e9  # of an H200, at most
    return [
        f"the median of up to {repeats} runs",
        f"({session.CPU_FLUSH_BYTES >> 20} MiB on a CPU) that much is written elsewhere",
        f"a device-to-device copy of {copies['cuda'] >> 10} GiB ({copies['cpu']} MiB on a CPU)",
        f"is done with {1e3 * ranks.AHEAD / clock:.0f} ms of something else",
    ]


FIGURES = {
    "README.md": readme,
    "bytes.md": bytes_page,
    "checkpoints.md": checkpoints,
    "fsdp2.md": fsdp2,
    "large-models.md": large_models,
    "layers.md": layers,
    "optimizer.md": optimizer,
    "performance.md": performance,
    "predictions.md": predictions,
}
"""Of each page, what it must say."""


def prose(text: str) -> str:
    """Without blocks, generated tables and code."""
    text = re.sub(re.escape(output.BEGIN) + ".*" + re.escape(output.END), "", text, flags=re.DOTALL)
    return " ".join(re.sub(r"`[^`\n]*`", "", BLOCK.sub("", text)).split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_is_in_a_result_file(page):
    rest = prose(page.read_text())
    for said in FIGURES.get(page.name, list)():
        assert rest.count(said) == 1, f"{page.name} does not say: {said}"
        rest = rest.replace(said, "")
    if page.name != HISTORY:
        assert not MEASURED.findall(rest), f"no result file is named for these figures of {page.name}"


def test_runs_of_other_sizes_and_ways_are_beside_those_of_large_models(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    before = pages.large_models_section()
    for folder in ("train", "large"):
        shutil.copytree(pages.RESULTS / folder, tmp_path / folder)
    run = json.loads((tmp_path / "train" / "llama_20b.json").read_text())
    options = {"layers": 20, "weights": "bf16", "optimizer": "fused_adamw", "overlap": None}
    figures = {"parameters": 8194873344, "peak_memory_mb": {"device": [131.0e3, 135.0e3]}}
    trained = run["runs"]["nvfp4"] | figures
    run |= {"options": run["options"] | options, "runs": {"bf16": trained}}
    (tmp_path / "train" / "llama_20b_bf16.json").write_text(json.dumps(run))
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    row = "| Llama, 20B, with 20 layers | bf16 weights | 8.19e9 | 135.0 GB | 16.47 | 0.47 | 2,876 |\n"
    assert row in pages.large_models_section()
    assert pages.large_models_section().replace(row, "") == before
