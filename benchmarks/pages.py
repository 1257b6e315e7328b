"""The generated tables of docs/, which `python -m benchmarks docs` writes and test_docs.py compares."""

import functools
import json
from pathlib import Path

from torch import nn

from benchmarks import gradients, hosts, large, losses, output
from benchmarks.output import BEGIN, END, Table, device_name, markdown_table
from benchmarks.session import RESULTS
from benchmarks.workloads import CONFIGS, ROOT
from zerofp4.inspect.memory import WAYS, memory_kept, model_of

FLASH = {"FlashAdamW": 7, "FlashAdamW, gradient release": 5}
"""Bytes per parameter that the paper of FlashOptim states (arXiv 2602.23349), with gradients in bfloat16,
masters of 24 bits and moments of 8.
"""
EARLY = 'NVFP4, state="compact", overlap="update"'
OFFLOADED = 'NVFP4, state="compact", offload=1.0, offload_gradients=True'
BESIDE = 'NVFP4, state="compact", offload=1.0, overlap="update"'
MODELS = {"llama_3_70b": "Llama-3-70B"}
"""By the name of a configuration without a run, the model."""
MACHINES = [
    ("one card of 24 GB", "llama_3_8b", BESIDE),
    ("one card of 24 GB", "llama_3_8b", OFFLOADED),
    ("one card of 80 GB, 128 GB of RAM", "llama_20b", BESIDE),
    ("one card of 80 GB, 128 GB of RAM", "llama_3_8b", OFFLOADED),
    ("four cards of 80 GB, 512 GB of RAM", "llama_3_70b", BESIDE),
    ("four cards of 80 GB, 512 GB of RAM", "llama_20b", OFFLOADED),
]
"""Machines, with a model that fits there and one of WAYS."""
CARDS = {"llama_3_8b": ("Llama-3-8B", 80e9), "llama_20b": ("Llama, 20B", 141e9)}
"""By the name of a configuration and of its run, the model and the memory of a card that suits it."""
WAY_OF = {
    ("bf16", "fused_adamw", None): "bf16 weights",
    ("nvfp4", "fused_adamw", None): "NVFP4",
    ("nvfp4", "compact_adamw", None): 'NVFP4, state="compact"',
    ("nvfp4", "compact_adamw", "update"): EARLY,
}
"""One of WAYS, by the weights, the optimizer and the overlap that the run was told."""


class Run:
    """A training run in benchmarks/results/train. layers: None for those of its configuration, one in
    examples/configs. card: bytes of its memory.
    """

    def __init__(self, path: Path):
        result = json.loads(path.read_text())
        options, ((kind, trained),) = result["options"], result["runs"].items()
        self.config, self.layers = Path(options["config"]).stem, options.get("layers")
        self.model, self.card = named(self.config, self.layers), CARDS[self.config][1]
        self.way = WAY_OF[kind, options["optimizer"], options["overlap"]]
        self.vocabulary = json.loads((CONFIGS / f"{self.config}.json").read_text())["vocab_size"]
        self.parameters, self.loss = trained["parameters"], trained["validation_loss"]
        self.peak = 1e6 * max(trained["peak_memory_mb"]["device"])
        self.tokens_per_second = trained["tokens_per_second"]


def runs() -> list[Run]:
    """With early updates, on one H200."""
    return [Run(RESULTS / "train" / f"{name}.json") for name in CARDS]


def other_runs() -> list[Run]:
    """With other numbers of layers, or trained in another way."""
    return [Run(path) for path in sorted((RESULTS / "train").glob("*.json")) if path.stem not in CARDS]


def named(config: str, layers: int | None) -> str:
    model = CARDS[config][0]
    return model if layers is None else f"{model}, with {layers} layers"


@functools.cache
def shapes(config: str, layers: int | None) -> nn.Module:
    return model_of(CONFIGS / f"{config}.json", layers)


def kept(run: Run, way: str) -> dict[str, float]:
    """Bytes per parameter that one of the WAYS keeps of a run's model on the GPU."""
    sizes = memory_kept(shapes(run.config, run.layers), **WAYS[way])
    return {part: size / run.parameters for part, size in sizes.items() if part != "host"}


def beyond(run: Run) -> float:
    """Bytes per parameter of the run's peak that are not kept: activations, logits and buffers."""
    return run.peak / run.parameters - sum(kept(run, run.way).values())


def large_models_section() -> str:
    """The tables of docs/large-models.md."""
    compared = "One after another in one process; a row with a dash had a process of its own:"
    predicted = "Predicted, in bytes and in parameters:"
    which = "Which way for which machine, predicted without activations and buffers:"
    tables = training_runs(), side_by_side(), predictions(), machines()
    first, second, third, fourth = map(markdown_table, tables)
    return "\n\n".join([first, compared, second, predicted, third, which, fourth])


def training_runs() -> Table:
    rows = [
        (
            run.model,
            ways(run.way),
            f"{run.parameters / 1e9:.2f}e9",
            f"{run.peak / 1e9:.1f} GB",
            f"{run.peak / run.parameters:.2f}",
            f"{beyond(run):.2f}",
            f"{run.tokens_per_second:,.0f}",
        )
        for run in (*runs(), *other_runs())
    ]
    sizes = ("peak", "bytes per parameter", "activations and buffers")
    return Table(("model", "trained with", "parameters", *sizes, "tokens per second"), "<<>>>>>", rows)


