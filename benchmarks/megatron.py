"""What Megatron-Core's distributed optimizer does with NVFP4 weights, beside its own bf16 weights."""

import argparse
from typing import Any

import torch
from torch import nn

from benchmarks.ranks import Timer, free_memory
from benchmarks.session import Session
from benchmarks.workloads import weight_shapes
from zerofp4.integrations import megatron as hook
from zerofp4.launch import World


def megatron(session: Session, options: argparse.Namespace, world: World) -> None:
    """The parameter update and gather of Megatron's distributed optimizer, NVFP4 weights beside bf16 ones.

    `publish` is from FP32 masters to weights on every rank, gathered; `step` is optimizer.step() from reduced
    gradients on, with torch's AdamW, which Megatron takes without Apex and TransformerEngine. Resident are
    the weights with all their buffers, on each rank.
    """
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    timer, shapes = Timer(session, world, options.repeats), weight_shapes(options.scale)
    hook.install()
    ours, theirs = (measure(timer, shapes, nvfp4=nvfp4) for nvfp4 in (True, False))
    hook.uninstall()
    for part, more in (("publish", ""), ("step", "; AdamW, which both do, is most of it")):
        rule = f"{part} of ours over that of bf16{more}"
        timer.count(f"{part}_over_bf16", "ratio", ours[part] / theirs[part], rule)


def measure(timer: Timer, shapes: list[tuple[int, int]], *, nvfp4: bool) -> dict[str, float]:
    """Milliseconds of publish and step."""
    suffix = "" if nvfp4 else "_bf16"
    before = free_memory(timer.device)
    with timer.peak(f"memory{suffix}", "weights, gradients, masters and moments included", before):
        model, optimizer = build(shapes, timer.device, nvfp4)
        parts = getattr(optimizer, "chained_optimizers", [optimizer])

        def publish() -> None:
            for part in parts:
                part._copy_main_params_to_model_params()  # Megatron has no public name for it
            model.start_param_sync()

        found = {}
        with torch.no_grad():
            for buffer in model.buffers:
                buffer.grad_data.fill_(1e-3)
            rule = "optimizer.step() of Megatron, from reduced gradients on"
            found["step"] = timer.ms(f"step{suffix}", optimizer.step, rule)
            found["publish"] = timer.ms(f"publish{suffix}", publish, "masters to weights on every rank")
    resident = sum(p.nbytes for p in model.parameters()) / sum(p.numel() for p in model.parameters())
    rule = "weights on each rank, with scales and amaxes"
    timer.count(f"weights{suffix}", "bytes_per_parameter", resident, rule)
    return found


def build(shapes: list[tuple[int, int]], device: torch.device, nvfp4: bool) -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(0)
    options = {"device": device, "dtype": torch.bfloat16}
    layers = nn.ModuleList(nn.Linear(cols, rows, bias=False, **options) for rows, cols in shapes)
    if nvfp4:
        hook.convert_model(layers)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16
    )
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, fp4_param_gather=nvfp4)
    model = DistributedDataParallel(config, ddp_config, layers)
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-4, bf16=True, use_distributed_optimizer=True, clip_grad=0.0
    )
    return model, get_megatron_optimizer(settings, [model])
