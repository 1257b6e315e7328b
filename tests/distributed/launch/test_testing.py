"""zerofp4.testing on several ranks: one wrong byte on one of them is seen by all."""

import re

import pytest
import torch
import torch.distributed as dist
from cases.optim import make_net
from torch import nn

from distributed.run import on_ranks
from zerofp4.optim import ZeroFP4Optimizer
from zerofp4.testing import VerificationError, verify_model, verify_weights, weight_buffers

PLACES = [("first.weight", "rowwise_data"), ("second.weight", "columnwise_scale"), ("norm.weight", "data")]


@on_ranks(2)
def test_a_single_wrong_byte_on_the_last_rank(world):
    net = make_net(world.device)
    optimizer = ZeroFP4Optimizer(net.parameters(), lr=0.01)
    named = dict(net.named_parameters())
    expected = {"nvfp4_weights": 2, "other_weights": len(named) - 2}
    assert verify_model(net, optimizer) == expected
    for name, buffer in PLACES:
        raw = weight_buffers(named[name])[buffer].view(torch.uint8)
        kept = raw.clone()
        raw.view(-1)[5 % raw.numel()] += world.rank
        place = re.escape(f"  rank 1: {name}.{buffer}")
        lines = rf"{place} is not its master's cast: 1 of .*\n{place} differs from rank 0: 1 of "
        message = rf"^2 buffers are not what they have to be:\n{lines}"
        with pytest.raises(VerificationError, match=message):
            verify_model(net, optimizer)
        raw.copy_(kept)
    assert verify_model(net, optimizer) == expected


@on_ranks(3)
def test_ranks_with_other_weights(world):
    """Those that are not of a group may hold something else."""
    group = dist.new_group([1, 2])
    parameter = nn.Parameter(torch.full((4,), float(world.rank > 0), device=world.device))
    if world.rank:
        found = verify_weights({"p": parameter}, [None], process_group=group)
        assert found == {"nvfp4_weights": 0, "other_weights": 1}
        parameter.data[2] += world.rank
        with pytest.raises(VerificationError, match=r"rank 2: p\.data differs from rank 1: 1 of 4 elements"):
            verify_weights({"p": parameter}, [None], process_group=group)
        dist.destroy_process_group(group)
    with pytest.raises(VerificationError, match=r"rank 1: p\.data differs from rank 0: [34] of 4"):
        verify_weights({"p": parameter}, [None])
    weights = {"w": torch.zeros(3 + world.rank, device=world.device)}
    if world.rank == 2:
        weights["v"] = torch.zeros(3, device=world.device)
    message = r"rank 1: w\.data is torch\.float32 \(4,\) here and not on rank 0\n.*\n  rank 2: v\.data is "
    with pytest.raises(VerificationError, match=message):
        verify_weights(weights, [None] * len(weights))
