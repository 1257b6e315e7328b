"""quantization_error with an optimizer: every rank compares with the whole masters."""

import pytest
import torch
from cases.fsdp2 import start, unsharded

import zerofp4
from distributed.optim.cases import gradients_of, parameters_of
from distributed.run import on_ranks
from zerofp4 import NVFP4Tensor, quantization_error
from zerofp4.optim import ZeroFP4Optimizer


@on_ranks(2)
def test_every_rank_has_the_numbers_of_the_whole_masters(world):
    parameters = parameters_of(world)
    model = torch.nn.ParameterList(parameters)
    optimizer = ZeroFP4Optimizer(model.named_parameters(), lr=0.1)
    before = quantization_error(model, optimizer, keep_codes=True)
    for parameter, gradient in zip(parameters, gradients_of(world, parameters, 0), strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
    optimizer.step()
    masters = optimizer.gathered_masters()
    report = quantization_error(model, optimizer, previous=before)
    records, names = iter(report.records), dict(model.named_parameters())
    for (name, weight), master in zip(names.items(), masters, strict=True):
        if not isinstance(weight, NVFP4Tensor):
            continue
        values = weight.dequantize(torch.float32)
        stack = [(values, master)] if master.dim() == 2 else list(zip(values, master, strict=True))
        for e, (found, wanted) in enumerate(stack):
            record = next(records)
            error = torch.linalg.vector_norm(found - wanted, dtype=torch.float64).item()
            whole = torch.linalg.vector_norm(wanted, dtype=torch.float64).item()
            assert record["name"] == (name if master.dim() == 2 else f"{name}[{e}]")
            assert record["compared_with"] == "master"
            assert abs(record["relative_error"] - error / whole) < 1e-12  # sums in another order
    assert next(records, None) is None and any(record["flipped"] for record in report.records)
    texts = [None] * world.world_size
    torch.distributed.all_gather_object(texts, str(report))
    assert texts[0] == texts[1]


@on_ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_weights_of_fsdp2_are_measured_while_they_are_gathered_as_codes(world, reshard_after_forward):
    """Sharded they are FP32 shards, and no NVFP4 weight; where layers get values they never are one."""
    run = start(world, reshard_after_forward=reshard_after_forward)
    count = len(list(run.model.parameters()))
    assert str(quantization_error(run.model)) == f"no NVFP4 weight ({count} other parameters)"
    run.step(0)
    masters = run.masters()
    with unsharded(run.model) as weights:
        report = quantization_error(run.model)
    if reshard_after_forward:
        assert report.records == [] and report.other_parameters == count
        return
    expected = []
    for name in weights:
        alone = torch.nn.ParameterDict({"w": zerofp4.quantize(masters[name])})
        for record in quantization_error(alone).records:
            expected.append(record | {"name": record["name"].replace("w", name)})
    assert report.records == expected and report.other_parameters == count - len(weights)
