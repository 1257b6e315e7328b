"""FusedAdamW is reference.adamw_step bit for bit, and an optimizer."""

import itertools
import math

import pytest
import torch
from fused_cases import OPTIONS, Expected, set_gradient
from helpers import assert_bytes_equal
from hypothesis import given
from hypothesis import strategies as st

from zerofp4.optim import FusedAdamW

# Below and above a row and a strip of the kernels, and their multiples.
NUMELS = st.one_of(st.sampled_from([0, 1, 127, 128, 129, 2047, 2048, 2049, 6144]), st.integers(2, 5000))
HYPERS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-3, 0.3]),
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.95), (0.5, 0.0), (0.95, 0.9999), (0.0, 0.0)]),
        "eps": st.sampled_from([1e-8, 1e-15, 0.1]),
        "weight_decay": st.sampled_from([0.0, 0.01, 1.0]),
        "maximize": st.booleans(),
    }
)


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
    generator = torch.Generator().manual_seed(seed)
    made = [
        embedded(torch.randn(numel, generator=generator).to(device), offset)
        for numel, offset, *_ in [*tensors, (300, 0, 0, False)]
    ]
    optimizer = FusedAdamW([p for p, _ in made], **hypers)
    expected = Expected(optimizer)
    for step in range(3):
        gradients = []
        for (p, _), (_, _, offset, bf16) in zip(made, tensors, strict=False):
            values = torch.randn(p.numel(), generator=generator) * 10.0 ** (step - 1)
            gradients.append(embedded(values.to(device, torch.bfloat16 if bf16 else torch.float32), offset))
            set_gradient(p, gradients[-1][0])
        before = [buffer.clone() for _, buffer in gradients]
        expected.step()
        optimizer.step()
        expected.check(f"step {step}:")
        for (_, buffer), old in zip(gradients, before, strict=True):
            assert_bytes_equal(buffer, old, "gradient")
    for p, buffer in made:
        assert (buffer == 7).sum().item() >= buffer.numel() - p.numel(), "written past a parameter"


def test_denormals_infinities_and_nan(device):
    special = [0.0, 1e-45, 1e-40, 1.2e-38, 1e-20, 1e-10, 1.0, 1e18, 1e25, 3.4e38, math.inf, math.nan]
    special = torch.tensor(special + [-x for x in special])
    masters, gradients = torch.cartesian_prod(special, special).to(device).unbind(1)
    for maximize, eps in itertools.product((False, True), (1e-8, 1e-45, 0.0)):
        p = masters.clone()
        optimizer = FusedAdamW([p], **OPTIONS | {"eps": eps}, maximize=maximize)
        expected = Expected(optimizer)
        for step in range(3):
            p.grad = gradients.roll(step).clone()
            expected.step()
            optimizer.step()
            expected.check(f"maximize {maximize}, eps {eps}, step {step}:")


@pytest.mark.parametrize("done", [0, 9, 1234567, 2**24 - 2])
def test_steps_are_counted_in_float32_and_bias_corrections_follow(device, done):
    p = torch.randn(100, device=device)
    optimizer = FusedAdamW([p], **OPTIONS | {"betas": (0.9, 0.9999999)})
    p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.state[p]["step"].fill_(done)
    p.grad = torch.randn_like(p)
    expected = Expected(optimizer)
    expected.steps[0] = done
    expected.step()
    optimizer.step()
    expected.check()


def test_more_tensors_than_a_launch_has_arguments_for(device):
    parameters = [torch.randn(1 + i % 5, device=device) for i in range(1100)]
    groups = [{"params": parameters[:3], "lr": 0.5}, {"params": []}, {"params": parameters[3:]}]
    optimizer = FusedAdamW(groups, **OPTIONS)
    expected = Expected(optimizer)
    for step in range(2):
        for i, p in enumerate(parameters):
            p.grad = torch.randn_like(p) if (i + step) % 7 else None
        expected.step()
        optimizer.step()
        expected.check(f"step {step}:")


def test_a_step_that_finds_an_infinity_changes_nothing(device):
    """Neither parameters nor moments nor step counts, whatever the gradients hold."""
    parameters = [torch.randn(n, device=device) for n in (5, 4096, 700)]
    optimizer = FusedAdamW(parameters, **OPTIONS)
    expected = Expected(optimizer)
    optimizer.found_inf = torch.zeros((), device=device)
    for step, flag in enumerate([0.0, 1.0, 0.0, math.inf, 0.0]):
        optimizer.found_inf.fill_(flag)
        for p in parameters:
            p.grad = torch.full_like(p, math.nan) if flag else torch.randn_like(p)
        if not flag:
            expected.step()
        optimizer.step()
        expected.check(f"step {step}:")


@pytest.mark.parametrize(
    ("found_inf", "error", "message"),
    [
        (1.0, TypeError, "found_inf must be None or one element of float32, got float"),
        (torch.zeros(2), TypeError, r"one element of float32, got torch.float32 \(2,\)"),
        (torch.zeros(1, dtype=torch.int32), TypeError, r"one element of float32, got torch.int32 \(1,\)"),
        (torch.zeros(1, device="meta"), ValueError, "found_inf is on meta, the parameters on"),
    ],
)
def test_flags_that_cannot_be_read(device, found_inf, error, message):
    p = torch.ones(3, device=device)
    p.grad = torch.ones_like(p)
    optimizer = FusedAdamW([p])
    optimizer.found_inf = found_inf
    with pytest.raises(error, match=message):
        optimizer.step()
    assert p.eq(1).all() and not optimizer.state


