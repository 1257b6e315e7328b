"""zerofp4.Quantizer: quantize with its options checked once."""

import copy

import pytest
import torch
from helpers import assert_bytes_equal
from tensor_helpers import ALL, FORMATS, addresses, assert_record_equal, make, same_format, values

import zerofp4
from zerofp4 import FourOverSix, Quantizer
from zerofp4.tensors import quantizer as module

ONE_SIDE = {"columns only": {"rowwise": False, "columnwise": True}, "rows only": {"block": (1, 16)}}


@pytest.mark.parametrize("options", [*FORMATS.values(), *ONE_SIDE.values()], ids=[*FORMATS, *ONE_SIDE])
def test_each_call_gives_the_bytes_of_quantize(device, options):
    options = {**({} if options in ONE_SIDE.values() else ALL), **options}
    q = Quantizer(**options)
    for seed, shape in enumerate([(48, 80), (48, 80), (2, 24, 64), (48, 80)]):
        x = values(*shape, device=device, seed=seed)
        made, expected = q(x), zerofp4.quantize(x, **options)
        assert same_format(made, expected) and not made.requires_grad
        assert_record_equal(made, expected)
        assert (made.columnwise_amax is made.amax) == (expected.columnwise_amax is expected.amax)


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_update_writes_every_buffer_where_it_is(device, options):
    q = Quantizer(columnwise=True, **options)
    out, x = make(device, **options), values(48, 80, device=device, seed=1)
    before, version = addresses(out), out._version
    assert q.update_(out, x) is out
    assert addresses(out) == before and out._version > version
    assert_record_equal(out, zerofp4.quantize(x, **ALL, **options))


def test_results_share_no_buffer(device):
    q, x = Quantizer(columnwise=True), values(32, 64, device=device)
    first, second = q(x), q(x)
    assert not set(addresses(first).values()) & set(addresses(second).values())


def test_each_buffer_has_a_storage_of_its_own(device):
    """Which share_memory_, resize_ and pickling treat alone; of a remembered layout too."""
    q, x = Quantizer(block=(1, 16), columnwise=True, hadamard=True), values(32, 64, device=device)
    for _ in range(2):
        buffers = [buffer for _, buffer in q(x).record.buffers()]
        assert len({buffer.untyped_storage().data_ptr() for buffer in buffers}) == len(buffers) == 6
        assert all(buffer.untyped_storage().nbytes() == buffer.nbytes for buffer in buffers)


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_a_record_alone_is_that_of_the_tensor(device, options):
    q, x = Quantizer(columnwise=True, **options), values(48, 80, device=device)
    for _ in range(2):
        record = q.record(x)
        assert_record_equal(zerofp4.NVFP4Tensor(record), q(x))
    assert not hasattr(record, "record")


def test_update_looks_at_the_buffers_of_every_call(device):
    """What a quantizer remembers are shapes: a buffer may be exchanged, moved or freed between calls."""
    q, x = Quantizer(columnwise=True), values(32, 64, device=device)
    out, again = q(x), values(32, 64, device=device, seed=1)
    q.update_(out, again)
    out.rowwise_data = torch.zeros_like(out.rowwise_data)
    q.update_(out, x)
    assert_record_equal(out, q(x))
    out.record.columnwise.data.data = torch.zeros_like(out.columnwise_data)
    q.update_(out, again)
    assert_record_equal(out, q(again))
    out.columnwise_data.untyped_storage().resize_(64)
    with pytest.raises(RuntimeError, match=r"columnwise_data needs 1024 bytes of its storage, which has 64"):
        q.update_(out, x)


def test_update_looks_again_where_buffers_were_exchanged(device):
    """A record that fitted before, whose codes are others now, or which has lost a copy."""
    x = values(48, 80, device=device)
    quantizer = zerofp4.Quantizer(columnwise=True)
    out = quantizer(x)
    quantizer.update_(out, x * 2)
    old = out.rowwise_data
    out.rowwise_data = torch.zeros_like(old)
    before = old.clone()
    quantizer.update_(out, -x)
    assert_bytes_equal(old, before, "what was there before")
    assert_bytes_equal(out.rowwise_data, quantizer(-x).rowwise_data, "what is there now")
    rows = zerofp4.Quantizer()(x)
    with pytest.raises(ValueError, match="out must have columnwise scales in the compact layout"):
        quantizer.update_(rows, x)
    quantizer.update_(out, x)
    assert_bytes_equal(out.columnwise_data, quantizer(x).columnwise_data, "the first again")


def test_update_of_a_view_and_of_a_negative_view(device):
    q, x = Quantizer(columnwise=True), values(64, 32, device=device)
    out = q(x.t())
    assert_record_equal(out, q(x.t().contiguous()))
    negative = torch.complex(x.float(), x.float()).conj().imag
    assert negative.is_neg()
    out = Quantizer()(negative)
    assert_record_equal(Quantizer().update_(out, negative), Quantizer()(-x.float()))


