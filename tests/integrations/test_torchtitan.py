"""gather_in_nvfp4 with a stand-in for torchtitan: what it changes, the order of its calls, what it refuses.

tests/distributed/integrations/test_torchtitan.py has the package itself.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from cases.fsdp2 import Model, check_gathered, inject, shard, take_experts
from cases.torchtitan_stand_in import config_of, torchtitan_stands_in
from torch import nn
from torch.distributed.tensor import DTensor

from zerofp4.integrations.torchtitan import gather_in_nvfp4
from zerofp4.optim import FusedAdamW


@pytest.fixture
def optimizers_class():
    with torchtitan_stands_in() as found:
        yield found


class Titan(Model):
    """parallelize() replaces a parameter, as torchtitan's does where ranks have slices."""

    def parallelize(self, dims: Any) -> None:
        self.second.weight = nn.Parameter(self.second.weight.detach() + dims.added)


class Part(nn.Module):
    """A pipeline stage without linear layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 4)


def shards(mesh, calls=True):
    """A parallelize_fn. calls: whether it calls the model's parallelize() when it must."""

    def parallelize_fn(model, *, parallel_dims, training, parallelism):
        splits = parallel_dims.tp_enabled or parallelism.spmd_backend != "partial_dtensor"
        if splits and calls:
            model.parallelize(parallel_dims)
        return shard(model, mesh)

    return parallelize_fn


def sharded(config, model, backend="partial_dtensor", tensor_parallel=False) -> nn.Module:
    """As torchtitan's Trainer shards a model."""
    return config.model_spec.parallelize_fn(
        model,
        parallel_dims=types.SimpleNamespace(tp_enabled=tensor_parallel, ep_enabled=False, added=1.0),
        training=config.training,
        parallelism=types.SimpleNamespace(spmd_backend=backend),
    )


@pytest.mark.parametrize("optimizer", [None, "FusedAdamW"])
@pytest.mark.parametrize(
    ("backend", "tensor_parallel"),
    [("partial_dtensor", False), ("partial_dtensor", True), ("spmd_types", False)],
)
def test_a_run_trains_masters_and_gathers_codes(optimizers_class, mesh, backend, tensor_parallel, optimizer):
    config = gather_in_nvfp4(config_of(shards(mesh)), optimizer, filter_fn=take_experts)
    assert config.training.disable_cuda_graphs and config.optimizer.implementation == "foreach"
    model = Titan()
    value = model.second.weight.detach() + (backend != "partial_dtensor" or tensor_parallel)
    assert sharded(config, model, backend, tensor_parallel) is model
    assert "parallelize" not in vars(model)
    optimizers = optimizers_class(config.optimizer, model_parts=[model, Part()])
    assert type(optimizers.optimizers[0]) is (FusedAdamW if optimizer else torch.optim.AdamW)
    assert len(optimizers.attachments) == 1
    assert model.state_dict()["second.weight"].to_local().equal(value)
    check_gathered(model)
    inject(model, 0)
    optimizers.optimizers[0].step()
    check_gathered(model)


def test_only_groups_of_adamw_change_their_optimizer(optimizers_class, mesh):
    config = gather_in_nvfp4(config_of(shards(mesh), ("AdamW", "DistMuon", "AdamW")), "FusedAdamW")
    names = [group.optimizer_name for group in config.optimizer.param_groups]
    assert names == ["FusedAdamW", "DistMuon", "FusedAdamW"]
    with pytest.raises(KeyError, match="Nothing"):
        optimizers_class._resolve_optimizer_factory("Nothing")


def test_a_seed_checkpoint_is_that_of_a_plain_model(optimizers_class, mesh):
    """torchtitan shards nothing then."""
    config, model = gather_in_nvfp4(config_of(shards(mesh)), "FusedAdamW"), Titan()
    optimizers = optimizers_class(config.optimizer, model_parts=[model])
    assert optimizers.attachments == []
    assert not any(isinstance(value, DTensor) for value in model.state_dict().values())


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("dtype", "bfloat16", r'training.dtype is "bfloat16", and masters are float32: set it to "float32"'),
        ("disable_cuda_graphs", False, r"training.disable_cuda_graphs is False.*Leave it True"),
    ],
)
def test_options_that_the_command_line_changed(optimizers_class, mesh, option, value, message):
    config, model = gather_in_nvfp4(config_of(shards(mesh))), Titan()
    setattr(config.training, option, value)
    with pytest.raises(ValueError, match=message):
        sharded(config, model)
    assert type(model.first.weight) is nn.Parameter


def test_a_model_whose_parallelize_is_not_called(optimizers_class, mesh):
    """Its weights would be gathered in bf16, and nobody would know."""
    config = gather_in_nvfp4(config_of(shards(mesh, calls=False)))
    with pytest.raises(RuntimeError, match=r"Titan was sharded without a call of its parallelize\(\)"):
        sharded(config, Titan(), tensor_parallel=True)
