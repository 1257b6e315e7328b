"""zerofp4.quantize: what its options make of a tensor, and where it writes."""

import pytest
import torch
from helpers import assert_bytes_equal, at_an_odd_address, needs_gpu
from tensor_helpers import (
    ALL,
    DTYPES,
    FORMATS,
    VIEWS,
    addresses,
    assert_record_equal,
    assert_specified,
    e4m3_max,
    same_format,
    specified,
    values,
)

import zerofp4
from zerofp4 import reference
from zerofp4.format import SCALE_DTYPE, SCALE_LAYOUTS
from zerofp4.storage import BUFFERS


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_formats(device, dtype, options):
    x = values(50, 96, device=device, dtype=dtype)
    t = zerofp4.quantize(x, **ALL, **options)
    assert (t.shape, t.dtype, t.device) == (x.shape, dtype, x.device)
    assert t.block == options.get("block", (16, 16))
    assert_specified(t, x, **options)
    q = specified(x, **options)
    block_rows = t.block[0]
    expected = reference.dequantize(
        q.rowwise_data, q.rowwise_scale, q.amax, block_rows, x.dtype, e4m3_max(options)
    )
    assert_bytes_equal(t.dequantize(), expected, "values")
    two = options.get("hadamard", False)
    assert (t.hadamard, t.four_over_six) == (two, options.get("four_over_six"))
    assert (t.columnwise_amax is t.amax) == (not two) and not t.requires_grad
    assert {name for name, _ in t.record.buffers()} == set(BUFFERS) - (set() if two else {"columnwise_amax"})
    bare = zerofp4.quantize(x, columnwise=True, **options)
    for side, columnwise in (("rowwise", False), ("columnwise", True)):
        assert t.expanded_scale(columnwise) is getattr(t, f"{side}_scale_expanded")
        assert t.swizzled_scale(columnwise) is getattr(t, f"{side}_scale_swizzled")
        assert bare.expanded_scale(columnwise).dtype == SCALE_DTYPE
        assert_bytes_equal(bare.expanded_scale(columnwise), getattr(t, f"{side}_scale_expanded"), side)
        assert_bytes_equal(bare.swizzled_scale(columnwise), getattr(t, f"{side}_scale_swizzled"), side)


# Inputs


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("view", [*VIEWS, "an odd offset"])
def test_views(device, options, view):
    x = values(34, 80, device=device)
    if view in VIEWS:
        x = VIEWS[view](x)
        assert not x.is_contiguous()
    else:
        x = torch.cat([x.new_full((1,), torch.nan), x.flatten()])[1:].view(34, 80)
    assert_specified(zerofp4.quantize(x, columnwise=True, **options), x, **options)


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_odd_address(dtype, options):
    x = at_an_odd_address(values(34, 272, dtype=dtype))
    assert_specified(zerofp4.quantize(x, columnwise=True, **options), x, **options)


@pytest.mark.parametrize("shape", [(3, 14, 48), (2, 3, 4, 16), (1, 1, 2, 32)])
@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_more_dimensions(device, shape, options):
    """Rows of one matrix in blocks of 1x16; in blocks of 16x16 a stack of matrices, and no more than that."""
    x = values(*shape, device=device)
    if len(shape) > 3 and options.get("block") is None:
        with pytest.raises(ValueError, match=r"a stack of them \[E, N, K\], got shape"):
            zerofp4.quantize(x, columnwise=True, **options)
        return
    t = zerofp4.quantize(x, columnwise=True, **options)
    assert t.shape == t.dequantize().shape == shape
    assert_specified(t, x, **options)


# Stochastic rounding


def test_a_generator_on_the_cpu_gives_the_same_codes_on_every_device(device):
    x = values(48, 80, device=device)
    drawn = []
    for place in (x, x, x.cpu()):
        generator = torch.Generator().manual_seed(7)
        options = {"block": (1, 16), "stochastic_rounding": True, "generator": generator}
        drawn.append(zerofp4.quantize(place, columnwise=True, **options))
    for t in drawn[1:]:
        assert_bytes_equal(t.rowwise_data, drawn[0].rowwise_data, "rowwise")
        assert_bytes_equal(t.columnwise_data, drawn[0].columnwise_data, "columnwise")
    state = torch.randint(2**63 - 1, (2,), generator=torch.Generator().manual_seed(7))
    assert_specified(drawn[0], x, block=(1, 16), rng_state=state.to(device))


