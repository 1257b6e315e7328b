"""Stacks of matrices [E, N, K]: the weights of experts, each quantized alone."""

import copy
import pickle
import tempfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases.ops import assert_record_equals
from cases.optim import through_a_file
from helpers import assert_all_equal, assert_bytes_equal, needs_gpu
from tensor_helpers import ALL, DTYPES, addresses, assert_record_equal
from torch.autograd import DeviceType

import zerofp4
from zerofp4 import FourOverSix, reference
from zerofp4.format import SCALE_LAYOUTS
from zerofp4.gemm import Operand
from zerofp4.storage import BUFFERS

SHAPES = [(1, 16, 16), (3, 34, 50), (3, 2, 2), (2, 130, 144), (5, 18, 30), (35, 16, 32)]
"""One expert; ragged matrices, whose codes and scales begin at odd addresses; more than fit in arguments."""

CHOICES = [None, FourOverSix(256, "mse"), FourOverSix(448, "mae")]

of_kinds = pytest.mark.parametrize("kind", [{}, {"block": (1, 16), "stacked": True}], ids=["16x16", "1x16"])


def experts(device, shape=(3, 34, 50), dtype=torch.bfloat16, seed=0):
    """Matrices of magnitudes so different that an amax of all would show."""
    generator = torch.Generator().manual_seed(seed)
    factors = 10.0 ** torch.arange(-1, shape[0] - 1).remainder(4)
    return (torch.randn(shape, generator=generator) * factors[:, None, None]).to(device, dtype)


def make(device, shape=(3, 34, 50), seed=0, **options):
    return zerofp4.quantize(experts(device, shape, seed=seed), **{**ALL, **options})