def side_by_side() -> Table:
    """Results of `python -m benchmarks large`, with tokens per second over those of the first way."""
    rows = []
    for path in sorted((RESULTS / "large").glob("*.json")):
        result = json.loads(path.read_text())
        settings, found = result["settings"], {row["name"]: row[row["kind"]] for row in result["rows"]}
        model = named(Path(settings["config"]).stem, settings["layers"])
        in_step = settings.get("micro_batches", 1) * settings["sequences"] * settings["tokens"]
        measured = [way for way in large.EVERY_WAY if f"{way}/tokens/1xcuda" in found]
        for way in measured:
            tokens, peak, size = (found[f"{way}/{name}/1xcuda"] for name in ("tokens", "memory", "peak"))
            over = f"{tokens / found[f'{measured[0]}/tokens/1xcuda']:.2f}" if len(measured) > 1 else "-"
            cells = (f"{peak / 1e3:.1f} GB", f"{size:.2f}", f"{in_step:,}", f"{tokens:,.0f}", over)
            rows.append((model, large.EVERY_WAY[way].rule, *cells))
    sizes = ("peak", "bytes per parameter", "tokens per step")
    header = ("model", "trained with", *sizes, "tokens per second", "over the first")
    return Table(header, "<<>>>>>", rows)


def predictions() -> Table:
    """What each way keeps, and the largest model of the run's proportions that fits, activations and all."""
    sizes = {ways(way): [sum(kept(run, way).values()) for run in runs()] for way in WAYS}
    sizes |= {f"{name}, by its paper": [size] * len(CARDS) for name, size in FLASH.items()}
    header, rows = [""], [[way] for way in sizes]
    for i, run in enumerate(runs()):
        header += [f"kept by {run.model}", f"largest on {run.card / 1e9:.0f} GB"]
        for row, found in zip(rows, sizes.values(), strict=True):
            largest = run.card / (found[i] + beyond(run))
            row += [f"{found[i]:.2f}", f"{largest / 1e9:.1f}e9"]
    return Table(header, "<>>>>", rows)


def machines() -> Table:
    """What the ways that suit a machine keep there."""
    rows = []
    for machine, config, way in MACHINES:
        sizes = memory_kept(shapes(config, None), **WAYS[way])
        host = sizes.pop("host") / 1e9
        model = MODELS.get(config) or CARDS[config][0]
        rows.append((machine, model, ways(way), f"{sum(sizes.values()) / 1e9:.1f} GB", f"{host:.1f} GB"))
    return Table(("machine", "model", "trained with", "on each GPU", "in host memory"), "<<<>>", rows)


def ways(name: str) -> str:
    """The name of a way with its options in code."""
    first, *options = name.split(", ")
    return ", ".join([first, *(f"`{option}`" for option in options)])


# Few bits between hosts


def between_hosts_section() -> str:
    """Errors of gradients and steps over emulated links, for docs/optimizer.md."""
    shown = {"gradients": errors_of_gradients, "hosts": steps_of_hosts}
    results = [result for _, result in output.load(RESULTS)]
    kinds = [(result["benchmark"].partition("_")[0], result) for result in results]
    return "\n\n".join(shown[name](result) for name in shown for kind, result in kinds if kind == name)


LAYERS = {
    gradients.WHOLE: "all linear layers",
    "tokens": "embedding, exact by default",
    "lm_head": "head, exact by default",
}


def errors_of_gradients(result: dict) -> str:
    settings, found = result["settings"], figures(result)
    names = dict.fromkeys(name.partition("/")[0] for name in found if "/" in name)
    rows = [
        (LAYERS.get(name, f"`{name}`"), *(f"{found[f'{name}/{format}']:.2g}" for format in gradients.FORMATS))
        for name in sorted(names, key=lambda name: name in LAYERS)
    ]
    model = f"A Llama with {settings['preset'].upper()} parameters in its layers"
    trained = f"has trained {settings['steps']} steps in bf16 ({device_name(result)})"
    header = ("gradients of", "bf16", "MXFP8", "NVFP4", "NVFP4, no transform")
    table = markdown_table(Table(header, "<>>>>", rows))
    return f"Relative squared errors of gradients. {model} {trained}:\n\n{table}"


def steps_of_hosts(result: dict) -> str:
    settings = result["settings"]
    found = {name.rpartition("/")[0]: value for name, value in figures(result).items()}
    ranks = int(result["benchmark"].split("_")[1])
    rows = []
    for way in settings["ways"]:
        step, tokens, sent = (found.get(f"{way}/{part}") for part in ("step", "tokens", "sent"))
        over = step / found[f"{hosts.BASE}/step"]
        moved = "-" if sent is None else f"{sent:,.0f} MB"
        rows.append((hosts.WAYS[way].rule, f"{tokens:,.0f}", f"{step:,.0f} ms", f"{over:.2f}", moved))
    machine = f"{settings['hosts']} emulated hosts, {ranks} x {device_name(result)}"
    model = f"{settings['layers']} layers of Llama-3-8B's shape, {settings['tokens']:,} tokens per rank"
    link = f"A rank sends {found['link']:.1f} GB/s to the next host"
    header = ("trained with", "tokens per second", "step", f"over `{hosts.BASE}`", "sent by a rank")
    return f"{machine}, {model}. {link}:\n\n{markdown_table(Table(header, '<>>>>', rows))}"


def figures(result: dict) -> dict[str, float]:
    """By row, what it is about."""
    return {row["name"]: row[row["kind"]] for row in result["rows"]}


SECTIONS = {
    "optimizer.md": between_hosts_section,
    "performance.md": output.summary_section,
    "measurements.md": output.docs_section,
    "serving.md": output.finetune_section,
    "training.md": losses.section,
    "large-models.md": large_models_section,
}
"""By page of docs/, what stands between its markers."""


def write_docs() -> list[Path]:
    paths = [ROOT / "docs" / name for name in SECTIONS]
    for path in paths:
        head, rest = path.read_text().split(BEGIN)
        path.write_text(head + BEGIN + SECTIONS[path.name]() + END + rest.split(END)[1])
    return paths
