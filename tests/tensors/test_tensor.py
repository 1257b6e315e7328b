"""NVFP4Tensor as a container: empty, buffers, copies, pickles, and what torch and people look at."""

import copy
import io
import pickle

import pytest
import torch
from cases.mxfp8 import formats
from helpers import assert_bytes_equal
from tensor_helpers import ALL, addresses, assert_quantized, assert_record_equal, make, values
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zerofp4
from zerofp4.format import SCALE_LAYOUTS
from zerofp4.storage import BUFFERS

# empty, and no elements


def test_empty_holds_zeros(device):
    t = zerofp4.empty((34, 50), device=device, scale_layouts=SCALE_LAYOUTS)
    assert (t.shape, t.dtype, t.device.type) == ((34, 50), torch.bfloat16, device.type)
    assert_record_equal(t, zerofp4.quantize(torch.zeros_like(t), **ALL))
    plain = zerofp4.empty((3, 4), dtype=torch.float32, columnwise=False)
    assert plain.columnwise_data is None and plain.columnwise_amax is None and plain.dtype == torch.float32
    with pytest.raises(ValueError, match="rows must be even, got 3"):
        zerofp4.empty((3, 4))
    with pytest.raises(TypeError, match=r"dtype must be one of .*int8"):
        zerofp4.empty((4, 4), dtype=torch.int8)


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0), (2, 0, 16)])
@pytest.mark.parametrize("block", [(16, 16), (1, 16)])
def test_no_elements(device, shape, block):
    t = zerofp4.quantize(torch.empty(shape, device=device), block=block, **ALL)
    count = shape[0] if len(shape) == 3 and block == (16, 16) else 1
    assert t.amax.tolist() == [0.0] * count and t.dequantize().shape == shape
    t.copy_(torch.empty(shape)).zero_()
    assert copy.deepcopy(t).shape == t.clone().shape == shape and "NVFP4Tensor" in repr(t)
    if len(shape) == 2:
        assert nn.functional.linear(torch.ones(3, shape[1], device=device), t).shape == (3, shape[0])


# Copies and what is shared


@formats
@pytest.mark.parametrize("copy_of", [torch.clone, copy.deepcopy, lambda t: t.to(t.device, copy=True)])
def test_copies_share_nothing(device, copy_of, make_format):
    t = make_format(device)
    new = copy_of(t)
    assert type(new) is type(t) and (new.dtype, new.block) == (t.dtype, t.block)
    assert_record_equal(new, t)
    assert set(addresses(new)) == set(addresses(t)) and new.record.columnwise_amax is new.record.amax
    assert not set(addresses(new).values()) & set(addresses(t).values())
    before = t.clone()
    new.zero_()
    assert_record_equal(t, before)


def test_detach_parameter_and_data_share_the_record(device):
    t = make(device)
    parameter = nn.Parameter(t)
    assert isinstance(parameter, nn.Parameter) and isinstance(parameter, zerofp4.NVFP4Tensor)
    others = (t.detach(), parameter.data, parameter.detach(), copy.copy(parameter))
    assert [other.requires_grad for other in (parameter, *others)] == [True, False, False, False, True]
    x = values(48, 80, device=device, seed=1)
    parameter.data.copy_(x)
    flat = torch.cat([torch.zeros(7, dtype=torch.uint8, device=device), t.rowwise_data.flatten()])
    t.rowwise_data = flat[7:].view(48, 40)
    for other in (t, parameter, *others):
        assert other.record is t.record and other.rowwise_data.data_ptr() == flat.data_ptr() + 7
    assert_quantized(parameter, x)
    flat.zero_()
    assert not parameter.dequantize().any()


def test_rowwise_data_takes_only_what_fits():
    t = make("cpu")
    with pytest.raises(ValueError, match=r"rowwise_data must have shape \(48, 40\), got \(40, 48\)"):
        t.rowwise_data = torch.zeros(40, 48, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"rowwise_data must be a torch\.uint8 tensor"):
        t.rowwise_data = torch.zeros(48, 40)
    with pytest.raises(AttributeError):
        t.columnwise_data = torch.zeros(80, 24, dtype=torch.uint8)


