"""What results of `python -m benchmarks fidelity` say: the generated part of docs/training.md."""

import functools
import json
import math
import statistics
from collections.abc import Callable

import torch

from benchmarks.arms import ARMS
from benchmarks.llama import PRESETS
from benchmarks.output import Table, markdown_table
from benchmarks.session import RESULTS
from benchmarks.workloads import ROOT

PICTURE = ROOT / "docs" / "images" / "losses.png"

Results = dict[str, dict[int, dict]]
"""Of one preset and number of tokens: result files by arm and seed."""
Loss = Callable[[dict], float]
DOCUMENTS: Loss = lambda run: run["final"]["documents"]  # noqa: E731
LOSSES: dict[str, Loss] = {
    "held-out documents": DOCUMENTS,
    "held-out packages": lambda run: run["final"]["packages"],
    "documents, masters in bf16": lambda run: run.get("masters", run["final"])["documents"],
}
"""Of a result file, by column of the tables of docs/training.md."""
PUBLISHED = (
    ("weights and activations in the forward pass, 16x16", ("1.43%", "1.58%", "1.57%"), "forward-16x16"),
    ("the same, 1x16", ("1.19%", "", "1.39%"), None),
    ("the same, 1x16, four over six", ("1.12%", "", "1.18%"), None),
    ("all three products, NVIDIA's recipe", ("1.60%", "1.78%", "1.88%"), "full"),
    ("all three products, Quartet II with four over six", ("1.26%", "1.31%", "1.39%"), None),
    ("weights alone, 16x16", ("", "", ""), "w16x16"),
    ("weights alone, 1x16, four over six", ("", "", ""), "w1x16-46"),
)
"""What is quantized, relative gaps that IST-DASLab published (30M, 50M, 100M), and the arm that is ours."""
PUBLISHED_WORDS = (
    "[Quartet II](https://github.com/IST-DASLab/Quartet-II), as published by IST-DASLab: Llama's shapes, a "
    "vocabulary of 32,000, sequences of 512 and 25 tokens per parameter, on another text, with a noise of "
    "about 0.05 points. An empty cell was not published, or has no interval yet."
)
USES = (
    ("ranks compute all scales, or FP4 tensor cores read columns", "`block=(16, 16)`", "w16x16"),
    ("layers multiply in bf16", "`block=(1, 16)`, `four_over_six`", "w1x16-46"),
    (
        "some bytes may be spent on the loss",
        "a `filter_fn` without the first and last block",
        "ends-w1x16-46",
    ),
    ("the end of a run may take bf16's memory", "`unconvert_model` at 90% of the steps", "until-90-w1x16-46"),
    (
        "both may",
        "that filter, and `unconvert_model` at 90% of the steps",
        "ends-until-90-w1x16-46",
    ),
    ("masters and moments are too large", '`state="compact"`', "compact"),
    ("all of it is too large", '`block=(1, 16)`, `four_over_six`, `state="compact"`', "compact-w1x16-46"),
    ("gradients are too large", '`overlap="update"`, no clipping', "update"),
    ("products run in FP4", "`NVFP4Recipe`", "full"),
    ("links between hosts are slow", '`between_hosts="bf16"`', "hosts-bf16"),
    ("links between hosts are slow", '`between_hosts="mxfp8"`', "hosts-mxfp8"),
    ("links between hosts are slow", '`between_hosts="nvfp4"`', "hosts-nvfp4"),
)
"""When, which options, and the arm that is the evidence."""
BLOCKS = 32
"""Of the model whose bits per weight are shown."""
T_OF_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)
"""Of Student's distribution with 1, 2, ... degrees of freedom: half of a 95% interval in standard errors."""


