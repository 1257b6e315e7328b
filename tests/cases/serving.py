"""Small models of transformers, of the architectures that serving engines know, and what an export has."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from helpers import assert_bytes_equal
from torch import nn

import zerofp4
from zerofp4.optim import ZeroFP4Optimizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 3,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "topk_method": "noaux_tc",  # as published configurations have it; vLLM asks
}
ARCHITECTURES = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {},
    "Gemma2": {"hidden_act": "gelu_pytorch_tanh"},  # as published configurations have it; SGLang asks
    "Qwen3Moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Mixtral": {"num_local_experts": 3},
    "DeepseekV3": LATENT,
}
"""What a config has besides SIZES."""

FIELDS = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
}
INPUT_FIELDS = {"compressed-tensors": "input_global_scale", "modelopt": "input_scale"}
DENSE = ("Llama", "Qwen3", "Mistral", "Gemma2")

UNFUSED = ("o_proj", "down_proj", "q_b_proj", "kv_b_proj")


def make_plain(name: str, seed: int = 0, **options) -> nn.Module:
    """Weights of one kind differ in their amaxes, so that it shows who has whose."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**SIZES | ARCHITECTURES[name] | options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            if parameter.dim() > 1:
                parameter.mul_(1 + i / 8)
    return model.eval()


def takes(module: nn.Module, name: str) -> bool:
    """A filter_fn: all linear layers and experts, but no head and no router."""
    return name != "lm_head" and name.rpartition(".")[2] != "gate"


def train(model: nn.Module, block=(16, 16), four_over_six=None, **options) -> ZeroFP4Optimizer:
    """Convert it and take a step."""
    zerofp4.convert_model(model, takes, block=block, four_over_six=four_over_six)
    groups = zerofp4.serving.amax_groups(model)
    optimizer = ZeroFP4Optimizer(model.named_parameters(), lr=1e-3, amax_groups=groups, **options)
    tokens = torch.arange(16, device=model.device).view(2, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@functools.cache
def trained(name: str) -> tuple[nn.Module, ZeroFP4Optimizer]:
    """Shared by tests, which leave it as it is."""
    model = make_plain(name)
    return model, train(model)


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an export, by the index if there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return safetensors.load_file(folder / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    files = {name: safetensors.load_file(folder / name) for name in set(weight_map.values())}
    assert {key for found in files.values() for key in found} == set(weight_map)
    return {key: files[name][key] for key, name in weight_map.items()}


def matrices(model: nn.Module) -> dict[str, torch.Tensor]:
    """By the names that checkpoints have, the NVFP4 matrices of a model, each a tensor of its own; of experts
    gate and up are one, called gate_up.
    """
    found = {}
    for key, parameter in model.named_parameters():
        if not isinstance(parameter, zerofp4.NVFP4Tensor):
            continue
        if parameter.dim() == 2:
            found[key.removesuffix(".weight")] = parameter.detach()
            continue
        is_mixtral = "Mixtral" in type(model).__name__
        prefix, last = key.rsplit(".", 1)
        if is_mixtral:
            prefix = prefix.replace(".mlp.", ".block_sparse_moe.")
        names = {"gate_up_proj": "gate_up", "down_proj": "w2" if is_mixtral else "down_proj"}
        for e in range(parameter.shape[0]):
            found[f"{prefix}.{e}.{names[last]}"] = parameter.detach()[e]
    return found


def served_modules(model: nn.Module) -> dict[str, tuple[torch.Tensor, slice]]:
    """By the name of a quantized module in an export, the matrix that it is of, and its rows there."""
    found = {}
    for name, matrix in matrices(model).items():
        prefix, last = name.rsplit(".", 1)
        if last != "gate_up":
            found[name] = matrix, slice(0, matrix.shape[0])
            continue
        half = matrix.shape[0] // 2
        gate, up = ("w1", "w3") if "Mixtral" in type(model).__name__ else ("gate_proj", "up_proj")
        found[f"{prefix}.{gate}"] = matrix, slice(0, half)
        found[f"{prefix}.{up}"] = matrix, slice(half, 2 * half)
    return found


def global_scale(format: str, amax: torch.Tensor, most: float = 2688) -> torch.Tensor:
    most = torch.full_like(amax, most)  # torch would divide a number by multiplying by 1 / amax, rounded
    return (most / amax).view(1) if format == "compressed-tensors" else (amax / most).view(())


def scales_of(matrix: torch.Tensor) -> torch.Tensor:
    """E4M3 [O, I/16], from the layout that repeats them, by another way than the export goes."""
    rows, columns = matrix.shape
    return matrix.expanded_scale()[:rows, : columns // 16]


def check_quantized(model: nn.Module, found: dict[str, torch.Tensor], format: str, most: float = 2688) -> int:
    """Each quantized module has the fields of the format, with the model's own bytes. Returns how many."""
    modules = served_modules(model)
    for name, (matrix, rows) in modules.items():
        codes, scales, global_ = (found[f"{name}.{field}"] for field in FIELDS[format])
        assert_bytes_equal(codes, matrix.rowwise_data[rows], name)
        assert_bytes_equal(scales, scales_of(matrix)[rows], name)
        assert_bytes_equal(global_, global_scale(format, matrix.amax, most), name)
    return len(modules)
