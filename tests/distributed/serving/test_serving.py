"""Exports and pieces of models that several ranks train."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases.fsdp2 import Collectives
from cases.serving import check_quantized, make_plain, read, served_modules, takes, train
from helpers import assert_bytes_equal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import zerofp4
from distributed.cases import no_space, shared_folder
from distributed.run import on_ranks
from zerofp4 import FourOverSix, serving
from zerofp4.integrations import fsdp2
from zerofp4.optim import FusedAdamW
from zerofp4.serving import files

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
TOKENS = torch.arange(16).view(2, 8)


KINDS = [("Llama", {}), ("Mixtral", {}), ("Llama", {"block": (1, 16), "four_over_six": FourOverSix()})]


def sharded(world, name: str, kind=None) -> tuple[nn.Module, fsdp2.Attachment]:
    """A model that fully_shard has cut, after a step."""
    model = make_plain(name).to(world.device, torch.float32)
    fsdp2.prepare(model, takes, amax_groups=serving.amax_groups(model, takes), **(kind or {}))
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=BF16)
    fully_shard(model, mesh=mesh, mp_policy=BF16)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    attachment = fsdp2.attach(model, optimizer)
    tokens = TOKENS.to(world.device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, attachment


def on_one_machine(model: nn.Module) -> nn.Module:
    """A whole model with the weights that quantizing the whole masters gives, with the amaxes of their
    groups, and bfloat16 values of all others.
    """
    whole, records = make_plain(type(model).__name__.removeprefix("FSDP").removesuffix("ForCausalLM")), {}
    for module, name, weight in fsdp2.prepared_weights(model):
        records[id(module), name] = weight.record
    found = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            value = parameter.detach().full_tensor()
            value = value.local if hasattr(value, "local") else value
            found[f"{prefix}.{name}"] = value.bfloat16(), records.get((id(module), name))
    for prefix, module in whole.named_modules():
        for name in list(module._parameters):
            if f"{prefix}.{name}" in found:
                value, record = found[f"{prefix}.{name}"]
                if record is not None:
                    options = {name: getattr(record, name) for name in ("block", "four_over_six", "stacked")}
                    value = zerofp4.quantize(value, amax=record.amax, **options)
                setattr(module, name, nn.Parameter(value, requires_grad=False))
    return whole


def read_alone(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """What a process without others writes."""
    with mock.patch("zerofp4.serving.save.resolve_group", lambda group: None):
        serving.save_pretrained(model, folder)
    return read(folder)


@on_ranks(2)
def test_what_keeps_an_export_from_being_written_all_ranks_raise(world):
    """Stale codes, a full disk of the rank that writes, which leaves the last export whole, and no codes."""
    model, attachment = sharded(world, "Llama")
    folder = shared_folder(world)
    if world.rank == 1:
        with torch.no_grad():
            model.model.layers[0].self_attn.o_proj.weight.to_local().mul_(2)
    with pytest.raises(RuntimeError, match=r"rank 1: the master of .*o_proj\.weight' was written to"):
        serving.save_pretrained(model, folder)
    attachment.refresh()
    serving.save_pretrained(model, folder)
    before = read(folder)
    with pytest.raises((OSError, RuntimeError), match="No space left"):
        with mock.patch.object(files.Export, "add", no_space if world.rank == 0 else None):
            serving.save_pretrained(model, folder)
    found = read(folder)
    assert found.keys() == before.keys() and all(found[key].equal(before[key]) for key in before)
    attachment.detach()
    with pytest.raises(RuntimeError, match=r"rank 0: 'model\..*' has no codes yet: call .*attach"):
        serving.save_pretrained(model, folder)


@on_ranks(2)
def test_slices_of_tensor_parallelism_are_refused(world):
    model = make_plain("Llama", num_hidden_layers=1).to(world.device, torch.float32)
    mesh = init_device_mesh(world.device.type, (1, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"model.layers.0.self_attn.o_proj": RowwiseParallel()})
    fsdp2.prepare(model, lambda module, name: name.endswith("o_proj"))
    fully_shard(model, mesh=mesh["data"], mp_policy=BF16)
    attachment = fsdp2.attach(model, FusedAdamW(model.parameters(), lr=1e-3))
    with pytest.raises(ValueError, match=r"o_proj\.weight cannot be served: under tensor parallelism"):
        serving.save_pretrained(model, shared_folder(world))
    attachment.detach()


@on_ranks(2, nightly=[3])
def test_ranks_with_other_models_are_refused(world):
    """As stages of a pipeline have, or experts of their own."""
    model = make_plain("Llama", seed=world.rank).to(world.device)
    zerofp4.convert_model(model, lambda module, name: name.endswith("o_proj"))
    folder = shared_folder(world)
    with pytest.raises(ValueError, match="rank 1 has another model than rank 0, or other amaxes"):
        serving.save_pretrained(model, folder)
    assert not list(folder.iterdir())


# What they are, written and sent in pieces


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that can be pickled, as float8 cannot."""
    return tensor.clone() if tensor.dtype.itemsize > 1 else tensor.view(torch.uint8).clone()


