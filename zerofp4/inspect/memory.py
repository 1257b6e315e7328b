"""The subcommand `memory`: what one GPU keeps to train a model, predicted from its shapes."""

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import nn

from zerofp4.engine import find_bucket_mb
from zerofp4.inspect.table import print_table
from zerofp4.nn import choose_weights
from zerofp4.optim import scales_shape, suits_compact
from zerofp4.tensors import empty

SUMMARY = "the memory that training a model takes on one GPU, predicted from its configuration"
DESCRIPTION = """\
Predict what one GPU keeps to train a causal language model of transformers in bfloat16 with FusedAdamW:
weights, gradients, masters and moments, computed from the model's shapes. Activations, and the buffers of a
step, are not in it: what is left on the card is for them. Nothing is allocated. The column "host" has masters
and moments in host memory, which are not on the GPU.

The largest model that the card can train has more or fewer layers of the same shape. Give --activations what
a run of the configuration has beyond what it keeps: a larger model has as many bytes of these per parameter,
a smaller one as many in all, since those of one layer, and logits, stay.
"""
WAYS = {
    "bf16 weights": {"nvfp4": False},
    "NVFP4": {},
    'NVFP4, state="compact"': {"state": "compact"},
    'NVFP4, state="compact", overlap="update"': {"state": "compact", "overlap": "update"},
    'NVFP4, state="compact", offload=1.0': {"state": "compact", "offload": True},
    'NVFP4, state="compact", offload=1.0, overlap="update"': {
        "state": "compact",
        "offload": True,
        "overlap": "update",
    },
    'NVFP4, state="compact", offload=1.0, offload_gradients=True': {
        "state": "compact",
        "offload": True,
        "offload_gradients": True,
    },
}
"""By name, options of memory_kept()."""
COLUMNS = "weights", "gradients", "masters", "moments", "host"


def memory_kept(
    model: nn.Module,
    *,
    nvfp4: bool = True,
    state: str = "full",
    overlap: str | None = None,
    offload: bool = False,
    offload_gradients: bool = False,
) -> dict[str, int]:
    """Bytes of weights, gradients, masters and moments on one rank, for a model that was not converted yet.

    model: may be on the meta device.
    nvfp4: whether convert_model() is called, with its defaults.
    state, overlap: of ZeroFP4Optimizer with FusedAdamW, and of its Communication. With "update" there are
        gradients of one bucket only.
    offload: whether masters and moments are in host memory, as "host".
    offload_gradients: of ZeroFP4Optimizer; sums of gradients are there, gradients those of a bucket.
    """
    chosen = {id(choice.parameter) for choice in choose_weights(model, None)[1]} if nvfp4 else set()
    kept = {"weights": 0, "gradients": 0, "masters": 0, "moments": 0}
    parameters = list(model.parameters())
    for p in parameters:
        n, quantized = p.numel(), id(p) in chosen
        compact = state == "compact" and suits_compact(p.shape)
        weight = empty(p.shape, dtype=p.dtype, device="meta", columnwise=False) if quantized else p
        kept["weights"] += weight.nbytes
        kept["gradients"] += p.nbytes
        if compact and p.dtype == torch.bfloat16:
            is_apart = quantized or offload  # else 16 of the 24 bits are the parameter
            kept["masters"] += 3 * n if is_apart else n
        elif quantized or offload or p.dtype != torch.float32:  # else the parameter is its own master
            kept["masters"] += 4 * n
        kept["moments"] += 2 * n + 4 * torch.Size(scales_shape(p.shape)).numel() if compact else 8 * n
    if overlap == "update" or offload_gradients:
        bucket = max(int(find_bucket_mb(parameters, None) * 2**20), *(p.nbytes for p in parameters))
        kept["gradients"] = min(kept["gradients"], bucket)
    if offload:
        sums = 4 * sum(p.numel() for p in parameters) if offload_gradients else 0
        kept["host"] = kept.pop("masters") + kept.pop("moments") + sums
    return kept


def on_gpu(kept: dict[str, int]) -> int:
    """The sum of memory_kept(), without host memory."""
    return sum(size for name, size in kept.items() if name != "host")


def elements(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def model_of(config: Path, layers: int | None = None) -> nn.Module:
    """The causal language model of a transformers configuration, in bfloat16, on the meta device. layers: how
    many, or None for those of the configuration.

    Raises FileNotFoundError, ValueError for fewer than one layer, ImportError without transformers.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{error}: pip install zerofp4[serving]") from error
    if not config.exists():  # transformers would look for a model of that name on its hub
        raise FileNotFoundError("no such file or folder")
    if layers is not None and layers < 1:
        raise ValueError(f"--layers must be at least 1, got {layers}")
    more = {} if layers is None else {"num_hidden_layers": layers}
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(str(config), **more)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="a config.json of transformers, or its folder")
    parser.add_argument("--layers", type=int, metavar="N", help="instead of those of the configuration")
    parser.add_argument("--card", type=float, metavar="GB", help="memory of the GPU, in 1e9 bytes")
    beyond = "activations and buffers of this model, in 1e9 bytes (default: 0)"
    parser.add_argument("--activations", type=float, metavar="GB", default=0.0, help=beyond)


def run(options: argparse.Namespace) -> int:
    card, beyond, larger = options.card and options.card * 1e9, options.activations * 1e9, None
    try:
        model = model_of(options.config, options.layers)
        if card is not None:
            larger = model_of(options.config, model.config.num_hidden_layers + 1)
    except (ImportError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        print(f"zerofp4 memory: {options.config}: {error}", file=sys.stderr)
        return 2
    count = elements(model)
    rows = [["", "bytes per parameter", *COLUMNS, "GB"]]
    rows[0] += [] if larger is None else ["left", "largest"]
    for name, way in WAYS.items():
        parts = memory_kept(model, **way)
        total = on_gpu(parts)
        each = [f"{parts.get(part, 0) / 1e9:.1f}" for part in COLUMNS]
        rows.append([name, f"{total / count:.2f}", *each, f"{total / 1e9:.1f}"])
        if larger is not None:
            left = card - total - beyond
            a_layer = on_gpu(memory_kept(larger, **way)) - total
            a_layer += beyond * (elements(larger) / count - 1) if left > 0 else 0
            largest = "-"
            if a_layer:  # else the model does not read num_hidden_layers
                more = math.floor(left / a_layer)
                layers = model.config.num_hidden_layers + more
                size = count + more * (elements(larger) - count)
                largest = f"{layers} layers, {size / 1e9:.1f}e9" if layers > 0 else "none"
            rows[-1] += [f"{left / 1e9:.1f}" if left > 0 else "does not fit", largest]
    what = f"with {options.activations:g} GB of" if beyond else "without"
    print(f"{count / 1e9:.2f}e9 parameters; GB on one GPU, {what} activations")
    print_table(rows, ["<", *[">"] * (len(rows[0]) - 1)])
    return 0
