"""load_pretrained: a checkpoint's codes, scales and amaxes are a model's weights, or it says why not."""

from __future__ import annotations

import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from cases.published import (
    COMPRESSED_TENSORS,
    HF_QUANT_CONFIG,
    MODELOPT,
    blank,
    layers_of,
    modelopt,
    random_matrix,
    values_of,
    write,
)
from cases.serving import ARCHITECTURES, FIELDS, make_plain, read, takes, train, trained
from helpers import assert_bytes_equal
from torch import nn

import zerofp4
from zerofp4 import serving
from zerofp4.optim import ZeroFP4Optimizer
from zerofp4.serving import files
from zerofp4.serving.checkpoint import amax_of
from zerofp4.serving.plan import FORMATS

formats = pytest.mark.parametrize("format", FIELDS)
TOKENS = torch.arange(16).view(2, 8)
LAYER = "model.layers.0.mlp.up_proj"


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def check_same_folder(found: Path, expected: Path) -> None:
    found, expected = read(found), read(expected)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert_bytes_equal(found[key], value, key)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder of ModelOpt's layout, and the values of its parameters."""
    tensors, state = modelopt(make_plain("Llama"))
    return write(tmp_path_factory.mktemp("modelopt"), make_plain("Llama"), tensors, MODELOPT), state


# Exports of this package


@formats
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_export_comes_back(name, format, tmp_path):
    """On the meta device, where rotary frequencies have no values either."""
    live, _ = trained(name)
    serving.save_pretrained(live, tmp_path / "first", format=format)
    model = blank(name, meta=True)
    report = serving.load_pretrained(model, tmp_path / "first")
    assert not report.missing and not report.unexpected and not report.warnings
    assert report.block == (16, 16) and report.format == format
    assert report.input_amaxes is None  # experts of an export of weights have input scales of 1 all the same
    expected = {key: p for key, p in live.named_parameters() if isinstance(p, zerofp4.NVFP4Tensor)}
    assert report.loaded == list(expected)
    for key, weight in expected.items():
        found = model.get_parameter(key)
        assert found.block == (1, 16) and not found.requires_grad and found.dtype == torch.bfloat16
        assert_bytes_equal(found.rowwise_data, weight.rowwise_data, key)
        assert_bytes_equal(found.amax, weight.amax, key)
    assert_bytes_equal(logits(model), logits(live), "logits")
    serving.save_pretrained(model, tmp_path / "second", format=format)
    check_same_folder(tmp_path / "second", tmp_path / "first")


FOUR_OVER_SIX = [None, zerofp4.FourOverSix(), zerofp4.FourOverSix(error="mse"), zerofp4.FourOverSix(448)]


def without_signs_of_zeros(weight: torch.Tensor) -> torch.Tensor:
    codes = torch.stack([weight.rowwise_data & 15, weight.rowwise_data >> 4])
    return torch.where(codes == 8, 0, codes)


@formats
@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
@pytest.mark.parametrize("four_over_six", FOUR_OVER_SIX, ids=str)
def test_a_step_at_learning_rate_0_changes_no_code(block, four_over_six, format, tmp_path):
    """But for signs of zeros, which an update of 0 removes."""
    name = "Qwen3Moe" if four_over_six is None else "Llama"
    live = make_plain(name)
    train(live, block=block, four_over_six=four_over_six)
    serving.save_pretrained(live, tmp_path, format=format)
    model = blank(name)
    report = serving.load_pretrained(model, tmp_path, masters="codes")
    assert report.block == block and not report.changed
    if four_over_six is None or four_over_six.e4m3_max == 448:
        assert report.four_over_six == four_over_six
    else:  # the same scales are the best by both errors
        assert report.four_over_six.e4m3_max == 256
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of masters that begin with 4-bit values
        options = {"lr": 0.0, "weight_decay": 0.0, "amax_groups": report.amax_groups}
        optimizer = ZeroFP4Optimizer(model.named_parameters(), **options)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    for key, weight in live.named_parameters():
        if isinstance(weight, zerofp4.NVFP4Tensor):
            found = model.get_parameter(key)
            assert found.requires_grad and found.block == block
            assert_bytes_equal(without_signs_of_zeros(found), without_signs_of_zeros(weight), key)
            assert_bytes_equal(found.rowwise_scale, weight.rowwise_scale, key)
            assert_bytes_equal(found.amax, weight.amax, key)


