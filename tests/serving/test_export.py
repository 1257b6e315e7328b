"""What save_pretrained writes: names, dtypes, codes, scales and configurations, of both formats."""

from __future__ import annotations

import json
import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from cases.optim import make_net
from cases.serving import (
    ARCHITECTURES,
    DENSE,
    FIELDS,
    INPUT_FIELDS,
    check_quantized,
    global_scale,
    make_plain,
    read,
    scales_of,
    served_modules,
    takes,
    train,
    trained,
)
from helpers import assert_bytes_equal
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import zerofp4
from zerofp4 import serving
from zerofp4.optim import AveragedMasters, ZeroFP4Optimizer
from zerofp4.serving import files
from zerofp4.serving.plan import FORMATS

formats = pytest.mark.parametrize("format", FIELDS)


@formats
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fields_of_an_architecture(name, format, tmp_path):
    model, optimizer = trained(name)
    serving.save_pretrained(model, tmp_path / "served", optimizer, format=format)
    found = read(tmp_path / "served")
    count = check_quantized(model, found, format)
    quantized = {f"{module}.{field}" for module in served_modules(model) for field in FIELDS[format]}
    assert len(quantized) == 3 * count and quantized <= found.keys()
    # Experts have an input scale of 1 although only weights are quantized, for vLLM.
    of_inputs = {f"{m}.{INPUT_FIELDS[format]}" for m in served_modules(model) if ".experts." in m}
    assert bool(of_inputs) == (name not in DENSE) and all(found[key] == 1 for key in of_inputs)
    # The rest is what transformers writes, without what is tied.
    ordinary = make_plain(name)
    ordinary.save_pretrained(tmp_path / "ordinary")
    names = read(tmp_path / "ordinary").keys()
    others = names - {f"{module}.weight" for module in served_modules(model)}
    assert found.keys() == quantized | of_inputs | others
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    for key in others:
        own = key.replace(".block_sparse_moe.", ".mlp.")
        assert_bytes_equal(found[key], values[own].detach(), key)


@formats
def test_configurations(format, tmp_path):
    model, optimizer = trained("Mixtral")
    serving.save_pretrained(model, tmp_path, optimizer, format=format)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = json.loads(model.config.to_json_string(use_diff=True))
    quantization = config.pop("quantization_config")
    assert config.pop("architectures") == ["MixtralForCausalLM"] and config.pop("dtype") == "bfloat16"
    del expected["dtype"]
    assert config.items() >= expected.items()
    blocks = [f"model.layers.{i}.{name}" for i in (0, 1) for name in ("mlp", "block_sparse_moe")]
    ignored = {"lm_head", *(f"{block}.gate" for block in blocks)}
    assert set(quantization["ignore"]) == ignored
    assert json.loads((tmp_path / "generation_config.json").read_text()).keys() >= {"transformers_version"}
    (group,) = quantization["config_groups"].values()
    assert group["targets"] == ["Linear"] and group.get("input_activations") is None
    bits = {"num_bits": 4, "type": "float", "group_size": 16}
    assert group["weights"].items() >= bits.items()
    extra = tmp_path / "hf_quant_config.json"
    if format == "compressed-tensors":
        assert quantization["quant_method"] == "compressed-tensors" and not extra.exists()
        assert quantization["format"] == "nvfp4-pack-quantized" and quantization["kv_cache_scheme"] is None
        assert group["weights"]["symmetric"] and group["weights"]["strategy"] == "tensor_group"
        return
    assert quantization["quant_method"] == "modelopt" and quantization["quant_algo"] == "W4A16_NVFP4"
    content = json.loads(extra.read_text())["quantization"]
    assert set(content.pop("exclude_modules")) == ignored
    assert content == {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16}


def test_a_model_that_transformers_has_loaded(tmp_path):
    make_plain("Mixtral").save_pretrained(tmp_path / "loaded")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "loaded")
    optimizer = train(model)
    serving.save_pretrained(model, tmp_path / "served", optimizer)
    assert check_quantized(model, read(tmp_path / "served"), "compressed-tensors")


