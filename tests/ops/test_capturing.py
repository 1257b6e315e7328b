"""Whether a CUDA graph is captured is asked of the device that an operation runs on."""

from types import SimpleNamespace

import pytest
import torch
import zerofp4._C as _C

from zerofp4.ops import device
from zerofp4.tensors import grouped

OTHER = torch.device("cuda", 1)


@pytest.fixture
def asked(monkeypatch):
    """The devices that were asked; a graph is captured on cuda:1 alone."""
    devices = []

    def is_capturing(device):
        devices.append(device)
        return device == OTHER

    for module in (device, grouped):
        monkeypatch.setattr(module, "is_capturing", is_capturing)
    return devices


def test_a_long_list_takes_several_launches(asked, monkeypatch):
    launches, count = [], 2 * _C.ARGUMENT_ITEMS + 1
    monkeypatch.setattr(device, "target_of", lambda where: where)
    words = list(range(3 * count))
    device.run_list(lambda part: SimpleNamespace(run=lambda _: launches.append(part)), words, 3, OTHER)
    assert [len(part) // 3 for part in launches] == [_C.ARGUMENT_ITEMS] * 2 + [1]
    assert [word for part in launches for word in part] == words
    assert asked == [OTHER]


def test_host_splits(asked):
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured m_splits must be on x's device"):
        grouped.sizes_on((16, 32), OTHER)
    assert asked == [OTHER]