def t_of_95(freedom: int) -> float:
    if freedom <= len(T_OF_95):
        return T_OF_95[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@functools.cache
def results() -> dict[str, Results]:
    """Results of `python -m benchmarks fidelity` by folder, of seeds that bf16 has. Arms have the order of
    arms.py. Those of a fork are beside the runs in bf16 that they leave.
    """
    found: dict[str, Results] = {}
    for folder in sorted((RESULTS / "fidelity").glob("*")):
        results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        for result in sorted(results, key=lambda result: list(ARMS).index(result["arm"])):
            found.setdefault(folder.name, {}).setdefault(result["arm"], {})[result["seed"]] = result
    for folder, arms in found.items():
        whole = found.get(folder.partition("-fork-")[0], {})
        arms = {"bf16": whole.get("bf16", {})} | arms
        seeds = arms["bf16"].keys()
        paired = {arm: {seed: own[seed] for seed in own if seed in seeds} for arm, own in arms.items()}
        found[folder] = {arm: own for arm, own in paired.items() if own}
    by_size = sorted(filter(found.get, found), key=lambda folder: size(found[folder]))
    return {folder: found[folder] for folder in by_size}


def some_run(arms: Results) -> dict:
    return next(iter(next(iter(arms.values())).values()))


def size(arms: Results) -> tuple[int, int, int]:
    run = some_run(arms)
    return run["parameters_of_blocks"], run["tokens"], fork(arms)


def fork(arms: Results) -> int:
    """Percent of the steps in which all arms are one run in bf16."""
    return max(
        round(100 * run.get("fork", 0) / run["steps"]) for own in arms.values() for run in own.values()
    )


def tokens_per_parameter(arms: Results) -> float:
    return some_run(arms)["tokens_per_parameter"]


def gaps_by_seed(arms: Results, arm: str, loss: Loss, base: str = "bf16") -> list[float]:
    """Percent by which a run's loss is above that of the base's run with the same seed."""
    bases = arms.get(base, {})
    return [100 * (loss(run) / loss(bases[s]) - 1) for s, run in arms[arm].items() if s in bases]


def spread(arms: Results, loss: Loss) -> tuple[float, int]:
    """(standard deviation of a gap by seed in percent, degrees of freedom), from all runs together: what the
    least-squares fit of log(loss) by a term for the arm and one for the seed leaves. Gaps of several arms
    share a run of bf16, so their own deviations would not be independent.
    """
    names, seeds = list(arms), list(arms["bf16"])
    runs = [(names.index(arm), seeds.index(seed), run) for arm in arms for seed, run in arms[arm].items()]
    freedom = len(runs) - len(names) - len(seeds) + 1
    if freedom == 0:
        return 0.0, 0
    terms = torch.zeros(len(runs), len(names) + len(seeds), dtype=torch.float64)
    for row, (arm, seed, _) in zip(terms, runs, strict=True):
        row[arm] = row[len(names) + seed] = 1
    values = torch.tensor([[math.log(loss(run))] for *_, run in runs], dtype=torch.float64)
    rest = values - terms @ torch.linalg.lstsq(terms, values, driver="gelsd").solution
    return 100 * (2 * rest.square().sum().item() / freedom) ** 0.5, freedom


def gap(arms: Results, arm: str, loss: Loss, base: str = "bf16") -> tuple[float, float | None]:
    """The mean over seeds, in percent, and half of its 95% interval: None if no arm has two seeds."""
    found = gaps_by_seed(arms, arm, loss, base)
    deviation, freedom = spread(arms, loss)
    half = t_of_95(freedom) * deviation / len(found) ** 0.5 if freedom else None
    return statistics.mean(found), half


def gaps_over_tokens(arms: Results, arm: str) -> list[tuple[float, float, float]]:
    """(millions of tokens, gap, half of its interval or 0) at each evaluation, on held-out documents."""
    run, rows = some_run(arms), []
    for i, row in enumerate(run["curve"]):
        percent, half = gap(arms, arm, lambda run, i=i: run["curve"][i]["documents"])
        rows.append((row["step"] * run["tokens"] / run["steps"] / 1e6, percent, half or 0.0))
    return rows


def shown_gap(percent: float, half: float | None) -> str:
    return f"{percent:+.2f}%" + ("" if half is None else f" ± {half:.2f}")


# The page


def section() -> str:
    found = results()
    settled = {name: arms for name, arms in found.items() if spread(arms, DOCUMENTS)[1]}
    parts = ["## What to use when", markdown_table(uses(settled))] if settled else []
    parts += ["## Curves", f"![Gaps over tokens](images/{PICTURE.name})"]
    for arms in found.values():
        parts += [f"## {title(arms)}", about(arms), markdown_table(gaps(arms))]
        for words, table in (
            ("The same losses over those of another arm:", over_others(arms)),
            ("Weights: the error at the end, and what codes and scales do halfway.", weights(arms)),
        ):
            parts += [words, markdown_table(table)] if table.rows else []
    parts += ["## Beside published gaps", PUBLISHED_WORDS, markdown_table(published(settled))]
    return "\n\n".join(parts)


def title(arms: Results) -> str:
    run, percent = some_run(arms), fork(arms)
    forks = f", the first {percent}% in bf16" if percent else ""
    return f"{run['preset'].upper()}, {run['tokens'] / 1e6:,.0f}M tokens{forks}"


def about(arms: Results) -> str:
    run, own = some_run(arms), [DOCUMENTS(run) for run in arms["bf16"].values()]
    deviation, freedom = spread(arms, DOCUMENTS)
    words = (
        f"{run['tokens_per_parameter']:.1f} tokens per parameter of the blocks, {run['epochs']:.1f} epochs, "
    )
    words += f"{run['device']}. bf16: {len(own)} {'run' if len(own) == 1 else 'runs'}, "
    words += f"loss {statistics.mean(own):.4f}"
    if len(own) > 1:
        words += f", standard deviation over seeds {100 * statistics.stdev(own) / statistics.mean(own):.2f}%"
    if freedom:
        words += f". A gap by seed has a standard deviation of {deviation:.2f} points, from all arms "
        words += f"({freedom} degrees of freedom)"
    else:
        words += ". **No arm has two seeds yet**: gaps have no interval"
    return f"{words}."


def uses(found: dict[str, Results]) -> Table:
    """By use the gap of an arm, from the folder with the most tokens per parameter; of two with as many, the
    one with the smaller interval.
    """
    rows = []
    for use, options, arm in USES:
        folders = [arms for arms in found.values() if arm in arms]
        if folders:
            arms = max(folders, key=lambda arms: (tokens_per_parameter(arms), -gap(arms, arm, DOCUMENTS)[1]))
            base = ARMS[arm].beside if ARMS[arm].convert is None else "bf16"
            base = base if gaps_by_seed(arms, arm, DOCUMENTS, base) else "bf16"
            shown = shown_gap(*gap(arms, arm, DOCUMENTS, base))
            bits = f"{bits_per_weight(arm):.2f}"
            cells = (shown, ARMS[base].words, str(len(arms[arm])), f"{tokens_per_parameter(arms):.1f}")
            rows.append((use, options, bits, *cells, f"{fork(arms)}%" if fork(arms) else "none"))
    header = ("if", "options", "bits per weight", "gap", "over", "runs", "tokens per parameter", "fork at")
    return Table(header, "<<>><>>>", rows)


def bits_per_weight(arm: str) -> float:
    """Of a model with many blocks, codes and scales of one side."""
    own, preset = ARMS[arm], PRESETS["30m"]
    if own.convert is None:
        return 16.0
    rows, columns = own.convert["block"]
    sizes = {name: preset.width**2 for name in ("q", "k", "v", "o")}
    sizes |= {name: preset.width * preset.hidden for name in ("gate", "up", "down")}
    total = sum(
        size * (4 + 8 / (rows * columns) if own.takes(f"blocks.{block}.{name}", BLOCKS) else 16)
        for name, size in sizes.items()
        for block in range(BLOCKS)
    )
    return total / BLOCKS / sum(sizes.values())


def gaps(arms: Results) -> Table:
    rows = []
    for arm, own in arms.items():
        if arm != "bf16":
            shown = [shown_gap(*gap(arms, arm, loss)) for loss in LOSSES.values()]
            has_masters = "masters" in next(iter(own.values()))
            rows.append((ARMS[arm].words, str(len(own)), *shown[:2], shown[2] if has_masters else ""))
    return Table(("arm", "runs", *LOSSES), "<>>>>", rows)


def over_others(arms: Results) -> Table:
    rows = []
    for arm in arms:
        base = ARMS[arm].beside
        if base != "bf16" and gaps_by_seed(arms, arm, DOCUMENTS, base):
            shown = shown_gap(*gap(arms, arm, DOCUMENTS, base))
            rows.append((ARMS[arm].words, ARMS[base].words, shown))
    return Table(("arm", "over", "held-out documents"), "<<>", rows)


def weights(arms: Results) -> Table:
    """Means over runs; of the largest error those of one weight."""
    rows = []
    for arm, own in arms.items():
        runs = [run for run in own.values() if run.get("errors")]
        if runs:
            by_weight = {
                name: statistics.mean(run["errors"][name] for run in runs) for name in runs[0]["errors"]
            }
            worst = max(by_weight, key=by_weight.__getitem__)
            halfway = [run["curve"][len(run["curve"]) // 2 - 1] for run in runs]
            shares = [
                f"{100 * statistics.mean(row[name] for row in halfway):.2g}%" if name in halfway[0] else ""
                for name in ("flipped", "oscillating", "underflowing")
            ]
            errors = (f"{100 * statistics.mean(by_weight.values()):.1f}%", f"{100 * by_weight[worst]:.1f}%")
            rows.append((ARMS[arm].words, *errors, worst.removesuffix(".weight"), *shares))
    header = ("error", "largest", "of", "codes flipped in a step", "oscillating", "underflowing scales")
    return Table(("arm", *header), "<>><>>>", rows)


def published(found: dict[str, Results]) -> Table:
    ours = [f"ours: {title(arms)}" for arms in found.values()]
    rows = []
    for words, theirs, arm in PUBLISHED:
        own = [shown_gap(*gap(arms, arm, DOCUMENTS)) if arm in arms else "" for arms in found.values()]
        rows.append((words, *theirs, *own))
    return Table(("quantized", "30M", "50M", "100M", *ours), "<" + ">" * (3 + len(ours)), rows)
