"""Casts into stacks of matrices [E, N, K]: each expert is a weight of its own."""

from __future__ import annotations

import pytest
import torch
from cases.cast import leave_amaxes
from cases.ops import assert_record_equals
from helpers import assert_bytes_equal

import zerofp4
from zerofp4 import reference
from zerofp4.format import SCALE_LAYOUTS

cast = zerofp4.cast_master_weights_to_nvfp4
SHAPES = [(3, 34, 50), (1, 16, 16), (34, 288), (5, 2, 18), (2, 130, 66)]
"""Ragged experts, one alone, a plain weight among them."""

of_blocks = pytest.mark.parametrize("block", [(16, 16), (1, 16)], ids=["16x16", "1x16"])


def make(device, shapes=SHAPES, dtype=torch.bfloat16, seed=0, block=(16, 16)):
    """(poisoned weights with every buffer, whole masters)"""
    generator = torch.Generator().manual_seed(seed)
    weights, whole = [], []
    for shape in shapes:
        weight = zerofp4.empty(shape, dtype=dtype, device=device, block=block, scale_layouts=SCALE_LAYOUTS)
        for _, buffer in weight.record.buffers():
            buffer.view(torch.uint8).fill_(0xA5)
        factors = 10.0 ** torch.arange(shape[0]).remainder(4)
        values = torch.randn(shape, generator=generator) * factors.view(-1, *[1] * (len(shape) - 1))
        weights.append(weight)
        whole.append(values.to(device))
    return weights, whole


def flat(whole):
    return [values.flatten() for values in whole]


def specified(weight, values, amax=None):
    values = values.view(weight.shape).to(weight.dtype)
    if weight.dim() == 3:
        return reference.quantize_experts(values, amax, block_rows=weight.block[0])
    return reference.quantize(values, weight.block[0], amax)


def check(weights, whole, amaxes=None):
    for i, (weight, values) in enumerate(zip(weights, whole, strict=True)):
        amax = None if amaxes is None else amaxes[i]
        assert_record_equals(weight.record, specified(weight, values, amax), f"weight {i}")