@formats
def test_blocks_of_one_row_and_four_over_six(format, tmp_path):
    """Not of convert_model: weights that were quantized so, as a file of quantize would bring them."""
    model = make_plain("Llama")
    choices = [None, zerofp4.FourOverSix(e4m3_max=256), zerofp4.FourOverSix(e4m3_max=448)]
    for layer in model.model.layers:
        for i, part in enumerate((layer.self_attn.o_proj, layer.mlp.down_proj)):
            choice = choices[i + 1]
            part.weight = nn.Parameter(zerofp4.quantize(part.weight, block=(1, 16), four_over_six=choice))
    serving.save_pretrained(model, tmp_path, format=format)
    found = read(tmp_path)
    for i, name in enumerate(("self_attn.o_proj", "mlp.down_proj")):
        weight = model.get_submodule(f"model.layers.1.{name}").weight
        codes, scales, global_ = (found[f"model.layers.1.{name}.{field}"] for field in FIELDS[format])
        assert_bytes_equal(codes, weight.rowwise_data, name)
        assert_bytes_equal(scales, weight.rowwise_scale, name)
        assert_bytes_equal(global_, global_scale(format, weight.amax, (1536, 2688)[i]), name)


def test_a_weight_of_zeros(tmp_path):
    model = make_plain("Llama", num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
    train(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
    for format, fields in FIELDS.items():
        serving.save_pretrained(model, tmp_path, format=format)
        found = {field: read(tmp_path)[f"model.layers.0.self_attn.o_proj.{field}"] for field in fields}
        assert found[fields[2]] == 1 and not found[fields[0]].any()


@pytest.mark.parametrize(
    ("amax", "e4m3_max", "expected"),
    [
        (7.0, 448, 384.0),
        (1.75, 448, 1536.0),
        (0.21875, 448, 12288.0),
        (147.0, 448, 128 / 7),
        (7.0, 256, 1536 / 7),
    ],
)
def test_a_global_scale_is_rounded_once(amax, e4m3_max, expected):
    """2688 * (1 / 7), of which the reciprocal is rounded too, is 384.00003."""
    scale = FORMATS["compressed-tensors"].global_of(amax, e4m3_max)
    assert scale.tolist() == [torch.tensor(expected).item()]


@formats
def test_scales_of_inputs_make_engines_quantize_activations(format, tmp_path):
    model, optimizer = trained("Llama")
    amaxes = {name: 1.0 + i for i, name in enumerate(served_modules(model))}
    serving.save_pretrained(model, tmp_path, optimizer, format=format, input_amaxes=amaxes)
    found, config = read(tmp_path), json.loads((tmp_path / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    assert group["input_activations"]["num_bits"] == 4 and group["input_activations"]["group_size"] == 16
    if format == "modelopt":
        assert config["quantization_config"]["quant_algo"] == "NVFP4"
    for name in amaxes:
        parent, _, last = name.rpartition(".")
        groups = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), (last,)
        fused = next(group for group in groups if last in group)
        largest = torch.tensor([max(amaxes[f"{parent}.{member}"] for member in fused)])
        assert_bytes_equal(found[f"{name}.{INPUT_FIELDS[format]}"], global_scale(format, largest), name)
    del amaxes["model.layers.1.mlp.up_proj"]
    with pytest.raises(ValueError, match=r"input_amaxes lacks model\.layers\.1\.mlp\.up_proj"):
        serving.save_pretrained(model, tmp_path, optimizer, format=format, input_amaxes=amaxes)


def test_dtype_of_what_is_not_quantized(tmp_path):
    model, optimizer = trained("DeepseekV3")
    serving.save_pretrained(model, tmp_path, optimizer, dtype=torch.float16)
    found = read(tmp_path)
    assert found["lm_head.weight"].dtype == found["model.norm.weight"].dtype == torch.float16
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert found[bias].dtype == model.get_buffer(bias).dtype != torch.float16


def test_tokenizers_are_copied(tmp_path, monkeypatch):
    model, optimizer = trained("Llama")
    origin, folder = tmp_path / "origin", tmp_path / "served"
    origin.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "README.md"):
        (origin / name).write_text(name)
    monkeypatch.setattr(model.config, "_name_or_path", str(origin), raising=False)
    serving.save_pretrained(model, folder, optimizer)
    assert (folder / "tokenizer.json").read_text() == "tokenizer.json"
    assert (folder / "chat_template.jinja").exists() and not (folder / "README.md").exists()

    class Tokenizer:
        def save_pretrained(self, folder):
            (Path(folder) / "tokenizer.json").write_text("another")

    serving.save_pretrained(model, folder, optimizer, tokenizer=Tokenizer())
    assert (folder / "tokenizer.json").read_text() == "another"


def test_shards_and_progress(tmp_path):
    model, optimizer = trained("Qwen3Moe")
    seen = []
    with mock.patch.object(files, "SHARD_BYTES", 20_000):
        serving.save_pretrained(model, tmp_path, optimizer, progress=lambda *sizes: seen.append(sizes))
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2 and check_quantized(model, read(tmp_path), "compressed-tensors")
    total = json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert total == sum(t.nbytes for t in read(tmp_path).values())
    done = [size for size, _ in seen]
    assert done == sorted(done) and seen[-1] == (total, total) and len(seen) == len(read(tmp_path))


def test_one_files_tensors_are_in_memory(tmp_path):
    """No rank holds the model twice."""
    model, optimizer = trained("Qwen3Moe")
    most, limit, add = 0, 20_000, files.Export.add

    def watched(export, name, tensor):
        nonlocal most
        add(export, name, tensor)
        most = max(most, sum(t.nbytes for held in export._held.values() for t in held.values()))

    with mock.patch.object(files.Export, "add", watched), mock.patch.object(files, "SHARD_BYTES", limit):
        serving.save_pretrained(model, tmp_path, optimizer)
    assert 0 < most <= limit < sum(t.nbytes for t in read(tmp_path).values())


def test_averages_are_quantized_as_masters_are(tmp_path):
    model = make_plain("Llama")
    optimizer = train(model)
    averages = AveragedMasters(optimizer, decay=0.5)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for p in model.parameters():
        p.grad = torch.ones(p.shape, dtype=p.dtype)
    optimizer.step()
    averages.update()
    serving.save_pretrained(model, tmp_path, averages)
    found = read(tmp_path)
    values = dict(zerofp4.master_state_dict(model, averages, torch.bfloat16))
    for group in serving.amax_groups(model):
        names = {id(p): name for name, p in model.named_parameters()}
        members = [values[names[id(member)]] for member in group]
        amax = torch.stack([member.abs().max() for member in members]).max().float().view(1)
        for member, value in zip(group, members, strict=True):
            name, expected = names[id(member)].removesuffix(".weight"), zerofp4.quantize(value, amax=amax)
            assert_bytes_equal(found[f"{name}.weight_packed"], expected.rowwise_data, name)
            assert_bytes_equal(found[f"{name}.weight_scale"], scales_of(expected), name)
            assert_bytes_equal(found[f"{name}.weight_global_scale"], torch.full_like(amax, 2688) / amax, name)
            assert not member.rowwise_data.equal(expected.rowwise_data)


# What cannot be served


def refused(model: nn.Module, folder: Path, error: type[Exception], match: str, *args, **options) -> None:
    """It raises, and leaves no folder."""
    with pytest.raises(error, match=match):
        serving.save_pretrained(model, folder / "served", *args, **options)
    assert not list(folder.iterdir())


def test_unequal_amaxes_of_fused_weights(tmp_path):
    model = make_plain("Llama")
    zerofp4.convert_model(model, takes)
    optimizer = ZeroFP4Optimizer(model.named_parameters())
    message = (
        r"model\.layers\.0\.self_attn\.q_proj has an amax of .* and model\.layers\.0\.self_attn\.k_proj of .*"
        r"build the optimizer with amax_groups=zerofp4\.serving\.amax_groups\(model\), .*"
        "; with FSDP2 give them to prepare"
    )
    refused(model, tmp_path, ValueError, message)
    ZeroFP4Optimizer(model.named_parameters(), amax_groups=serving.amax_groups(model), masters_from=optimizer)
    serving.save_pretrained(model, tmp_path / "served")


@pytest.mark.parametrize(
    ("converted", "quantized", "plain"),
    [("gate_up_proj", "gate_proj", "down_proj"), ("down_proj", "down_proj", "gate_proj")],
)
def test_experts_of_which_some_weights_are_not_quantized(converted, quantized, plain, tmp_path):
    """Engines have one scheme for the experts of a layer. The shared ones of DeepSeek are a layer apart."""
    model = make_plain("DeepseekV3")
    zerofp4.convert_model(model, lambda module, name: name.endswith(f"mlp.experts.{converted}"))
    experts = r"model\.layers\.1\.mlp\.experts\.0"
    message = rf"^{experts}\.{quantized} is quantized and {experts}\.{plain} is not"
    refused(model, tmp_path, ValueError, message)
    with pytest.raises(ValueError, match=message):
        list(serving.weights(model))
    model = make_plain("DeepseekV3")
    zerofp4.convert_model(model, lambda module, name: name.endswith("mlp.shared_experts.down_proj"))
    serving.save_pretrained(model, tmp_path)


def test_fused_weights_of_which_one_is_not_quantized(tmp_path):
    model = make_plain("Llama")
    zerofp4.convert_model(model, lambda module, name: name.endswith("up_proj"))
    message = r"mlp\.up_proj is quantized and model\.layers\.0\.mlp\.gate_proj is not"
    refused(model, tmp_path, ValueError, message)


def test_a_number_of_columns_that_blocks_do_not_divide(tmp_path):
    model = make_plain("Llama", intermediate_size=72)
    zerofp4.convert_model(model, lambda module, name: name.endswith("down_proj"))
    message = r"down_proj\.weight has 72 columns, and engines need a multiple of 16"
    refused(model, tmp_path, ValueError, message)


def test_a_name_that_exists_twice(tmp_path):
    model = make_plain("Llama")
    train(model)
    model.model.norm.register_buffer("unused", torch.zeros(1))
    attention = model.model.layers[1].self_attn.o_proj
    attention.register_buffer("weight_scale", torch.zeros(1))
    message = r"layers\.1\.self_attn\.o_proj\.weight_scale would be written twice, for model\.layers\.1"
    refused(model, tmp_path, ValueError, message)


@pytest.mark.parametrize("amax", [math.inf, 1e-36])
def test_an_amax_without_a_global_scale(tmp_path, amax):
    model = make_plain("Llama", num_hidden_layers=1)
    zerofp4.convert_model(model, lambda module, name: name.endswith("o_proj"))
    model.model.layers[0].self_attn.o_proj.weight.amax.fill_(amax)
    refused(model, tmp_path, ValueError, "whose global scale is no finite float32")


def test_other_models_and_arguments(tmp_path):
    model, optimizer = trained("Llama")
    plain = make_plain("Llama", num_hidden_layers=1)
    refused(make_net(torch.device("cpu")), tmp_path, TypeError, "must be a PreTrainedModel of transformers")
    refused(plain, tmp_path, ValueError, "model has no NVFP4 weight")
    refused(model, tmp_path, ValueError, "format must be one of .*, got 'gguf'", optimizer, format="gguf")
    refused(model, tmp_path, TypeError, "dtype must be a floating one", optimizer, dtype=torch.int8)
    adam = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    refused(model, tmp_path, TypeError, "optimizer must be a ZeroFP4Optimizer or AveragedMasters", adam)
    plain.lm_head.weight = nn.Parameter(zerofp4.quantize_mxfp8(plain.lm_head.weight))
    zerofp4.convert_model(plain, lambda module, name: name.endswith("o_proj"))
    refused(plain, tmp_path, ValueError, r"lm_head\.weight is an MXFP8Tensor, which no serving format here")
    columns = zerofp4.quantize(plain.model.layers[0].mlp.down_proj.weight, rowwise=False, columnwise=True)
    plain.model.layers[0].mlp.down_proj.weight = nn.Parameter(columns)
    refused(plain, tmp_path, ValueError, r"down_proj\.weight cannot be served: it has no rowwise copy")


def test_the_weight_of_a_conv1d(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=32, n_positions=16))
    zerofp4.convert_model(model.to(torch.bfloat16))
    refused(model, tmp_path, ValueError, r"c_attn\.weight is the weight \[in, out\] of a Conv1D")
