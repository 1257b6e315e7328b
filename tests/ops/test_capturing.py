"""Whether a CUDA graph is captured is asked of the device that an operation runs on."""

import pytest
import torch
import zerofp4._C as _C

from zerofp4.ops import lists
from zerofp4.tensors import grouped

OTHER = torch.device("cuda", 1)


@pytest.fixture
def asked(monkeypatch):
    """The devices that were asked; a graph is captured on cuda:1 alone."""
    devices = []

    def is_capturing(device):
        devices.append(device)
        return device == OTHER

    for module in (lists, grouped):
        monkeypatch.setattr(module, "is_capturing", is_capturing)
    return devices


def test_a_long_list(asked):
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured a list of tensors may have"):
        lists.run_list(None, _C.ARGUMENT_ITEMS + 1, OTHER)
    assert asked == [OTHER]


def test_host_splits(asked):
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured m_splits must be on x's device"):
        grouped.sizes_on((16, 32), OTHER)
    assert asked == [OTHER]
