"""nvidia-modelopt reads exports in its format."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from cases.serving import ARCHITECTURES, read, served_modules, trained

from zerofp4 import serving

if not importlib.util.find_spec("modelopt"):
    pytest.skip("nvidia-modelopt is not installed", allow_module_level=True)
pytestmark = pytest.mark.heavy  # its import takes seconds


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_are_dequantize_but_for_one_unit(name, tmp_path):
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    model, optimizer = trained(name)
    serving.save_pretrained(model, tmp_path, optimizer, format="modelopt")
    found, differing, total = read(tmp_path), 0, 0
    for module, (matrix, rows) in served_modules(model).items():
        expected = matrix.dequantize()[rows] + 0  # its zeros have no sign
        packed = NVFP4QTensor(expected.shape, torch.bfloat16, found[f"{module}.weight"])
        scales = {"scale": found[f"{module}.weight_scale"], "double_scale": found[f"{module}.weight_scale_2"]}
        values = packed.dequantize(dtype=torch.bfloat16, block_sizes={-1: 16}, **scales)
        distance = (values.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
        assert values.dtype == torch.bfloat16 and distance.max() <= 1, module
        differing, total = differing + int(distance.sum()), total + distance.numel()
    assert differing <= 0.001 * total


def test_the_configuration_is_what_it_makes_of_its_own_file(tmp_path):
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    model, optimizer = trained("Qwen3Moe")
    amaxes = dict.fromkeys(served_modules(model), 1.0)
    for inputs in (None, amaxes):
        serving.save_pretrained(model, tmp_path, optimizer, format="modelopt", input_amaxes=inputs)
        content = json.loads((tmp_path / "hf_quant_config.json").read_text())
        config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
        assert convert_hf_quant_config_format(content) == config
