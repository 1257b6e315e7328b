"""Checkpoints in NVFP4 as others publish them, made by hand of random codes and scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cases.serving import make_plain, safetensors

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

Tensors = dict[str, torch.Tensor]


def random_matrix(rows: int, columns: int, amax: float, seed: int) -> Tensors:
    """A matrix with ModelOpt's fields, with 448 as its largest scale and a code of 6 in each block."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    codes[:, ::8] = codes[:, ::8] & 0xF0 | 7
    scales = torch.rand(rows, columns // 16, generator=generator) * 440 + 2
    scales[0, 0] = 448
    return {
        "weight": codes,
        "weight_scale": scales.to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(amax) / torch.tensor(2688.0),
    }


def values_of(fields: Tensors) -> torch.Tensor:
    """What ModelOpt's formula gives, bfloat16 [N, K]."""
    codes = torch.stack([fields["weight"] & 15, fields["weight"] >> 4], dim=-1).flatten(1).long()
    values = E2M1[codes & 7] * (1 - 2 * (codes >> 3))
    scales = fields["weight_scale"].float() * fields["weight_scale_2"]
    return (values * scales.repeat_interleave(16, dim=1)).bfloat16()


def layers_of(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that are quantized: all but the head."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}


def modelopt(model: nn.Module) -> tuple[Tensors, Tensors]:
    """Tensors of a checkpoint of the model's shape, as nvidia publishes them, with input scales and those of
    a KV cache in FP8; and the values of all parameters. Amaxes are chosen so that the values have no ties.
    """
    state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    tensors = dict(state)
    for i, (name, layer) in enumerate(layers_of(model).items()):
        last = name.rpartition(".")[2]
        fused = last in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        fields = random_matrix(*layer.weight.shape, 1.25 if fused else 1.375, i)
        state[f"{name}.weight"] = values_of(fields)
        tensors |= {f"{name}.{field}": tensor for field, tensor in fields.items()}
        tensors[f"{name}.input_scale"] = torch.tensor(1.0 + i) / torch.tensor(2688.0)
        if last in ("k_proj", "v_proj"):
            tensors[f"{name}.{last[0]}_scale"] = torch.tensor(0.5)
    return tensors, state


def write(folder: Path, model: nn.Module, tensors: Tensors, quantization: dict | None, **files: Any) -> Path:
    """A folder with one file of tensors. quantization: of config.json. files: other JSON by name."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"format": "nvfp4-pack-quantized", "targets": ["Linear"]}},
}
HF_QUANT_CONFIG = {
    "producer": {"name": "modelopt"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}


def blank(name: str = "Llama", meta: bool = False, **options: Any) -> nn.Module:
    """Another model of the same shape, with other values."""
    with torch.device("meta" if meta else "cpu"):
        return make_plain(name, seed=99, **options)
