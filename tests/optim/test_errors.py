"""Bad input to ZeroFP4Optimizer, when it is built and when it steps, and to averages of its masters."""

import copy
import math
import warnings

import pytest
import torch
from cases.optim import (
    Net,
    assert_all_equal,
    assert_refused,
    assert_weights_follow,
    batch,
    built,
    keywords,
    make_gradients,
    make_net,
    make_parameters,
    set_gradients,
    take_step,
    unchanged,
)
from distributed.optim.matrix_cases import MATRICES
from helpers import freed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import zerofp4
from zerofp4 import quantize
from zerofp4.integrations import fsdp2
from zerofp4.optim import AveragedMasters, FusedAdamW, ZeroFP4Optimizer


def test_the_list_of_parameters_is_fixed(device):
    _, optimizer = built(device)
    extra = nn.Parameter(torch.zeros(3, device=device))
    with pytest.raises(RuntimeError, match=r"add_param_group: .* build a new optimizer"):
        optimizer.add_param_group({"params": [extra]})
    params = optimizer.param_groups[0]["params"]
    for change, undo in [
        (lambda: params.append(extra), params.pop),
        (lambda: params.reverse(), params.reverse),
        (lambda: optimizer.param_groups.append({"params": [extra]}), optimizer.param_groups.pop),
    ]:
        change()
        assert_refused(optimizer, "param_groups")
        undo()
    optimizer.step()


@pytest.mark.parametrize(
    ("optimizer_class", "name", "value"),
    [
        (FusedAdamW, "lr", math.inf),
        (torch.optim.AdamW, "lr", math.nan),
        (FusedAdamW, "lr", torch.tensor(math.inf)),
        (torch.optim.AdamW, "betas", (0.9, math.nan)),
        (torch.optim.SGD, "momentum", math.nan),
        (torch.optim.Adagrad, "lr_decay", math.inf),
    ],
)
def test_options_must_be_finite(device, optimizer_class, name, value):
    """Given for a group, edited or loaded; masters and weights stay as they are. A load mends it."""
    parameters = make_parameters(device)
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    with pytest.raises(ValueError, match=r"inf|nan"):
        ZeroFP4Optimizer([groups[0], groups[1] | {name: value}], optimizer_class, lr=0.1)
    optimizer = ZeroFP4Optimizer(groups, optimizer_class, lr=0.1)
    take_step(parameters, optimizer, 0)
    good, bad = (copy.deepcopy(optimizer.state_dict()) for _ in range(2))
    bad["param_groups"][1][name] = value
    with unchanged(parameters, optimizer):
        for call in (lambda: optimizer.load_state_dict(bad), optimizer.step, optimizer.step):
            with pytest.raises(ValueError, match=rf"\[1\]\['{name}'\] must be finite, got .*(inf|nan)"):
                call()
            optimizer.param_groups[1][name] = value
    assert repr(optimizer.state_dict()["param_groups"][1][name]) == repr(value)
    optimizer.load_state_dict(good)
    optimizer.step()
    assert_weights_follow(parameters, optimizer.gathered_masters())


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, FusedAdamW])
def test_options_may_be_changed_on_either_side(device, optimizer_class):
    """By a scheduler over the inner optimizer, too. A load brings the options of both."""
    parameters, optimizer = built(device, optimizer_class, lr=0.1)
    sides = optimizer.param_groups[0], optimizer.inner.param_groups[0]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.inner, 1, gamma=0.5)
    take_step(parameters, optimizer, 0)
    saved = optimizer.state_dict()
    scheduler.step()
    optimizer.param_groups[0]["eps"] = 1e-6
    take_step(parameters, optimizer, 1)
    assert [(side["lr"], side["eps"]) for side in sides] == [(0.05, 1e-6)] * 2
    optimizer.param_groups[0]["lr"] = 0.3
    assert optimizer.state_dict()["param_groups"][0]["lr"] == sides[1]["lr"] == 0.3
    optimizer.param_groups[0]["lr"] = 0.4
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.1


def test_entries_that_a_group_may_lose(device):
    """Names, which only this optimizer has, and what a load did not bring."""
    optimizer = ZeroFP4Optimizer(make_net(device).named_parameters(), lr=0.1)
    saved = optimizer.state_dict()
    optimizer.param_groups[0]["initial_lr"] = 0.1
    optimizer.load_state_dict(saved)
    (group,) = optimizer.param_groups
    del group["param_names"], group["initial_lr"]
    optimizer.step()
    assert "initial_lr" not in optimizer.param_groups[0]


