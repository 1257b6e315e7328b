"""What messages call parameters, and the first difference between ranks."""

import pytest
import torch
from torch import nn

from zerofp4 import quantize
from zerofp4.distributed import first_difference
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer
from zerofp4.optim.groups import parameter_name
from zerofp4.storage import called


def named_weight(name):
    weight = nn.Parameter(quantize(torch.ones(16, 16)))
    weight.record.name = name
    return weight


def test_a_name_is_a_place_and_what_the_tensor_is_called():
    assert called("x[0]", torch.ones(2)) == "x[0]"
    assert called("x[0]", torch.ones(2), "bias") == "x[0] 'bias'"
    assert called("x[0]", named_weight("fc1")) == called("x[0]", named_weight("fc1").record) == "x[0] 'fc1'"
    assert called("x[0]", named_weight("fc1"), "layers.fc1.weight") == "x[0] 'layers.fc1.weight'"
    assert called("x[0]", named_weight(None)) == "x[0]"


def test_both_optimizers_call_a_parameter_the_same():
    groups = [{"params": [("a", torch.ones(3)), ("b", torch.ones(4, dtype=torch.float64))]}]
    for optimizer_class in (ZeroFP4Optimizer, FusedAdamW):
        with pytest.raises(TypeError, match=r"param_groups\[0\]\['params'\]\[1\] 'b' must"):
            optimizer_class([dict(group) for group in groups])
    group = {"params": [torch.ones(2), named_weight("fc1"), named_weight(None)]}
    assert [parameter_name(g, i, group) for g, i in ((0, 0), (1, 1), (2, 2))] == [
        "param_groups[0]['params'][0]",
        "param_groups[1]['params'][1] 'fc1'",
        "param_groups[2]['params'][2]",
    ]


@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [
        ([[1, 2]], None),
        ([[1, 2], [1, 2]], None),
        ([[], []], None),
        ([[1, 2], [1, 3]], (1, 1)),
        ([[1, 2], [1, 2], [0, 3]], (2, 0)),
        ([[1, 2], [9, 9], [1]], (2, None)),
        ([[], [1]], (1, None)),
    ],
)
def test_first_difference_between_ranks(by_rank, expected):
    assert first_difference(by_rank) == expected
