"""masters_from: a new optimizer begins with the masters of the one before it."""

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
    built,
    keywords,
    make_net,
    make_parameters,
    take_steps,
    through_a_file,
)

import zerofp4
from zerofp4.optim import ZeroFP4Optimizer


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
        (parameters, old.inner, TypeError, "masters_from must be a ZeroFP4Optimizer, got AdamW"),
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
