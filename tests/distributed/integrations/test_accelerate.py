"""accelerate and transformers around a ZeroFP4Optimizer: what they prepare trains on, and what they save."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import zerofp4
from distributed.engine.overlap_cases import OPTIONS, Net, assert_same, loss_of, make
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def make_accelerator(world):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    return accelerate.Accelerator(cpu=world.device.type == "cpu")


@on_ranks(1, 2)
def test_prepared_models_train_as_others(world):
    """One is wrapped in DDP by prepare(), once its optimizer exists, and another before it does."""
    accelerator = make_accelerator(world)
    prepared = make(world)
    net, optimizer = accelerator.prepare(*prepared)
    torch.manual_seed(3)
    other = Net().to(world.device)
    zerofp4.convert_model(other, columnwise=True)
    wrapped = DistributedDataParallel(other, init_sync=False)
    other_optimizer = ZeroFP4Optimizer(other.named_parameters(), FusedAdamW, **OPTIONS)
    for step in range(3):
        loss_of(wrapped, world, step).backward()
        accelerator.backward(loss_of(net, world, step))
        for each in (other_optimizer, optimizer):
            each.step()
            each.zero_grad()
        assert_same([(other, other_optimizer), prepared], f"step {step}")


@on_ranks(1, 2)
def test_a_save_of_rank_0_alone_says_so(world):
    """One rank has all of it, and goes on."""
    accelerator = make_accelerator(world)
    net, optimizer = make(world)
    prepared = accelerator.prepare(optimizer)
    loss_of(net, world, 0).backward()
    prepared.step()
    folder = Path(tempfile.mkdtemp())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.save_state(folder)
    said = [str(w.message) for w in caught if "torch.distributed.checkpoint" in str(w.message)]
    assert bool(said) == (world.world_size > 1 and world.rank == 0)
    assert all("call consolidate_state_dict() of the optimizer" in message for message in said)
    if world.world_size == 1:
        other = make(world)
        other[1].load_state_dict(torch.load(folder / "optimizer.bin", weights_only=True))
        assert_same([(net, optimizer), other], "loaded")


@on_ranks(1, 2)
def test_a_trainer_trains_evaluates_and_goes_on(world):
    """On the CPU it moves the model to "cpu:0", which to torch is another device than "cpu"."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    model.to(world.device, torch.bfloat16)
    zerofp4.convert_model(model)
    optimizer = ZeroFP4Optimizer(model.named_parameters(), FusedAdamW, lr=1e-2)
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    options = {"per_device_train_batch_size": 2, "max_steps": 3, "max_grad_norm": 0, **quiet}
    options["use_cpu"] = world.device.type == "cpu"
    arguments = transformers.TrainingArguments(tempfile.mkdtemp(), **options)
    ids = torch.arange(16)
    data = [{"input_ids": ids, "labels": ids}] * 32
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data[:4], optimizers=(optimizer, None)
    )
    losses = [trainer.evaluate()["eval_loss"]]
    for _ in range(2):
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] > losses[1] > losses[2]
    optimizer.check()
    assert int(optimizer.state_dict()["steps"]) == 6
