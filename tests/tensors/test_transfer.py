"""How quantized tensors travel: stagers, pinned memory, collectives, and who would cut them into pieces."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases.mxfp8 import formats
from helpers import assert_all_equal, assert_bytes_equal
from tensor_helpers import addresses, assert_quantized, assert_record_equal, make, values
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zerofp4
from zerofp4.tensors import dispatch, transfer

# Stagers


@formats
def test_new_empty_with_a_device_is_of_the_same_format(device, make_format):
    t = make_format(device)
    there = t.new_empty(t.size(), device="cpu")
    assert type(there) is type(t) and there.device.type == "cpu" and there.shape == t.shape
    assert set(addresses(there)) == set(addresses(t))
    assert not set(addresses(there).values()) & set(addresses(t).values())
    plain = (t.new_empty((3, 4), device="cpu"), t.new_empty(t.shape), t.new_empty(t.shape, dtype=torch.int32))
    assert all(type(other) is torch.Tensor for other in plain)
    assert plain[1].dtype == t.dtype and plain[1].device == t.device


@formats
def test_to_empty_keeps_the_format(device, make_format):
    model = nn.Linear(80, 48, dtype=torch.bfloat16, device=device)
    model.weight = nn.Parameter(make_format(device))
    for where in (lambda: model.to_empty(device=device), lambda: model.to("meta").to_empty(device=device)):
        where()
        assert isinstance(model.weight, nn.Parameter) and type(model.weight) is type(make_format(device))
        assert model.weight.device.type == device.type and set(addresses(model.weight))
    t = make_format(device)
    for like in (torch.empty_like(t), torch.zeros_like(t), torch.zeros_like(t, device="cpu")):
        assert type(like) is torch.Tensor and like.dtype == t.dtype


@formats
def test_a_staged_copy_has_the_bytes(device, make_format):
    t = make_format(device)
    t.record.name, t.record.attachments["plans"] = "layers.0", [object()]
    staged = StateDictStager().stage({"weight": t})["weight"]
    assert type(staged) is type(t) and staged.device.type == "cpu" and not staged.record.attachments
    assert_record_equal(staged, t.cpu())
    assert staged.record.name == "layers.0" and staged.record.columnwise_amax is staged.record.amax
    t.zero_()
    assert staged.dequantize().any(), "the staged copy shares no buffer"


def test_async_save_writes_what_there_was(world_of_one, tmp_path):
    model = nn.Linear(80, 48, dtype=torch.bfloat16)
    zerofp4.convert_model(model)
    expected = model.weight.detach().clone()
    future = dcp.async_save(model.state_dict(), checkpoint_id=tmp_path)
    model.weight.data.zero_()
    future.result()
    dcp.load(model.state_dict(), checkpoint_id=tmp_path)
    assert_record_equal(model.weight, expected)


@formats
def test_pinned_memory_and_streams(device, make_format):
    t = make_format("cpu")
    assert not t.is_pinned()
    if device.type != "cuda":
        return
    pinned = t.pin_memory()
    assert type(pinned) is type(t) and pinned.is_pinned()
    assert all(b.is_pinned() for _, b in pinned.record.buffers())
    assert not t.is_pinned()
    assert_record_equal(pinned, t)
    make_format(device).record_stream(torch.cuda.Stream())


@formats
def test_record_stream_reaches_every_buffer(make_format, monkeypatch):
    """On the CPU there is no stream to record: a stand-in takes the operator's place."""
    t, seen = make_format("cpu"), []
    operator = torch.ops.aten.record_stream.default
    assert dispatch.HANDLERS[operator] is transfer.record_stream
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda buffer, stream: seen.append(buffer))
    transfer.record_stream(t, None)
    assert [b.data_ptr() for b in seen] == [b.data_ptr() for _, b in t.record.buffers()]


@formats
@pytest.mark.parametrize("pin_memory", [False, True])
def test_saved_tensors_on_the_cpu_give_the_same_gradients(device, make_format, pin_memory):
    weight = nn.Parameter(make_format(device))
    x = values(4, 80, device=device).requires_grad_()
    gradients = []
    for hooks in (contextlib.nullcontext(), torch.autograd.graph.save_on_cpu(pin_memory=pin_memory)):
        with hooks:
            out = nn.functional.linear(x, weight)
        gradients.append(torch.autograd.grad(out.square().sum(), (x, weight)))
    assert_all_equal(*gradients, "gradient")