# What an optimizer does


@pytest.mark.parametrize("on_device", [False, True])
def test_tensor_lr_and_schedulers(device, on_device):
    p = torch.randn(500, device=device)
    lr = torch.tensor(0.1, device=device if on_device else "cpu")
    optimizer = FusedAdamW([p], lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    expected = Expected(optimizer)
    for step in range(4):
        assert optimizer.param_groups[0]["lr"] is lr and lr.item() == pytest.approx(0.1 * 0.5**step)
        p.grad = torch.randn_like(p)
        expected.step()
        optimizer.step()
        expected.check(f"step {step}:")
        scheduler.step()


def test_one_cycle_changes_lr_and_betas(device):
    parameters = [torch.randn(9, device=device) for _ in range(2)]
    optimizer = FusedAdamW([{"params": [p]} for p in parameters], lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=9)
    expected = Expected(optimizer)
    for step in range(5):
        for p in parameters:
            p.grad = torch.randn_like(p)
        expected.step()
        optimizer.step()
        expected.check(f"step {step}:")
        scheduler.step()
    assert optimizer.param_groups[0]["betas"][0] != 0.9


def test_gradients_that_come_go_and_move(device):
    parameters = [torch.randn(n, device=device) for n in (3, 300, 3000)]
    optimizer = FusedAdamW(parameters, **OPTIONS)
    optimizer.step()
    assert not optimizer.state
    expected = Expected(optimizer)
    kept = []
    for step, present in enumerate([(1,), (0, 1), (), (2,), (0, 1, 2), (0, 1, 2)]):
        for i, p in enumerate(parameters):
            dtype = torch.bfloat16 if (step + i) % 3 == 0 else torch.float32
            set_gradient(p, torch.randn_like(p).to(dtype) if i in present else None)
            kept.append(p.grad)
        expected.step()
        optimizer.step()
        expected.check(f"step {step}:")
        optimizer.zero_grad()


def test_moved_parameters_and_replaced_state(device):
    p = torch.randn(77, device=device)
    optimizer = FusedAdamW([p], **OPTIONS)
    expected = Expected(optimizer)
    for step in range(4):
        if step == 2:
            p.data = p.data.clone()
            optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].clone()
        p.grad = torch.randn_like(p)
        expected.step()
        optimizer.step()
        expected.check(f"step {step}:")


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
        for tensor in (p, q):
            tensor.grad = torch.randn_like(tensor)
        expected.step()
        return 5

    assert optimizer.step(closure) == 5
    expected.check()
    assert calls == ["pre", "post"]


def test_a_subclass_may_have_methods_of_common_names(device):
    class Mixin:
        def begin(self, model, micro_batches):
            raise AssertionError("step() must not call a method of a subclass")

        expect = update = run = build = check = begin

    p = torch.randn(9, device=device)
    optimizer = type("Mixed", (Mixin, FusedAdamW), {})([p], **OPTIONS)
    expected = Expected(optimizer)
    p.grad = torch.randn_like(p)
    expected.step()
    optimizer.step()
    expected.check()
    own = set(dir(FusedAdamW([p]))) - set(dir(torch.optim.AdamW([p])))
    documented = {"found_inf", "clip_factor", "offer_amaxes", "offer_parts", "amaxes_outdated"}
    assert {name for name in own if not name.startswith("_")} == documented


def test_a_backward_pass_through_old_values_fails(device):
    p = torch.randn(5, device=device, requires_grad=True)
    optimizer = FusedAdamW([p])
    loss = p.square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_are_clipped_as_they_are_read(device, dtype):
    """The bytes of gradients that were multiplied in float32; they themselves stay."""
    masters = [torch.randn(n, device=device) for n in (5, 4096, 700)]
    others = [master.clone() for master in masters]
    clipped, plain = (FusedAdamW(ps, lr=0.01, weight_decay=0.1, maximize=True) for ps in (masters, others))
    for step in range(3):
        clipped.clip_factor = torch.tensor(0.3 + step, device=device)
        gradients = [torch.randn_like(master).to(dtype) for master in masters]
        before = [gradient.clone() for gradient in gradients]
        for master, other, gradient in zip(masters, others, gradients, strict=True):
            set_gradient(master, gradient)
            other.grad = gradient.float() * clipped.clip_factor
        clipped.step()
        plain.step()
        for i, (master, other) in enumerate(zip(masters, others, strict=True)):
            assert_bytes_equal(master, other, f"step {step}: master {i}")
            assert_bytes_equal(gradients[i], before[i], f"step {step}: gradient {i}")


@pytest.mark.parametrize("name", ["clip_factor", "found_inf"])
def test_scalars_that_kernels_cannot_read(device, name):
    master = torch.zeros(8, device=device)
    optimizer = FusedAdamW([master])
    master.grad = torch.ones_like(master)
    for scalar in (0.5, torch.ones(2, device=device), torch.ones((), dtype=torch.float64, device=device)):
        setattr(optimizer, name, scalar)
        with pytest.raises(TypeError, match=f"{name} must be None or one element of float32"):
            optimizer.step()
    assert not master.any()
