"""Models out of a ZeRO run: masters, averages, safetensors, ordinary parameters; another optimizer."""

import copy
import importlib.util
import math
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases.optim import assert_all_equal
from helpers import assert_bytes_equal
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import zerofp4
from distributed.cases import no_space, shared_folder
from distributed.run import on_ranks
from distributed.state.cases import Model, build, run, saved, trained, whole
from zerofp4.optim import AveragedMasters, ZeroFP4Optimizer
from zerofp4.serving import files


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["adamw", "compact"])
def test_the_model_of_the_masters(world, case, dtype):
    """In its own keys, and as an ordinary one in its place."""
    model, optimizer = trained(world, case=case)
    found = dict(zerofp4.master_state_dict(model, optimizer, dtype))
    assert list(found) == list(model.state_dict())
    for (name, p), master in zip(model.named_parameters(), optimizer.gathered_masters(), strict=True):
        expected = p.detach() if master is None else master
        assert_bytes_equal(found[name], expected.to(dtype), name)
    storages = {tensor.untyped_storage().data_ptr() for tensor in found.values() if tensor.numel()}
    assert len(storages) == sum(p.numel() > 0 for p in model.parameters())
    masters = dict(zerofp4.master_state_dict(model, optimizer))
    with pytest.raises(RuntimeError, match=r"first\.weight is held by a ZeroFP4Optimizer"):
        zerofp4.unconvert_model(model)
    assert {"first.weight", "second.weight"} <= set(zerofp4.unconvert_model(model, optimizer))
    for name, p in model.named_parameters():
        assert type(p) is nn.Parameter
        assert_bytes_equal(p.detach(), masters[name].to(p.dtype), name)
    with pytest.raises(RuntimeError, match="was replaced in its module"):
        run(model, optimizer, range(1))


@pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="safetensors is not installed")
@on_ranks(1, 2)
def test_safetensors_are_written_in_shards(world):
    import safetensors.torch as safetensors

    model, optimizer = trained(world)
    path, names = shared_folder(world), []
    expected = dict(zerofp4.master_state_dict(model, optimizer, torch.bfloat16))
    for shards, size in [(1, files.SHARD_BYTES), (3, 3500)]:
        with mock.patch.object(files, "SHARD_BYTES", size):
            zerofp4.save_safetensors(model, path, optimizer, torch.bfloat16)
        if world.rank == 0:
            index, names = path / "model.safetensors.index.json", sorted(path.glob("*.safetensors"))
            assert len(names) == shards and index.exists() == (shards > 1)
            found = {key: value for name in names for key, value in safetensors.load_file(name).items()}
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert_bytes_equal(found[key], value.cpu(), key)
    run(model, optimizer, range(2, 3))
    with pytest.raises((OSError, RuntimeError), match="No space left"):  # of the rank that writes, on all
        with mock.patch.object(files.Export, "add", no_space if world.rank == 0 else None):
            zerofp4.save_safetensors(model, path, optimizer, torch.bfloat16)
    if world.rank == 0:
        assert set(path.iterdir()) == {*names, index}


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("case", ["adamw", "fused", "compact"])
def test_weights_that_were_written_to_are_exported_and_saved(world, case):
    """Trainer loads its best model and saves then. The masters are those of a new optimizer, but for elements
    that are what their master gave before, too.
    """
    model, optimizer = trained(world, case=case)
    best, averages = copy.deepcopy(model.state_dict()), AveragedMasters(optimizer)
    average = dict(zerofp4.master_state_dict(model, averages))
    run(model, optimizer, range(2, 4))
    model.load_state_dict(best)
    beside = copy.deepcopy(model)
    expected = dict(zerofp4.master_state_dict(beside, build(beside, case)))

    def check(model, source, expected=expected):
        found = dict(zerofp4.master_state_dict(model, source))
        for name, p in model.named_parameters():
            if p.requires_grad:
                dtype = torch.float32 if isinstance(p, zerofp4.NVFP4Tensor) else p.dtype
                assert_bytes_equal(found[name].to(dtype), expected[name].to(dtype), name)

    check(model, optimizer)
    check(model, AveragedMasters(optimizer))
    check(model, averages, average)
    for own in ({}, {"full_state_dict": True}):
        state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**own))
        other, loaded = trained(world, 0, case, seed=1)
        set_optimizer_state_dict(other, loaded, state, options=StateDictOptions(**own))
        check(other, loaded)
    path = saved(world, optimizer)
    other, loaded = trained(world, 0, case, seed=1)
    dcp.load({"optimizer": loaded}, checkpoint_id=path)
    check(other, loaded)
    with pytest.raises(RuntimeError, match="was written to since the last step"):
        run(model, optimizer, range(4, 5))
    dcp.load({"optimizer": optimizer}, checkpoint_id=path)
    check(model, optimizer)
    run(model, optimizer, range(4, 5))
    model.load_state_dict(best)
    zerofp4.unconvert_model(model, optimizer)
    for name in ("first.weight", "second.weight"):
        assert_bytes_equal(model.get_parameter(name).detach(), expected[name].to(best[name].dtype), name)


