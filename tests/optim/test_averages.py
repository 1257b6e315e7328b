"""Averages of weights: what torch's AveragedModel is told, and what AveragedMasters refuses."""

import pytest
import torch
from cases.optim import Net, make_net
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from zerofp4.optim import AveragedMasters, ZeroFP4Optimizer

WAYS = [{}, {"avg_fn": get_ema_avg_fn(0.9)}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("updates", [0, 1])
def test_the_averages_of_torch_do_not_quantize_in_silence(device, way, updates):
    model = make_net(device)
    averaged = AveragedModel(model, **way)
    averaged.n_averaged.fill_(updates)  # the first update copies, the others average
    with pytest.raises(RuntimeError, match=r"writes to an NVFP4Tensor.* use zerofp4\.optim\.AveragedMas"):
        averaged.update_parameters(model)
    plain = AveragedModel(Net().to(device), **way)
    plain.update_parameters(plain.module)
    plain.update_parameters(plain.module)


def test_wrong_arguments(device):
    optimizer = ZeroFP4Optimizer(make_net(device).parameters())
    with pytest.raises(TypeError, match="optimizer must be a ZeroFP4Optimizer, got AdamW"):
        AveragedMasters(torch.optim.AdamW(Net().parameters()))
    for decay in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=f"decay must be from 0 to 1, got {decay}"):
            AveragedMasters(optimizer, decay)
