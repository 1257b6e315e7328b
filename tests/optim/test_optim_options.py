"""What ranks compare of the options of parameter groups, and which ones no optimizer takes."""

import copy
import math

import pytest
import torch
from optim_cases import (
    assert_all_equal,
    assert_weights_follow,
    make_gradients,
    make_parameters,
    set_gradients,
)

from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer
from zerofp4.optim.groups import HASH_BITS, OptionsHash, compared_options, show_option


def groups(*lrs, **options):
    return [{"params": [], "lr": lr, "name": "text", "foreach": None, **options} for lr in lrs]


def test_numbers_and_tensors_are_compared(device):
    made = groups(0.5, torch.tensor(0.25, device=device), betas=(0.5, torch.tensor([0.75])), maximize=False)
    compared = compared_options(made)
    assert [(name, show_option(value)) for name, value in compared] == [
        ("param_groups[0]['betas']", "(0.5, a tensor of [0.75])"),
        ("param_groups[0]['lr']", "0.5"),
        ("param_groups[0]['maximize']", "0.0"),
        ("param_groups[1]['betas']", "(0.5, a tensor of [0.75])"),
        ("param_groups[1]['lr']", "a tensor of 0.25"),
        ("param_groups[1]['maximize']", "0.0"),
    ]
    assert show_option(compared[4][1], read_tensors=False) == "a tensor of ()"
    word = lambda groups: OptionsHash(device).of(groups)[0]  # noqa: E731
    assert word(groups(0.5)) == word(groups(0.5, name="other"))
    assert word(groups(1)) == word(groups(1.0)) != word(groups(2))


def test_the_hash_of_tensors_tells_values_and_places_apart(device):
    """Of any dtype, on any device; equal values have equal hashes, so -0.0 is 0.0."""
    word = lambda *lrs: OptionsHash(device).of(groups(*lrs))[1].item()  # noqa: E731
    tensor = lambda value, **options: torch.tensor(value, device=device, **options)  # noqa: E731
    assert OptionsHash(device).of(groups(0.5, 1))[1] is None
    values = [0.0, 1.0, -1.0, 2.0, 0.1, math.nextafter(0.1, 1), 5e-324, math.inf, math.nan, 1e300]
    words = [word(tensor(value, dtype=torch.float64)) for value in values]
    pairs = [word(tensor(a), tensor(b)) for a in values[:4] for b in values[:4]]
    assert len(set(words)) == len(words) and len(set(pairs)) == len(pairs)
    assert all(w == int(w) and 0 <= w < 2**HASH_BITS for w in words + pairs)
    assert word(tensor(0.0)) == word(tensor(-0.0)) == word(tensor([[0.0]]))
    assert word(tensor(0.5)) == word(torch.tensor(0.5, dtype=torch.bfloat16)) == word(0.5, tensor(0.5))


def test_every_change_of_an_option_is_in_the_next_hash(device):
    """Also one in place, of a list or a tensor, where nothing is replaced."""
    lr, hashes = torch.tensor(0.25, device=device), OptionsHash(device)
    made = groups(0.5, lr, betas=[0.5, 0.75])
    changes = [
        lambda: made[0].update(lr=0.75),
        lambda: made[0].update(rho=0.5),
        lambda: made[0]["betas"].__setitem__(0, 0.25),
        lambda: lr.fill_(0.125),
        lambda: made.pop(0),
    ]
    for change in changes:
        before = hashes.of(made)
        assert hashes.of(made) == before
        change()
        assert hashes.of(made) == OptionsHash(device).of(made) != before


NOT_FINITE = [
    ("lr", math.inf),
    ("lr", math.nan),
    ("lr", torch.tensor(math.inf)),
    ("betas", (0.9, math.nan)),
    ("eps", math.inf),
    ("weight_decay", math.inf),
    ("momentum", math.nan),
    ("dampening", math.inf),
    ("alpha", math.nan),
    ("lr_decay", math.inf),
]


def classes_with(name) -> list[type]:
    """The optimizers that have the option."""
    others = {"alpha": torch.optim.RMSprop, "lr_decay": torch.optim.Adagrad}
    others |= dict.fromkeys(("momentum", "dampening"), torch.optim.SGD)
    return [others[name]] if name in others else [FusedAdamW, torch.optim.AdamW]


@pytest.mark.parametrize(("name", "value"), NOT_FINITE)
def test_options_must_be_finite(device, name, value):
    """Given for all groups or for one, edited or loaded; masters and weights stay as they are."""
    for optimizer_class in classes_with(name):
        parameters = make_parameters(device)
        with pytest.raises(ValueError, match=r"inf|nan"):
            ZeroFP4Optimizer(parameters, optimizer_class, **{"lr": 0.1, name: value})
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], name: value}]
        with pytest.raises(ValueError, match=r"inf|nan"):
            ZeroFP4Optimizer(groups, optimizer_class, lr=0.1)
        groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
        optimizer = ZeroFP4Optimizer(groups, optimizer_class, lr=0.1)
        set_gradients(parameters, make_gradients(parameters, 0))
        optimizer.step()
        before = optimizer.gathered_masters()
        message = rf"param_groups\[1\]\['{name}'\] must be finite, got .*(inf|nan)"
        kept, optimizer.param_groups[1][name] = optimizer.param_groups[1][name], value
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        optimizer.param_groups[1][name] = kept
        state_dict = copy.deepcopy(optimizer.state_dict())
        state_dict["param_groups"][1][name] = value
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state_dict)
        assert_all_equal(optimizer.gathered_masters(), before, "master")
        optimizer.step()
        assert_weights_follow(parameters, optimizer.gathered_masters())


def test_options_of_other_names_may_be_infinite(device):
    class Limited(torch.optim.SGD):
        def __init__(self, params, lr=0.1, limit=math.inf):
            super().__init__(params, lr)
            self.param_groups[0]["limit"] = limit

    parameters = make_parameters(device)
    optimizer = ZeroFP4Optimizer(parameters, Limited)
    optimizer.param_groups[0]["limit"] = math.inf
    optimizer.step()


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
def test_options_of_fused_adamw_alone_must_be_finite(name):
    p = torch.zeros(4, requires_grad=True)
    p.grad = torch.ones(4)
    with pytest.raises(ValueError, match=f"{name} must be finite, got inf"):
        FusedAdamW([p], **{name: math.inf})
    optimizer = FusedAdamW([p])
    optimizer.param_groups[0][name] = math.inf
    with pytest.raises(ValueError, match=rf"\[0\]: {name} must be finite, got inf"):
        optimizer.step()
    assert p.eq(0).all()