def test_deterministic_algorithms_may_fill_what_is_allocated(device):
    torch.use_deterministic_algorithms(True)
    try:
        q, x = (
            Quantizer(columnwise=True, scale_layouts=("compact", "swizzled")),
            values(32, 64, device=device),
        )
        first = q(x)
        assert_record_equal(q(x), first)
    finally:
        torch.use_deterministic_algorithms(False)


def test_given_amaxes_and_a_flag_pass_through(device):
    x, amax = values(32, 64, device=device), torch.full((1,), 9.0, device=device)
    q = Quantizer(block=(1, 16), columnwise=True, hadamard=True)
    given = {"amax": amax, "columnwise_amax": 2 * amax}
    assert_record_equal(
        q(x, **given), zerofp4.quantize(x, block=(1, 16), columnwise=True, hadamard=True, **given)
    )
    kept = q(x)
    q.update_(kept, 3 * x, skip=torch.ones(1, device=device))
    assert_record_equal(kept, q(x))


def test_random_numbers_are_drawn_as_quantize_draws_them(device):
    x = values(32, 64, device=device)
    q = Quantizer(block=(1, 16), stochastic_rounding=True, generator=torch.Generator().manual_seed(3))
    again = torch.Generator().manual_seed(3)
    for _ in range(2):
        expected = zerofp4.quantize(x, block=(1, 16), stochastic_rounding=True, generator=again)
        assert_record_equal(q(x), expected)


def test_other_dtypes_of_one_shape_are_not_mixed_up(device):
    q = Quantizer()
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        assert q(values(32, 64, device=device, dtype=dtype)).dtype == dtype


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "_REMEMBERED", 3)
    q = Quantizer(block=(1, 16))
    for rows in range(1, 9):
        assert_record_equal(q(values(rows, 32)), zerofp4.quantize(values(rows, 32), block=(1, 16)))
    assert len(q._layouts) <= 3


def test_tracing_sees_no_memory(device):
    """Shapes of a trace are not those of a call."""
    q = Quantizer(columnwise=True)

    def values_of(x):
        return q(x).dequantize()

    x = values(32, 64, device=device)
    compiled = torch.compile(values_of, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), values_of(x))


def test_a_module_with_one_can_be_copied():
    q = Quantizer(block=(1, 16), stochastic_rounding=True, generator=torch.Generator())
    assert copy.deepcopy({"q": q})["q"] is q


def test_repr_says_the_options():
    assert repr(Quantizer(columnwise=True)) == (
        "Quantizer(block=(16, 16), rowwise=True, columnwise=True, scale_layouts=('compact',), "
        "hadamard=False, random_signs=True, four_over_six=None, stochastic_rounding=False)"
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"block": (16, 1)}, ValueError, r"block must be \(16, 16\) or \(1, 16\), got \(16, 1\)"),
        ({"rowwise": False}, ValueError, "rowwise and columnwise are both False"),
        ({"hadamard": True}, ValueError, "hadamard=True needs blocks of 1x16"),
        ({"random_signs": False}, ValueError, "random_signs=False says how hadamard transforms"),
        ({"scale_layouts": "compact"}, ValueError, "scale_layouts must be a sequence of names"),
        ({"generator": torch.Generator()}, ValueError, "generator is for stochastic rounding"),
        ({"stochastic_rounding": True, "generator": 3}, TypeError, "generator must be a torch.Generator"),
        ({"four_over_six": 256}, TypeError, "four_over_six must be a FourOverSix or None, got int"),
        (
            {"stochastic_rounding": True, "four_over_six": FourOverSix()},
            ValueError,
            "stochastic rounding and four over six exclude each other",
        ),
    ],
)
def test_options_are_judged_before_any_call(options, error, message):
    with pytest.raises(error, match=message):
        Quantizer(**options)


def test_what_a_call_refuses():
    q = Quantizer(columnwise=True)
    with pytest.raises(TypeError, match=r"x must be a plain torch\.Tensor, got NVFP4Tensor"):
        q(q(values(32, 32)))
    with pytest.raises(ValueError, match="rows must be even, got 3"):
        q(values(3, 32))
    with pytest.raises(ValueError, match=r"out must have block \(16, 16\), got \(1, 16\)"):
        q.update_(zerofp4.quantize(values(32, 32), block=(1, 16), columnwise=True), values(32, 32))
    with pytest.raises(ValueError, match="out must have four_over_six None, got FourOverSix"):
        q.update_(
            zerofp4.quantize(values(32, 32), columnwise=True, four_over_six=FourOverSix()), values(32, 32)
        )
    with pytest.raises(ValueError, match="out must have columnwise scales in the compact layout"):
        q.update_(zerofp4.quantize(values(32, 32)), values(32, 32))
