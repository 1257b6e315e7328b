"""FusedAdamW is reference.adamw_step bit for bit, torch.optim.AdamW to a few roundings, and an optimizer. It
refuses with a message that names the argument, the rule and the value, and changes nothing then.
"""

import contextlib
import copy
import itertools
import math
import pickle
import re

import pytest
import torch
from cases.optim import assert_all_equal
from distributed.optim.fused_cases import (
    HYPERS,
    OPTIONS,
    Expected,
    each_state,
    set_gradient,
    set_random_gradients,
    step_alike,
)
from helpers import assert_bytes_equal, freed
from hypothesis import given
from hypothesis import strategies as st

import zerofp4
from zerofp4.optim import FusedAdamW

# Below and above a row and a strip of the kernels, and their multiples.
NUMELS = st.one_of(st.sampled_from([0, 1, 127, 128, 129, 2047, 2048, 2049, 6144]), st.integers(2, 5000))


def embedded(values: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A view of the values at an element offset of an aligned buffer, and the buffer; 7 around them."""
    buffer = torch.full((offset + values.numel() + 9,), 7, dtype=values.dtype, device=values.device)
    view = buffer[offset : offset + values.numel()]
    view.copy_(values)
    return view, buffer


@given(
    tensors=st.lists(st.tuples(NUMELS, st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=4),
    hypers=HYPERS,
    seed=st.integers(0, 1000),
)
def test_equals_the_reference(device, tensors, hypers, seed):
    generator, gradients = torch.Generator().manual_seed(seed), []
    made = [
        embedded(torch.randn(numel, generator=generator).to(device), offset)
        for numel, offset, *_ in [*tensors, (300, 0, 0, False)]
    ]

    def gradient(step, i, p):
        if i == len(tensors):
            return None
        *_, offset, bf16 = tensors[i]
        values = torch.randn(p.numel(), generator=generator) * 10.0 ** (step - 1)
        view, buffer = embedded(values.to(device, torch.bfloat16 if bf16 else torch.float32), offset)
        gradients.append((buffer, buffer.clone()))
        return view

    Expected(FusedAdamW([p for p, _ in made], **hypers)).compare_steps(range(3), gradient)
    for buffer, before in gradients:
        assert_bytes_equal(buffer, before, "gradient")
    for p, buffer in made:
        assert (buffer == 7).sum().item() >= buffer.numel() - p.numel(), "written past a parameter"


def test_denormals_infinities_and_nan(device):
    special = [0.0, 1e-45, 1e-40, 1.2e-38, 1e-20, 1e-10, 1.0, 1e18, 1e25, 3.4e38, math.inf, math.nan]
    special = torch.tensor(special + [-x for x in special])
    masters, gradients = torch.cartesian_prod(special, special).to(device).unbind(1)
    for maximize, eps in itertools.product((False, True), (1e-8, 1e-45, 0.0)):
        optimizer = FusedAdamW([masters.clone()], **OPTIONS | {"eps": eps}, maximize=maximize)
        Expected(optimizer).compare_steps(range(3), lambda step, *_: gradients.roll(step).clone())


@pytest.mark.parametrize("done", [0, 9, 1234567, 2**24 - 2])
def test_steps_are_counted_in_float32_and_bias_corrections_follow(device, done):
    p = torch.randn(100, device=device)
    optimizer = FusedAdamW([p], **OPTIONS | {"betas": (0.9, 0.9999999)})
    p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.state[p]["step"].fill_(done)
    expected = Expected(optimizer)
    expected.steps[0] = done
    expected.compare_steps()


def test_more_tensors_than_a_launch_has_arguments_for(device):
    parameters = [torch.randn(1 + i % 5, device=device) for i in range(1100)]
    groups = [{"params": parameters[:3], "lr": 0.5}, {"params": []}, {"params": parameters[3:]}]
    Expected(FusedAdamW(groups, **OPTIONS)).compare_steps(
        range(2), lambda step, i, p: torch.randn_like(p) if (i + step) % 7 else None
    )


SHAPES = [(5,), (4096,), (7, 100)]
"""The last one has codes where state is compact."""


@each_state
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_found_inf_and_clip_factor(device, dtype, state):
    """A step that finds an infinity changes neither parameters nor state, whatever the gradients are. Clipped
    gradients have the bytes of a multiplication in float32.
    """
    masters = [torch.randn(shape, device=device) for shape in SHAPES]
    optimizer = FusedAdamW(masters, **OPTIONS, maximize=True, state=state)
    expected = Expected(optimizer)
    optimizer.found_inf = torch.zeros((), device=device)
    for flag in (1.0, math.inf):
        optimizer.found_inf.zero_()
        expected.compare_steps(range(2), lambda _, i, p: torch.randn_like(p).to(dtype))
        optimizer.clip_factor = torch.tensor(0.3 + flag, device=device).clamp(max=2)
        optimizer.found_inf.fill_(flag)
        for p in masters:
            set_gradient(p, torch.full_like(p, math.nan, dtype=dtype))
        optimizer.step()
        expected.check(f"found_inf {flag}:")


# What an optimizer does


@pytest.mark.parametrize("on_device", [False, True])
def test_a_scheduler_changes_a_tensor_lr_and_betas(device, on_device):
    lr = torch.tensor(0.1, device=device if on_device else "cpu")
    optimizer = FusedAdamW([{"params": [torch.randn(500, device=device)], "lr": rate} for rate in (lr, 0.1)])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=9)
    expected = Expected(optimizer)
    for _ in range(5):
        before = lr.item()
        expected.compare_steps()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] is lr and lr.item() != before
    assert optimizer.param_groups[0]["betas"][0] != 0.9


def test_what_lies_elsewhere_than_in_the_step_before(device):
    """Gradients, which come and go, too, a parameter and an entry of state."""
    parameters = [torch.randn(n, device=device) for n in (3, 300, 3000)]
    optimizer = FusedAdamW([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.3}], **OPTIONS)
    optimizer.step()
    assert not optimizer.state
    expected, present, kept = Expected(optimizer), [(1,), (0, 1), (), (2,), (0, 1, 2), (0, 1, 2)], []

    def gradient(step, i, p):
        kept.append(torch.randn_like(p).to(torch.float32 if (step + i) % 3 else torch.bfloat16))
        return kept[-1] if i in present[step] else None

    for step in range(len(present)):
        expected.compare_steps([step], gradient)
        if step == 4:
            parameters[1].data = parameters[1].data.clone()
            optimizer.state[parameters[1]]["exp_avg"] = optimizer.state[parameters[1]]["exp_avg"].clone()
    optimizer.state.clear()  # it begins anew
    optimizer.step()
    assert [state["step"].item() for state in optimizer.state.values()] == [1, 1, 1]


def test_added_groups_closures_and_hooks(device):
    p, q = (torch.randn(5, device=device) for _ in range(2))
    optimizer = FusedAdamW([("weight", p)], **OPTIONS)
    optimizer.add_param_group({"params": [("bias", q)], "weight_decay": 0.0})
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    expected = Expected(optimizer)

    def closure():
        assert torch.is_grad_enabled()
        set_random_gradients((p, q))
        expected.step()
        return 5

    assert optimizer.step(closure) == 5
    expected.check()
    assert calls == ["pre", "post"]


# torch.optim.AdamW


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.999), (0.9, 0.0), (0.0, 0.0), (0.95, 0.95)])
@pytest.mark.parametrize("eps", [1e-8, 1e-3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_close_to_torch(device, betas, eps, weight_decay):
    """Within 4 eps * (|p| + lr) per step from the same state: torch's own variants differ from each other by
    as much. Where beta1 is 0 or beta2 <= beta1^2, an update can be many times lr: then |p| is the larger of p
    before and p after, of which one is at least half the update.
    """
    options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    is_large = betas[0] == 0 or betas[1] <= betas[0] ** 2
    for lr, maximize in itertools.product((1e-3, 0.1), (False, True)):
        p = torch.randn(4000, generator=torch.Generator().manual_seed(0)).to(device)
        optimizer = FusedAdamW([p], lr=torch.tensor(lr, device=device), maximize=maximize, **options)
        for step in range(6):
            p.grad = torch.randn(4000, generator=torch.Generator().manual_seed(step)).to(device)
            before, theirs = p.clone(), p.clone()
            plain = torch.optim.AdamW([theirs], lr=lr, maximize=maximize, **options)
            plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            plain.param_groups[0].update(lr=lr, fused=False)
            plain.state[theirs] = {k: v.cpu() if k == "step" else v for k, v in plain.state[theirs].items()}
            theirs.grad = p.grad
            plain.step()
            optimizer.step()
            size = torch.maximum(before.abs(), theirs.abs()) if is_large else theirs.abs()
            error = (p - theirs).abs() / (torch.finfo(torch.float32).eps * (size + lr))
            assert error.max() <= 4, (lr, maximize, step)


def trained(optimizer_class, device, steps, **options):
    """An optimizer of two groups after some steps; the second parameter has had no gradient yet."""
    generator = torch.Generator().manual_seed(1)
    shapes = (33,), (40,), (2, 100)
    parameters = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02, "betas": (0.8, 0.9)}]
    optimizer = optimizer_class(groups, lr=0.01, **options)
    for _ in range(steps):
        for p in (parameters[0], parameters[2]):
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        optimizer.step()
    return optimizer, parameters


@pytest.mark.parametrize(
    ("saver", "loader", "options"),
    [
        *((torch.optim.AdamW, FusedAdamW, {"fused": fused}) for fused in (False, True)),
        (FusedAdamW, torch.optim.AdamW, {}),
        (FusedAdamW, FusedAdamW, {}),
    ],
)
@pytest.mark.parametrize("steps", [0, 3])
def test_each_loads_what_the_other_saved(device, saver, loader, options, steps):
    saved, parameters = trained(saver, device, steps, **options)
    loaded, copies = trained(loader, device, 1)
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    for p, q in zip(parameters, copies, strict=True):
        assert (p in saved.state) == (q in loaded.state)
        for name, value in saved.state.get(p, {}).items():
            assert_bytes_equal(loaded.state[q][name].to(value.device), value, name)
    torchs, _ = trained(torch.optim.AdamW, device, 0, fused=True)
    mine = saved if saver is FusedAdamW else loaded
    for group, expected in zip(mine.param_groups, torchs.param_groups, strict=True):
        assert group | {"params": 0} == expected | {"params": 0}
    step_alike(saved, parameters, loaded, copies)
    # The bound is test_close_to_torch's. torch's fused kernel takes 1 - beta^step in float32, which in the
    # first steps is good to 1e-5 of itself.
    near = {"rtol": 0, "atol": 0} if saver is loader else {"rtol": 1e-6, "atol": 2e-7}
    for p, q in zip(parameters, copies, strict=True):
        torch.testing.assert_close(q, p, **near)
        assert loaded.state[q]["step"] == saved.state[p]["step"]
        assert loader is torch.optim.AdamW or loaded.state[q]["step"].device == q.device


@each_state
@pytest.mark.parametrize("how", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_goes_on_where_it_was(device, how, state):
    optimizer, parameters = trained(FusedAdamW, device, 2, state=state)
    twin = how(optimizer)
    twins = [p for group in twin.param_groups for p in group["params"]]
    step_alike(optimizer, parameters, twin, twins)
    assert_all_equal(twins, parameters, "parameter")


# What is refused


@contextlib.contextmanager
def refused(optimizer, error, message):
    """Raises, and leaves parameters and the states of the optimizer's state_dict as they were."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    values, states = [p.clone() for p in parameters], copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(error, match=message):
        yield
    found = optimizer.state_dict()["state"]
    assert found.keys() == states.keys()
    assert_all_equal(parameters, values, "parameter")
    for i, state in found.items():
        for key, value in state.items():
            assert_bytes_equal(value, states[i][key], key)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "amsgrad=True is not supported"),
        ({"state": "small"}, 'state must be "full" or "compact", got \'small\''),
        ({"lr": -0.1}, "lr must be finite and 0 or more, got -0.1"),
        ({"lr": float("nan")}, "lr must be finite and 0 or more, got nan"),
        ({"eps": math.inf}, "eps must be finite and 0 or more, got inf"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers of at least 0 and below 1, got \(0.9, 1.0\)"),
        ({"betas": (0.9, torch.tensor(0.9))}, r"betas must be two numbers .*, got \(0.9, tensor"),
    ],
)
def test_options(device, options, message):
    """Of the constructor, of an added group, and edited before a step: found before anything has changed, the
    groups before included.
    """
    with pytest.raises(ValueError, match=message):
        FusedAdamW([torch.zeros(3)], **options)
    optimizer = FusedAdamW([{"params": [torch.randn(20, device=device)]} for _ in range(2)])
    group = optimizer.param_groups[1]
    set_random_gradients([*optimizer.param_groups[0]["params"], *group["params"]])
    optimizer.step()
    good = dict(group)
    group.update(options)
    with refused(optimizer, ValueError, re.escape("param_groups[1]: ") + message):
        optimizer.step()
    group.clear()
    group.update(good)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [torch.zeros(4, device=device)], **options})
    optimizer.step()  # without the group