@of_blocks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("start", "numel"),
    [
        (0, 5100),
        (0, 1),
        (1699, 3),
        (1700, 1700),
        (1701, 1699),
        (851, 3399),
        (3399, 1701),
        (5099, 1),
        (7, 1500),
    ],
)
def test_shards_that_begin_and_end_inside_experts(device, start, numel, dtype, block):
    """Of 3 experts of 1700 elements: what is owned is written as a cast of each expert alone would, and what
    is not stays.
    """
    weights, whole = make(device, [(3, 34, 50)] * 2, block=block)
    stack, alone = weights
    master = whole[0].flatten()[start : start + numel].to(dtype)
    cast([stack], [master], [start])
    cuts = [(max(start - e * 1700, 0), min(start + numel - e * 1700, 1700)) for e in range(3)]
    pieces = [whole[0][e].flatten()[first:last].to(dtype) for e, (first, last) in enumerate(cuts)]
    owned = [len(piece) > 0 and first < last for piece, (first, last) in zip(pieces, cuts, strict=True)]
    cast(
        list(alone),
        [piece if some else None for piece, some in zip(pieces, owned, strict=True)],
        [first if some else None for (first, _), some in zip(cuts, owned, strict=True)],
    )
    for name, buffer in stack.record.buffers():
        assert_bytes_equal(buffer, alone.record.buffer(name), name)
    if start % 2:  # the other half of the first byte is not ours
        assert stack.rowwise_data.view(-1)[start // 2] & 15 == 0xA5 & 15


def test_codes_of_shards_in_buffers_of_the_caller(device):
    weights, whole = make(device, [(3, 34, 50)] * 2)
    for start, numel in ((1699, 1703), (33, 5000), (1700, 1700)):
        master = whole[0].flatten()[start : start + numel]
        codes = torch.full(((start + numel + 1) // 2 - start // 2,), 0xA5, dtype=torch.uint8, device=device)
        cast(weights[:1], [master], [start], fsdp_shard_model_weights=[codes])
        assert (weights[0].rowwise_data == 0xA5).all()
        weights[1].rowwise_data.fill_(0xA5)
        cast(weights[1:], [master], [start])
        expected = weights[1].rowwise_data.view(-1)[start // 2 : (start + numel + 1) // 2]
        assert_bytes_equal(codes, expected, f"codes of {start}")


@of_blocks
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3.4e38])
def test_one_expert_is_skipped_and_the_others_are_not(device, bad, block):
    weights, whole = make(device, block=block)
    starts = [0] * len(weights)
    plan = zerofp4.CastPlan(weights, flat(whole), starts)
    plan.step()
    plan.post()
    before = [weight.clone() for weight in weights]
    changed = [2 * values for values in whole]
    changed[0][1, 33, 49] = bad
    changed[3][0, 0, 0] = bad
    plan = zerofp4.CastPlan(weights, flat(changed), starts)
    plan.step()
    plan.post()
    assert plan.found_inf.item() == 1
    for i, (weight, old, values) in enumerate(zip(weights, before, changed, strict=True)):
        skipped = {0: 1, 3: 0}.get(i)
        for e, matrix in enumerate(weight.record.matrices()):
            if e == skipped:
                for name, buffer in matrix.buffers():
                    kept = old.record.matrices()[e].buffer(name)
                    assert_bytes_equal(buffer, kept, f"{i}[{e}] {name}")
            else:
                alone = values.view(-1, *weight.record.matrix)[e]
                assert_record_equals(matrix, reference.quantize(alone.bfloat16(), block[0]), f"{i}[{e}]")


def test_a_group_is_skipped_for_one_expert(device):
    weights, whole = make(device, [(3, 16, 32)] * 2)
    whole[0][2, 3, 4] = torch.nan
    zerofp4.CastPlan(weights, flat(whole), [0, 0], amax_groups=[weights]).step()
    for weight in weights:
        assert (weight.rowwise_data[2] == 0xA5).all()
        assert not (weight.rowwise_data[:2] == 0xA5).all()


@pytest.mark.parametrize(("name", "called"), [(None, r"model_weights\[1\]\[2\]"), ("w", r"'w\[2\]'")])
def test_an_expert_that_is_not_finite_is_named(device, name, called):
    weights, whole = make(device, [(16, 32), (3, 16, 32)])
    weights[1].record.name = name
    whole[1][2, 0, 0] = torch.nan
    plan = zerofp4.CastPlan(weights, flat(whole), [0, 0], on_nonfinite="raise")
    with pytest.raises(FloatingPointError, match=rf"\(after rounding to the weight's dtype\): .*{called}; "):
        plan.step()


def test_groups_of_another_number_of_experts_are_refused(device):
    weights, whole = make(device, [(3, 16, 32), (2, 16, 32), (16, 32)])
    for other in (1, 2):
        with pytest.raises(ValueError, match=r"expert by expert, but model_weights\[\d\] has shape"):
            zerofp4.CastPlan(weights, flat(whole), [0] * 3, amax_groups=[[weights[0], weights[other]]])


def test_masters_and_codes_that_moved(device):
    weights, whole = make(device)
    starts = [0] * len(weights)
    cast(weights, flat(whole), starts)
    whole = [3 * values for values in whole]
    weights[0].rowwise_data = torch.full_like(weights[0].rowwise_data, 0xA5)
    cast(weights, flat(whole), starts)
    zerofp4.post_all_gather_processing(weights)
    check(weights, whole)


def test_amaxes_that_an_update_leaves(device):
    weights, whole = make(device)
    masters = [values.flatten()[3:] for values in whole]
    plan = zerofp4.CastPlan(weights, masters, [3] * len(weights))
    pieces = plan.master_pieces()
    assert len(pieces) == sum(len(weight.record.matrices()) for weight in weights)
    assert sum(piece.shard.numel for piece in pieces) == sum(map(torch.numel, masters))
    plan.step()
    expected = [weight.clone() for weight in weights]
    for weight in weights:
        weight.zero_()
    leave_amaxes(plan, pieces)
    plan.step()
    for i, (weight, other) in enumerate(zip(weights, expected, strict=True)):
        for name in ("rowwise_scale", "columnwise_scale", "amax"):
            assert_bytes_equal(weight.record.buffer(name), other.record.buffer(name), f"{i} {name}")


def test_no_experts(device):
    weights = [zerofp4.empty((0, 16, 32), device=device), zerofp4.empty((16, 32), device=device)]
    masters = [torch.zeros(0, device=device), torch.randn(512, device=device)]
    cast(weights, masters, [0, 0])
    zerofp4.post_all_gather_processing(weights)
    check(weights[1:], [masters[1]])
