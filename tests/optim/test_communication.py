"""Communication: what it takes, and where it must be given."""

from __future__ import annotations

import pytest
import torch
from cases.optim import make_parameters

from zerofp4.optim import Communication, ZeroFP4Optimizer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": True}, "overlap must be one of"),
        ({"overlap": "forwards"}, "overlap must be one of"),
        ({"accumulate": None}, "accumulate must be one of"),
        ({"accumulate": "sharded", "transport": "peer"}, "is not supported with transport"),
        ({"accumulate": "sharded", "overlap": "backward", "transport": "peer"}, "is not supported with"),
        ({"accumulate": "sharded", "overlap": "update"}, 'is not supported with overlap="update"'),
        ({"transport": "nvlink"}, "transport must be one of"),
        ({"gradient_wire": torch.float64}, "gradient_wire must be None or one of"),
        ({"gradient_dtype": torch.float16}, "gradient_dtype must be one of"),
        ({"reduction": "sum"}, "reduction must be one of"),
        ({"reduction": "reduce_scatter", "transport": "peer"}, 'not supported with transport="peer"'),
    ],
)
def test_options_that_cannot_be_meant(options, message):
    with pytest.raises(ValueError, match=message):
        Communication(**options)


def test_an_option_of_communication_that_is_given_to_the_optimizer():
    """It would be an option of torch's class, which does not know it."""
    parameters = make_parameters(torch.device("cpu"))
    with pytest.raises(TypeError, match=r"give communication=zerofp4.optim.Communication\(overlap='both'\)"):
        ZeroFP4Optimizer(parameters, overlap="both")
    with pytest.raises(TypeError, match="communication must be a Communication, got str"):
        ZeroFP4Optimizer(parameters, communication="peer")
