"""Adapters of peft beside converted weights."""

import pytest
import torch
from torch import nn

import zerofp4

peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
pytestmark = pytest.mark.heavy


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))


def converted():
    model = plain()
    zerofp4.convert_model(model)
    return model


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_merged_model_is_the_trained_one(kind):
    """Trained by an optimizer of the adapters alone, as Trainer makes it: it never sees the frozen base."""
    config = peft.LoraConfig(target_modules=["0", "2"], r=4, use_dora=kind == "dora")
    model, x = peft.get_peft_model(converted(), config), torch.randn(64, 32)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = zerofp4.optim.ZeroFP4Optimizer(trainable, lr=0.1)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = model(x)
    with pytest.raises((RuntimeError, TypeError), match=r"call zerofp4\.unconvert_model\(model\) before"):
        model.merge_and_unload()
    assert len(zerofp4.unconvert_model(model)) == 2
    # float32 sums in another order
    torch.testing.assert_close(model.merge_and_unload()(x), expected, rtol=1e-4, atol=1e-4)


def test_adapters_are_saved_loaded_and_merged_into_unconverted_weights(tmp_path):
    config = peft.LoraConfig(target_modules=["0", "2"], init_lora_weights=False)
    model, x = peft.get_peft_model(converted(), config), torch.randn(4, 32)
    model.save_pretrained(tmp_path)
    assert torch.equal(peft.PeftModel.from_pretrained(converted(), tmp_path)(x), model(x))
    for safe in (False, True):
        with pytest.raises(RuntimeError, match=r"call zerofp4\.unconvert_model\(model\) before"):
            model.merge_and_unload(safe_merge=safe)
    assert len(zerofp4.unconvert_model(model)) == 2
    expected = model(x)
    # float32 sums in another order
    torch.testing.assert_close(model.merge_and_unload()(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["pissa", "pissa_niter_4", "olora"])
def test_adapters_that_change_base_weights_come_before_the_conversion(how):
    config = peft.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights=how)
    with pytest.raises((RuntimeError, TypeError), match=r"\(PiSSA, OLoRA\) before convert_model"):
        peft.get_peft_model(converted(), config)
    model = peft.get_peft_model(plain(), config)
    report = zerofp4.convert_model(model, lambda module, name: "lora_" not in name)
    assert len(report.converted) == 2
    x = torch.randn(4, 32)
    expected = plain()(x)
    assert 0 < (model(x) - expected).norm() < 0.2 * expected.norm()  # by the codes of what is left of weights
