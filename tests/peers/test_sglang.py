"""SGLang's own loader, on exports: bytes of all parameters.

SGLang wants other versions of transformers and compressed-tensors, so it runs in an environment of its own.
The variable ZEROFP4_SGLANG_PYTHON names its interpreter; without it the first test makes one in build/sglang.
"""

from __future__ import annotations

import pytest
from cases.engines import Engine, exports_of, taken, write_export
from cases.serving import read

IMPORTED = """
aiohttp compressed-tensors==0.18.0 dill einops fastapi gguf ipython msgspec numpy openai==2.8.0 orjson
packaging partial-json-parser pillow psutil pybase64 pydantic python-multipart pyzmq regex requests scipy
sentencepiece setproctitle torch==2.13.0 torch_memory_saver tqdm transformers==5.19.0 triton uvicorn
watchfiles zstandard
"""
"""Of its requirements those that its loader imports. The others have kernels for GPUs, or serve."""
SGLANG = Engine(
    "sglang", (("install", "-qq", *IMPORTED.split()), ("install", "-qq", "--no-deps", "sglang==0.5.23"))
)
REFUSED = ("Mixtral", "compressed-tensors", 0)
"""Its Mixtral raises KeyError for input scales of weight-only experts. Its Qwen3-MoE ignores them."""
ARCHITECTURES = ("Llama", "Qwen3", "Mistral", "Gemma2", "Qwen3Moe", "Mixtral")
"""Its DeepSeek-V3 cannot be built on a CPU without a scaled rotary embedding."""
EXPORTS = [export for export in exports_of(ARCHITECTURES) if export != REFUSED]
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The folder of all exports, and that of what SGLang made of them."""
    root, out = tmp_path_factory.mktemp("exports"), tmp_path_factory.mktemp("load")
    return root, SGLANG.run(out, out, *(write_export(root, *export) for export in EXPORTS))


@pytest.mark.parametrize(("name", "format", "has_inputs"), EXPORTS)
def test_its_loader_takes_all_bytes(loaded, name, format, has_inputs):
    """Codes, scales, global scales, all others: each tensor of an export is in a parameter of SGLang."""
    export, parameters = (folder / f"{name}-{format}-{has_inputs}" for folder in loaded)
    parameters = parameters.with_name(f"{parameters.name}.safetensors")
    is_compressed = format == "compressed-tensors"
    found = taken(export, parameters, FUSED, is_up_first=is_compressed and bool(has_inputs))
    unused = "input_global_scale" if is_compressed and not has_inputs else None
    assert found == {key for key in read(export) if key.rpartition(".")[2] != unused}
