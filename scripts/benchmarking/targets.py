"""What the rows should reach on one H200, and what the figures of a row mean."""

from typing import NamedTuple


class Kind(NamedTuple):
    """A figure that a target can be set for: a row of this kind has it under the kind's name."""

    unit: str
    digits: int
    at_least: bool  # else at most

    def show(self, value: float) -> str:
        return f"{value:,.{self.digits}f}{self.unit}"

    def is_met(self, value: float, target: float) -> bool:
        return value >= target if self.at_least else value <= target

    def bound(self, target: float) -> str:
        return f"{'at least' if self.at_least else 'at most'} {target:g}{self.unit}"


KINDS = {
    "percent_of_copy": Kind("%", 1, at_least=True),
    "speedup": Kind("x", 2, at_least=True),
    "ratio": Kind("x", 3, at_least=False),
    "host_us": Kind(" us", 1, at_least=False),
    "host_us_per_weight": Kind(" us per weight", 2, at_least=False),
    "launches": Kind("", 0, at_least=False),
    "milliseconds": Kind(" ms", 3, at_least=False),
    "megabytes": Kind(" MB", 0, at_least=False),
    "tokens_per_second": Kind(" tokens/s", 0, at_least=True),
    "gigabytes_per_second": Kind(" GB/s", 0, at_least=True),
    "bytes_per_parameter": Kind(" bytes", 3, at_least=False),
    "percent_of_shard": Kind("% of the FP32 shard", 3, at_least=False),
    "percent_of_state": Kind("% of the state", 2, at_least=False),
}

HOST_COUNTS = (10, 224, 2000)
MODEL_COUNT = 224
"""The linear weights of Llama-3-8B."""

TARGETS = {
    "local_step/llama3-8b/rank1of4": ("percent_of_copy", 92),
    "local_step/16384": ("percent_of_copy", 95),
    "local_step/2000-small": ("percent_of_copy", 70),
    "transpose/llama3-8b": ("percent_of_copy", 88),
    "adamw/llama3-8b": ("percent_of_copy", 90),
    "adamw_then_cast/llama3-8b": ("speedup", 1.08),
    "device_memory/llama3-8b": ("percent_of_shard", 1.0),
    "quantize_1d/16384": ("percent_of_copy", 75),
    "quantize_2d/16384": ("percent_of_copy", 80),
    "quantize_2d_both/16384": ("percent_of_copy", 70),
    "quantize_1d_rht/16384": ("percent_of_copy", 55),
    "quantize_1d_rht_swizzled/16384": ("percent_of_copy", 55),
    "rht_swizzled_over_compact/16384": ("ratio", 1.03),
    "rht_one_pass_over_two/16384": ("speedup", 1.2),
    "tensor_amax/16384": ("percent_of_copy", 85),
    "amax_rht/16384": ("percent_of_copy", 85),
    "dequantize_1d/16384": ("percent_of_copy", 85),
    "dequantize_2d/16384": ("percent_of_copy", 85),
    "dequantize_1d_swizzled_over_compact/16384": ("ratio", 1.05),
    "dequantize_2d_swizzled_over_compact/16384": ("ratio", 1.05),
    "swizzle_over_clone/131072x32768": ("ratio", 1.25),
    "quantize_mxfp8/16384": ("percent_of_copy", 90),
    "dequantize_mxfp8/16384": ("percent_of_copy", 95),
    "grouped_over_one/64x4096x2048": ("ratio", 1.1),
    "launches/quantize_grouped/64x4096x2048": ("launches", 1),
}
TARGETS |= {
    "linear_over_bf16/8192x4096x14336": ("ratio", 1.16),
    "linear_over_bf16/16384x8192x8192": ("ratio", 1.10),
    "linear_over_bf16/8192x4096x4096": ("ratio", 1.40),
    "grouped_linear_over_bf16/64x1024x2048x1408": ("ratio", 1.50),
    "saved_over_bf16/8192x4096x14336": ("ratio", 0.30),
    "saved_over_bf16/16384x8192x8192": ("ratio", 0.30),
    "saved_over_bf16/8192x4096x4096": ("ratio", 0.30),
    "grouped_saved_over_bf16/64x1024x2048x1408": ("ratio", 0.30),
    "host_layer_linear": ("host_us", 80),
    "host_quantizer_update": ("host_us", 20),
    "launches/swizzles/1": ("launches", 0),
    "launches/swizzles/4": ("launches", 0),
    "launches/swizzles/16": ("launches", 0),
}
TARGETS |= {
    f"host_step/{MODEL_COUNT}": ("host_us", 30),
    f"host_post/{MODEL_COUNT}": ("host_us", 100),
    f"host_all_gather/{MODEL_COUNT}": ("host_us", 30),
    f"host_zero_step/{MODEL_COUNT}": ("host_us", 400),
    "host_linear": ("host_us", 35),
    "host_quantize_rht_swizzled": ("host_us", 40),
    "host_swizzle_scales/448": ("host_us", 100),
}
for _count in HOST_COUNTS:
    TARGETS.setdefault(f"host_step/{_count}", ("host_us", 60))
    TARGETS[f"host_function/{_count}"] = ("host_us_per_weight", 0.6)
    TARGETS[f"launches/local_step/{_count}"] = ("launches", 4)
    TARGETS[f"launches/transpose/{_count}"] = ("launches", 1)


def target_of(name: str, kind: str) -> dict:
    """The "kind" and "target" of a row: `kind` and None where nothing is asked of it."""
    kind, target = TARGETS.get(name, (kind, None))
    return {"kind": kind, "target": target}
