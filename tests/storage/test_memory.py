"""Records that files make, and tensors that have no memory of their own: what a kernel may be handed."""

import pickle

import pytest
import torch
from cases.mxfp8 import formats
from tensor_helpers import make, values
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zerofp4
from zerofp4.storage import check_plain


class Changed:
    """A quantized tensor, pickled with other buffers."""

    def __init__(self, tensor, buffers):
        self.rebuild, (*front, _, name, requires_grad, is_parameter) = tensor.__reduce_ex__(2)
        self.arguments = (*front, buffers, name, requires_grad, is_parameter)

    def __reduce__(self):
        return self.rebuild, self.arguments


def buffers_of(t):
    return dict(t.__reduce_ex__(2)[1][3])


@formats
@pytest.mark.parametrize("options", [{}, {"columnwise": False}], ids=["both", "rowwise"])
def test_every_buffer_of_another_shape_is_refused(make_format, options):
    """As of a file that another version wrote."""
    t = make_format("cpu", **options)
    for name, buffer in buffers_of(t).items():
        wrong = torch.empty(2) if name == "amax" else buffer[:-1].contiguous()
        with pytest.raises(ValueError, match=f"{name} must have shape"):
            pickle.loads(pickle.dumps(Changed(t, {**buffers_of(t), name: wrong})))


@formats
def test_missing_buffers_are_refused(make_format):
    t = make_format("cpu")
    for lacking in ("rowwise_data", "rowwise_scale", "columnwise_scale"):
        buffers = buffers_of(t)
        del buffers[lacking]
        with pytest.raises(ValueError, match="buffers must have"):
            pickle.loads(pickle.dumps(Changed(t, buffers)))


# What has no memory of its own


@pytest.fixture
def local_mesh(world_of_one):
    return init_device_mesh("cpu", (1,))


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
    message = r"is a DTensor, which has no memory of its own: pass a plain tensor, such as to_local\(\)"
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
    assert_refused(fake, "is a FakeTensor, which has no memory of its own: pass a plain tensor")


def test_sparse_and_quantized_tensors():
    sparse = values(48, 80).float().to_sparse()
    for quantize in QUANTIZE:
        with pytest.raises(TypeError, match=r"x must be a dense tensor, got layout torch\.sparse_coo"):
            quantize(sparse)
    with pytest.raises(TypeError, match=r"is a NVFP4Tensor, .*dequantize\(\)"):
        check_plain("x", make("cpu"))


class Tagged(torch.Tensor):
    """A subclass without a dispatch of its own, which has its memory."""


def test_subclasses_that_have_memory_are_taken():
    x = values(48, 80).as_subclass(Tagged)
    check_plain("x", x)
    assert torch.equal(zerofp4.quantize(x).rowwise_data, zerofp4.quantize(values(48, 80)).rowwise_data)
