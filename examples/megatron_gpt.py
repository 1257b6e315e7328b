"""Megatron-Core with NVFP4 weights: its GPT, its DistributedDataParallel, its distributed optimizer.

    torchrun --nproc-per-node 2 examples/megatron_gpt.py

Needs GPUs and Megatron-Core 0.18 or 0.19, but no TransformerEngine.
"""

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

import zerofp4
from zerofp4.integrations import megatron

LENGTH, VOCABULARY, STEPS = 32, 64, 20
world = zerofp4.launch.init_process_group()
parallel_state.initialize_model_parallel()
torch.manual_seed(0)
model_parallel_cuda_manual_seed(0)
megatron.install()
config = TransformerConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    params_dtype=torch.bfloat16,
    bf16=True,
    gradient_accumulation_fusion=False,  # these two need Apex
    masked_softmax_fusion=False,
    finalize_model_grads_func=finalize_model_grads,
)
gpt = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH)
model = Float16Module(config, gpt.cuda())
report = megatron.convert_model(model)  # before DistributedDataParallel
ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, fp4_param_gather=True)
model = DistributedDataParallel(config, ddp_config, model)
options = OptimizerConfig(optimizer="adam", lr=1e-2, bf16=True, use_distributed_optimizer=True)
optimizer = get_megatron_optimizer(options, [model])

generator = torch.Generator().manual_seed(1 + world.rank)  # each rank has batches of its own
places = torch.arange(LENGTH, device=world.device).expand(8, LENGTH)


def forward(_, model):
    """One micro-batch: the sequences count up from a random token."""
    first = torch.randint(VOCABULARY, (8, 1), generator=generator).to(world.device)
    tokens = (first + places) % VOCABULARY
    output = model(tokens, places, None, labels=(tokens + 1) % VOCABULARY)
    return output, lambda losses: (losses.mean(), {"loss": losses.mean().item()})


run, losses = get_forward_backward_func(), []
batch = {"num_microbatches": 1, "seq_length": LENGTH, "micro_batch_size": 8, "forward_only": False}
for _ in range(STEPS):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    (told,) = run(forward_step_func=forward, data_iterator=None, model=[model], **batch)
    optimizer.step()
    losses.append(told["loss"])
print(f"rank {world.rank} of {world.world_size}: {report}; loss {losses[0]:.3f}, then {losses[-1]:.3f}")
assert losses[-1] < losses[0]
if world.rank == 0:
    print("Megatron-LM trained NVFP4 weights, and the loss fell.")
parallel_state.destroy_model_parallel()
zerofp4.launch.destroy_process_group()
