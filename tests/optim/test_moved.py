"""What moves or is replaced under a ZeroFP4Optimizer: no step before refresh() or a new optimizer, which
begins with the masters of the one before it.
"""

import copy
import pickle
import re
import warnings

import pytest
import torch
from cases.optim import (
    Net,
    Plain,
    assert_all_equal,
    assert_refused,
    batch,
    both,
    built,
    keywords,
    make_gradients,
    make_net,
    make_parameters,
    set_gradients,
    take_steps,
    through_a_file,
    unchanged,
)
from torch import nn

import zerofp4
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

DEFAULTS = {"lr": 0.01, "weight_decay": 0.1}


def share_master(optimizer, parameter):
    optimizer.state[parameter]["master"].values.share_memory_()


def replace_master(_, optimizer):
    master = optimizer._shards.masters[0]
    master.data = master.data.clone()


MOVES = {
    "codes": (lambda ps, _: setattr(ps[0], "rowwise_data", ps[0].rowwise_data.clone()), r"\['params'\]\[0\]"),
    "record": (lambda ps, _: setattr(ps[0], "data", ps[0].data.clone()), r"\['params'\]\[0\]"),
    "dense": (lambda ps, _: setattr(ps[1], "data", ps[1].data.clone()), r"\['params'\]\[1\]"),
    "own master": (lambda ps, _: setattr(ps[3], "data", ps[3].data.clone()), r"\['params'\]\[3\]"),
    "master": (replace_master, r"the master of .*\[0\]"),
}
# torch moves storages in place on the CPU only.
MOVES_IN_PLACE = {
    "shared codes": (lambda ps, _: ps[0].rowwise_data.share_memory_(), r"\['params'\]\[0\]: rowwise_data"),
    "shared dense": (lambda ps, _: ps[5].detach().share_memory_(), r"\['params'\]\[5\]"),
    "masters": (lambda ps, optimizer: share_master(optimizer, ps[0]), r"the master of .*\[0\]"),
    "found_inf": (lambda _, optimizer: optimizer.found_inf.share_memory_(), "found_inf"),
}


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, FusedAdamW])
@pytest.mark.parametrize("what", [*MOVES, *MOVES_IN_PLACE])
def test_no_step_after_a_move_and_the_same_steps_after_refresh(device, what, optimizer_class):
    if what in MOVES_IN_PLACE and device.type != "cpu":
        pytest.skip("torch does not move storages in place on a GPU")
    move, name = (MOVES | MOVES_IN_PLACE)[what]
    plain, optimizer = both(device, optimizer_class, **DEFAULTS)
    take_steps(plain, optimizer, [0])
    move(plain.parameters, optimizer)
    set_gradients(plain.parameters, make_gradients(plain.parameters, 1))
    with unchanged(plain.parameters, optimizer, optimizer.found_inf):
        assert_refused(optimizer, rf"{name}.* has moved since .* call refresh\(\)")
    if what != "master":  # a tensor of ours, whose buffer is of no more use
        optimizer.refresh()
        take_steps(plain, optimizer, [1, 2])


def test_refresh_in_inference_mode(device):
    """The parameters are those of training, as they were, whatever was assigned to them."""
    parameters, optimizer = built(device)
    with unchanged(parameters, optimizer):
        for i in (1, 3, 5):
            parameters[i].data = torch.full_like(parameters[i].data, 7)
        with torch.inference_mode():
            optimizer.refresh()
    assert not any(p.is_inference() for p in parameters)
    sum((p.dequantize() if hasattr(p, "record") else p).float().square().sum() for p in parameters).backward()
    optimizer.step()
    assert optimizer.found_inf.item() == 0


@pytest.mark.parametrize(("shape", "dtype"), [((300,), torch.float64), ((299,), torch.float16)])
def test_refresh_of_a_parameter_that_is_another(device, shape, dtype):
    parameters, optimizer = built(device)
    parameters[5].data = torch.zeros(shape, dtype=dtype, device=device)
    moved = parameters[0].rowwise_data = parameters[0].rowwise_data.clone()
    with pytest.raises(ValueError) as caught:
        optimizer.refresh()
    now = f"{str(dtype).removeprefix('torch.')} {shape}"
    assert f"['params'][5] was float16 (300,) on {device}, now it is {now} on" in str(caught.value)
    assert parameters[0].rowwise_data is moved


# Parameters that a model replaces


REPLACED = r"'params'\]\[\d\].* was replaced in its module since the optimizer was built \(by convert_model"


def by_hand(net):
    net.first.weight = nn.Parameter(torch.zeros_like(net.first.bias).expand(32, 48).t().contiguous())


def assign(net):
    kind = type(net.first.weight.data)
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    assert type(net.first.weight.data) is kind