def rows_of(kind) -> int:
    return kind.get("block", (16, 16))[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@of_kinds
def test_every_buffer(device, shape, dtype, choice, kind):
    x, rows = experts(device, shape, dtype), rows_of(kind)
    t = zerofp4.quantize(x, **ALL, four_over_six=choice, **kind)
    specified = reference.quantize_experts(x, block_rows=rows, four_over_six=choice)
    assert_record_equals(t.record, specified, "quantized")
    assert {name for name, _ in t.record.buffers()} == set(BUFFERS) - {"columnwise_amax"}
    assert t.shape == shape and t.amax.shape == shape[:1] and t.columnwise_amax is t.amax
    assert t.record.matrix == shape[1:]
    maximum = 448 if choice is None else choice.e4m3_max
    expected = reference.dequantize(t.rowwise_data, t.rowwise_scale, t.amax, rows, dtype, maximum)
    assert_bytes_equal(t.dequantize(), expected, "values")
    assert_bytes_equal(zerofp4.quantize_dequantize(x, four_over_six=choice, **kind), expected, "in one go")


def test_odd_rows(device):
    x = experts(device, (3, 17, 30))
    t = zerofp4.quantize(x, scale_layouts=SCALE_LAYOUTS)
    assert_record_equals(t.record, reference.quantize_experts(x), "rowwise")
    with pytest.raises(ValueError, match="rows must be even, got 17"):
        zerofp4.quantize(x, columnwise=True)
    with pytest.raises(ValueError, match="the last dimension must be even, got 17"):
        zerofp4.quantize(x.mT.contiguous())


def test_the_columnwise_copy_alone(device):
    x = experts(device)
    t = zerofp4.quantize(x, rowwise=False, columnwise=True)
    both = zerofp4.quantize(x, columnwise=True)
    assert_record_equal(t, both, ("columnwise_data", "columnwise_scale", "columnwise_amax"))
    assert_bytes_equal(t.dequantize(), both.dequantize(), "values")


@of_kinds
def test_given_amaxes(device, kind):
    x, rows = experts(device), rows_of(kind)
    amax = torch.tensor([0.5, 7.0, 1e4], device=device)
    t = zerofp4.quantize(x, **ALL, amax=amax, **kind)
    assert_record_equals(t.record, reference.quantize_experts(x, amax, block_rows=rows), "given")
    expected = reference.dequantize(t.rowwise_data, t.rowwise_scale, t.amax, rows, x.dtype)
    assert_bytes_equal(zerofp4.quantize_dequantize(x, amax=amax, **kind), expected, "values")
    for call in (zerofp4.quantize, zerofp4.quantize_dequantize):
        with pytest.raises(ValueError, match=r"amax must have shape \(3,\), got \(1,\)"):
            call(x, amax=amax[:1], **kind)


@pytest.mark.parametrize("block", [(16, 16), (1, 16)])
def test_what_cannot_be_a_stack(device, block):
    x = experts(device)
    for call in (zerofp4.quantize, zerofp4.quantize_dequantize):
        with pytest.raises(ValueError, match=r"a stack of matrices \[E, N, K\], got shape \(34, 50\)"):
            call(x[0], block=block, stacked=True)
    with pytest.raises(ValueError, match="stacked=True is for weights, and hadamard=True"):
        zerofp4.quantize(x, block=(1, 16), columnwise=True, hadamard=True, stacked=True)
    flat = zerofp4.quantize(x, block=(1, 16))
    assert flat.amax.shape == (1,) and flat.rowwise_data.shape == (102, 25)
    with pytest.raises(ValueError, match="out must have stacked True, got False"):
        zerofp4.quantize(x, block=(1, 16), stacked=True, out=flat)


def test_an_expert_that_is_not_finite_leaves_the_others_alone(device):
    x = experts(device)
    x[1, 3, 4] = torch.nan
    t = zerofp4.quantize(x, **ALL)
    assert t.amax.isinf().tolist() == [False, True, False]
    assert_record_equals(t.record, reference.quantize_experts(x), "with NaN")


@of_kinds
def test_out_skip_and_a_quantizer(device, kind):
    x, t, rows = experts(device, seed=1), make(device, **kind), rows_of(kind)
    kept, before = addresses(t), copy.deepcopy(t)
    quantizer = zerofp4.Quantizer(columnwise=True, **kind)
    quantizer.update_(t, x, skip=torch.ones(1, device=device))
    assert_record_equal(t, before)
    quantizer.update_(t, x, skip=torch.zeros(1, device=device))
    specified = reference.quantize_experts(x, block_rows=rows)
    assert_record_equals(t.record, specified, "written")
    assert addresses(t) == kept
    for _ in range(2):  # the layout of the shape is remembered
        assert_record_equals(quantizer(x).record, specified, "quantizer")


def test_empty_holds_zeros_until_something_is_copied(device):
    x, t = experts(device), zerofp4.empty((3, 34, 50), device=device, scale_layouts=SCALE_LAYOUTS)
    assert t.amax.shape == (3,) and not t.dequantize().any()
    t.copy_(x)
    assert_record_equals(t.record, reference.quantize_experts(x), "copied")
    t.zero_()
    assert not t.dequantize().any() and t.amax.tolist() == [0.0] * 3


@pytest.mark.parametrize("rowwise", [True, False])
def test_copies_of_bytes_derive_what_the_source_lacks(device, rowwise):
    source = make(device, rowwise=rowwise, columnwise=not rowwise, scale_layouts=("compact",))
    target = zerofp4.empty((3, 34, 50), device=device, scale_layouts=SCALE_LAYOUTS)
    target.copy_(source)
    assert_record_equal(target, make(device))


@of_kinds
def test_padded_scales_without_and_with_buffers(device, kind):
    bare, full = make(device, scale_layouts=("compact",), **kind), make(device, **kind)
    for columnwise, side in ((False, "rowwise"), (True, "columnwise")):
        expanded = getattr(full, f"{side}_scale_expanded")
        swizzled = getattr(full, f"{side}_scale_swizzled")
        assert_bytes_equal(bare.expanded_scale(columnwise), expanded, "expanded")
        assert_bytes_equal(bare.swizzled_scale(columnwise), swizzled, "swizzled")
        matrix = zerofp4.quantize(experts(device)[0], block=bare.block)
        many = zerofp4.swizzle_scales([bare, full, *[matrix] * (not columnwise)], columnwise=columnwise)
        assert_bytes_equal(many[0], swizzled, "of a list")
        assert many[1] is swizzled
        back = zerofp4.unswizzle_scales([full], columnwise=columnwise)[0]
        assert_bytes_equal(back, getattr(full, f"{side}_scale"), "back")


def test_lists_of_stacks_and_matrices(device):
    tensors = [make(device), zerofp4.quantize(experts(device)[2]), make(device, (2, 16, 48), rowwise=False)]
    for tensor, values in zip(tensors, zerofp4.dequantize_many(tensors), strict=True):
        assert_bytes_equal(values, tensor.dequantize(), "values")


# The experts' own tensors


@of_kinds
def test_an_expert_shares_the_buffers(device, kind):
    t = make(device, **kind)
    other = experts(device, seed=5)[1]
    expected = [zerofp4.quantize(m, **ALL, block=t.block) for m in experts(device)]
    expected[1] = zerofp4.quantize(other, **ALL, block=t.block)
    version = t._version
    t[1].copy_(other)
    assert t._version > version
    for e, (mine, each) in enumerate(zip(t.unbind(), t, strict=True)):
        assert_record_equal(mine, expected[e])
        assert_record_equal(each, expected[e])
        assert mine.columnwise_amax is mine.amax
    assert_record_equal(t[-1], expected[2])
    with pytest.raises(IndexError):
        t[3]
    assert type(t[:, 0]) is torch.Tensor and type(t.unbind(1)[0]) is torch.Tensor


def test_gradients_of_experts_are_those_of_the_stack(device):
    parameter = torch.nn.Parameter(make(device))
    x = torch.randn(4, 50, device=device, dtype=torch.bfloat16)
    plain = parameter.dequantize().detach().requires_grad_()
    torch.nn.functional.linear(x, parameter[1]).sum().backward()
    torch.nn.functional.linear(x, plain[1]).sum().backward()
    assert_bytes_equal(parameter.grad, plain.grad, "gradient")


def test_an_expert_outlives_inference_mode(device):
    t = make(device)
    with torch.inference_mode():
        inside = t[1]
        assert_bytes_equal(inside.dequantize(), t.dequantize()[1], "inside")
    assert_bytes_equal(inside.dequantize(), t.dequantize()[1], "outside")


def test_operands_are_experts(device):
    t, x = make(device), zerofp4.quantize(torch.randn(6, 50, device=device), block=(1, 16))
    for stack in (t, make(device, (1, 34, 50))):
        with pytest.raises(ValueError, match=r"an operand must be one matrix.*index the tensor"):
            Operand(stack)
    alone = zerofp4.quantize(experts(device)[1], columnwise=True)
    assert_bytes_equal(zerofp4.gemm(x, t[1]), zerofp4.gemm(x, alone), "product")
    columns = [Operand(w, columnwise=True) for w in (t[1], alone)]
    assert_bytes_equal(zerofp4.gemm(columns[0], columns[0]), zerofp4.gemm(columns[1], columns[1]), "columns")


# Ways to leave the place


WAYS = {
    "clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "torch.save": through_a_file,
    "the CPU and back": lambda t: t.to("cpu", copy=True).to(t.device),
    "DCP": lambda t: through_a_distributed_checkpoint(t),
    "empty_like and copy_": lambda t: torch.empty_like(t, device=t.device).copy_(t),
}


def through_a_distributed_checkpoint(t):
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"weight": t}, checkpoint_id=folder, no_dist=True)
        options = {"block": t.block, "stacked": t.dim() == 3}
        target = zerofp4.quantize(torch.zeros_like(t.dequantize()), **ALL, **options)
        dcp.load({"weight": target}, checkpoint_id=folder, no_dist=True)
    return target


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@of_kinds
def test_ways(device, way, kind):
    t = make(device, **kind)
    there = way(t)
    assert type(there) is type(t) and there.shape == t.shape
    assert_record_equal(there, t)
    assert not set(addresses(there).values()) & set(addresses(t).values())
    expert = way(t[1])
    assert_record_equal(expert, t[1])


