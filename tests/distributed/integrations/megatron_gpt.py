"""A small GPT of Megatron-Core's local spec, trained with NVFP4 weights, and what must hold of it.

Import it inside `with megatron_here():` where there is no GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn

from zerofp4 import NVFP4Tensor, quantize
from zerofp4.integrations import megatron

VOCABULARY, LENGTH = 128, 16


@dataclasses.dataclass
class Trained:
    """A model in Megatron's DDP and its optimizer."""

    model: Any
    optimizer: Any
    config: TransformerConfig

    def weights(self) -> dict[str, NVFP4Tensor]:
        return {n: p for n, p in self.model.named_parameters() if isinstance(p, NVFP4Tensor)}

    def optimizers(self) -> list:
        """The DistributedOptimizers: of the dense parameters, and of experts."""
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])


def model(
    *,
    nvfp4: bool = True,
    converted: str | None = None,
    columnwise: bool = False,
    hidden: int = 48,
    layers: int = 2,
    **config,
) -> Float16Module:
    """A GPT on this rank, the same in every call. converted: what the names of converted layers contain; None
    is what is converted by default. config: changes of the TransformerConfig.
    """
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": 4}
    dtypes = {"params_dtype": torch.bfloat16, "bf16": True, "pipeline_dtype": torch.bfloat16}
    off = dict.fromkeys(("gradient_accumulation_fusion", "masked_softmax_fusion", "add_bias_linear"), False)
    off |= dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0)
    ranks = {
        f"{kind}_model_parallel_size": getattr(parallel_state, f"get_{kind}_model_parallel_world_size")()
        for kind in ("tensor", "pipeline", "expert")
    }
    settings = TransformerConfig(use_cpu_initialization=True, **{**sizes, **dtypes, **off, **ranks, **config})
    torch.manual_seed(0)

    def plain_norm(_, config, hidden_size, eps) -> nn.LayerNorm:
        """Megatron's own wrapper of torch's norm refuses sequence parallelism."""
        return nn.LayerNorm(hidden_size, eps)

    with mock.patch.object(WrappedTorchNorm, "__new__", plain_norm):
        gpt = GPTModel(
            settings,
            get_gpt_layer_local_spec(num_experts=settings.num_moe_experts),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
    for name, parameter in gpt.named_parameters():
        if settings.sequence_parallel and "norm" in name:  # as Megatron's own norms have it, with Apex
            parameter.sequence_parallel = True
    made = Float16Module(settings, gpt.to("cuda" if torch.cuda.is_available() else "cpu"))
    if nvfp4:
        chosen = None if converted is None else lambda _, name: converted in name
        megatron.convert_model(made, chosen, columnwise=columnwise)
    return made


def build(
    *, ddp: dict | None = None, optimizer: dict | None = None, nvfp4: bool = True, **options
) -> Trained:
    """The model with these options in Megatron's DDP. ddp and optimizer: changes of their configurations."""
    made = model(nvfp4=nvfp4, **options)
    ddp_options = {"use_distributed_optimizer": True, "fp4_param_gather": nvfp4, "bucket_size": 20_000}
    ddp_config = DistributedDataParallelConfig(**{**ddp_options, **(ddp or {})})
    wrapped = DistributedDataParallel(made.config, ddp_config, made)
    chosen = {"optimizer": "adam", "lr": 1e-2, "weight_decay": 0.1, "bf16": True, "clip_grad": 1.0}
    chosen |= {"use_distributed_optimizer": True, "overlap_param_gather": ddp_config.overlap_param_gather}
    config = OptimizerConfig(**{**chosen, **(optimizer or {})})
    return Trained(wrapped, get_megatron_optimizer(config, [wrapped]), made.config)


def forward(gpt: nn.Module, number: int) -> torch.Tensor:
    """The output for a micro-batch, which is another one on each data-parallel rank: losses of the tokens on
    the last pipeline stage.
    """
    generator = torch.Generator().manual_seed(1000 * number + parallel_state.get_data_parallel_rank())
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    tokens = tokens.to(next(gpt.parameters()).device)
    places = torch.arange(LENGTH, device=tokens.device).expand_as(tokens)
    return gpt(tokens, places, None, labels=tokens.roll(-1, 1))


def step(trained: Trained, index: int, micro_batches: int = 1) -> float:
    """A step of training, through Megatron's own schedule; its loss, on the last pipeline stage."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model, optimizer = trained.model, trained.optimizer
    trained.config.finalize_model_grads_func = finalize_model_grads
    trained.config.no_sync_func = model.no_sync if model.ddp_config.overlap_grad_reduce else None
    model.zero_grad_buffer()
    optimizer.zero_grad()
    numbers = itertools.count(1000 * index)

    def forward_step(_, gpt):
        output = forward(gpt, next(numbers))
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=None,
        model=[model],
        num_microbatches=micro_batches,
        seq_length=LENGTH,
        micro_batch_size=2,
        decoder_seq_length=LENGTH,
        forward_only=False,
    )
    updated, _, _ = optimizer.step()
    assert updated
    return sum(loss["loss"].item() for loss in losses)


def gather_now(trained: Trained) -> None:
    """Where the gather would overlap with the next forward pass: all of it, now."""
    if trained.model.ddp_config.overlap_param_gather:
        trained.model.start_param_sync(force_sync=True)


def forget_routes(trained: Trained) -> None:
    """What dispatchers of tokens keep of the last pass is its graph, and with it the model: a circle that
    Python cannot see.
    """
    for module in trained.model.modules():
        kept = vars(module.token_dispatcher) if hasattr(module, "token_dispatcher") else {}
        kept.update({name: None for name, value in kept.items() if isinstance(value, torch.Tensor)})


def reduced_gradients(trained: Trained) -> dict[torch.nn.Parameter, torch.Tensor]:
    """The whole gradients, as all ranks averaged them and the last step used them."""
    return _whole(trained.optimizers()[0], lambda main: main.grad)


def named_masters(trained: Trained) -> dict[str, torch.Tensor]:
    """The whole FP32 masters."""
    names = {parameter: name for name, parameter in trained.model.named_parameters()}
    found = [item for optimizer in trained.optimizers() for item in _whole(optimizer).items()]
    return {names[parameter]: master for parameter, master in found}


def _whole(optimizer, of_master: Callable = lambda main: main) -> dict[torch.nn.Parameter, torch.Tensor]:
    """For each parameter of a DistributedOptimizer, what all ranks have with their shards of the master."""
    groups = zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True)
    own = {p: main for models, mains in groups for p, main in zip(models, mains, strict=True)}
    found = {}
    for param in (p for buffer in optimizer.buffers for p in buffer.params):
        whole = found[param] = torch.zeros(param.shape, device=param.device)
        if param in own:
            at = optimizer._get_model_param_range_map(param)["param"]
            whole.view(-1)[at.start : at.end] = of_master(own[param])
        bits = whole.view(torch.int32)  # as floats 0.0 + -0.0 would lose a sign
        dist.all_reduce(bits, group=optimizer.data_parallel_group)
    return found


def wrong_bytes(trained: Trained) -> int:
    """How many bytes of the weights on this rank are not those of their quantized masters; other weights are
    compared with their rounded masters.
    """
    wrong, named = 0, dict(trained.model.named_parameters())
    for name, master in named_masters(trained).items():
        found, expected = [named[name].detach()], [master.to(named[name].dtype)]
        if isinstance(named[name], NVFP4Tensor):
            quantized = quantize(*expected, columnwise=named[name].columnwise_data is not None)
            found, expected = ([b for _, b in t.record.buffers()] for t in (named[name], quantized))
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.shape == theirs.shape, name
            wrong += int((mine.view(torch.uint8) != theirs.view(torch.uint8)).sum())
    return wrong


def fingerprints(trained: Trained) -> dict[str, str]:
    """Of the bytes of all NVFP4 weights of the model, by layer and name; from all ranks, which must agree."""
    mine = {}
    for layer in trained.model.module.module.decoder.layers:
        for name, weight in layer.named_parameters():
            if isinstance(weight, NVFP4Tensor):
                buffers = [b.cpu().view(torch.uint8).numpy().tobytes() for _, b in weight.record.buffers()]
                mine[f"{layer.layer_number} {name}"] = hashlib.sha256(b"".join(buffers)).hexdigest()
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    found: dict[str, str] = {}
    for name, digest in (item for others in everyones for item in others.items()):
        assert found.setdefault(name, digest) == digest, f"{name} differs between ranks"
    return found


def _sharded(trained: Trained, is_loading: bool) -> dict:
    model = trained.model.module.sharded_state_dict()
    how = {"distrib_optim_sharding_type": "fully_reshardable"}
    optimizer = trained.optimizer.sharded_state_dict(model, is_loading, metadata=how)
    return {"model": model, "optimizer": optimizer}


def save(trained: Trained, folder: Path) -> None:
    """A distributed checkpoint, in a folder that all ranks see. Collective."""
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    # Results come back through a process of their own, which takes seconds to start.
    with mock.patch.object(filesystem_async, "get_write_results_queue", lambda *_: queue.Queue()):
        dist_checkpointing.save(_sharded(trained, is_loading=False), str(folder))
    dist.barrier()


@contextlib.contextmanager
def with_state(trained: Trained) -> Iterator[None]:
    """Lets Megatron load into the state of torch's Adam: it does not make that before the first step, and its
    step count is a tensor, which Megatron keeps elsewhere and asks for all the same.
    """
    for optimizer in trained.optimizers():
        optimizer._init_optimizer_states_with_dummy_values()
    original = DistributedOptimizer._set_main_param_and_optimizer_states
    with mock.patch.object(
        DistributedOptimizer,
        original.__name__,
        lambda self, param, tensors: original(self, param, {"step": None, **tensors}),
    ):
        yield


def load(trained: Trained, folder: Path, *, weights: bool = True) -> None:
    """As Megatron does: the model, unless only the masters are wanted, then its optimizer. Collective."""
    with with_state(trained):
        state = dist_checkpointing.load(_sharded(trained, is_loading=True), str(folder))
        if weights:
            trained.model.module.load_state_dict(state["model"])
        trained.optimizer.load_state_dict(state["optimizer"])


def save_masters(trained: Trained, path: Path) -> None:
    """The masters and state that this rank's peers have, in a file of the first of them. Collective."""
    trained.optimizer.save_parameter_state(str(path))
    dist.barrier()


def load_masters(trained: Trained, path: Path) -> None:
    with with_state(trained):
        trained.optimizer.load_parameter_state(str(path))