@pytest.mark.parametrize(
    ("make", "replace"),
    [(Net, zerofp4.convert_model), (Net, assign), (make_net, assign), (make_net, by_hand)],
)
def test_a_parameter_that_is_replaced_and_put_back(device, make, replace):
    """Those that are not trained may be replaced."""
    net = Net().to(device) if make is Net else make(device)
    net.second.requires_grad_(False)
    optimizer = ZeroFP4Optimizer(net.parameters(), lr=0.1)
    net.second.bias = nn.Parameter(net.second.bias.detach().clone(), requires_grad=False)
    net(batch(device, 0)).square().mean().backward()
    optimizer.step()
    originals = dict(net.named_parameters())
    before = [master for master in optimizer.gathered_masters() if master is not None]
    replace(net)
    assert_refused(optimizer, REPLACED)
    after = [master for master in optimizer.gathered_masters() if master is not None]
    assert_all_equal(after, before, "master")
    for name, p in originals.items():
        module, _, own = name.rpartition(".")
        setattr(net.get_submodule(module), own, p)
    optimizer.step()


# masters_from


def test_an_optimizer_built_twice_leaves_the_first_of_no_use(device, tmp_path):
    """As by a cell of a notebook that is run twice: what the first one says must not undo the second."""
    net = make_net(device)
    old = ZeroFP4Optimizer(net.parameters(), lr=0.1)
    old.load_state_dict(old.state_dict())  # its next step begins by writing weights
    with pytest.warns(UserWarning, match="masters_from"):
        optimizer = ZeroFP4Optimizer(net.parameters(), lr=0.1)
    plain = Plain(list(net.parameters()), torch.optim.AdamW, lr=0.1)
    for step in range(3):
        for call in (
            old.step,
            lambda: old.clip_grad_norm_(1.0),
            old.refresh,
            old.check,
            lambda: zerofp4.save_safetensors(net, tmp_path, old),
            lambda: zerofp4.unconvert_model(net, old),
            lambda: old.load_state_dict(old.state_dict()),
        ):
            with pytest.raises((RuntimeError, ValueError), match="another ZeroFP4Optimizer was built over"):
                call()
        take_steps(plain, optimizer, [step])


def lost(net, **options):
    """What building an optimizer warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ZeroFP4Optimizer(net.named_parameters(), **keywords(options))
    return [(str(warning.message), warning.filename) for warning in caught]


def test_masters_that_begin_with_4_bit_values_again_warn(device):
    net = make_net(device)
    assert not lost(net)  # what convert_model kept
    ((message, file),) = lost(net)
    assert re.search(r"masters of 2 weights \(.*'first.weight'.* masters_from", message) and file == __file__
    assert not lost(net, masters_from=ZeroFP4Optimizer(net.named_parameters()))
    assert len(lost(net)) == 1
    copied = copy.deepcopy(net)
    assert len(lost(copied)) == 1
    net.load_state_dict(Net().state_dict())  # of whose values the codes are all that stays
    assert len(lost(net)) == 1


LOSE = {
    "a state_dict": lambda layer: layer.load_state_dict(through_a_file(layer.state_dict())),
    "no values": lambda layer: layer.to_empty(device=layer.weight.device),
    "by hand": lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight.detach().clone())),
}


@pytest.mark.parametrize("lose", LOSE)
def test_masters_that_begin_with_4_bit_values_warn(device, lose):
    net = make_net(device)
    LOSE[lose](net.first)
    ((message, file),) = lost(net)
    assert re.search(r"masters of 1 weights \(.*'first.weight'\) begin with 4-bit values.* Load the", message)
    assert file == __file__


def test_masters_that_an_earlier_optimizer_lacks_warn(device):
    """The advice to give masters_from would not help."""
    net = make_net(device)
    earlier = ZeroFP4Optimizer([("second.weight", net.second.weight)])
    LOSE["by hand"](net.first)
    ((message, _),) = lost(net, masters_from=earlier)
    assert "masters of 1 weights" in message and "masters_from" not in message


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_a_model_keeps_what_masters_begin_with(device, duplicate):
    """Also one that was pickled, as for a process that is spawned, and a layer with primary weights."""
    net = make_net(device)
    models = duplicate(net), net
    sides = [ZeroFP4Optimizer(each.named_parameters()).gathered_masters() for each in models]
    assert_all_equal(*sides, "master")
    layer = zerofp4.nn.Linear(32, 16, device=device, primary_weights=True)
    ZeroFP4Optimizer(duplicate(layer).named_parameters())


def test_sources_that_are_refused(device):
    parameters, old = built(device, seed=0)
    old.step()
    before = copy.deepcopy([p.detach().float() for p in parameters])
    with torch.no_grad():
        parameters[4].zero_()
    for chosen, source, kind, message in [
        (
            parameters,
            old.inner,
            TypeError,
            "must be a ZeroFP4Optimizer, a folder or a function, got",
        ),
        (make_parameters(device), old, ValueError, "has the master of none of the trainable parameters"),
        (parameters, old, ValueError, r"\[4\] was written to since the last step of masters_from"),
    ]:
        with pytest.raises(kind, match=message):
            ZeroFP4Optimizer(chosen, masters_from=source)
    ZeroFP4Optimizer([*parameters[:4], *parameters[5:]], masters_from=old)
    assert_all_equal([p.detach().float() for p in parameters[:4]], before[:4], "parameter")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_is_neither_copied_nor_pickled(duplicate):
    optimizer = ZeroFP4Optimizer(make_net("cpu").parameters())
    with pytest.raises(TypeError, match=r"neither copied nor pickled.* build a new optimizer"):
        duplicate(optimizer)