def test_a_first_step_without_any_gradient_warns(device):
    """Such as one after the backward pass of a copy of the model."""
    net = make_net(device)
    optimizer = ZeroFP4Optimizer(net.named_parameters(), lr=0.1)
    copied = copy.deepcopy(net)
    copied(batch(device, 0)).square().mean().backward()
    with pytest.warns(UserWarning, match=r"no gradient in the first step\(\)") as caught:
        optimizer.step()
    assert [warning.filename for warning in caught] == [__file__]
    of_copy = ZeroFP4Optimizer(copied.named_parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # a later one may skip a batch
        of_copy.step()


BAD_GRADIENTS = {
    "sparse": (torch.Tensor.to_sparse, "of layout torch.sparse_coo: gradients must be dense"),
    "freed": (freed, "whose storage was freed"),
    "freed with an offset": (lambda g: freed(torch.stack((g, g))[1]), "whose storage was freed"),
    "shorter": (torch.clone, r"of shape \(2, 2\)"),
}


@pytest.mark.parametrize("kind", BAD_GRADIENTS)
@pytest.mark.parametrize("i", [0, 1], ids=["quantized", "plain"])
def test_gradients_that_cannot_be_read(device, i, kind):
    """In a first step, or after one whose gradients have passed all checks."""
    change, problem = BAD_GRADIENTS[kind]
    parameters, optimizer = built(device, FusedAdamW)
    for step in range(2):
        set_gradients(parameters, make_gradients(parameters, step))
        parameters[i].grad = change(parameters[i].grad)
        if kind == "shorter":  # through .data, which torch does not check
            parameters[i].grad.data = parameters[i].grad.new_zeros(2, 2)
        assert_refused(optimizer, rf"\['params'\]\[{i}\] has a gradient {problem}")
        take_step(parameters, optimizer, step)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, FusedAdamW])
def test_a_gradient_with_another_sign_in_memory(device, optimizer_class):
    masters = []
    for change in (torch.clone, lambda g: torch._neg_view(-g)):
        parameters, optimizer = built(device, optimizer_class, seed=0)
        optimizer.step()
        parameters[0].grad = change(parameters[0].grad)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        masters.append(optimizer.gathered_masters())
    assert_all_equal(*masters, "master")


BAD_COMMUNICATION = [
    ("overlap", "forwards", "must be one of"),
    ("transport", "nvlink", "must be one of"),
    ("reduction", "sum", "must be one of"),
    ("gradient_wire", torch.float64, "must be one of"),
    ("between_hosts", "fp8", "must be one of"),
    ("exactly", max, "is for between_hosts, which is None"),
    *(("gradient_dtype", dtype, "must be one of") for dtype in (torch.float16, "float32", True)),
    *(
        ("bucket_mb", size, "must be a positive number of mega")
        for size in (0, -1, math.nan, math.inf, True, "8")
    ),
]


def bad_classes(device):
    matrix, bias = (nn.Parameter(torch.zeros(n, device=device)) for n in ((4, 6), (4,)))
    first, second = make_parameters(device, 0, MATRICES[:2])
    adamw, adafactor = torch.optim.AdamW, torch.optim.Adafactor
    whole = {"whole_matrices": True}

    def with_bias(**options):
        return [{"params": [matrix]}, {"params": [bias], **options}]

    message = r"\[0\]\['params'\]\[1\] 'fc.bias' has shape \(4,\), and torch.optim.Muon gets whole matrices"
    yield ValueError, message, [("fc.weight", matrix), ("fc.bias", bias)], {}
    message = "torch.optim.adamw.AdamW gets whole matrices"
    yield ValueError, message, [bias], {"optimizer_class": adamw, **whole}
    message = "optimizer_class: Muon cannot run on shards of parameters, it orthogonalizes whole matrices"
    yield ValueError, message, [matrix], {"whole_matrices": False}
    message = "momentum: given for Muon, which is the class of no group"
    yield ValueError, message, [{"params": [matrix], "optimizer_class": adamw}], {"momentum": 0.9}
    message = r"\[1\]\['optimizer_class'\] is AdamW, and lr was given for Muon: a group with a class"
    yield ValueError, message, with_bias(optimizer_class=adamw), {"lr": 0.1}
    message = r"param_groups\[1\]\['optimizer_class'\] must be a subclass of torch.optim.Optimizer, got <cla"
    yield TypeError, message, with_bias(optimizer_class=int), {}
    message = r"param_groups\[1\]\['optimizer_class'\]: Adafactor cannot run on shards.*whole_matrices=True"
    yield ValueError, message, with_bias(optimizer_class=adafactor), {}
    groups = with_bias(optimizer_class=adamw, betas=(2.0, 0.9))
    yield ValueError, "Invalid beta", groups, {}
    groups = [{"params": [first]}, {"params": [second], "optimizer_class": adamw}]
    message = r"\[0\].* and .*\[1\].* share an amax, so they must have the same optimizer_class"
    yield ValueError, message, groups, {"amax_groups": [[first, second]]}


