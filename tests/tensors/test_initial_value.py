"""get_high_precision_init_val: whatever writes to a converted weight, no stale value comes back."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import assert_bytes_equal
from tensor_helpers import assert_record_equal, values
from torch import nn

import zerofp4


def converted(device="cpu", dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Linear(80, 48, bias=False, dtype=dtype, device=device)
    zerofp4.convert_model(model, block=(16, 16))
    return model


WAYS = {
    "load_state_dict": lambda model, x: model.load_state_dict({"weight": x}),
    "data": lambda model, x: model.weight.data.copy_(x),
    "no_grad": torch.no_grad()(lambda model, x: model.weight.copy_(x)),
    "out": lambda model, x: zerofp4.quantize(x.to(model.weight.device), out=model.weight.detach()),
    "inference_mode": torch.inference_mode()(lambda model, x: model.weight.detach().copy_(x)),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_is_the_new_initial_value(device, way):
    model, x = converted(device), values(48, 80, seed=5)
    WAYS[way](model, x)
    value = model.weight.get_high_precision_init_val()
    assert value.device.type == "cpu" and value.dtype == torch.bfloat16
    assert_bytes_equal(value, x, "initial value")
    x.zero_()
    assert value.any(), "the initial value is a copy"


def test_values_are_rounded_and_broadcast_as_a_parameter_would_hold_them(device):
    model, x = converted(device), values(80, dtype=torch.float32, seed=5)
    model.weight.data.copy_(x)
    expected = x.bfloat16().expand(48, 80).contiguous()
    assert_bytes_equal(model.weight.get_high_precision_init_val(), expected, "broadcast")
    nn.init.constant_(model.weight, 0.3)
    expected = torch.full((48, 80), 0.3, dtype=torch.bfloat16)
    assert_bytes_equal(model.weight.get_high_precision_init_val(), expected, "filled")
    nn.init.zeros_(model.weight)
    assert not model.weight.get_high_precision_init_val().any()


def test_an_in_place_load_of_a_distributed_checkpoint(tmp_path):
    model, x = converted(), values(48, 80, seed=5)
    dcp.save({"weight": x}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    assert_bytes_equal(model.weight.get_high_precision_init_val(), x, "initial value")


def test_bytes_of_another_weight_bring_its_initial_value_or_none(device):
    target, source = converted(device), converted(device)
    source.weight.data.copy_(values(48, 80, seed=5))
    target.load_state_dict(source.state_dict())
    value = target.weight.get_high_precision_init_val()
    assert_bytes_equal(value, values(48, 80, seed=5), "handed on")
    assert value is not source.weight.get_high_precision_init_val()
    target = converted(device)
    target.load_state_dict({"weight": source.weight.detach().clone()})  # codes, and nothing that made them
    assert target.weight.get_high_precision_init_val() is None


def test_writes_that_say_nothing_leave_no_stale_value(device):
    """Casts, collectives and compiled functions write bytes: the value is quantized again and compared."""
    x = values(48, 80, device=device, seed=5)
    torch._dynamo.reset()
    for write in (
        lambda w: zerofp4.CastPlan([w], [x.float().view(-1)], [0]).step(),
        lambda w: w.rowwise_data.copy_(zerofp4.quantize(x).rowwise_data),
        lambda w: w.record.rebind(torch.zeros_like(w.rowwise_data)),
        lambda w: torch.compile(lambda t: t.copy_(x), backend="aot_eager", fullgraph=True)(w.detach()),
        lambda w: zerofp4.quantize(
            x, out=w.detach(), stochastic_rounding=True, skip=torch.zeros(1, device=device)
        ),
    ):
        model = converted(device)
        write(model.weight)
        assert model.weight.get_high_precision_init_val() is None
    skipped = converted(device)
    before = skipped.weight.get_high_precision_init_val()
    zerofp4.quantize(x, out=skipped.weight.detach(), skip=torch.ones(1, device=device))
    assert skipped.weight.get_high_precision_init_val() is before


def test_what_changes_no_code_keeps_the_value(device):
    model = converted(device)
    value = model.weight.get_high_precision_init_val().clone()
    model.weight.rowwise_data = model.weight.rowwise_data.clone()
    for same in (model.weight, model.weight.detach(), copy.deepcopy(model).weight, model.to("cpu").weight):
        assert_bytes_equal(same.get_high_precision_init_val(), value, "initial value")
    assert model.to("meta").weight.get_high_precision_init_val() is None


def test_a_weight_without_one_gets_none(device):
    model = converted(device)
    model.weight.clear_high_precision_init_val()
    model.weight.data.copy_(values(48, 80))
    assert model.weight.get_high_precision_init_val() is None


def test_its_own_values_copied_back_change_nothing(device):
    model = converted(device)
    value, before = model.weight.get_high_precision_init_val(), model.weight.detach().clone()
    model.weight.data.copy_(model.weight.dequantize())
    assert model.weight.get_high_precision_init_val() is value
    assert_record_equal(model.weight, before)


def with_adapter(device):
    """A converted layer, frozen, and one that stays as it is and comes later, as those of peft."""
    model = nn.Sequential(converted(device).requires_grad_(False))
    zerofp4.convert_model(model)  # what is converted stays so
    model.append(nn.Linear(48, 16, dtype=torch.bfloat16, device=device))
    return model


def train(model, optimizer):
    model(torch.ones(2, 80, dtype=torch.bfloat16, device=model[1].weight.device)).sum().backward()
    optimizer.step()


OPTIMIZERS = {
    "all parameters": lambda model: zerofp4.optim.ZeroFP4Optimizer(model.named_parameters(), lr=0.1),
    "trainable ones": lambda model: zerofp4.optim.ZeroFP4Optimizer(model[1].named_parameters(), lr=0.1),
    "torch": lambda model: torch.optim.AdamW(model[1].parameters(), lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_frees_the_values_of_frozen_weights(device, kind):
    """Of the model that it trains, not of another one."""
    model, other = with_adapter(device), with_adapter(device)
    optimizer = OPTIMIZERS[kind](model)
    if kind == "torch":
        train(model, optimizer)
    weight = model[0].weight
    assert weight.get_high_precision_init_val() is None
    train(model, optimizer)
    expected = weight.detach().dequantize()
    assert zerofp4.unconvert_model(model) == ["0.weight"]
    assert_bytes_equal(model[0].weight.detach(), expected, "unconverted")
    assert other[0].weight.get_high_precision_init_val() is not None


def test_a_first_step_of_torch_leaves_weights_that_are_to_be_trained():
    model = with_adapter("cpu")
    model[0].requires_grad_(True)
    train(model, OPTIMIZERS["torch"](model))
    assert model[0].weight.get_high_precision_init_val() is not None
