"""load_pretrained reads what compressed-tensors' own functions compress."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases.published import Tensors, blank, layers_of, write
from cases.serving import make_plain, read
from helpers import assert_bytes_equal

import zerofp4
from zerofp4 import serving
from zerofp4.optim import ZeroFP4Optimizer
from zerofp4.serving.fused import fused_groups
from zerofp4.serving.plan import FORMATS

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

FIELDS = ("weight_packed", "weight_scale", "weight_global_scale")
CONFIG, _ = FORMATS["compressed-tensors"].configuration(["lm_head"], True)
(SCHEME,) = QuantizationConfig.model_validate(CONFIG).config_groups.values()
TOKENS = torch.arange(16).view(2, 8)


def compress(weights: Tensors, dtype: torch.dtype) -> Tensors:
    """Fields of linear layers by name, with one global scale for those that engines fuse. dtype: in which it
    computes that scale.
    """
    amaxes = {name: weight.abs().max() for name, weight in weights.items()}
    for group in fused_groups(weights):
        largest = torch.stack([amaxes[name] for name in group]).max()
        amaxes |= dict.fromkeys(group, largest)
    found = {}
    for name, weight in weights.items():
        amax = amaxes[name].to(dtype)
        global_scale = generate_gparam(-amax, amax)
        blocks = weight.float().unflatten(1, (-1, 16))
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), SCHEME.weights, global_scale)
        state = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
        compressed = NVFP4PackedCompressor.compress(state, SCHEME)
        found |= {f"{name}.{field}": value for field, value in compressed.items()}
        found[f"{name}.input_global_scale"] = generate_gparam(torch.tensor(-3.0), torch.tensor(3.0))
    return found


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def folder(request, tmp_path_factory) -> Path:
    plain = make_plain("Llama")
    weights = {name: layer.weight.detach() for name, layer in layers_of(plain).items()}
    tensors = {
        key: value for key, value in plain.state_dict().items() if key.removesuffix(".weight") not in weights
    }
    path = tmp_path_factory.mktemp(str(request.param))
    return write(path, plain, tensors | compress(weights, request.param), CONFIG)


@pytest.mark.filterwarnings("ignore:load_pretrained. no amax has exactly")
def test_bytes_and_logits(folder, tmp_path):
    """A global scale that was computed in bfloat16 may lie between those of two amaxes."""
    model, found = blank(meta=True), read(folder)
    report = serving.load_pretrained(model, folder)
    is_exact = not report.warnings
    assert is_exact or "bfloat16" in folder.name
    assert len(report.loaded) == 14 and not report.missing and not report.unexpected
    assert report.input_amaxes == dict.fromkeys(layers_of(model), 3.0) and len(report.amax_groups) == 4
    for name in layers_of(model):
        weight = model.get_parameter(f"{name}.weight")
        codes, scales, global_scale = (found[f"{name}.{field}"] for field in FIELDS)
        assert_bytes_equal(weight.rowwise_data, codes, name)
        assert_bytes_equal(weight.rowwise_scale, scales, name)
        again = FORMATS[report.format].global_of(weight.amax.item(), 448)
        torch.testing.assert_close(again, global_scale, rtol=0 if is_exact else 2**-23, atol=0)
    theirs = blank()
    state = {key: value for key, value in found.items() if key in theirs.state_dict()}
    for name in layers_of(model):
        fields = {field: found[f"{name}.{field}"] for field in FIELDS}
        state[f"{name}.weight"] = NVFP4PackedCompressor.decompress(fields, SCHEME)["weight"]
        ours = model.get_parameter(f"{name}.weight").dequantize()
        distance = (state[f"{name}.weight"].view(torch.int16).int() - ours.view(torch.int16).int()).abs()
        assert distance.max() <= 1, name
    theirs.load_state_dict(state)
    with torch.no_grad():
        expected = theirs(input_ids=TOKENS).logits
        # A tie in a weight moves it by one unit of bfloat16, and the products round to bfloat16 too.
        torch.testing.assert_close(model(input_ids=TOKENS).logits, expected, rtol=2**-6, atol=2**-6)
    serving.save_pretrained(model, tmp_path, input_amaxes=report.input_amaxes)
    again = read(tmp_path)
    assert again.keys() == found.keys()
    for key, value in found.items():
        if is_exact or not key.endswith("weight_global_scale"):
            assert_bytes_equal(again[key], value, key)


@pytest.mark.filterwarnings("ignore:load_pretrained. no amax has exactly")
def test_training_goes_on_from_the_codes(folder):
    """Also where a global scale was computed in bfloat16, of which the amax is no magnitude of a weight."""
    model = blank()
    report = serving.load_pretrained(model, folder, masters="codes")
    assert not report.changed and report.four_over_six is None
    before = {key: model.get_parameter(key).dequantize() for key in report.loaded}
    optimizer = ZeroFP4Optimizer(
        model.named_parameters(), lr=0.0, weight_decay=0.0, amax_groups=report.amax_groups
    )
    codes = {key: model.get_parameter(key).rowwise_data & 0x77 for key in report.loaded}
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    for key in report.loaded:
        weight, found = model.get_parameter(key), read(folder)[key.replace(".weight", ".weight_scale")]
        assert_bytes_equal(weight.rowwise_data & 0x77, codes[key], key)
        assert_bytes_equal(weight.rowwise_scale, found, key)
        torch.testing.assert_close(weight.dequantize(), before[key], rtol=2**-7, atol=0)


def model_with_cache():
    from compressed_tensors.offload import offload_module

    model = blank()
    offload_module(model.model.layers[0].mlp.up_proj, "cpu", "cpu")
    return model


def test_models_that_it_offloads_are_not_said_to_be_converted(folder):
    """transformers leaves some of a compressed checkpoint's layers with its cache in place of parameters."""
    model = model_with_cache()
    layer = model.model.layers[0].mlp.up_proj
    before = layer.weight.detach().clone()
    report = zerofp4.convert_model(model)
    assert "in a CPUCache" in report.skipped["model.layers.0.mlp.up_proj.weight"]
    assert len(report.converted) == 13 and layer.weight.equal(before)
    with pytest.raises(
        ValueError, match=r"up_proj\.weight is in a CPUCache: load a model that no library offl"
    ):
        serving.load_pretrained(model_with_cache(), folder)
