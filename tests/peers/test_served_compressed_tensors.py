"""compressed-tensors and transformers read exports: codes, scales, values, logits and generated tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cases.serving import ARCHITECTURES, DENSE, global_scale, make_plain, read, served_modules, trained
from helpers import assert_bytes_equal
from torch import nn

import zerofp4
from zerofp4 import serving
from zerofp4.serving.plan import FORMATS

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
from compressed_tensors.quantization.quant_scheme import NVFP4, NVFP4A16
from transformers import AutoModelForCausalLM

FORMAT = "compressed-tensors"
FIELDS = ("weight_packed", "weight_scale", "weight_global_scale")
TOKENS = torch.arange(16).view(2, 8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """An export of each architecture, in this package's own format."""
    root = tmp_path_factory.mktemp("exports")
    for name in ARCHITECTURES:
        serving.save_pretrained(trained(name)[0], root / name)
    return {name: root / name for name in ARCHITECTURES}


def decompressed(folder: Path, module: str, found: dict[str, torch.Tensor]) -> torch.Tensor:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    fields = {field: found[f"{module}.{field}"] for field in FIELDS}
    return NVFP4PackedCompressor.decompress(fields, scheme)["weight"]


def units(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """By element, the distance in units of the last place of bfloat16."""
    return (actual.view(torch.int16).int() - expected.view(torch.int16).int()).abs()


def has_ties(amax: torch.Tensor) -> bool:
    """Whether code * scale * amax / 2688 can lie halfway between two bfloat16 numbers: then its mantissa
    is odd, of 9 bits. 2688 is 7 * 3 * 128. If the factor 7 is one of the scale, code * scale / 7 is 1 or 3,
    and the result has at most 8 bits: so it must be one of the amax.
    """
    return mantissa(amax) % 7 == 0


def mantissa(amax: torch.Tensor) -> int:
    """Of a bfloat16 number in float32, as an integer of 8 bits."""
    return int(amax.view(torch.int32) >> 16 & 0x7F | 0x80)


def test_the_configuration_is_theirs(folders):
    config = json.loads((folders["Llama"] / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(config)
    assert parsed.quantization_status == QuantizationStatus.COMPRESSED
    assert parsed.format == "nvfp4-pack-quantized" and parsed.ignore == ["lm_head"]
    (scheme,) = parsed.config_groups.values()
    assert NVFP4PackedCompressor.can_compress(nn.Linear, scheme)
    assert set(NVFP4PackedCompressor.compression_param_names(scheme)) == set(FIELDS)
    assert scheme.input_activations is None and scheme.weights.scale_dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("has_inputs", [False, True])
def test_the_scheme_is_that_of_their_preset(has_inputs):
    config, _ = FORMATS[FORMAT].configuration([], has_inputs)
    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    names = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "scale_dtype")
    preset = NVFP4 if has_inputs else NVFP4A16
    for role in ("weights", "input_activations"):
        ours, theirs = getattr(scheme, role), preset.get(role)
        assert (ours is None) == (theirs is None)
        assert ours is None or all(getattr(ours, name) == getattr(theirs, name) for name in names)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_are_dequantize_but_for_ties(folders, name):
    """They divide the scale by 2688 / amax, and this package multiplies it with amax and 1 / 2688. If the
    exact value lies halfway between two bfloat16 numbers, one may round up and the other down.
    """
    found = read(folders[name])
    for module, (matrix, rows) in served_modules(trained(name)[0]).items():
        distance = units(decompressed(folders[name], module, found), matrix.dequantize()[rows])
        assert distance.max() <= 1, module
        assert has_ties(matrix.amax) or not distance.any(), module


def test_how_many_values_differ():
    """Of 400 weights, only in those whose amax has a mantissa with the factor 7."""
    config, _ = FORMATS[FORMAT].configuration([], False)
    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    generator, differing = torch.Generator().manual_seed(1), 0
    for i in range(400):
        values = torch.randn(64, 256, generator=generator).mul(0.02 * 2 ** (i / 400))
        weight = zerofp4.quantize(values.bfloat16())
        values = (weight.rowwise_data, weight.expanded_scale()[:64, :16], global_scale(FORMAT, weight.amax))
        fields = dict(zip(FIELDS, values, strict=True))
        distance = units(NVFP4PackedCompressor.decompress(fields, scheme)["weight"], weight.dequantize())
        assert distance.max() <= 1
        assert has_ties(weight.amax) or not distance.any()
        differing += int(distance.sum())
    assert 0 < differing < 0.001 * 400 * 64 * 256


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_their_converter_makes_one_export_of_the_other(folders, name, tmp_path):
    """But for the last bit of a global scale, of which it takes the reciprocal."""
    serving.save_pretrained(trained(name)[0], tmp_path, format="modelopt")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    converter = ModelOptNvfp4Converter(ignore=config["ignore"], targets=["re:.*proj", "re:.*w[123]"])
    converted, expected = converter.process(read(tmp_path)), read(folders[name])
    assert converted.keys() == expected.keys()
    for key, value in expected.items():
        if key.endswith("global_scale"):
            torch.testing.assert_close(converted[key].view(1), value, rtol=2**-23, atol=0)
        else:
            assert_bytes_equal(converted[key], value, key)


@pytest.mark.parametrize("name", DENSE)
def test_transformers_loads_an_export(folders, name):
    """The logits are those of an ordinary model with their values, to the bit. (Experts are left out: up to
    5.24, at least, transformers loads those without their global scales.)
    """
    loaded, info = AutoModelForCausalLM.from_pretrained(folders[name], output_loading_info=True)
    assert not any(info.values()), info
    found, ordinary = read(folders[name]), make_plain(name, seed=7)
    modules = served_modules(trained(name)[0])
    state = {key: value for key, value in found.items() if not key.endswith(FIELDS)}
    state |= {f"{module}.weight": decompressed(folders[name], module, found) for module in modules}
    ordinary.load_state_dict(state, strict=not ordinary.config.tie_word_embeddings)
    with torch.no_grad():
        assert_bytes_equal(loaded(input_ids=TOKENS).logits, ordinary(input_ids=TOKENS).logits, "logits")
        live = trained(name)[0](input_ids=TOKENS).logits
    if not any(has_ties(matrix.amax) for matrix, _ in modules.values()):
        assert_bytes_equal(live, ordinary(input_ids=TOKENS).logits, "logits of the live model")


def test_transformers_generates_with_an_export(folders):
    loaded, (live, _) = AutoModelForCausalLM.from_pretrained(folders["Llama"]), trained("Llama")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert loaded.generate(TOKENS, **options).equal(live.generate(TOKENS, **options))