@on_ranks(1, 2, 3)
def test_a_new_optimizer_goes_on_from_an_old_one_with_more_parameters(world):
    """Unfrozen and added ones begin anew, the others keep masters and moments; groups may differ."""
    model, old = trained(world, case="fused")
    expected = dict(zerofp4.master_state_dict(model, old))
    moments = {
        name: whole(old.state[p]["exp_avg"]) for name, p in model.named_parameters() if p.requires_grad
    }
    model.frozen.requires_grad_(True)
    model.added = nn.Parameter(torch.ones(3, device=world.device))
    with pytest.raises(RuntimeError, match=r"have it load_state_dict\(\) this one's state_dict\(\)"):
        run(model, old, range(1))
    named = list(model.named_parameters())
    new = build(model, "fused", groups=[{"params": named[::2]}, {"params": named[1::2], "lr": 0.5}])
    new.load_state_dict(old.state_dict())
    found = dict(zerofp4.master_state_dict(model, new))
    assert_all_equal([found[name] for name in expected], list(expected.values()), "master")
    for name, p in named:
        entries = new.state[p]
        if name in moments:
            assert_bytes_equal(whole(entries["exp_avg"]), moments[name], name)
        else:
            assert not whole(entries["exp_avg"]).any() and not whole(entries["step"])
    assert [group["lr"] for group in new.param_groups] == [0.01, 0.01]
    run(model, new, range(2, 4))


@on_ranks(2)
def test_a_frozen_quantized_weight_has_its_values(world):
    model = Model().to(world.device)
    weight = model.first.weight.requires_grad_(False)
    optimizer = build(model)
    weight.clear_high_precision_init_val()
    found = dict(zerofp4.master_state_dict(model, optimizer))
    assert_bytes_equal(found["first.weight"], weight.dequantize(torch.float32), "first.weight")


# AveragedMasters: an average of masters that are sharded


DECAY = 0.9


def averaged(world, steps=3, case="adamw"):
    """A model, its optimizer, the averages, and what they have to be: by hand, of whole masters."""
    model, optimizer = trained(world, 0, case)
    averages = AveragedMasters(optimizer, DECAY)
    expected = dict(zerofp4.master_state_dict(model, optimizer))
    for step in range(steps):
        run(model, optimizer, [step])
        averages.update()
        expected = by_hand(expected, model, optimizer)
    return model, optimizer, averages, expected


def by_hand(expected, model, optimizer):
    masters = dict(zerofp4.master_state_dict(model, optimizer))
    return {name: DECAY * expected[name] + (1 - DECAY) * masters[name] for name in masters}


def check(model, averages, expected):
    found = dict(zerofp4.master_state_dict(model, averages))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if name != "frozen":
            assert_bytes_equal(value, expected[name], name)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("case", ["adamw", "fused", "muon", "compact"])
def test_the_average_is_that_of_whole_masters(world, case):
    model, optimizer, averages, expected = averaged(world, case=case)
    check(model, averages, expected)
    model.cube.grad = torch.full_like(model.cube, math.nan)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    averages.update()
    check(model, averages, by_hand(expected, model, optimizer))


