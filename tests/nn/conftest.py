"""What tests of layers share as fixtures."""

import pytest
import torch
from cases.gemm import skip_without_grouped_mm

from zerofp4.nn import grouped_linear, operators
from zerofp4.tensors import Quantizer


@pytest.fixture
def multiplied_at_once(monkeypatch, device):
    """All groups are multiplied in one call: where torch has a kernel for that, and on the CPU, where its
    grouped_mm is a loop, because it is made to.
    """
    skip_without_grouped_mm(device)
    why_not = grouped_linear.why_not_grouped

    def why_not_here(of: torch.device, *others) -> str | None:
        return None if of.type == "cpu" else why_not(of, *others)

    monkeypatch.setattr(grouped_linear, "why_not_grouped", why_not_here)


@pytest.fixture
def quantized(monkeypatch) -> list:
    """The shapes of what Python has quantized, in groups or not."""
    found, record, of_groups = [], Quantizer.record, operators.quantize_grouped

    def counting(self, x, **options):
        found.append(tuple(x.shape))
        return record(self, x, **options)

    def counting_groups(x, *arguments, **options):
        found.append(tuple(x.shape))
        return of_groups(x, *arguments, **options)

    monkeypatch.setattr(Quantizer, "record", counting)
    monkeypatch.setattr(operators, "quantize_grouped", counting_groups)
    return found