# Collectives


def outputs(t):
    plain = torch.ones(t.shape, dtype=t.dtype)
    return {
        "all_reduce": lambda: dist.all_reduce(t),
        "all_reduce of a list": lambda: dist.all_reduce_coalesced([t]),
        "reduce": lambda: dist.reduce(t, 0),
        "scatter": lambda: dist.scatter(t, [plain], src=0),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(t, plain),
        "reduce_scatter": lambda: dist.reduce_scatter(t, [plain]),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(t, plain),
        "all_to_all": lambda: dist.all_to_all([t], [plain]),
        "all_to_all_single": lambda: dist.all_to_all_single(t, plain),
        "recv": lambda: dist.group.WORLD.recv([t], 0, 0),
    }


@pytest.mark.parametrize("name", outputs(torch.ones(2, 2)))
@pytest.mark.filterwarnings("ignore")
def test_a_collective_that_would_write_raises(world_of_one, name):
    t = make("cpu")
    before = t.clone()
    with pytest.raises(RuntimeError, match=r"the collective \w+ would write to an NVFP4Tensor"):
        outputs(t)[name]()
    assert_record_equal(t, before)


@pytest.mark.parametrize("gather", [dist.all_gather, lambda into, t: dist.gather(t, into, dst=0)])
def test_gathered_into_a_list_are_values(world_of_one, gather):
    """torch gathers into plain memory and copies from there, which requantizes."""
    t, x = make("cpu"), values(48, 80, seed=1)
    gather([t], x)
    assert_quantized(t, x)


def test_a_collective_reads_the_values(world_of_one):
    t, plain = make("cpu"), torch.ones(48, 80, dtype=torch.bfloat16)
    dist.all_gather([plain], t)
    assert_bytes_equal(plain, t.dequantize(), "gathered")


@formats
def test_broadcast_in_a_world_of_one(world_of_one, make_format):
    t = make_format("cpu")
    before, version = t.clone(), t._version
    dist.broadcast(t, 0)
    dist.broadcast(t, 0, async_op=True).wait()
    assert_record_equal(t, before)
    assert t._version > version


# Who makes plain parameters of what a model holds


def converted():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    zerofp4.convert_model(model)
    return model


def replicate_without_a_call(model, mesh):
    """No operator sees the weight before the product."""
    weight = distribute_tensor(model[0].weight, mesh, [Replicate()])
    nn.functional.linear(DTensor.from_local(torch.ones(4, 32), mesh), weight)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (lambda m, mesh: fully_shard(m, mesh=mesh), "FSDP cannot shard.*zerofp4.integrations.fsdp2"),
        (lambda m, mesh: fully_shard(m[0], mesh=mesh), "FSDP cannot shard.*zerofp4.integrations.fsdp2"),
        (
            lambda m, mesh: parallelize_module(m, mesh, {"0": ColwiseParallel()}),
            "DTensor and tensor parallel",
        ),
        (lambda m, mesh: distribute_tensor(m[0].weight, mesh, [Shard(0)]), "DTensor and tensor parallelism"),
        (replicate_without_a_call, "DTensor and tensor parallelism are not supported"),
    ],
)
def test_sharding_a_converted_model_is_an_error_in_the_call_or_the_first_forward(
    world_of_one, shard, message
):
    mesh, model = init_device_mesh("cpu", (1,)), converted()
    with pytest.raises(NotImplementedError, match=message):
        shard(model, mesh)
        model(torch.ones(4, 32))


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch's older FSDP needs an accelerator")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_older_fsdp(world_of_one, use_orig_params):
    with pytest.raises(NotImplementedError, match="FSDP cannot shard"):
        FullyShardedDataParallel(converted(), use_orig_params=use_orig_params)