def test_data_can_be_another_quantized_tensor():
    parameter, other = nn.Parameter(make("cpu")), make("cpu", (16, 32))
    parameter.data = other
    assert parameter.record is other.record and parameter.shape == (16, 32) and parameter.requires_grad
    for plain in (torch.zeros(16, 32), torch.ones(16, 32, dtype=torch.float16), other.dequantize()):
        with pytest.raises(TypeError, match="data must be an NVFP4Tensor, got Tensor: copy_ takes"):
            parameter.data = plain
    assert parameter.record is other.record


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("convert", ["method", "to", "to, with a device"])
def test_a_module_gets_another_dtype_as_a_whole(device, dtype, convert):
    """Its codes stay, and what they were quantized from."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(8, 80), nn.Linear(80, 48), nn.LayerNorm(48), nn.Linear(48, 16))
    module.to(device, torch.bfloat16)
    zerofp4.convert_model(module)
    weight = module[1].weight
    weight.hook = []
    weight.register_post_accumulate_grad_hook(weight.hook.append)
    before, initial = weight.detach().clone(), weight.get_high_precision_init_val()
    if convert == "method":
        module.half() if dtype == torch.float16 else module.float()
    else:
        module.to(*[device] * (convert != "to"), dtype)
    assert {p.dtype for p in module.parameters()} == {dtype}
    assert module[1].weight is weight and isinstance(weight, zerofp4.NVFP4Tensor)
    assert_record_equal(weight, before)
    assert_bytes_equal(weight.dequantize(), before.dequantize(dtype), "values")
    assert_bytes_equal(weight.get_high_precision_init_val(), initial, "initial value")
    module(torch.arange(8, device=device)).sum().backward()
    assert weight.grad.dtype == dtype and [p is weight for p in weight.hook] == [True]


def test_a_dtype_that_quantized_weights_have_not():
    module = nn.Sequential(nn.Embedding(8, 80, dtype=torch.bfloat16), linear(make("cpu")))
    with pytest.raises(TypeError, match=r"\.to\(torch\.bfloat16\) takes back what has become torch\.float64"):
        module.double()
    module.to(torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    module(torch.arange(8)).sum().backward()


def test_hooks_outlive_a_move(device):
    """torch swaps the parameter even where nothing moves."""
    module = linear(make(device))
    weight, seen = module.weight, []
    kept = weight.register_post_accumulate_grad_hook(lambda p: seen.append(("kept", p is weight)))
    removed = weight.register_post_accumulate_grad_hook(lambda p: seen.append("removed"))
    scaled = weight.register_hook(lambda grad: 2 * grad)
    x = torch.ones(3, 80, dtype=torch.bfloat16, device=device)
    module(x).sum().backward()
    expected = weight.grad
    for move in (lambda: module.to(device), module.bfloat16, module.share_memory, lambda: module.to("cpu")):
        move()
        assert module.weight is weight
    removed.remove()
    weight.register_post_accumulate_grad_hook(lambda p: seen.append("added"))
    seen.clear()
    weight.grad = None
    module(x.cpu()).sum().backward()
    assert seen == [("kept", True), "added"]
    assert_bytes_equal(weight.grad, expected.cpu(), "gradient")
    kept.remove()
    scaled.remove()
    module(x.cpu()).sum().backward()
    assert seen == [("kept", True), "added", "added"]


def test_deepcopy_of_a_parameter_and_of_a_module():
    module = nn.Linear(80, 48, dtype=torch.bfloat16)
    module.weight = nn.Parameter(make("cpu"))
    module.weight.grad = torch.ones(48, 80, dtype=torch.bfloat16)
    module.weight.tensor_parallel = {"axis": 0}
    module.weight.record.attachments["plans"] = [object()]
    module.register_buffer("same", module.weight.detach())
    new = copy.deepcopy(module)
    assert isinstance(new.weight, nn.Parameter) and isinstance(new.weight, zerofp4.NVFP4Tensor)
    assert_record_equal(new.weight, module.weight)
    assert not set(addresses(new.weight).values()) & set(addresses(module.weight).values())
    assert new.same.record is new.weight.record
    assert new.weight.tensor_parallel == {"axis": 0} and not new.weight.record.attachments
    assert new.weight.grad is not module.weight.grad and torch.equal(new.weight.grad, module.weight.grad)
    assert not copy.deepcopy(nn.Parameter(make("cpu"), requires_grad=False)).requires_grad
    with pytest.raises(RuntimeError, match="leaf"):
        copy.deepcopy(module.weight.clone())


def test_to_another_device(device):
    t = make(device)
    assert t.to(device) is t and (device.type == "cuda" or t.cpu() is t)
    there = t.to("meta")
    assert isinstance(there, zerofp4.NVFP4Tensor) and there.columnwise_amax is there.amax
    assert {buffer.device.type for _, buffer in there.record.buffers()} == {there.device.type} == {"meta"}
    module = nn.Linear(80, 48, device=device)
    module.weight = parameter = nn.Parameter(t)
    module.weight.grad = torch.ones(48, 80, device=device, dtype=t.dtype)
    module.to("cpu")
    assert module.weight is parameter and parameter.device.type == parameter.grad.device.type == "cpu"
    assert isinstance(parameter, zerofp4.NVFP4Tensor) and parameter.requires_grad
    assert_record_equal(parameter, make("cpu"))
    module.to(device)
    assert_record_equal(parameter, t)


# Serialization


def save_and_load(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), **options), len(file.getvalue())


@formats
@pytest.mark.parametrize("weights_only", [True, False])
def test_save_and_load(device, weights_only, make_format):
    t = make_format(device)
    t.record.name = "layers.0"
    parameter = nn.Parameter(t.clone(), requires_grad=False)
    loaded, _ = save_and_load({"t": t, "p": parameter}, weights_only=weights_only)
    for new, old in ((loaded["t"], t), (loaded["p"], parameter)):
        assert type(new) is type(t) and (new.dtype, new.block) == (old.dtype, old.block)
        assert_record_equal(new, old)
        assert new.record.columnwise_amax is new.record.amax and new.record.name == old.record.name
        assert (isinstance(new, nn.Parameter), new.requires_grad) == (isinstance(old, nn.Parameter), False)
    assert_record_equal(save_and_load(t, map_location="cpu")[0], t.cpu())


def test_pickle_and_shared_memory():
    parameter = nn.Parameter(make("cpu"))
    new = pickle.loads(pickle.dumps(parameter))
    assert isinstance(new, nn.Parameter) and new.requires_grad
    assert_record_equal(new, parameter)
    parameter.share_memory_()
    assert all(buffer.is_shared() for _, buffer in parameter.record.buffers())
    assert_record_equal(parameter, new)


def test_a_view_of_a_flat_buffer_saves_only_its_own_bytes():
    t = make("cpu")
    _, size = save_and_load(t)
    flat = torch.zeros(1 << 20, dtype=torch.uint8)
    flat[100 : 100 + 48 * 40] = t.rowwise_data.flatten()
    t.rowwise_data = flat[100 : 100 + 48 * 40].view(48, 40)
    loaded, size_of_view = save_and_load(t)
    assert size_of_view <= size + 100
    assert_record_equal(loaded, t)


def linear(t):
    module = nn.Linear(80, 48, bias=False, dtype=torch.bfloat16, device=t.device)
    module.weight = nn.Parameter(t)
    return module


@formats
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(device, assign, make_format):
    source, target = linear(make_format(device)), linear(make_format(device))
    target.weight.data.zero_()
    before = addresses(target.weight)
    state, _ = save_and_load(source.state_dict())
    assert target.load_state_dict(state, assign=assign).missing_keys == []
    assert isinstance(target.weight, nn.Parameter) and target.weight.requires_grad
    assert_record_equal(target.weight, source.weight)
    assert (addresses(target.weight) == before) == (not assign)


def test_state_dict_of_a_plain_model_requantizes(device):
    target = linear(zerofp4.empty((48, 80), device=device, scale_layouts=SCALE_LAYOUTS))
    before, x = addresses(target.weight), values(48, 80)
    target.load_state_dict({"weight": x})
    assert_quantized(target.weight, x.to(device))
    assert addresses(target.weight) == before
    plain = nn.Linear(80, 48, bias=False, dtype=torch.bfloat16)
    plain.load_state_dict(target.state_dict())
    assert_bytes_equal(plain.weight.detach(), target.weight.dequantize().detach().cpu(), "values")


# What torch and people look at


def test_flatten_names_what_exists_and_unflatten_restores_it():
    for options, expected in (
        ({}, ["rowwise_data", "rowwise_scale", "amax"]),
        ({"rowwise": False, "columnwise": True}, ["columnwise_data", "columnwise_scale", "amax"]),
        (ALL, [name for name in BUFFERS if name != "columnwise_amax"]),
    ):
        t = zerofp4.quantize(values(48, 80), **options)
        names, context = t.__tensor_flatten__()
        assert names == expected
        inner = {name: getattr(t, name) for name in names}
        new = zerofp4.NVFP4Tensor.__tensor_unflatten__(inner, context, t.shape, t.stride())
        assert_record_equal(new, t)
        assert (new.shape, new.dtype, new.block) == (t.shape, t.dtype, t.block)
        assert new.columnwise_amax is (None if t.columnwise_amax is None else new.amax)


def test_repr_says_what_it_is(device):
    t = zerofp4.quantize(torch.full((4, 16), 3.0, device=device), columnwise=True, scale_layouts=["swizzled"])
    scales = "rowwise=compact+swizzled, columnwise=compact+swizzled"
    options = f"dtype=torch.float32, block=(16, 16), device={t.device}, {scales}"
    assert repr(t) == f"NVFP4Tensor(shape=(4, 16), {options}, amax=3)"
    assert repr(nn.Parameter(t)) == f"NVFP4Tensor(shape=(4, 16), {options}, amax=3, requires_grad=True)"
    assert "amax" not in repr(t.to("meta"))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(t)
        assert repr(fake) == f"NVFP4Tensor(shape=(4, 16), {options})"
        assert fake.dequantize().shape == (4, 16)
