"""Steps have the same bytes whatever torch's default dtype is: many training scripts set another one."""

from __future__ import annotations

import contextlib

import pytest
import torch
from cases.optim import assert_all_equal, keywords

from distributed.optim.cases import all_bytes, gradients_of, parameters_of
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

WAYS = [
    (FusedAdamW, {}),
    (FusedAdamW, {"state": "compact"}),
    (FusedAdamW, {"overlap": "update"}),  # of fp16 gradients, among others
    (FusedAdamW, {"overlap": "update", "reduction": "reduce_scatter", "gradient_wire": torch.bfloat16}),
    (FusedAdamW, {"overlap": "both", "gradient_wire": torch.bfloat16}),
    (torch.optim.AdamW, {"gradient_dtype": torch.float32}),
]


@contextlib.contextmanager
def by_default(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def trained(world, dtype, cls, options):
    """Norms and bytes after three steps of an optimizer that is built and used under a default dtype."""
    parameters, norms = parameters_of(world), []
    with by_default(dtype):
        optimizer = ZeroFP4Optimizer(parameters, cls, lr=0.02, **keywords(options, bucket_mb=0.003))
    for step in range(3):
        gradients = gradients_of(world, parameters, step)
        with by_default(dtype):
            pairs = zip(parameters, gradients, strict=True)
            sum((p.float() * g).sum() for p, g in pairs if g is not None).backward()
            if options.get("overlap") != "update":
                norms += [optimizer.clip_grad_norm_(limit, p) for limit, p in ((100.0, 3.0), (50.0, 2.0))]
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.skipped_steps == 0
    return [*norms, *all_bytes(parameters, optimizer)]


@on_ranks(1, 2)
@pytest.mark.parametrize(("cls", "options"), WAYS)
def test_steps_under_another_default_dtype(world, cls, options):
    expected = trained(world, torch.float32, cls, options)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert_all_equal(trained(world, dtype, cls, options), expected, f"{dtype}: tensor")