def test_fsdp_may_leave_quantized_weights_alone(world_of_one):
    model = converted()
    ignored = {p for p in model.parameters() if isinstance(p, zerofp4.NVFP4Tensor)}
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), ignored_params=ignored)
    model(torch.ones(4, 32)).sum().backward()
    assert isinstance(model[0].weight, zerofp4.NVFP4Tensor) and model[0].weight.grad is not None


# Inference mode


@formats
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode, torch.no_grad])
def test_conversions_are_those_of_the_values_in_every_mode(device, make_format, mode):
    t = make_format(device)
    assert t.dtype == torch.bfloat16
    exact = t.dequantize(torch.float64)
    if isinstance(t, zerofp4.NVFP4Tensor):  # whose values need more than bfloat16
        assert (exact != t.dequantize().double()).any()
    with mode():
        for dtype, ways in {
            torch.float32: (lambda: t.float(), lambda: t.type_as(torch.ones(1))),
            torch.float16: (lambda: t.half(), lambda: t.to(torch.ones(1).half().to(device))),
            torch.float64: (lambda: t.double(), lambda: t.to(t.device, torch.float64)),
        }.items():
            assert_bytes_equal(t.dequantize(dtype), exact.to(dtype), f"exact values as {dtype}")
            for way in (*ways, lambda dtype=dtype: t.to(dtype), lambda dtype=dtype: t.type(dtype)):
                assert type(way()) is torch.Tensor
                assert_bytes_equal(way().cpu(), t.dequantize().to(dtype).cpu(), str(dtype))
        assert t.dequantize().dtype == t.dtype and t.bfloat16() is t


@formats
def test_moves_in_inference_mode_keep_the_format(device, make_format):
    t = make_format(device)
    with torch.inference_mode():
        for way in (lambda: t.to("cpu", copy=True), lambda: t.cpu(), lambda: t.to(t.device, copy=True)):
            assert type(way()) is type(t)
            assert_record_equal(way().cpu(), t.cpu())
        model = nn.Linear(80, 48, dtype=torch.bfloat16, device=device)
        model.weight = nn.Parameter(t)
        model.to("meta")
        assert type(model.weight) is type(t) and isinstance(model.weight, nn.Parameter)
        assert model.weight.device.type == "meta"


# Sizes


@formats
def test_nbytes_are_those_of_the_buffers(make_format):
    t = make_format("cpu")
    assert t.nbytes == sum(buffer.nbytes for _, buffer in t.record.buffers())
    assert nn.Parameter(t).nbytes == t.nbytes
    codes_and_scales = zerofp4.quantize(values(128, 256, dtype=torch.float32))
    assert codes_and_scales.nbytes == 128 * 128 + 8 * 16 + 4


@pytest.mark.parametrize(
    ("options", "per_element"),
    [
        ({"block": (16, 16)}, 1 / 2 + 1 / 256),
        ({"block": (1, 16)}, 1 / 2 + 1 / 16),
        ({"columnwise": True}, 1 + 1 / 128),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_over_the_parameters_of_a_model(dtype, options, per_element):
    """nbytes is the truth, also if an optimizer owns the codes. element_size() cannot be a fraction."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(3)))
    zerofp4.convert_model(model, **options)
    numel = 3 * 64 * 64
    amaxes = 3 * 4
    optimizer = None
    for _ in range(2):
        weights = list(model.parameters())
        assert sum(p.nbytes for p in weights) == numel * per_element + amaxes
        assert sum(p.data.nbytes for p in weights) == sum(p.nbytes for p in weights)
        assert {p.element_size() for p in weights} == {p.itemsize for p in weights} == {dtype.itemsize}
        optimizer = optimizer or zerofp4.ZeroFP4Optimizer(weights, lr=1e-3)


def test_all_of_a_tensor_as_it_is_strided_is_the_tensor(device):
    """So FSDP2 takes what it has gathered; any other view is of values."""
    t = make(device)
    same = torch.as_strided(t, t.shape, t.stride())
    assert type(same) is zerofp4.NVFP4Tensor and same.record is t.record
    part = torch.as_strided(t, (2, 2), t.stride(), 1)
    assert type(part) is torch.Tensor
    assert torch.equal(part, t.dequantize().as_strided((2, 2), t.stride(), 1))
