"""How the bytes of an operation are counted, what the figures of a row mean, and what they should reach.

A byte rule counts what an operation must read and write once, with n owned elements. It returns the bytes and
the rule in words, which goes beside the figure: of a workload, or of the tensors that an operation on a
single one is given and makes.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from benchmarks.workloads import Workload

# Bytes


class Moved(NamedTuple):
    """elements: the n of the rule; scales or tiles where there are no values."""

    bytes: float
    rule: str
    elements: int


def counted_as(row: dict) -> Moved:
    """For another way to do what that row does, however many bytes it moves."""
    return Moved(row["bytes"], f"counted as {row['name']}", row["elements"])


class Linear(NamedTuple):
    """A rule for a workload: bytes for each owned element, and for each tile and element of all weights."""

    words: str
    owned: float = 0
    tiles: float = 0
    elements: float = 0

    def __call__(self, workload: Workload) -> Moved:
        """elements of what is moved: those of the first factor that is not 0."""
        counts = (workload.owned, workload.tiles, workload.elements)
        size = sum(factor * count for factor, count in zip(self[1:], counts, strict=True))
        counted = next(count for factor, count in zip(self[1:], counts, strict=True) if factor)
        return Moved(size, self.words, counted)


begin = Linear("4 per tile", tiles=4)
amax = Linear("4.0156n: masters, and 4 per 256", owned=4 + 4 / 256)
scale = Linear("6 per tile of all weights", tiles=6)  # an amax read, and a scale written to two buffers
cast = Linear("4.5156n: masters, codes, and 4 per 256", owned=4.5 + 4 / 256)
read_masters = Linear("4n: masters", owned=4)
# Masters twice, codes and scales. The vector of amaxes counts once, as read by scale.
local_step = Linear(f"8.5n + {scale.words}", owned=8.5, tiles=scale.tiles)
# The codes: the scale stage has written the scales of both sides.
transpose = Linear("1 per element, half read, half written; scales: in the scale stage", elements=1)
adamw = Linear("28n: master and two moments read and written, gradient read", owned=28)
# Who reads the masters once gets the amaxes out of the update.
adamw_then_cast = Linear(f"32.5n + {scale.words}", owned=32.5, tiles=scale.tiles)


def cast_blocks(elements: int, reads: int = 1) -> Linear:
    """Of weights with a scale for so many elements, which the cast writes. reads: of a master."""
    size = 4 * reads + 0.5 + 1 / elements
    words = f"masters{' twice' * (reads - 1)}, codes, and a scale per {elements}"
    return Linear(f"{size:.6g}n: {words}", owned=size)


def once(tensors: Iterable[torch.Tensor], elements: int, words: str) -> Moved:
    """Every byte of these tensors, read or written."""
    size = sum(tensor.nbytes for tensor in tensors)
    return Moved(size, f"{size / elements:.5g}n: {words}", elements)


def quantize(x: torch.Tensor, out: torch.Tensor) -> Moved:
    return once([x, out], x.numel(), "x read, codes and scales written")


def dequantize(data: torch.Tensor, scale: torch.Tensor, values: torch.Tensor) -> Moved:
    return once([data, scale, values], values.numel(), "codes and scales read, values written")


def round_means(means: torch.Tensor, messages: torch.Tensor) -> Moved:
    return once([means, messages], means.numel(), "means read, messages written")


def average_means(messages: torch.Tensor, mean: torch.Tensor) -> Moved:
    return once([messages, mean], len(messages) * mean.numel(), "messages read, their mean written")


def rearrange(sources: Iterable[torch.Tensor], targets: Iterable[torch.Tensor]) -> Moved:
    """Of scales: the padding of the targets included."""
    read, written = (sum(tensor.nbytes for tensor in tensors) for tensors in (sources, targets))
    return Moved(read + written, "scales read and written", read)


# Figures


class Kind(NamedTuple):
    """A figure that a target can be set for: a row of this kind has it under the kind's name."""

    unit: str
    digits: int
    at_least: bool = False  # else at most

    def show(self, value: float) -> str:
        return f"{value:,.{self.digits}f}{self.unit}"

    def is_met(self, value: float, target: float) -> bool:
        return value >= target if self.at_least else value <= target

    def bound(self, target: float) -> str:
        return f"{'at least' if self.at_least else 'at most'} {target:g}{self.unit}"


