"""Host time of single calls: what a product, a quantization, a list or an optimizer's step keeps the host, on
tensors so small that nothing else counts.
"""

import torch
from torch import nn

import zerofp4
from benchmarking.session import Session

SIDE = 32
LIST_ITEMS = 448
"""Both sides of Llama-3-8B's linear weights."""


def host_calls(session: Session, weights: int) -> None:
    """Rows that a model with that many weights pays in a step, and a layer in a call."""
    all_gather(session, weights)
    linear(session)
    quantize(session)
    swizzle(session)
    optimizer_step(session, weights)


def all_gather(session: Session, weights: int) -> None:
    """In a world of one, which has every element."""
    model = [zerofp4.empty((SIDE, SIDE), device=session.device) for _ in range(weights)]
    masters = [torch.randn(weight.numel(), device=session.device) for weight in model]
    plan = zerofp4.CastPlan(model, masters, [0] * weights)
    call = session.clock.host_us(plan.all_gather)
    session.count(f"host_all_gather/{weights}", "host_us", call, "CastPlan.all_gather(), a world of one")


def linear(session: Session) -> None:
    """F.linear with an NVFP4 weight, forward and backward, less the same with a plain one."""
    x = torch.randn(4, SIDE, device=session.device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(SIDE, SIDE, device=session.device, dtype=torch.bfloat16)
    gradient = torch.ones_like(x)

    def step(parameter: nn.Parameter) -> None:
        x.grad = parameter.grad = None
        nn.functional.linear(x, parameter).backward(gradient)

    times = []
    for value in (weight, zerofp4.quantize(weight, columnwise=True)):
        parameter = nn.Parameter(value)
        times.append(session.clock.host_us(lambda parameter=parameter: step(parameter)))
    rule = "F.linear forward and backward with an NVFP4 weight, less the same with a bfloat16 one"
    session.count("host_linear", "host_us", times[1] - times[0], rule, plain_us=times[0])


def quantize(session: Session) -> None:
    x = torch.randn(SIDE, SIDE, device=session.device, dtype=torch.bfloat16)
    options = {"block": (1, 16), "columnwise": True, "hadamard": True}
    options["scale_layouts"] = ("compact", "swizzled")
    call = session.clock.host_us(lambda: zerofp4.quantize(x, **options))
    session.count("host_quantize_rht_swizzled", "host_us", call, "quantize(hadamard=True), scales swizzled")


def swizzle(session: Session) -> None:
    x = torch.randn(SIDE, SIDE, device=session.device, dtype=torch.bfloat16)
    tensors = [zerofp4.quantize(x, block=(1, 16)) for _ in range(LIST_ITEMS)]
    call = session.clock.host_us(lambda: zerofp4.swizzle_scales(tensors))
    session.count(f"host_swizzle_scales_new/{LIST_ITEMS}", "host_us", call, "swizzle_scales of a list")
    out = zerofp4.swizzle_scales(tensors)
    call = session.clock.host_us(lambda: zerofp4.swizzle_scales(tensors, out=out))
    rule = "swizzle_scales of a list into what it returned before"
    session.count(f"host_swizzle_scales/{LIST_ITEMS}", "host_us", call, rule)


def optimizer_step(session: Session, weights: int) -> None:
    """A world of one, with nothing to reduce: what ZeroFP4Optimizer adds to the optimizer that it wraps."""
    options = {"device": session.device, "dtype": torch.bfloat16}
    parameters = [
        nn.Parameter(zerofp4.quantize(torch.randn(SIDE, SIDE, **options), columnwise=True))
        for _ in range(weights)
    ]
    optimizer = zerofp4.optim.ZeroFP4Optimizer(parameters, torch.optim.AdamW, lr=1e-3, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones(SIDE, SIDE, **options)
    whole = session.clock.host_us(optimizer.step)
    optimizer.inner.found_inf = torch.zeros((), device=session.device)  # which torch reads, as in a step
    inner = session.clock.host_us(optimizer.inner.step)
    rule = "ZeroFP4Optimizer.step() in a world of one, less the step of its torch.optim.AdamW(fused=True)"
    session.count(f"host_zero_step/{weights}", "host_us", whole - inner, rule, inner_us=inner)