def test_draws_differ_and_the_default_generator_can_be_seeded(device):
    x = values(48, 80, device=device)
    torch.manual_seed(3)
    first, second = (zerofp4.quantize(x, stochastic_rounding=True) for _ in range(2))
    assert not torch.equal(first.rowwise_data, second.rowwise_data)
    torch.manual_seed(3)
    again = zerofp4.quantize(x, stochastic_rounding=True)
    assert_bytes_equal(again.rowwise_data, first.rowwise_data, "the same seed")


# out and skip


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_out(device, options):
    t = zerofp4.quantize(values(48, 80, device=device), **ALL, **options)
    for _, buffer in t.record.buffers():
        buffer.view(torch.uint8).fill_(0xA5)
    before, version = addresses(t), t._version
    x = values(48, 80, device=device, seed=1)
    assert zerofp4.quantize(x, columnwise=True, out=t, **options) is t
    assert_record_equal(t, zerofp4.quantize(x, **ALL, **options))
    assert addresses(t) == before and t._version > version


# Compiled and captured


# "inductor" calls the operator as "aot_eager" does, and compiles what is around it: two formats are enough.
# On a CPU there is nothing around it for which it would need a C++ compiler, most of a minute.
COMPILED = [("aot_eager", name) for name in FORMATS] + [("inductor", "2d"), ("inductor", "hadamard")]


@pytest.mark.heavy
@pytest.mark.parametrize(("backend", "format"), COMPILED)
def test_compiled_in_one_graph(device, format, backend):
    options = FORMATS[format]

    def function(x, out):
        t = zerofp4.quantize(x, columnwise=True, scale_layouts=SCALE_LAYOUTS, **options)
        zerofp4.quantize(x, columnwise=True, out=out, **options)
        scale = t.columnwise_scale_swizzled.view(torch.uint8)
        return t, t.dequantize(), scale if device.type == "cpu" else scale + 0

    torch._dynamo.reset()
    x, old = values(34, 80, device=device), values(34, 80, device=device, seed=1)
    out = zerofp4.quantize(old, columnwise=True, **options)
    before = addresses(out)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    t, dequantized, scale = compiled(x, out)
    expected = zerofp4.quantize(x, **ALL, **options)
    assert_record_equal(t, expected)
    assert same_format(t, expected) and (t.columnwise_amax is t.amax) == (not t.hadamard)
    assert_record_equal(out, zerofp4.quantize(x, columnwise=True, **options))
    assert addresses(out) == before
    assert_bytes_equal(dequantized, expected.dequantize(), "values")
    assert_bytes_equal(scale, expected.columnwise_scale_swizzled.view(torch.uint8), "scale")


@pytest.mark.heavy
def test_compiled_stochastic_rounding_draws_anew_at_every_call(device):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: zerofp4.quantize(x, stochastic_rounding=True), fullgraph=True, backend="aot_eager"
    )
    x = values(34, 80, device=device)
    assert not torch.equal(compiled(x).rowwise_data, compiled(x).rowwise_data)


@needs_gpu
@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_cuda_graph_refreshes_a_weight_or_not(options, stochastic):
    if stochastic and "four_over_six" in options:
        pytest.skip("stochastic rounding and four over six exclude each other")
    x, flag = values(130, 288, device="cuda"), torch.zeros(1, device="cuda")
    out = zerofp4.quantize(x, **ALL, **options)
    arguments = {"columnwise": True, "out": out, "skip": flag, "stochastic_rounding": stochastic, **options}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        zerofp4.quantize(x, **arguments)
    before = addresses(out)
    for seed, skip in ((1, 0.0), (2, 1.0), (3, 0.0)):
        kept = out.clone()
        x.copy_(values(130, 288, seed=seed))
        flag.fill_(skip)
        graph.replay()
        fresh = zerofp4.quantize(x, **ALL, **options)
        if skip:
            assert_record_equal(out, kept)
        elif not stochastic:
            assert_record_equal(out, fresh)
        else:
            assert_bytes_equal(out.rowwise_scale, fresh.rowwise_scale, "scales do not depend on rounding")
            assert not torch.equal(out.rowwise_data, fresh.rowwise_data)
    assert addresses(out) == before