@on_ranks(1, 2)
def test_averages_are_saved_and_loaded(world):
    _, _, averages, expected = averaged(world)
    path = shared_folder(world)
    dcp.save({"averages": averages}, checkpoint_id=path)
    other, optimizer, loaded, _ = averaged(world, steps=1)
    dcp.load({"averages": loaded}, checkpoint_id=path)
    check(other, loaded, expected)
    run(other, optimizer, [1])
    loaded.update()
    check(other, loaded, by_hand(expected, other, optimizer))
    loaded.load_state_dict(averages.state_dict())
    check(other, loaded, expected)
    alone = [dist.new_group([rank]) for rank in range(world.world_size)][world.rank]
    other, optimizer = trained(world, 0, group=alone)
    loaded = AveragedMasters(optimizer, DECAY)
    dcp.load({"averages": loaded}, checkpoint_id=path, no_dist=True)
    check(other, loaded, expected)


@on_ranks(1, 2)
def test_averages_go_by_name_to_an_optimizer_with_other_groups(world):
    """Numbers would exchange layers of one shape, and nobody would notice."""
    model = nn.Sequential(*[nn.Linear(48, 32, dtype=torch.bfloat16) for _ in range(3)]).to(world.device)
    zerofp4.convert_model(model)
    named = list(model.named_parameters())
    averages = AveragedMasters(build(model, "fused"), DECAY)
    expected = dict(zerofp4.master_state_dict(model, averages))
    kept = averages.state_dict()
    groups = [{"params": named[4:]}, {"params": named[:4]}]
    other = AveragedMasters(build(model, "fused", groups=groups), DECAY)
    other.load_state_dict(kept)
    check(model, other, expected)


@on_ranks(1, 2)
def test_averages_that_lack_one_are_refused_and_the_others_make_an_ordinary_model(world):
    model, _, averages, expected = averaged(world)
    state = averages.state_dict()
    if world.rank == world.world_size - 1:
        state["state"].popitem()
    with pytest.raises(ValueError, match=r"\.average is missing"):
        averages.load_state_dict(state)
    check(model, averages, expected)
    zerofp4.unconvert_model(model, averages)
    for p, name in ((model.first.weight, "first.weight"), (model.second.weight, "second.weight")):
        assert type(p) is torch.nn.Parameter
        assert_bytes_equal(p.detach(), expected[name].to(p.dtype), name)


# Models that other packages write beside the optimizer: every tensor with its values, nothing else


BF16 = torch.bfloat16
AROUND = 24 << 10
"""Bytes that a file may have beside its tensors: names and shapes."""


def tiny_llama(world, tied):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(5)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).to(world.device, BF16)
    for layer in model.model.layers:  # of several dtypes, as models are trained
        layer.input_layernorm.float()
        layer.input_layernorm.register_forward_hook(lambda _, __, y: y.to(BF16))
    zerofp4.convert_model(model)
    return model


def by_accelerate(model, folder):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.Accelerator(cpu=not torch.cuda.is_available()).save_model(model, folder)


def by_safetensors(model, folder):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    safetensors.save_model(model, folder / "model.safetensors")


WAYS = {
    "safetensors": by_safetensors,
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "accelerate": by_accelerate,
}


@on_ranks(1, 2)
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_is_written(world, tied):
    """A tied one once, which is read under both names. Before register_plain_state_dict() what cannot hold a
    quantized tensor names it.
    """
    model = tiny_llama(world, tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    optimizer = ZeroFP4Optimizer(model.named_parameters(), lr=0.01)
    tokens = torch.arange(8, device=world.device).view(1, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    for save in WAYS.values():
        with pytest.raises(
            TypeError, match=r"cannot hold the NVFP4Tensor .*zerofp4\.register_plain_state_dict"
        ):
            save(model, Path(tempfile.mkdtemp()))
    zerofp4.register_plain_state_dict(model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    assert len(expected) == 21
    once = sum(value.nbytes for name, value in expected.items() if not tied or name != "lm_head.weight")
    for way, save in WAYS.items():
        folder, found = Path(tempfile.mkdtemp()), {}
        save(model, folder)
        if way != "safetensors" and world.rank:  # rank 0 alone writes
            continue
        for path in folder.glob("*.safetensors"):
            found |= pytest.importorskip("safetensors.torch").load_file(path)
        assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) < once + AROUND, way
        missing = expected.keys() - found.keys()
        assert found.keys() <= expected.keys(), way
        assert not missing or (tied and missing < {"lm_head.weight", "model.embed_tokens.weight"}), way
        for name, value in found.items():
            assert_bytes_equal(value.to(world.device), expected[name], f"{way}, {name}")
