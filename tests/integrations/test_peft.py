"""Adapters of peft beside converted weights."""

import pytest
import torch
from torch import nn

import zerofp4

peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
pytestmark = pytest.mark.heavy


def test_adapters_are_merged_into_unconverted_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    zerofp4.convert_model(model)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0", "2"], init_lora_weights=False))
    for safe in (False, True):
        with pytest.raises(RuntimeError, match=r"call zerofp4\.unconvert_model\(model\) before"):
            model.merge_and_unload(safe_merge=safe)
    assert len(zerofp4.unconvert_model(model)) == 2
    x = torch.randn(4, 32)
    expected = model(x)
    # float32 sums in another order
    torch.testing.assert_close(model.merge_and_unload()(x), expected, rtol=1e-4, atol=1e-4)
