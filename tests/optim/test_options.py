"""Options: of parameter groups, which ranks compare or no optimizer takes, and of Communication."""

import copy
import math

import pytest
import torch
from cases.optim import assert_weights_follow, make_parameters, take_step, unchanged

from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer
from zerofp4.optim.inner import HASH_BITS, OptionsHash


def groups(*lrs, **options):
    return [{"params": [], "lr": lr, "name": "text", "foreach": None, **options} for lr in lrs]


def test_hashes_tell_values_and_places_apart(device):
    """Equal values have equal hashes, of any dtype and on any device, so -0.0 is 0.0. A change is in the next
    hash, also one of a tensor in place.
    """
    tensor = lambda value, **options: torch.tensor(value, device=device, **options)  # noqa: E731
    of = lambda *lrs, **options: OptionsHash(device).of(groups(*lrs, **options))  # noqa: E731
    assert of(0.5) == of(0.5, name="other") and of(1) == of(1.0) != of(2) and of(0.5, 1)[1] is None
    values = [0.0, 1.0, -1.0, 2.0, 0.1, math.nextafter(0.1, 1), 5e-324, math.inf, math.nan, 1e300]
    words = [of(tensor(value, dtype=torch.float64))[1].item() for value in values]
    pairs = [of(tensor(a), tensor(b))[1].item() for a in values[:4] for b in values[:4]]
    assert len(set(words)) == len(words) and len(set(pairs)) == len(pairs)
    assert all(w == int(w) and 0 <= w < 2**HASH_BITS for w in words + pairs)
    assert of(tensor(0.0)) == of(tensor(-0.0)) == of(tensor([[0.0]]))
    assert of(tensor(0.5)) == of(torch.tensor(0.5, dtype=torch.bfloat16))
    lr, hashes = tensor(0.25), OptionsHash(device)
    made = groups(0.5, lr)
    for change in (lambda: made[0].update(rho=0.5), lambda: lr.fill_(0.125), lambda: made.pop(0)):
        before = hashes.of(made)
        assert hashes.of(made) == before
        change()
        assert hashes.of(made) == OptionsHash(device).of(made) != before


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


# How gradients and weights travel


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": "forwards"}, "overlap must be one of"),
        ({"transport": "nvlink"}, "transport must be one of"),
        ({"gradient_wire": torch.float64}, "gradient_wire must be one of"),
        ({"gradient_dtype": torch.float16}, "gradient_dtype must be one of"),
        ({"reduction": "sum"}, "reduction must be one of"),
        ({"reduction": "reduce_scatter", "transport": "peer"}, "not supported with transport='peer'"),
    ],
)
def test_options_that_cannot_be_meant(options, message):
    with pytest.raises(ValueError, match=message):
        Communication(**options)


def test_another_object_than_a_communication():
    with pytest.raises(TypeError, match="communication must be a Communication, got str"):
        ZeroFP4Optimizer(make_parameters(torch.device("cpu")), communication="peer")
