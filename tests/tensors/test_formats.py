"""NVFP4Tensors with a transform or four over six: what torch does with them keeps what they are."""

import copy
import itertools

import pytest
import torch
from cases.optim import through_a_file
from tensor_helpers import ALL, FORMATS, assert_record_equal, e4m3_max, same_format, values

import zerofp4

COPIES = {
    "clone": lambda t: t.clone(),
    "deepcopy": copy.deepcopy,
    "detach": lambda t: t.detach(),
    "parameter": lambda t: torch.nn.Parameter(t),
    "to": lambda t: t.to(t.device, copy=True),
    "save": through_a_file,
    "flatten": lambda t: type(t).__tensor_unflatten__(
        {name: getattr(t, name) for name in t.__tensor_flatten__()[0]},
        t.__tensor_flatten__()[1],
        t.shape,
        None,
    ),
}


@pytest.mark.parametrize("copy_of", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("rowwise", [True, False])
def test_copies_keep_the_format(device, options, copy_of, rowwise):
    t = zerofp4.quantize(values(34, 80, device=device), **(ALL | {"rowwise": rowwise}), **options)
    new = copy_of(t)
    assert same_format(new, t)
    assert_record_equal(new, t)
    assert (new.columnwise_amax is new.amax) == (t.columnwise_amax is t.amax)


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_copy_of_values_requantizes_with_the_same_options(device, options):
    t = zerofp4.quantize(values(34, 80, device=device), **ALL, **options)
    x = values(34, 80, device=device, seed=1)
    assert_record_equal(t.copy_(x), zerofp4.quantize(x, **ALL, **options))
    assert_record_equal(t.fill_(1.5), zerofp4.quantize(torch.full_like(x, 1.5), **ALL, **options))
    assert_record_equal(t.zero_(), zerofp4.quantize(torch.zeros_like(x), **ALL, **options))


@pytest.mark.parametrize("pair", list(itertools.product(FORMATS, repeat=2)), ids=" from ".join)
def test_copy_between_formats(device, pair):
    """Bytes where both mean the same by them, values otherwise."""
    into, source = (FORMATS[name] for name in pair)
    x = values(34, 80, device=device, seed=1)
    t = zerofp4.quantize(values(34, 80, device=device), **ALL, **into)
    other = zerofp4.quantize(x, **ALL, **source)
    t.copy_(other)
    kinds = [(o.get("block"), o.get("hadamard"), o.get("random_signs"), e4m3_max(o)) for o in (into, source)]
    expected = other if kinds[0] == kinds[1] else zerofp4.quantize(other.dequantize(), **ALL, **into)
    assert_record_equal(t, expected)
    assert same_format(t, zerofp4.quantize(x, columnwise=True, **into))


def test_one_side_from_two_takes_that_sides_amax(device):
    options = FORMATS["hadamard"]
    x = values(34, 80, device=device, seed=1)
    both = zerofp4.quantize(x, **ALL, **options)
    alone = zerofp4.quantize(torch.zeros_like(x), rowwise=False, columnwise=True, **options)
    assert_record_equal(alone.copy_(both), zerofp4.quantize(x, rowwise=False, columnwise=True, **options))
    with pytest.raises(ValueError, match="the source has no rowwise copy"):
        both.copy_(alone)