@formats
def test_experts_that_are_not_quantized(format, tmp_path):
    """Parts of one parameter come from several tensors."""
    live = make_plain("Qwen3Moe")
    zerofp4.convert_model(live, lambda module, name: name.endswith("o_proj"))
    serving.save_pretrained(live, tmp_path, format=format)
    for meta in (False, True):
        model = blank("Qwen3Moe", meta=meta)
        report = serving.load_pretrained(model, tmp_path)
        assert len(report.loaded) == 2 and not report.missing and not report.unexpected
        for key, value in live.state_dict().items():
            if key not in report.loaded:
                assert_bytes_equal(model.state_dict()[key], value, key)
        assert_bytes_equal(logits(model), logits(live), "logits")


@formats
def test_several_files(format, tmp_path):
    live, _ = trained("Llama")
    with mock.patch.object(files, "SHARD_BYTES", 18_000):
        serving.save_pretrained(live, tmp_path, format=format)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = blank()
    serving.load_pretrained(model, tmp_path)
    assert_bytes_equal(logits(model), logits(live), "logits")


@formats
def test_a_weight_of_zeros(format, tmp_path):
    live = make_plain("Llama")
    with torch.no_grad():
        live.model.layers[0].self_attn.o_proj.weight.zero_()
    train(live)
    with torch.no_grad():
        live.model.layers[0].self_attn.o_proj.weight.zero_()
    serving.save_pretrained(live, tmp_path, format=format)
    model = blank()
    serving.load_pretrained(model, tmp_path)
    assert model.model.layers[0].self_attn.o_proj.weight.amax == 0
    assert_bytes_equal(logits(model), logits(live), "logits")


@formats
@pytest.mark.parametrize("e4m3_max", [448, 256])
def test_the_amax_of_a_global_scale(format, e4m3_max):
    """All magnitudes of bfloat16 and float16 come back, and so does the scale of any other amax."""
    exact = [i / 256 for i in range(256, 512)] + [i * 2**-20 for i in range(1025, 2048, 7)] + [2.0**-30]
    for amax in exact:
        scale = FORMATS[format].global_of(amax, e4m3_max)
        assert amax_of(FORMATS[format], scale, e4m3_max) == (amax, True)
    for amax in torch.rand(200, generator=torch.Generator().manual_seed(0)).tolist():
        scale = FORMATS[format].global_of(amax, e4m3_max)
        found, is_exact = amax_of(FORMATS[format], scale, e4m3_max)
        assert is_exact and FORMATS[format].global_of(found, e4m3_max).equal(scale)


# Checkpoints of others


def test_a_checkpoint_of_modelopt(published):
    folder, state = published
    model, ordinary = blank(), blank()
    report = serving.load_pretrained(model, folder)
    ordinary.load_state_dict(state)
    layers = list(layers_of(model))
    assert report.loaded == [f"{name}.weight" for name in layers] and report.format == "modelopt"
    assert report.input_amaxes == {name: 1.0 + i for i, name in enumerate(layers)}
    assert len(report.kv_scales) == 4 and not report.unexpected and not report.missing
    assert report.block == (1, 16) and report.four_over_six is None and len(report.amax_groups) == 4
    found = read(folder)
    for name in layers:
        weight = model.get_parameter(f"{name}.weight")
        assert_bytes_equal(weight.rowwise_data, found[f"{name}.weight"], name)
        assert_bytes_equal(weight.rowwise_scale, found[f"{name}.weight_scale"], name)
        assert_bytes_equal(weight.dequantize(), state[f"{name}.weight"], name)
    assert_bytes_equal(logits(model), logits(ordinary), "logits")
    for shown in ("14 NVFP4 weights of a modelopt checkpoint, 81.4%", "1x16", "embed_tokens", "k_scale"):
        assert shown in str(report)


def test_it_is_exported_as_it_came(published, tmp_path):
    """With its input scales, which fused modules share in an export."""
    folder, _ = published
    model = blank()
    report = serving.load_pretrained(model, folder)
    serving.save_pretrained(model, tmp_path, format="modelopt", input_amaxes=report.input_amaxes)
    found, expected = read(tmp_path), read(folder)
    assert found.keys() == expected.keys() - set(report.kv_scales)
    for key, value in found.items():
        if not key.endswith("input_scale") or key.endswith(("o_proj.input_scale", "down_proj.input_scale")):
            assert_bytes_equal(value, expected[key], key)


def test_the_configuration_in_a_file_of_its_own(published, tmp_path):
    tensors, state = modelopt(make_plain("Llama"))
    write(tmp_path, make_plain("Llama"), tensors, None, hf_quant_config=HF_QUANT_CONFIG)
    model = blank(meta=True)
    assert len(serving.load_pretrained(model, tmp_path).loaded) == 14
    found = model.get_parameter(f"{LAYER}.weight").dequantize()
    assert_bytes_equal(found, state[f"{LAYER}.weight"], LAYER)


