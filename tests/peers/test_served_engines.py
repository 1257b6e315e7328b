"""The rules by which vLLM and SGLang read an export, from their own Python files.

They require torch for GPUs and their kernels. The files of a rule can be imported without these, with mocks
of all other modules. Nothing of the mocks is compared. test_vllm.py and test_sglang.py load
exports with all of these packages, on a CPU.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from cases.serving import ARCHITECTURES, FIELDS, read, served_modules, trained

import zerofp4
from zerofp4 import serving

QUANTIZATION = "model_executor.layers.quantization"
FILES = {
    "vllm": (
        f"{QUANTIZATION}.base_config",
        f"{QUANTIZATION}.compressed_tensors.compressed_tensors",
        f"{QUANTIZATION}.compressed_tensors.utils",
        f"{QUANTIZATION}.modelopt",
        f"{QUANTIZATION}.utils.config_utils",
        f"{QUANTIZATION}.utils.quant_utils",
        "distributed.weight_transfer.base",
    ),
    "sglang": (
        "srt.layers.quantization.base_config",
        "srt.layers.quantization.compressed_tensors.compressed_tensors",
        "srt.layers.quantization.compressed_tensors.utils",
        "srt.layers.quantization.modelopt_quant",
        "srt.layers.quantization.utils",
    ),
}
"""The modules that are imported as they are."""

MODELS = {
    "Llama": "llama",
    "Qwen3": "qwen3",
    "Mistral": "llama",
    "Gemma2": "gemma2",
    "Qwen3Moe": "qwen3_moe",
    "Mixtral": "mixtral",
    "DeepseekV3": "deepseek_v2",
}
"""vLLM's file of an architecture."""

ADDED = {"DeepseekV3": {"fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"]}}
"""What a model adds to the mapping of its file when it is built."""