def bad_arguments(device):
    parameters = make_parameters(device)
    weight, bias = parameters[0], parameters[1]
    shared = torch.zeros(10, device=device)
    views = [nn.Parameter(shared[:6]), nn.Parameter(shared[5:])]
    rows = nn.Parameter(quantize(torch.ones(16, 16, device=device), block=(1, 16), columnwise=True))
    frozen = nn.Parameter(torch.zeros(3, device=device), requires_grad=False)
    yield TypeError, "must be a subclass of torch.optim.Optimizer", [bias], {"optimizer_class": int}
    for name in ("LBFGS", "Adafactor", "SparseAdam"):
        message = f"optimizer_class: {name} cannot run on shards of parameters, it"
        yield ValueError, message, [bias], {"optimizer_class": getattr(torch.optim, name)}
    yield ValueError, "share memory: pass tied weights as one", [bias, bias], {}
    yield ValueError, r"\[0\] and .*\[1\] share memory", views, {}
    groups = [{"params": [("weight", weight)]}, {"params": [("module.weight", bias)]}]
    yield ValueError, "several parameters have the name 'weight' in checkpoints", groups, {}
    yield TypeError, "must have one of the dtypes", [bias, nn.Parameter(shared.double())], {}
    if shared.is_cuda:
        on_cpu = nn.Parameter(torch.zeros(3))
        yield ValueError, r"\[1\] is on cpu, .*\[0\] on cuda:0", [bias, on_cpu], {}
    message = r"process_group of param_groups\[0\] must be a process group, got int"
    yield TypeError, message, [{"params": [bias], "process_group": 1}], {}
    yield ValueError, "meta device", [nn.Parameter(torch.zeros(3, device="meta"))], {}
    yield ValueError, r"has block \(1, 16\) and a columnwise copy", [rows], {}
    yield ValueError, "no parameter requires a gradient", [frozen], {}
    message = 'on_nonfinite must be "skip" or "raise", got \'no\''
    yield ValueError, message, [bias], {"on_nonfinite": "no"}
    yield ValueError, "Invalid learning rate", [bias], {"lr": -1.0}
    yield TypeError, "momentum", [bias], {"momentum": 0.9}
    yield ValueError, "amax_groups", [bias], {"amax_groups": [[bias]]}
    yield ValueError, "amax_groups", [weight], {"amax_groups": [[weight, bias]]}
    yield TypeError, "communication must be a Communication, got str", [bias], {"communication": "peer"}
    yield TypeError, "exactly must be a function of a name", [bias], {"exactly": ["weight"]}
    for name, value, message in BAD_COMMUNICATION:
        yield ValueError, f"{name} {message}", [bias], {name: value}
    by_peers = {"reduction": "reduce_scatter", "transport": "peer"}
    yield ValueError, "not supported with transport='peer'", [bias], by_peers
    fused, compact = {"optimizer_class": FusedAdamW}, {"state": "compact"}
    updates = fused | {"overlap": "update"}
    yield ValueError, "other: AdamW updates all masters at once", [bias], {"overlap": "update"}
    yield ValueError, "whole matrices are updated all", [weight], updates | {"whole_matrices": True}
    yield ValueError, "other weights are updated by then", [bias], updates | {"on_nonfinite": "raise"}
    for params, options in (([bias], {"state": "small"}), ([{"params": [bias], "state": "small"}], {})):
        yield ValueError, 'state must be "full" or "compact", got .small.', params, fused | options
    yield ValueError, "is of FusedAdamW .* class is AdamW", [weight], compact
    message = "is of FusedAdamW without whole_matrices"
    yield ValueError, message, [weight], fused | compact | {"whole_matrices": True}
    pair = [nn.Parameter(quantize(torch.zeros(16, cols, device=device))) for cols in (64, 32)]
    message = "share an amax, so they must have the same"
    yield ValueError, message, pair, fused | compact | {"amax_groups": [pair]}
    for kind, message, params, options in bad_classes(device):
        yield kind, message, params, {"optimizer_class": torch.optim.Muon} | options


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_bad_arguments(device):
    for kind, message, params, options in bad_arguments(device):
        with pytest.raises(kind, match=message):
            ZeroFP4Optimizer(params, **keywords(options))