def test_a_head_in_nvfp4_and_layers_in_fp8(tmp_path):
    plain = make_plain("Llama")
    tensors, _ = modelopt(plain)
    head, down = "lm_head", "model.layers.0.mlp.down_proj"
    fields = random_matrix(*plain.lm_head.weight.shape, 1.25, 77)
    tensors |= {f"{head}.{field}": tensor for field, tensor in fields.items()}
    for field in ("weight_scale_2", "weight_scale"):
        del tensors[f"{down}.{field}"]
    fp8 = torch.randn(plain.get_parameter(f"{down}.weight").shape).to(torch.float8_e4m3fn)
    tensors |= {f"{down}.weight": fp8, f"{down}.weight_scale": torch.tensor(0.03)}
    layers = {down: {"quant_algo": "FP8"}, head: {"quant_algo": "NVFP4", "group_size": 16}}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    model = blank()
    report = serving.load_pretrained(model, write(tmp_path, plain, tensors, mixed))
    assert f"{head}.weight" in report.loaded and report.dequantized == [f"{down}.weight"]
    assert not report.unexpected
    assert_bytes_equal(model.lm_head.weight.dequantize(), values_of(fields), "head")
    expected = (fp8.float() * torch.tensor(0.03)).bfloat16()
    assert_bytes_equal(model.get_parameter(f"{down}.weight").detach(), expected, "FP8")


def test_fused_weights_with_unequal_global_scales(tmp_path):
    plain = make_plain("Llama")
    tensors, _ = modelopt(plain)
    key = "model.layers.0.self_attn.k_proj"
    tensors[f"{key}.weight_scale_2"] = torch.tensor(2.75) / 2688
    model = blank()
    with pytest.warns(UserWarning, match=r"1 groups .* unequal global scales .*q_proj, .*k_proj"):
        report = serving.load_pretrained(model, write(tmp_path, plain, tensors, MODELOPT))
    assert len(report.amax_groups) == 3 and model.get_parameter(f"{key}.weight").amax == 2.75
    assert "warning" in str(report)
    with pytest.raises(ValueError, match="engines fuse the two"):
        serving.save_pretrained(model, tmp_path / "again")


def test_codes_that_a_cast_would_change_are_counted(tmp_path):
    """A global scale twice as large as a cast of the values has makes scales that it does not."""
    plain = make_plain("Llama")
    tensors, _ = modelopt(plain)
    key = "model.layers.0.self_attn.o_proj"
    scales = tensors[f"{key}.weight_scale"]
    tensors[f"{key}.weight_scale"] = (scales.float() / 1.7).to(torch.float8_e4m3fn)
    model = blank()
    with pytest.warns(
        UserWarning, match=r"would change codes or scales of 1 weights, for 100\.0% of the elements"
    ):
        report = serving.load_pretrained(model, write(tmp_path, plain, tensors, MODELOPT), masters="codes")
    assert report.changed.keys() == {f"{key}.weight"} and report.changed[f"{key}.weight"] == 1


def test_a_global_scale_that_no_amax_has(tmp_path):
    plain = make_plain("Llama")
    tensors, _ = modelopt(plain)
    key = "model.layers.0.self_attn.o_proj.weight_scale_2"
    format = FORMATS["modelopt"]
    scale = torch.tensor(1.125 / 2688)  # there the scales are closer to each other than the amaxes
    candidates = [scale, torch.nextafter(scale, torch.tensor(1.0)), torch.nextafter(scale, torch.tensor(0.0))]
    scale = next(each for each in candidates if not amax_of(format, each, 448)[1])
    tensors[key] = scale
    model = blank()
    with pytest.warns(UserWarning, match=r"no amax has exactly the global scale of 1 weights \(.*o_proj\)"):
        serving.load_pretrained(model, write(tmp_path, plain, tensors, MODELOPT))
    amax = model.model.layers[0].self_attn.o_proj.weight.amax
    assert abs(amax.item() / 2688 / scale.item() - 1) < 2**-23


def test_names_that_one_side_lacks(published, tmp_path):
    tensors = read(published[0])
    del tensors["model.norm.weight"]
    tensors["model.extra"] = torch.ones(1)
    model = blank()
    with pytest.warns(UserWarning, match=r"no values for 1 names of the model \(model\.norm\.weight\)"):
        report = serving.load_pretrained(model, write(tmp_path, model, tensors, MODELOPT))
    assert report.missing == ["model.norm.weight"] and report.unexpected == ["model.extra"]


# What is refused, before anything is changed