def test_a_file_of_another_shape_is_refused(device):
    names, context = make(device).__tensor_flatten__()
    buffers = {name: make(device).record.buffer(name) for name in names}
    with pytest.raises(ValueError, match=r"amax must have shape \(3,\), got \(1,\)"):
        short = {**buffers, "amax": buffers["amax"][:1]}
        zerofp4.NVFP4Tensor.__tensor_unflatten__(short, context, (3, 34, 50), None)
    with pytest.raises(ValueError, match=r"rowwise_data must have shape \(34, 25\), got \(3, 34, 25\)"):
        zerofp4.NVFP4Tensor.__tensor_unflatten__(buffers, context, (34, 50), None)
    with pytest.raises(ValueError, match=r"a stack of them \[E, N, K\], got shape \(1, 3, 34, 50\)"):
        zerofp4.NVFP4Tensor.__tensor_unflatten__(buffers, context, (1, 3, 34, 50), None)


# torch.compile


@of_kinds
def test_compiled(device, kind):
    x = experts(device)

    def through(x, weight):
        made = zerofp4.quantize(x, columnwise=True, **kind)
        return made.dequantize(), torch.nn.functional.linear(x[0], weight[1])

    t = make(device, **kind)
    compiled = torch.compile(through, backend="aot_eager", fullgraph=True)
    assert_all_equal(compiled(x, t), through(x, t), "compiled")


@needs_gpu
def test_one_launch_for_all_experts():
    """Also for more of them than a dimension of a grid has blocks."""
    device = torch.device("cuda", 0)
    x = torch.randn(66_000, 2, 16, device=device).bfloat16()
    quantizer = zerofp4.Quantizer(columnwise=True, scale_layouts=("compact", "swizzled"))
    quantizer(x)
    with torch.profiler.profile() as profile:
        stack = quantizer(x)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == DeviceType.CUDA]
    assert sum("quantize_kernel" in name for name in names) == 1
    assert sum("amax_kernel" in name for name in names) == 1
    for e in (0, 65_534, 65_535, 65_999):
        alone = quantizer(x[e])
        for name, buffer in alone.record.buffers():
            assert_bytes_equal(stack[e].record.buffer(name), buffer, f"expert {e}: {name}")
