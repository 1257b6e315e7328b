"""zerofp4.Quantizer: quantize with its options checked once."""

import copy

import pytest
import torch
from tensor_helpers import ALL, FORMATS, assert_record_equal, same_format, values

import zerofp4
from zerofp4 import Quantizer
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


def test_each_buffer_has_a_storage_of_its_own(device):
    """Which share_memory_, resize_ and pickling treat alone; of a remembered layout too."""
    q, x = Quantizer(block=(1, 16), columnwise=True, hadamard=True), values(32, 64, device=device)
    for _ in range(2):
        buffers = [buffer for _, buffer in q(x).record.buffers()]
        assert len({buffer.untyped_storage().data_ptr() for buffer in buffers}) == len(buffers) == 6
        assert all(buffer.untyped_storage().nbytes() == buffer.nbytes for buffer in buffers)


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


def test_options_are_judged_before_any_call():
    """By the rules of quantize."""
    with pytest.raises(ValueError, match="hadamard=True needs blocks of 1x16"):
        Quantizer(hadamard=True)


def test_repr_says_the_options():
    assert repr(Quantizer(columnwise=True)) == (
        "Quantizer(block=(16, 16), rowwise=True, columnwise=True, scale_layouts=('compact',), "
        "hadamard=False, random_signs=True, four_over_six=None, stochastic_rounding=False, stacked=False)"
    )
