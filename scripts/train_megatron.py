"""Train a GPT of Megatron-Core's local spec, with NVFP4 or bf16 weights, on the text of scripts/train.py.

    torchrun --nproc-per-node=2 scripts/train_megatron.py --steps 200
    torchrun --nproc-per-node=4 scripts/train_megatron.py --tp 2 --overlap
    torchrun --nproc-per-node=2 scripts/train_megatron.py --layers 2 --width 64 --heads 2 --sequence-length 64

Megatron-Core (0.18 or 0.19), its DistributedDataParallel and its distributed optimizer do the training, and
no TransformerEngine; zerofp4.integrations.megatron stands in where weights are quantized and gathered. The
third is for a machine without a GPU, where Megatron does not run by itself and megatron_on_cpu.py helps it.
Writes DIR/megatron-WEIGHTS.jsonl, a line a step, and says at the end whether the weights on every rank are
those of the quantized masters.
"""

import argparse
import importlib.util
import json
import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from megatron_on_cpu import megatron_here
from text import Batches, Text

import zerofp4
from zerofp4.integrations import megatron
from zerofp4.launch import destroy_process_group, init_process_group

VOCABULARY = Text.vocabulary


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--weights", choices=["nvfp4", "bf16"], default="nvfp4")
    add("--layers", type=int, default=12)
    add("--width", type=int, default=768)
    add("--heads", type=int, default=12)
    add("--sequence-length", type=int, default=1024)
    add("--batch-size", type=int, default=8, help="sequences in a micro-batch of a rank")
    add("--micro-batches", type=int, default=1)
    add("--steps", type=int, default=200)
    add("--lr", type=float, default=6e-4)
    add("--tp", type=int, default=1, help="tensor-parallel ranks")
    add("--pp", type=int, default=1, help="pipeline stages")
    add("--overlap", action="store_true", help="gather and reduce while forward and backward passes compute")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/megatron"), metavar="DIR")
    return parser.parse_args(arguments)


def build(options: argparse.Namespace):
    """The model in Megatron's DDP, and its optimizer with a schedule of the learning rate."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(options.seed)
    model_parallel_cuda_manual_seed(options.seed)
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.width,
        num_attention_heads=options.heads,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,  # these two are of Apex
        masked_softmax_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=options.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    model = Float16Module(config, gpt.cuda())
    if options.weights == "nvfp4":
        report = megatron.convert_model(model)
        say(f"{len(report.converted)} weights in NVFP4, {report.share:.0%} of this rank's parameters")
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        fp4_param_gather=options.weights == "nvfp4",
        overlap_grad_reduce=options.overlap,
        overlap_param_gather=options.overlap,
        grad_reduce_in_fp32=True,
    )
    model = DistributedDataParallel(config, ddp_config, model)
    config.no_sync_func = model.no_sync if options.overlap else None
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.lr / 10,
            weight_decay=0.1,
            adam_beta2=0.95,
            bf16=True,
            use_distributed_optimizer=True,
            overlap_param_gather=options.overlap,
            clip_grad=1.0,
        ),
        [model],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.lr / 10,
        lr_warmup_steps=max(1, options.steps // 20),
        lr_decay_steps=options.steps,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=options.steps,
        wd_incr_style="constant",
    )
    return model, optimizer, scheduler


def forward(batches: Batches, model):
    """What Megatron's schedule calls for each micro-batch."""
    device = next(model.parameters()).device
    tokens, targets = (part.contiguous() for part in batches.next(device))
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    output = model(tokens, places, None, labels=targets)
    return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})


def mean_loss(losses: list[dict], device: torch.device) -> float:
    """Over micro-batches and data-parallel ranks; only the last stage of a pipeline has losses."""
    total = torch.tensor([sum(loss["loss"].item() for loss in losses), len(losses)], device=device)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def wrong_bytes(optimizer) -> int:
    """Of the codes on this rank, those that are not of the quantized whole masters. Collective."""
    wrong = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        weights, masters, starts = part._get_nvfp4_params_and_shard_fp32_from_nvfp4()
        for weight, master, start in zip(weights, masters, starts, strict=True):
            whole = torch.zeros(weight.numel(), device=weight.device)
            if master is not None:
                whole[start : start + master.numel()] = master
            dist.all_reduce(whole, group=part.data_parallel_group)
            expected = zerofp4.quantize(whole.view(weight.shape).to(weight.dtype))
            wrong += int((expected.rowwise_data != weight.rowwise_data).sum())
    return wrong


def train(options: argparse.Namespace, text: Text, device: torch.device) -> int:
    """Returns the exit code. Collective; Megatron's groups are there."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model, optimizer, scheduler = build(options)
    # Other windows on each data-parallel rank, the same on all ranks that share a model.
    place = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    batches = Batches(text.train, options.batch_size, options.sequence_length, *place, options.seed)
    run = get_forward_backward_func()
    shape = {"seq_length": options.sequence_length, "micro_batch_size": options.batch_size}
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / f"megatron-{options.weights}.jsonl"
    tokens = options.sequence_length * options.batch_size * options.micro_batches
    tokens *= dist.get_world_size() // (options.tp * options.pp)
    with log.open("w") if dist.get_rank() == 0 else Path("/dev/null").open("w") as file:
        for step in range(1, options.steps + 1):
            start = time.perf_counter()
            model.zero_grad_buffer()
            optimizer.zero_grad()
            losses = run(
                forward_step_func=forward,
                data_iterator=batches,
                model=[model],
                num_microbatches=options.micro_batches,
                forward_only=False,
                **shape,
            )
            _, norm, _ = optimizer.step()
            scheduler.step(increment=1)
            loss = mean_loss(losses, device)
            if not math.isfinite(loss):
                say(f"the loss is {loss} at step {step}: try a lower --lr than {options.lr}")
                return 1
            rate = tokens / (time.perf_counter() - start)
            row = {"step": step, "loss": loss, "grad_norm": float(norm), "tokens_per_second": rate}
            file.write(json.dumps(row) + "\n")
            if step % max(1, options.steps // 20) == 0:
                say(f"step {step}: loss {loss:.4f}, {rate:,.0f} tokens/s")
    if options.overlap:
        model.start_param_sync(force_sync=True)
    wrong = torch.tensor([wrong_bytes(optimizer)], device=device)
    dist.all_reduce(wrong)
    say(f"{int(wrong)} bytes of codes on all ranks differ from those of the quantized masters; wrote {log}")
    return int(wrong) > 0


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> int:
    options = parse_options()
    if importlib.util.find_spec("megatron") is None:
        sys.exit(
            "train_megatron.py: Megatron-Core is not there: pip install megatron-core==0.19.2 with Python "
            "3.12 or newer, or unpack its wheel and put that folder on PYTHONPATH"
        )
    text = Text.of_standard_library()
    text.check(options.sequence_length)
    world = init_process_group()
    if world.device.type == "cpu":
        if torch.cuda.is_available():
            sys.exit("train_megatron.py: not a GPU for each rank: start fewer, or set CUDA_VISIBLE_DEVICES=")
        say("no GPU: Megatron runs on the CPU through megatron_on_cpu.py, slowly; choose small sizes")
    with megatron_here(), megatron.install():
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(options.tp, options.pp)
        code = train(options, text, world.device)
        parallel_state.destroy_model_parallel()
    destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
