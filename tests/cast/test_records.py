"""Casts into records that have scales and no codes, as FSDP2's have, and masters that change places."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_bytes_equal

import zerofp4


def make(device, shape=(34, 48)):
    """A record with scales of both sides and no codes, a buffer for those, and a master."""
    record = zerofp4.empty(shape, device=device).record
    record.rowwise.data = record.columnwise.data = None
    codes = torch.full((shape[0] * shape[1] // 2,), 0xA5, dtype=torch.uint8, device=device)
    torch.manual_seed(0)
    return record, codes, torch.randn(shape, device=device).view(-1)


def check(record, codes, master) -> None:
    expected = zerofp4.quantize(master.view(record.shape).to(record.dtype), columnwise=True)
    assert_bytes_equal(codes, expected.rowwise_data.view(-1), "codes")
    for name, buffer in record.buffers():
        assert_bytes_equal(buffer, expected.record.buffer(name), name)


def test_codes_go_to_buffers_and_scales_to_the_record(device):
    record, codes, master = make(device)
    plan = zerofp4.CastPlan([record], [master], [0], fsdp_shard_model_weights=[codes])
    plan.step()
    plan.post()  # there is no row to transpose
    check(record, codes, master)
    with pytest.raises(ValueError, match="the codes of some ranks are in fsdp_shard_model_weights"):
        plan.all_gather()


def test_a_record_without_codes_needs_buffers(device):
    record, _, master = make(device)
    with pytest.raises(ValueError, match=r"model_weights\[0\] has no rowwise data to cast into"):
        zerofp4.CastPlan([record], [master], [0])


def test_refresh_takes_other_masters(device):
    record, codes, master = make(device)
    plan = zerofp4.CastPlan([record], [master], [0], fsdp_shard_model_weights=[codes])
    plan.step()
    other = master.clone().mul_(-3)
    with pytest.raises(ValueError, match=r"master_weights\[0\] must keep its 1632 elements, has 1631"):
        plan.refresh([other[1:].clone()])
    plan.step()
    check(record, codes, master)
    plan.refresh([other])
    master.zero_()
    plan.step()
    check(record, codes, other)