class Mocked(types.ModuleType):
    """Has every name; one that begins with a capital is a class, of which others can be derived."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {}) if name[0].isupper() else mock.MagicMock(name=name)
        setattr(self, name, found)
        return found


class Finder:
    """Finds mocks for all modules of a package, and of what only a GPU has, but for the listed files."""

    def __init__(self, package: str, folder: Path):
        self._package, self._folder = package, folder
        self._files = {f"{package}.{name}" for name in FILES[package]}
        self.roots = {package, "flashinfer", "sgl_kernel", "triton"}

    def find_spec(self, name, path, target=None):
        is_mocked = name.partition(".")[0] in self.roots and name not in self._files
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_mocked else None

    def create_module(self, spec):
        module = Mocked(spec.name)
        _, *rest = spec.name.split(".")
        module.__path__ = [str(self._folder.joinpath(*rest))] if spec.name.startswith(self._package) else []
        return module

    def exec_module(self, module) -> None: ...


def engine(package: str) -> Iterator[functools.partial]:
    """What imports a listed module of a package that is installed."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed (its Python files are enough)")
    finder = Finder(package, Path(found.submodule_search_locations[0]))
    before = set(sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        yield lambda name: importlib.import_module(f"{package}.{name}")
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in finder.roots:
                del sys.modules[name]


@pytest.fixture(scope="module")
def vllm():
    yield from engine("vllm")


@pytest.fixture(scope="module")
def sglang():
    yield from engine("sglang")


def source(module: types.ModuleType, name: str) -> str:
    """The text of another file of the engine."""
    root = Path(module.__file__)
    while root.name not in FILES:
        root = root.parent
    return (root / name).read_text()


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[tuple[str, str], dict[str, dict]]:
    """By architecture and format, the configuration files of an export, and which names it has."""
    found = {}
    for name in ARCHITECTURES:
        for format in FIELDS:
            folder = tmp_path_factory.mktemp(name)
            serving.save_pretrained(trained(name)[0], folder, format=format)
            files = {path.name: json.loads(path.read_text()) for path in folder.glob("*config.json")}
            found[name, format] = files | {"tensors": read(folder)}
    return found


def packed_modules(vllm, name: str) -> dict[str, list[str]]:
    """packed_modules_mapping of vLLM's model."""
    tree = ast.parse(source(vllm(f"{QUANTIZATION}.modelopt"), f"model_executor/models/{MODELS[name]}.py"))
    (mapping,) = [
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "packed_modules_mapping"
    ]
    return mapping | ADDED.get(name, {})


def layers(name: str, mapping: dict[str, list[str]]) -> set[str]:
    """What vLLM and SGLang call the layers of the quantized modules: fused ones, and experts as one."""
    fused = {member: packed for packed, members in mapping.items() for member in members}
    found = set()
    for module in served_modules(trained(name)[0]):
        parent, _, last = module.rpartition(".")
        is_expert = re.search(r"\.experts\.\d+$", parent)
        found.add(parent[: parent.rindex(".")] if is_expert else f"{parent}.{fused.get(last, last)}")
    return found


def unquantized(name: str) -> set[str]:
    routers = {"Qwen3Moe": "mlp.gate", "Mixtral": "block_sparse_moe.gate", "DeepseekV3": "mlp.gate"}
    first = 1 if name == "DeepseekV3" else 0
    gates = {f"model.layers.{i}.{routers[name]}" for i in range(first, 2)} if name in routers else set()
    return {"lm_head"} | gates


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_vllm_fuses_shares_one_amax(vllm, name):
    mapping, known = packed_modules(vllm, name), {frozenset(members) for members in serving.FUSED}
    assert {frozenset(members) for members in mapping.values()} <= known


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_vllm_reads_compressed_tensors(vllm, configs, name):
    module = vllm(f"{QUANTIZATION}.compressed_tensors.compressed_tensors")
    ignores = vllm(f"{QUANTIZATION}.compressed_tensors.utils").should_ignore_layer
    quantization = configs[name, "compressed-tensors"]["config.json"]["quantization_config"]
    config = module.CompressedTensorsConfig.from_config(quantization)
    (scheme,) = config.target_scheme_map.values()
    assert config._is_nvfp4_format(scheme["weights"]) and scheme["input_activations"] is None
    mapping = packed_modules(vllm, name)
    assert not any(ignores(layer, config.ignore, mapping) for layer in layers(name, mapping))
    assert all(ignores(layer, config.ignore, mapping) for layer in unquantized(name))


@pytest.mark.parametrize("kind", ["file", "flat"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_vllm_reads_modelopt(vllm, configs, name, kind):
    module = vllm(f"{QUANTIZATION}.modelopt")
    files = configs[name, "modelopt"]
    flat = files["config.json"]["quantization_config"]
    content = files["hf_quant_config.json"] if kind == "file" else flat
    assert module.ModelOptNvFp4Config.override_quantization_method(flat, None) == "modelopt_fp4"
    with mock.patch.object(module, "algos_owned_by", lambda owner: ["NVFP4", "W4A16_NVFP4"]):
        config = module.ModelOptNvFp4Config.from_config(content)
    assert config.quant_method == "W4A16_NVFP4" and config.group_size == 16
    assert config.kv_cache_quant_algo is None and config.is_checkpoint_nvfp4_serialized
    config.packed_modules_mapping = packed_modules(vllm, name)
    assert not any(map(config.is_layer_excluded, layers(name, config.packed_modules_mapping)))
    assert all(map(config.is_layer_excluded, unquantized(name)))


def test_vllm_registers_these_fields(vllm):
    schemes = f"{QUANTIZATION}.compressed_tensors.schemes".replace(".", "/")
    text = source(vllm(f"{QUANTIZATION}.modelopt"), f"{schemes}/compressed_tensors_w4a4_nvfp4.py")
    registered = set(re.findall(r'register_parameter\("(\w+)"', text))
    assert registered == {*FIELDS["compressed-tensors"], "input_global_scale"}
    text = inspect.getsource(vllm(f"{QUANTIZATION}.modelopt").KNvfp4Static.create_weights)
    assert set(re.findall(r'"(weight\w*)"', text)) == set(FIELDS["modelopt"])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sglang_reads_compressed_tensors(sglang, configs, name):
    module = sglang("srt.layers.quantization.compressed_tensors.compressed_tensors")
    ignores = sglang("srt.layers.quantization.compressed_tensors.utils").should_ignore_layer
    quantization = configs[name, "compressed-tensors"]["config.json"]["quantization_config"]
    config = module.CompressedTensorsConfig.from_config(quantization)
    (scheme,) = config.target_scheme_map.values()
    assert config._is_fp4a16_nvfp4(scheme["weights"], scheme["input_activations"])
    assert not config._is_fp4a4_nvfp4(scheme["weights"], scheme["input_activations"])
    mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    mapping |= ADDED.get(name, {})
    assert not any(ignores(layer, config.ignore, mapping) for layer in layers(name, mapping))
    assert all(ignores(layer, config.ignore, mapping) for layer in unquantized(name))


@pytest.mark.parametrize("kind", ["file", "flat"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sglang_reads_modelopt(sglang, configs, name, kind):
    module = sglang("srt.layers.quantization.modelopt_quant")
    files = configs[name, "modelopt"]
    flat = files["config.json"]["quantization_config"]
    config = module.ModelOptFp4Config.from_config(files["hf_quant_config.json"] if kind == "file" else flat)
    assert config.is_w4a16 and config.is_checkpoint_nvfp4_serialized and config.group_size == 16
    mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    assert not any(map(config.is_layer_excluded, layers(name, mapping | ADDED.get(name, {}))))
    assert all(map(config.is_layer_excluded, unquantized(name)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fused_modules_have_one_global_scale(configs, name):
    """SGLang raises ValueError for others, vLLM scales them wrongly."""
    for format, (*_, global_scale) in FIELDS.items():
        tensors, seen = configs[name, format]["tensors"], {}
        for module in served_modules(trained(name)[0]):
            parent, _, last = module.rpartition(".")
            group = next((i for i, members in enumerate(serving.FUSED) if last in members), last)
            seen.setdefault((parent, group), set()).add(tensors[f"{module}.{global_scale}"].item())
        assert all(len(values) == 1 for values in seen.values())


def test_a_source_of_weights_for_vllm(vllm):
    """The adapter of docs/serving.md."""
    base = vllm("distributed.weight_transfer.base")
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (code,) = [block for block in blocks if "WeightSource" in block]
    namespace: dict = {"zerofp4": zerofp4}
    with mock.patch.dict(sys.modules, {"vllm.distributed.weight_transfer.base": base}):
        exec(code, namespace)
    model, _ = trained("Qwen3Moe")
    weights = namespace["ServedSource"](model)
    names = [meta.name for meta in weights.metadata]
    assert weights.implements_iter_full() and weights.implements_iter_local()
    assert weights.owned_names(0) == names == serving.weights(model).names
    for iterated in (weights.iter_full(), weights.iter_local()):
        for meta, (name, tensor) in zip(weights.metadata, iterated, strict=True):
            assert meta.name == name and meta.owners is None
            assert (meta.dtype, meta.shape) == (tensor.dtype, tuple(tensor.shape))
