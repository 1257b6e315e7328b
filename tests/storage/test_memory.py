"""Records that files and frameworks make: kernels write where the shapes of a record say."""

import io
import pickle
import zipfile

import pytest
import torch
from cases.mxfp8 import make as make_mxfp8
from tensor_helpers import make, values
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zerofp4
from zerofp4.storage import check_memory, check_plain
from zerofp4.tensors import transfer

FORMATS = {"nvfp4": make, "mxfp8": make_mxfp8}
formats = pytest.mark.parametrize("make_format", FORMATS.values(), ids=FORMATS)


class Crafted:
    """Pickles as a call of the function that torch.load allows, with whatever arguments."""

    def __init__(self, function, arguments, state=None):
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce_ex__(self, protocol):
        return self.reduced


def load(crafted):
    file = io.BytesIO()
    torch.save(crafted, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def arguments_of(t):
    """(cls, shape, context, buffers, name, requires_grad, is_parameter), to change and to pickle."""
    return list(t.__reduce_ex__(2)[1])


@formats
@pytest.mark.parametrize("options", [{}, {"columnwise": False}], ids=["both", "rowwise"])
def test_every_buffer_that_is_too_small_is_refused(make_format, options):
    t = make_format("cpu", **options)
    for name, buffer in t.record.buffers():
        for wrong in (buffer[:-1], buffer[..., :-1], buffer.flatten(), buffer[:0]):
            arguments = arguments_of(t)
            arguments[3] = {**arguments[3], name: wrong.contiguous().view(torch.uint8)}
            if name == "amax":
                arguments[3][name] = torch.empty(2)
            with pytest.raises((ValueError, RuntimeError, TypeError)):
                load(Crafted(transfer._rebuild_tensor, tuple(arguments)))


@formats
@pytest.mark.parametrize(
    "shape",
    [(4096, 4096), (48, 82), (50, 80), (-48, -80), (-2, -24, 80), (3840,), (), (48, 80, 2), (2**62, 80)],
)
def test_an_inflated_shape_is_refused(make_format, shape):
    arguments = arguments_of(make_format("cpu"))
    arguments[1] = shape
    with pytest.raises((ValueError, RuntimeError)):
        load(Crafted(transfer._rebuild_tensor, tuple(arguments)))


@pytest.mark.parametrize(
    "context",
    [
        (torch.int8, (16, 16), False, True, None),
        (torch.bfloat16, (4096, 16), False, True, None),
        (torch.bfloat16, (0, 16), False, True, None),
        (torch.bfloat16, (1, 16), False, True, None),
        (torch.bfloat16, (16, 16), True, True, None),
        (torch.bfloat16, (16, 16), False, False, None),
        (torch.bfloat16, (16, 16), False, True, (100000, "mae")),
        (torch.bfloat16, (16, 16), "no", True, None),
        (torch.bfloat16, (16, 16), False, (1, 16), None),
        (torch.bfloat16, (16, 16), False, True, 0),
        (torch.bfloat16,),
        None,
    ],
)
def test_options_that_the_format_has_not_are_refused(context):
    arguments = arguments_of(make("cpu"))
    arguments[2] = context
    with pytest.raises((ValueError, TypeError)):
        load(Crafted(transfer._rebuild_tensor, tuple(arguments)))


@pytest.mark.parametrize(("index", "value"), [(3, {"rowwise_data": None}), (3, None), (4, 1), (4, ["a"])])
def test_what_is_no_buffer_and_no_name_is_refused(index, value):
    arguments = arguments_of(make("cpu"))
    arguments[index] = {**arguments[index], **value} if isinstance(value, dict) else value
    with pytest.raises((TypeError, AttributeError)):
        load(Crafted(transfer._rebuild_tensor, tuple(arguments)))


@formats
def test_missing_and_unknown_buffers_are_refused(make_format):
    t = make_format("cpu")
    for lacking in (
        "rowwise_data",
        "rowwise_scale",
        "columnwise_scale",
        *(["amax"] if t.record.amax is not None else []),
    ):
        arguments = arguments_of(t)
        del arguments[3][lacking]
        with pytest.raises(ValueError, match=r"buffers must have|has no amax"):
            load(Crafted(transfer._rebuild_tensor, tuple(arguments)))
    for extra in ({"columnwise_amax": torch.ones(1)}, {"elsewhere": torch.ones(1)}):
        arguments = arguments_of(t)
        arguments[3] |= extra
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            load(Crafted(transfer._rebuild_tensor, tuple(arguments)))
    arguments = arguments_of(t)
    arguments[3] = {}
    with pytest.raises((ValueError, StopIteration), match="buffers must have a copy"):
        load(Crafted(transfer._rebuild_tensor, tuple(arguments)))


@formats
def test_a_tensor_is_over_a_record_and_takes_no_state(make_format):
    """Both are calls that a file may make, since the classes are allowed in it."""
    t = make_format("cpu")
    for instead in (torch.ones(4, 4), {"shape": (4, 4)}, ((4, 4), t.record.context(), ())):
        with pytest.raises((TypeError, pickle.UnpicklingError), match="record must be an"):
            load(Crafted(type(t), (instead,)))
    with pytest.raises((TypeError, pickle.UnpicklingError), match="has no state to set"):
        load(Crafted(*t.__reduce_ex__(2), {"record": 1}))


@formats
def test_tensors_of_a_file_that_change_later_are_not_those_of_the_record(make_format):
    """A pickle may call set_ on a tensor that it has handed over: the record was checked before."""
    t = make_format("cpu")
    names, context = t.__tensor_flatten__()
    for rebuild in (
        lambda buffers: transfer._rebuild_tensor(type(t), (48, 80), context, buffers, None, False, False),
        lambda buffers: type(t)(((48, 80), context, tuple(buffers)), *buffers.values()),
    ):
        buffers = {name: getattr(t, name).clone() for name in names}
        new = rebuild(buffers)
        for buffer in buffers.values():
            buffer.set_(torch.empty(1, dtype=buffer.dtype))
        new.record.check()
        assert torch.equal(new.dequantize(), t.dequantize())


@formats
def test_a_file_cannot_claim_more_than_its_storages_hold(make_format):
    """Bytes of a storage are taken away from the archive, and the sizes in the pickle stay."""
    file = io.BytesIO()
    torch.save(make_format("cpu"), file)
    whole = zipfile.ZipFile(io.BytesIO(file.getvalue()))
    storages = [name for name in whole.namelist() if "/data/" in name]
    assert storages
    for cut in storages:
        shorter = io.BytesIO()
        with zipfile.ZipFile(shorter, "w") as archive:
            for name in whole.namelist():
                content = whole.read(name)
                archive.writestr(name, content[: len(content) // 2] if name == cut else content)
        with pytest.raises((RuntimeError, ValueError)):
            torch.load(io.BytesIO(shorter.getvalue()), weights_only=True)


def test_strides_that_leave_the_shape_are_refused():
    t = make("cpu")
    overlapping = torch.zeros(1, dtype=torch.uint8).expand(48, 40)
    with pytest.raises(ValueError, match="rowwise_data must be contiguous, got strides"):
        t.rowwise_data = overlapping
    arguments = arguments_of(t)
    arguments[3]["rowwise_data"] = t.rowwise_data.t().contiguous().t()
    with pytest.raises(ValueError, match="rowwise_data must be contiguous"):
        load(Crafted(transfer._rebuild_tensor, tuple(arguments)))


def test_every_way_to_make_a_record_or_rebind_a_buffer_asks_for_its_memory():
    t = make("cpu")
    freed = torch.zeros(48, 40, dtype=torch.uint8)
    freed.untyped_storage().resize_(8)
    with pytest.raises(RuntimeError, match="rowwise_data needs 1920 bytes of its storage, which has 8"):
        t.rowwise_data = freed
    names, context = t.__tensor_flatten__()
    buffers = {name: getattr(t, name) for name in names} | {"rowwise_data": freed}
    with pytest.raises(RuntimeError, match="rowwise_data needs 1920 bytes"):
        zerofp4.NVFP4Tensor.__tensor_unflatten__(buffers, context, t.shape, None)
    with pytest.raises(ValueError, match=r"rowwise_data must have shape"):
        t.record.map(lambda buffer: buffer[:1])
    t.record.rowwise.data = freed  # past every setter; a plan looks once more
    with pytest.raises(RuntimeError, match="rowwise_data needs 1920 bytes"):
        zerofp4.CastPlan([t], [torch.ones(48 * 80)], [0])


# What has no memory of its own


@pytest.fixture
def local_mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def assert_refused(x, message):
    weight = zerofp4.empty((48, 80))
    with pytest.raises(TypeError, match=r"master_weights\[0\] .*" + message):
        zerofp4.CastPlan([weight], [x.view(-1)], [0])
    with pytest.raises(TypeError, match="x .*" + message):
        check_plain("x", x)


QUANTIZE = (
    zerofp4.quantize,
    zerofp4.quantize_dequantize,
    zerofp4.quantize_mxfp8,
    lambda x: zerofp4.quantize_grouped(x, [48]),
)


def test_dtensor(local_mesh):
    x = DTensor.from_local(values(48, 80).float(), local_mesh)
    message = r"is a DTensor, which has no memory of its own: pass its to_local\(\)"
    assert_refused(x, message)
    for quantize in QUANTIZE:
        with pytest.raises(TypeError, match="x " + message):
            quantize(x)
    for name in ("amax", "skip"):
        with pytest.raises(TypeError, match=f"{name} is a DTensor"):
            one = DTensor.from_local(torch.ones(1), local_mesh)
            zerofp4.quantize(x.to_local(), out=zerofp4.quantize(x.to_local()), **{name: one})
    cast = ([zerofp4.empty((48, 80))], [torch.ones(3840)], [0])
    codes = DTensor.from_local(torch.zeros(48 * 40, dtype=torch.uint8), local_mesh)
    with pytest.raises(TypeError, match=r"fsdp_shard_model_weights\[0\] is a DTensor"):
        zerofp4.CastPlan(*cast, fsdp_shard_model_weights=[codes])
    with pytest.raises(TypeError, match="found_inf is a DTensor"):
        zerofp4.CastPlan(*cast, found_inf=one)


def test_fake_tensor():
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(values(48, 80).float())
        assert zerofp4.quantize(fake).dequantize().shape == (48, 80)  # an operator knows what to do
    assert_refused(fake, "is a FakeTensor, which has no memory of its own: pass a tensor with data")


def test_functionalized_and_zero_tensors():
    functional = torch._to_functional_tensor(values(48, 80).float())
    zero = torch._efficientzerotensor(48, 80)
    for x, message in ((functional, "is a functionalized tensor"), (zero, "is an efficient zero tensor")):
        with pytest.raises(TypeError, match="x " + message):
            check_plain("x", x)
        for quantize in QUANTIZE:
            with pytest.raises(TypeError, match="x " + message):
                quantize(x)


def test_sparse_and_quantized_tensors():
    sparse = values(48, 80).float().to_sparse()
    for quantize in QUANTIZE:
        with pytest.raises(TypeError, match=r"x must be a dense tensor, got layout torch\.sparse_coo"):
            quantize(sparse)
    with pytest.raises(TypeError, match=r"is a NVFP4Tensor, .*pass its dequantize\(\)"):
        check_plain("x", make("cpu"))


class Tagged(torch.Tensor):
    """A subclass without a dispatch of its own, which has its memory."""


def test_subclasses_that_have_memory_are_taken():
    x = values(48, 80).as_subclass(Tagged)
    check_plain("x", x)
    assert torch.equal(zerofp4.quantize(x).rowwise_data, zerofp4.quantize(values(48, 80)).rowwise_data)
    x.untyped_storage().resize_(10)
    with pytest.raises(RuntimeError, match="x needs 7680 bytes"):
        check_memory("x", x)
    strided = torch.zeros(10, 10)[:, ::3]
    check_memory("x", strided)
    strided.untyped_storage().resize_(396)
    with pytest.raises(RuntimeError, match="x needs 400 bytes of its storage, which has 396"):
        check_memory("x", strided)
    check_memory("x", torch.zeros(0, 5))
