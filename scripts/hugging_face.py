"""Models of Hugging Face's transformers, made from a configuration, for scripts/train.py."""

import importlib.util
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
"""What configurations call the longest sequence."""


class ConfigError(ValueError):
    """No model can be made from it."""


def config_file(path: Path) -> Path:
    """The file itself, or that in a folder as save_pretrained() leaves it.

    Raises ConfigError where there is none or it is no JSON object, and without the library transformers.
    """
    found = path / "config.json" if path.is_dir() else path
    if not found.is_file():
        raise ConfigError(f"there is no {found}")
    read_config(found)
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("needs the library transformers (pip install transformers)")
    return found


def read_config(file: Path) -> dict:
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is no configuration: it has a {type(found).__name__}")
    return found


def longest_sequence(file: Path) -> int | None:
    """As far as the configuration says."""
    found = read_config(file)
    return next((found[name] for name in LONGEST if isinstance(found.get(name), int)), None)


def make_model(
    file: Path,
    vocabulary: int,
    device: torch.device,
    recomputes: bool = False,
    layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> nn.Module:
    """A causal language model with initial weights in dtype, made on the device, whose vocabulary has as
    many tokens as the configuration says. Raises ConfigError, also where these are fewer than those of the
    text.

    recomputes: its layers keep only their inputs for the backward pass, which computes them once more.
    layers: how many, if not as many as the configuration says.
    """
    import transformers

    try:
        more = {} if layers is None else {"num_hidden_layers": layers}
        config = transformers.AutoConfig.from_pretrained(str(file), **more)
        with device:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        if recomputes:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file}: {error}") from error
    tokens = model.get_input_embeddings().num_embeddings
    if tokens < vocabulary:
        raise ConfigError(f"{file}: a vocabulary of {tokens} tokens, and the text has {vocabulary}")
    return model


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Those that it repeats: of its lists of modules, the one with most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda each: sum(p.numel() for p in each.parameters()), default=()))


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in nats per token, of int64 [batch, length]."""
    logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
