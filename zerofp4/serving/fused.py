"""Which weights serving engines put into one matrix, so that they must share an amax."""

import collections
import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from zerofp4.nn import FilterFn, choose_weights
from zerofp4.tensors import NVFP4Tensor

FUSED: list[tuple[str, ...]] = [
    ("q_proj", "k_proj", "v_proj"),  # Llama, Qwen3, Qwen3-MoE, Mistral, Mixtral, Gemma
    ("gate_proj", "up_proj"),  # the same models; in DeepSeek also the shared experts
    ("w1", "w3"),  # experts of Mixtral, as its checkpoints call them
    ("q_a_proj", "kv_a_proj_with_mqa"),  # DeepSeek
    ("query", "key", "value"),  # BERT
    ("in_proj_qkv", "in_proj_z"),  # linear attention of Qwen3.5
    ("in_proj_b", "in_proj_a"),
]
"""Last names of siblings that engines fuse, with the models that have them. Append a tuple for another."""


def fused_groups(names: Iterable[str]) -> Iterator[list[str]]:
    """The names of modules that engines fuse, in lists of two or more."""
    places = {name: (g, last) for g, members in enumerate(FUSED) for last, name in enumerate(members)}
    found: dict[tuple[str, int], dict[int, str]] = collections.defaultdict(dict)
    for name in names:
        parent, _, last = name.rpartition(".")
        if last in places:
            group, place = places[last]
            found[parent, group][place] = name
    for siblings in found.values():
        if len(siblings) > 1:
            yield [siblings[place] for place in sorted(siblings)]


def amax_groups(model: nn.Module, filter_fn: FilterFn | None = None) -> list[list[torch.Tensor]]:
    """The weights of a model that serving engines fuse, for `amax_groups` of convert_model, ZeroFP4Optimizer,
    CastPlan and integrations.fsdp2.prepare: q, k and v of each attention, gate and up of each MLP and expert.

    A fused matrix has one global scale. Of unequal ones vLLM takes the largest, which scales the other
    weights wrongly, and SGLang refuses them. Stacked experts [E, N, K] need no group, since an expert's gate
    and up are one matrix there.

    model: before convert_model, or after it. zerofp4.serving.FUSED has the modules' last names.
    filter_fn: that of convert_model or prepare, for a model that is not converted yet.

    Returns the groups in the order of the model, each with the weights that are, or will be, in NVFP4.
    """
    parameters = model.named_parameters()
    weights = {name.removesuffix(".weight"): p for name, p in parameters if isinstance(p, NVFP4Tensor)}
    if not weights:
        _, chosen = choose_weights(model, filter_fn, tensor_parallel=True)
        weights = {choice.name: choice.parameter for choice in chosen}
    return [[weights[name] for name in group] for group in fused_groups(weights)]


def experts_of(name: str) -> str | None:
    """`mlp.experts` for `mlp.experts.3.down_proj`, a module of a routed expert; None for another module."""
    found = re.fullmatch(r"(.*\.experts)\.\d+\.[^.]+", name)
    return found and found[1]