def check_pieces(world, model: nn.Module, dtype: torch.dtype | None) -> None:
    """The pieces of all ranks, put together, are the whole tensors; taking them calls no collective."""
    served = serving.weights(model, dtype=dtype)
    with Collectives() as collectives:
        pieces = [(name, as_bytes(tensor).cpu(), part) for name, tensor, part in served]
    assert collectives.calls == []
    by_rank = [None] * world.world_size
    dist.all_gather_object(by_rank, pieces)
    whole = dict(served.whole())
    assert list(whole) == served.names
    for announced in served.served:
        tensor = whole[announced.name]
        assert (tensor.dtype, tuple(tensor.shape)) == announced[1:]
        tensor = as_bytes(tensor).cpu()
        rows = tensor.shape[0] if tensor.dim() else 1
        taken = torch.zeros(rows, dtype=torch.bool)
        for own in by_rank:
            for name, piece, part in own:
                if name != announced.name:
                    continue
                assert part.shape == announced.shape
                mine = tensor[part.first : part.first + piece.shape[0]] if tensor.dim() else tensor
                assert_bytes_equal(piece, mine, name)
                taken[part.first : part.first + max(piece.shape[0] if piece.dim() else 1, 1)] = True
        assert taken.all(), announced


@on_ranks(2, nightly=[3])
@pytest.mark.parametrize(("name", "kind"), KINDS, ids=str)
def test_sharded_models_are_those_of_one_machine(world, name, kind):
    """As files and in pieces, of which all ranks send 9/16 of a byte an element."""
    model, _ = sharded(world, name, kind)
    folder, other = shared_folder(world), shared_folder(world)
    serving.save_pretrained(model, folder, dtype=torch.bfloat16)
    whole = on_one_machine(model)
    if world.rank == 0:
        found, expected = read(folder), read_alone(whole, other)
        most = 6 * FourOverSix().e4m3_max if kind else 2688
        assert check_quantized(whole, found, "compressed-tensors", most) == len(served_modules(whole))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_bytes_equal(found[key], value, key)
    check_pieces(world, model, torch.bfloat16)
    numel = sum(weight.record.shape.numel() for *_, weight in fsdp2.prepared_weights(model))
    quantized = ("weight_packed", "weight_scale")
    sent = sum(t.nbytes for n, t, _ in serving.weights(model) if n.endswith(quantized))
    sent = torch.tensor(sent, device=world.device)
    dist.all_reduce(sent)
    assert sent * 16 == numel * 9


@on_ranks(2, nightly=[3])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_zero_ranks_serve_what_they_trained(world, name):
    model = make_plain(name).to(world.device)
    optimizer = train(model)
    folder = shared_folder(world)
    serving.save_pretrained(model, folder, optimizer)
    if world.rank == 0:
        assert check_quantized(model, read(folder), "compressed-tensors") == len(served_modules(model))
    check_pieces(world, model, None)
    assert all(tensor.shape == part.shape for _, tensor, part in serving.weights(model))