KINDS = {
    "percent_of_copy": Kind("%", 1, at_least=True),
    "speedup": Kind("x", 2, at_least=True),
    "ratio": Kind("x", 3),
    "host_us": Kind(" us", 1),
    "host_us_per_weight": Kind(" us per weight", 2),
    "launches": Kind("", 0),
    "milliseconds": Kind(" ms", 3),
    "megabytes": Kind(" MB", 0),
    "tokens_per_second": Kind(" tokens/s", 0, at_least=True),
    "gigabytes_per_second": Kind(" GB/s", 0, at_least=True),
    "bytes_per_parameter": Kind(" bytes", 3),
    "loss": Kind("", 4),
    "squared_error": Kind("", 7),
    "percent_of_shard": Kind("% of the FP32 shard", 3),
    "percent_of_state": Kind("% of the state", 2),
}

# Targets, all of H200s but for `cpu_`: two cores of a CPU with AVX2 alone

HOST_COUNTS = (10, 224, 2000)
MODEL_COUNT = 224
"""The linear weights of Llama-3-8B."""

_BY_KIND: dict[str, dict[str, float]] = {
    "percent_of_copy": {
        "local_step/llama3-8b/rank1of4": 92,
        "local_step/16384": 95,
        "local_step/2000-small": 70,
        "local_step_1d/llama3-8b/rank1of4": 92,
        "local_step_1d/16384": 92,
        "transpose/llama3-8b": 88,
        "adamw/llama3-8b": 90,
        "adamw_compact/llama3-8b": 88,
        "quantize_1d/16384": 75,
        "quantize_2d/16384": 80,
        "quantize_2d_both/16384": 70,
        "quantize_1d_rht/16384": 55,
        "tensor_amax/16384": 85,
        "amax_rht/16384": 85,
        "dequantize_1d/16384": 85,
        "dequantize_2d/16384": 85,
        "quantize_mxfp8/16384": 90,
        "dequantize_mxfp8/16384": 95,
    },
    "percent_of_shard": {"device_memory/llama3-8b": 1.0},
    "speedup": {
        "adamw_then_cast/llama3-8b": 1.08,
        "rht_one_pass_over_two/16384": 1.2,
        "fsdp2/reshard/tokens_over_bf16": 1.0,
        "eager/1x2048/weights_over_bf16": 0.95,
        "eager/1x2048/layers_over_bf16": 0.70,
        "eager/4x2048/weights_over_bf16": 0.98,
        "eager/4x2048/layers_over_bf16": 0.86,
        "compiled/1x2048/weights_over_bf16": 0.95,
        "compiled/1x2048/layers_over_bf16": 0.75,
    },
    "ratio": {
        "dequantize_1d_swizzled_over_compact/16384": 1.05,
        "dequantize_2d_swizzled_over_compact/16384": 1.05,
        "swizzle_over_clone/131072x32768": 1.25,
        "grouped_over_one/64x4096x2048": 1.1,
        **{f"means_{format}_over_saved/16384": 0.1 for format in ("mxfp8", "nvfp4")},
        "linear_over_bf16/8192x4096x14336": 1.16,
        "linear_over_bf16/16384x8192x8192": 1.10,
        "linear_over_bf16/8192x4096x4096": 1.40,
        "grouped_linear_over_bf16/64x1024x2048x1408": 1.50,
        "saved_over_bf16/8192x4096x14336": 0.30,
        "saved_over_bf16/16384x8192x8192": 0.30,
        "saved_over_bf16/8192x4096x4096": 0.30,
        "grouped_saved_over_bf16/64x1024x2048x1408": 0.30,
        "cpu_converted_linear_over_bf16/256x1024x1024": 0.30,
        "cpu_converted_linear_over_float32/256x1024x1024": 1.50,
        "step_2_ranks/step_over_bf16": 0.72,
        "step_2_ranks/step_clipped_over_bf16": 0.78,
        "step_2_ranks/publish_over_bf16": 0.50,
        "step_2_ranks/update_over_bf16": 0.62,
        "step_2_ranks/peer_step_over_bf16": 0.42,
        "step_2_ranks/peer_step_clipped_over_bf16": 0.60,
        "step_2_ranks/peer_publish_over_bf16": 0.42,
        "step_2_ranks/peer_update_over_bf16": 0.55,
        "step_2_ranks/peer_step_over_floor": 1.15,
        "step_4_ranks/peer_step_over_bf16": 0.52,
        "step_4_ranks/peer_publish_over_bf16": 0.32,
        "step_4_ranks/peer_update_over_bf16": 0.42,
        "step_4_ranks/peer_step_over_floor": 1.15,
        "step_4_ranks/peer_exposed_step_over_bf16": 0.35,
        "states/step_compact_over_full": 0.60,
        "states/step_compact_over_torch_bf16": 0.92,
        "states/step_compact_over_flash": 0.55,
        "fsdp2/reshard/gather_over_bf16": 0.35,
        "fsdp2/reshard/peak_over_bf16": 1.03,
        "fsdp2/keep/gather_over_bf16": 0.35,
        "fsdp2/keep/peak_over_bf16": 0.95,
        "fsdp2/host_layer_over_bf16": 1.10,
        "hosts/bf16/step_over_reduce_scatter": 1.0,  # of links of at most 5 GB/s
        "hosts/mxfp8/step_over_reduce_scatter": 0.65,
        "hosts/nvfp4/step_over_reduce_scatter": 0.50,
        "megatron/publish_over_bf16": 0.6,
        "checkpoint/save_over_dtensors": 1.1,
        "checkpoint/load_over_dtensors": 1.1,
    },
    "percent_of_state": {
        "checkpoint/zerofp4_save_gpu": 5.0,
        "checkpoint/zerofp4_load_host": 5.0,
        "checkpoint/zerofp4_load_gpu": 5.0 + 100 / 3,  # of AdamW's state: new masters beside the old ones
    },
    "bytes_per_parameter": {
        "fsdp2/resident/rows": 0.51,
        "fsdp2/resident/rows_and_columns": 1.02,
        "megatron/weights": 1.1,
        "states/kept_compact": 7.7,
        "states/peak_in_backward": 5.9,
        "load/weights": 0.6,
    },
    "megabytes": {f"{name}/{place}_memory": 2000 for name in ("export", "load") for place in ("host", "gpu")},
    "milliseconds": {f"step/{prefix}host_step": 0.5 for prefix in ("", "peer_")},
    "launches": {
        "launches/quantize_grouped/64x4096x2048": 1,
        **{f"launches/swizzles/{count}": 0 for count in (1, 4, 16)},
        **{f"launches/local_step/{count}": 4 for count in HOST_COUNTS},
        **{f"launches/transpose/{count}": 1 for count in HOST_COUNTS},
    },
    "host_us": {
        **{f"host_step/{count}": 30 if count == MODEL_COUNT else 60 for count in HOST_COUNTS},
        f"host_post/{MODEL_COUNT}": 100,
        f"host_all_gather/{MODEL_COUNT}": 30,
        f"host_zero_step/{MODEL_COUNT}": 400,
        "host_linear": 35,
        "host_layer_linear": 80,
        "host_layer_linear_both": 120,
        "host_quantizer_update": 20,
        "host_quantize_rht_swizzled": 40,
    },
    "host_us_per_weight": {f"host_function/{count}": 0.6 for count in HOST_COUNTS},
}
TARGETS = {name: (kind, target) for kind, found in _BY_KIND.items() for name, target in found.items()}
"""By the name of a row. Those of several ranks, "NAME/2xcuda" in the file, begin with the benchmark in place
of that ending, with or without the number of ranks.
"""


def target_of(benchmark: str, name: str, kind: str) -> dict:
    """The "kind" and "target" of a row: `kind` and None where nothing is asked of it."""
    part = name.rpartition("/")[0]
    for key in (name, f"{benchmark}/{part}", f"{benchmark.partition('_')[0]}/{part}"):
        if key in TARGETS:
            kind, target = TARGETS[key]
            return {"kind": kind, "target": target}
    return {"kind": kind, "target": None}
