"""How gradients travel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zerofp4.engine import make_wire


@pytest.mark.parametrize(("gigabytes", "expected"), [(0.5, 256), (7, 512), (13.02, 952.32), (140, 1024)])
def test_the_size_of_buckets_follows_the_model(gigabytes, expected):
    half = nn.Parameter(torch.empty(int(gigabytes * 2**28), dtype=torch.bfloat16, device="meta"))
    assert make_wire(None, None, [half, half]).bucket_mb == pytest.approx(expected)
    assert make_wire(None, 3, [half, half]).bucket_mb == 3


def test_what_is_rounded_to_float32_takes_more():
    weight = nn.Parameter(torch.empty(7 * 2**29, dtype=torch.bfloat16, device="meta"))
    assert make_wire(torch.float32, None, [weight]).bucket_mb == 1024


@pytest.mark.parametrize("bucket_mb", [0, -1, float("inf"), float("nan"), True, "8"])
def test_a_size_that_cannot_be_meant(bucket_mb):
    with pytest.raises(ValueError, match="bucket_mb must be a positive number of megabytes"):
        make_wire(None, bucket_mb)