@pytest.mark.parametrize("name", ["clip_factor", "found_inf"])
def test_scalars_that_kernels_cannot_read(device, name):
    optimizer = FusedAdamW([torch.ones(3, device=device)])
    set_random_gradients(optimizer.param_groups[0]["params"])
    for scalar, error, message in (
        (1.0, TypeError, "must be a torch.float32 tensor, got float"),
        (torch.zeros(2, device=device), ValueError, r"must have shape \(\), got \(2,\)"),
        (torch.zeros(1, device="meta"), ValueError, "must be on .*, got meta"),
    ):
        setattr(optimizer, name, scalar)
        with refused(optimizer, error, f"{name} {message}"):
            optimizer.step()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: torch.zeros(4).bfloat16(), TypeError, "must be a torch.float32 tensor, got torch.bfloat16"),
        (lambda: torch.zeros(4).to_sparse(), TypeError, "must be a dense tensor, got layout"),
        (lambda: torch.zeros(4, device="meta"), ValueError, "must be on a CPU or CUDA device, got meta"),
        (lambda: zerofp4.quantize(torch.zeros(16, 16)), TypeError, "must be a plain tensor, got NVFP4Tensor"),
    ],
)
def test_parameters(make, error, message):
    with pytest.raises(error, match=re.escape("param_groups[0]['params'][0] 'weight'") + ".*" + message):
        FusedAdamW([("weight", make())])