def refused(
    folder: Path, match: str, model: nn.Module | None = None, error: type = ValueError, **options
) -> None:
    model = blank() if model is None else model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(error, match=match):
        serving.load_pretrained(model, folder, **options)
    for key, value in model.state_dict().items():
        assert_bytes_equal(value, before[key], key)


@pytest.mark.parametrize(
    ("quantization", "match"),
    [
        (None, "no quantized checkpoint"),
        ({"quant_method": "gptq"}, "quant_method 'gptq'"),
        (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ, and AWQ's pre_quant_scale"),
        (MODELOPT | {"quant_algo": "NVFP4_SVD"}, "NVFP4_SVD, and SVDQuant"),
        (MODELOPT | {"quant_algo": "W4A8_MXFP4_FP8"}, "quant_algo is W4A8_MXFP4_FP8"),
        (MODELOPT | {"group_size": 32}, "group_size is 32"),
        (COMPRESSED_TENSORS | {"format": "mxfp4-pack-quantized"}, "format is mxfp4-pack-quantized"),
        (COMPRESSED_TENSORS | {"transform_config": {"R1": {}}}, "transform_config"),
        (COMPRESSED_TENSORS | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
)
def test_configurations(published, tmp_path, quantization, match):
    refused(write(tmp_path, blank(), read(published[0]), quantization), match)


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        (f"{LAYER}.pre_quant_scale", torch.ones(64), "AWQ"),
        (f"{LAYER}.weight_quantizer._svdquant_lora_a", torch.ones(64), "SVDQuant"),
        (f"{LAYER}.weight_scale_swizzled", torch.ones(64), "swizzled"),
        (
            f"{LAYER}.weight_scale",
            torch.ones(128, 4).to(torch.float8_e4m3fn),
            r"must be F8_E4M3 \[80, 4\], got",
        ),
        (f"{LAYER}.weight_scale", torch.ones(80, 4), "got F32"),
        (f"{LAYER}.weight", torch.ones(80, 16, dtype=torch.uint8), r"must be U8 \[80, 32\]"),
        (f"{LAYER}.weight_scale_2", None, r"lacks .*up_proj\.weight_scale_2"),
        (f"{LAYER}.weight_scale_2", torch.tensor(float("nan")), "up_proj: a global scale must be positive"),
        ("model.norm.weight", torch.ones(32), r"model\.norm\.weight has the shape \[32\]"),
        ("model.norm.weight", torch.ones(64).to(torch.float8_e4m3fn), "in FP8 and has no scale"),
        ("lm_head.weight_scale_inv", torch.ones(1), "FP8 weights with a scale for each block"),
    ],
)
def test_tensors(published, tmp_path, name, tensor, match):
    tensors = read(published[0]) | {name: tensor}
    refused(write(tmp_path, blank(), {k: v for k, v in tensors.items() if v is not None}, MODELOPT), match)


def test_experts_of_which_a_part_is_missing(tmp_path):
    serving.save_pretrained(trained("Qwen3Moe")[0], tmp_path, format="modelopt")
    tensors = read(tmp_path)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    write(tmp_path, trained("Qwen3Moe")[0], tensors, MODELOPT)
    match = r"experts\.gate_up_proj is one parameter, of which the checkpoint has only a part"
    refused(tmp_path, match, blank("Qwen3Moe"))


def test_experts_with_two_amaxes_in_one_matrix(tmp_path):
    serving.save_pretrained(trained("Qwen3Moe")[0], tmp_path, format="modelopt")
    tensors = read(tmp_path)
    tensors["model.layers.1.mlp.experts.2.up_proj.weight_scale_2"] *= 2
    write(tmp_path, trained("Qwen3Moe")[0], tensors, MODELOPT)
    refused(tmp_path, r"2\.gate_proj and .*2\.up_proj have different global scales", blank("Qwen3Moe"))


def test_models_and_arguments(published, tmp_path):
    folder, _ = published
    converted = blank()
    zerofp4.convert_model(converted, takes)
    with pytest.raises(ValueError, match="load a model before it is converted or sharded"):
        serving.load_pretrained(converted, folder)
    refused(folder, "masters must be None or 'codes', got 'bf16'", masters="bf16")
    refused(tmp_path, "no quantized checkpoint")
    plain = write(tmp_path / "plain", converted, dict(blank().state_dict()), COMPRESSED_TENSORS)
    refused(plain, "the checkpoint has no NVFP4 weight")
    refused(folder, "must be a PreTrainedModel", nn.Linear(2, 2), TypeError)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    refused(tmp_path, "has no model.safetensors.index.json and no model.safetensors", error=FileNotFoundError)