def test_arguments_of_something_else(device):
    parameters, optimizer = built(device)
    with pytest.raises(TypeError, match=r"overlap is an option of communication: .*\(overlap='update'\)"):
        ZeroFP4Optimizer(parameters, FusedAdamW, overlap="update")
    with pytest.raises(TypeError, match=r"max_norm must be a number, got list: .* without parameters"):
        optimizer.clip_grad_norm_(parameters, 1.0)
    for given in (nn.Linear(2, 2), torch.optim.AdamW(parameters), torch.optim.AdamW):
        with pytest.raises(TypeError, match=r"params must be model\.named_parameters\(\), .*the next"):
            ZeroFP4Optimizer(given, lr=0.1)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_a_dtype_for_gradients_that_are_there(device):
    parameters = make_parameters(device)
    parameters[1].grad = torch.zeros_like(parameters[1])
    with pytest.raises(ValueError, match=r"\[1\] has a gradient of torch\.bfloat16 by now"):
        ZeroFP4Optimizer(parameters, **keywords(gradient_dtype=torch.float32))
    assert all(p.grad_dtype == p.dtype for p in parameters)


def test_a_torch_without_grad_dtype(device, monkeypatch):
    """Compact masters that are updated with those of others need gradients in another dtype than theirs."""
    monkeypatch.setattr("zerofp4.optim.build.HAS_GRAD_DTYPE", False)
    p, q = (nn.Parameter(torch.zeros(4, 64, dtype=torch.bfloat16, device=device)) for _ in range(2))
    groups = [{"params": [p], "state": "compact"}, {"params": [q], "optimizer_class": torch.optim.SGD}]
    for params, options, what in (
        ([p], {"gradient_dtype": torch.float32}, r"gradient_dtype=torch\.float32"),
        (groups, {}, 'state="compact" beside SGD'),
    ):
        with pytest.raises(ValueError, match=f"{what} gives .* which torch .* does not make"):
            ZeroFP4Optimizer(params, FusedAdamW, **keywords(options))


@pytest.mark.parametrize("prepared", [False, True])
def test_a_model_of_fsdp2(world_of_one, prepared):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if prepared:
        fsdp2.prepare(net)
    else:
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    message = r"\[0\] '0.weight' is a DTensor or was prepared for FSDP2.*fsdp2\.attach\(model, optimizer\)"
    with pytest.raises(TypeError, match=message):
        ZeroFP4Optimizer(net.named_parameters())


@pytest.mark.filterwarnings("error")
def test_a_model_that_was_not_converted_warns(device):
    """Not one that trains others beside frozen NVFP4 weights, as adapters are trained."""
    model = nn.Sequential(nn.Linear(32, 32, device=device), nn.Linear(32, 32, device=device))
    with pytest.warns(UserWarning, match=r"none of the 4 parameters is NVFP4.* zerofp4\.convert_model\("):
        ZeroFP4Optimizer(model.named_parameters())
    zerofp4.convert_model(model, lambda module, name: name == "0")
    model[0].requires_grad_(False)
    ZeroFP4Optimizer(model.named_parameters())
    ZeroFP4Optimizer([p for p in model.parameters() if p.requires_grad])  # as most give it adapters


# Averages of weights


@pytest.mark.parametrize(
    "way", [{}, {"avg_fn": get_ema_avg_fn(0.9)}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}]
)
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


def test_averages_that_are_refused(device):
    """(distributed/state/test_export has good ones.)"""
    optimizer = ZeroFP4Optimizer(make_net(device).parameters(), lr=0.1)
    for other in (torch.optim.AdamW(Net().parameters()), AveragedMasters(optimizer)):
        with pytest.raises(TypeError, match=f"must be a ZeroFP4Optimizer, got {type(other).__name__}"):
            AveragedMasters(other)
    for decay in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match=f"decay must be from 0 to 1, got {decay}"):
            AveragedMasters(optimizer, decay)