def test_a_parameter_twice_or_that_changes_its_kind(device):
    p = torch.randn(4, 4, device=device)
    message = re.escape("param_groups[0] has a parameter twice")
    with pytest.warns(UserWarning, match="duplicate parameters"), pytest.raises(ValueError, match=message):
        FusedAdamW([p, p])
    optimizer = FusedAdamW([p])
    optimizer.step()
    p.data = p.data.t()
    with pytest.raises(ValueError, match=r"\['params'\]\[0\] must be contiguous, got strides \(1, 4\)"):
        optimizer.step()


def test_two_devices(device):
    if device.type == "cpu":
        pytest.skip("needs a second device")
    with pytest.raises(ValueError, match=r"\['params'\]\[1\] must be on cuda:0, got cpu"):
        FusedAdamW([torch.zeros(4, device=device), torch.zeros(4)])
    lr = torch.tensor(0.1, device=device)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['lr'\] must be on cpu, got cuda:0"):
        FusedAdamW([torch.zeros(4)], lr=lr).step()
    with pytest.raises(TypeError, match=r"\['lr'\] must be a torch.float32 tensor, got torch.float64"):
        FusedAdamW([torch.zeros(4, device=device)], lr=lr.double()).step()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (torch.Tensor.half, TypeError, "must be float32 or bfloat16, got torch.float16"),
        (torch.Tensor.to_sparse, TypeError, "must be a dense tensor, got layout torch.sparse_coo"),
        (torch._neg_view, ValueError, "has its negative bit set, which kernels do not see"),
        (lambda g: freed(torch.cat([g, g])[4:]), RuntimeError, "needs 96 bytes of its storage, which has 0"),
        (lambda g: g.t().contiguous().t(), ValueError, r"must be contiguous, got strides \(1, 4\)"),
    ],
)
def test_gradients(device, make, error, message):
    parameters = [torch.randn(4, 3, device=device) for _ in range(2)]
    optimizer = FusedAdamW(parameters)
    set_random_gradients(parameters)
    optimizer.step()
    set_gradient(parameters[1], make(torch.ones(4, 3, device=device)))
    name = re.escape("the gradient of param_groups[0]['params'][1]")
    with refused(optimizer, error, f"{name}.* {message}"):
        optimizer.step()


