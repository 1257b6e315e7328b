"""zerofp4.quantize: what it refuses of x, of its options, and as out."""

import pytest
import torch
from tensor_helpers import FORMATS, make, values

import zerofp4
from zerofp4 import FourOverSix


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        ([[1.0, 2.0]], {}, TypeError, "x must be a plain torch.Tensor, got list"),
        (make("cpu"), {}, TypeError, "x must be a plain .*, got NVFP4Tensor"),
        (torch.zeros(4, 4, dtype=torch.int32), {}, TypeError, "x must have one of the dtypes .*int32"),
        (torch.zeros(4, 4, dtype=torch.float64), {}, TypeError, "x must have one of the dtypes .*float64"),
        (torch.zeros(16), {}, ValueError, r"at least 2 dimensions, got shape \(16,\)"),
        (torch.zeros(4, 5), {}, ValueError, "last dimension must be even, got 5"),
        (torch.zeros(5, 4), {"columnwise": True}, ValueError, "rows must be even, got 5"),
        (torch.zeros(4, 4), {"rowwise": False}, ValueError, "both False"),
        (torch.zeros(4, 4), {"block": (16, 1)}, ValueError, r"block must be .*got \(16, 1\)"),
        (torch.zeros(4, 4), {"scale_layouts": ["padded"]}, ValueError, "scale_layouts .*'padded'"),
        (torch.zeros(4, 4), {"amax": 1.0}, TypeError, "amax must be a torch.float32 tensor, got float"),
        (torch.zeros(4, 4), {"amax": torch.ones(1).half()}, TypeError, "amax must be a torch.float32 tensor"),
        (torch.zeros(4, 4), {"amax": torch.ones(2)}, ValueError, r"amax must have shape \(1,\), got \(2,\)"),
        (torch.zeros(4, 4), {"amax": torch.ones(1).to("meta")}, ValueError, "amax must be on cpu, got meta"),
    ],
)
def test_refuses_x_and_what_does_not_fit_it(x, options, error, message):
    with pytest.raises(error, match=message):
        zerofp4.quantize(x, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hadamard": True, "columnwise": True}, ValueError, "needs blocks of 1x16, got 16x16: both copies"),
        ({"hadamard": True, "block": (1, 16)}, ValueError, "transforms the columnwise copy, but none"),
        ({"random_signs": False}, ValueError, "random_signs=False .* hadamard is False"),
        ({"stochastic_rounding": True, "four_over_six": FourOverSix()}, ValueError, "exclude each other"),
        ({"four_over_six": 256}, TypeError, "four_over_six must be a FourOverSix or None, got int"),
        ({"generator": torch.Generator()}, ValueError, "generator is for stochastic rounding"),
        ({"stochastic_rounding": True, "generator": 3}, TypeError, "generator must be a torch.Generator"),
        ({"columnwise_amax": torch.ones(1), "columnwise": True}, ValueError, "but hadamard is False"),
        ({"columnwise_amax": 3.0}, TypeError, "columnwise_amax must be a torch.float32 tensor, got float"),
        ({"skip": torch.zeros(1)}, ValueError, "there is no out"),
        (
            {**FORMATS["hadamard"], "columnwise": True, "rowwise": False, "amax": torch.ones(1)},
            ValueError,
            "amax is that of the rowwise copy, but none is asked for: give columnwise_amax",
        ),
    ],
)
def test_refuses_options(options, error, message):
    with pytest.raises(error, match=message):
        zerofp4.quantize(values(4, 16), **options)


# out


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"out": torch.zeros(48, 80)}, TypeError, "out must be an NVFP4Tensor, got Tensor"),
        ({"x": values(80, 48)}, ValueError, r"out must have x's shape .*80, 48.* got .*48, 80"),
        ({"x": values(48, 80).half()}, ValueError, "out must have x's dtype .*float16, got .*bfloat16"),
        ({"x": values(48, 80).to("meta")}, ValueError, "out must have x's device meta, got cpu"),
        ({"block": (1, 16)}, ValueError, r"out must have block \(1, 16\), got \(16, 16\)"),
        ({"columnwise": True}, ValueError, "out must have columnwise scales in the compact layout"),
        ({"scale_layouts": ["swizzled"]}, ValueError, "out must have rowwise scales in the swizzled layout"),
    ],
)
def test_out_that_does_not_fit(options, error, message):
    out = zerofp4.quantize(values(48, 80))
    with pytest.raises(error, match=message):
        zerofp4.quantize(**{"x": values(48, 80), "out": out, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hadamard": True, "columnwise": True}, "out must have hadamard True, got False"),
        ({"four_over_six": FourOverSix()}, r"out must have four_over_six FourOverSix\(.*\), got None"),
        ({"skip": torch.zeros(1, dtype=torch.float64)}, "skip must be a torch.float32 tensor"),
        ({"skip": torch.zeros(2)}, r"skip must have shape \(1,\), got \(2,\)"),
    ],
)
def test_out_of_another_format(options, message):
    out = zerofp4.quantize(values(4, 16), block=(1, 16), columnwise=True)
    with pytest.raises((TypeError, ValueError), match=message):
        zerofp4.quantize(values(4, 16), block=(1, 16), out=out, **options)