def bad_states(good, state):
    """(entry that does not fit, its value, error, message)"""
    yield "step", good["step"].expand(2), ValueError, r"must have shape \(\), got \(2,\)"
    if state == "compact":
        yield "scales", good["scales"][:, :2], ValueError, r"must have shape \(8, 3, 2\), got"
        yield "exp_avg_codes", good["exp_avg_codes"].float(), TypeError, "must be a torch.int8"
    else:
        yield "exp_avg", good["exp_avg"][1:], ValueError, r"must have shape \(8, 130\), got"
        yield "exp_avg_sq", good["exp_avg_sq"].double(), TypeError, "must be a torch.float32"


@each_state
def test_state_that_does_not_fit(device, state):
    """A parameter before it gets no state, and another part keeps what it has; so does who loads it."""
    params = [torch.randn(8, 130, device=device) for _ in range(3)]
    optimizer = FusedAdamW(params, state=state)
    optimizer.offer_parts([(params[:2], None), (params[2:], None)])
    set_random_gradients(params[1:])
    optimizer.step()
    set_random_gradients(params[:1])
    good = {p: optimizer.state[p] for p in params[1:]}
    loaders = [FusedAdamW(params, state=loader) for loader in ("full", "compact")]
    for name, bad, error, message in bad_states(good[params[2]], state):
        optimizer.state[params[2]] = good[params[2]] | {name: bad}
        with refused(optimizer, error, f"{name} {message}"):
            optimizer.step()
        for loader in loaders if name not in ("step", "exp_avg_sq") else ():  # which a load converts
            with pytest.raises(error, match=f"{name} in the state of AdamW {message}"):
                loader.load_state_dict(optimizer.state_dict())
            assert not loader.state
    optimizer.state.update(good)
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [1, 2, 2]
    assert all(optimizer.state[p] is entries for p, entries in good.items())


def test_state_of_another_optimizer():
    p = torch.zeros(4)
    p.grad = torch.ones(4)
    optimizer = FusedAdamW([p])
    optimizer.step()
    state, groups = optimizer.state, optimizer.param_groups
    for theirs, message in (
        (torch.optim.AdamW([p], amsgrad=True), "amsgrad=True is not supported"),
        (torch.optim.SGD([p], momentum=0.9), r"exp_avg_sq, or .*, got \['momentum_buffer'\]"),
    ):
        theirs.step()
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(theirs.state_dict())
        assert optimizer.state is state and optimizer.param_groups is groups
