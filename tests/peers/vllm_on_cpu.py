"""Runs in the environment of vLLM for CPUs, as a program: what vLLM makes of exports.

python vllm_on_cpu.py load OUT FOLDER...       writes parameters as vLLM's loader leaves them
python vllm_on_cpu.py generate OUT FOLDER...   writes 12 greedy tokens after 0 to 3, 16 to 19, 32 to 35

The files are OUT/NAME.safetensors and OUT/NAME.json, with the name of the folder.

vLLM has no NVFP4 kernel for CPUs. Its own dequantization and torch's linear() stand for one.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.layers.fused_moe.experts.nvfp4_emulation_moe import (
    Nvfp4QuantizationEmulationTritonExperts as EmulatedExperts,
)
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as experts_of_compressed_tensors,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4 as compressed_tensors,
)
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

OPTIONS = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 64}


class DequantizingKernel(NvFp4LinearKernel):
    """For weights only: activations are not quantized."""

    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, config):
        return True, None

    def process_weights_after_loading(self, layer):
        pass

    def apply_weights(self, layer, x, bias=None):
        fields = layer.weight.data, layer.weight_scale.data, layer.weight_global_scale
        weight = dequantize_to_dtype(*fields, x.dtype, 16, swizzle=False)
        return torch.nn.functional.linear(x, weight, bias)


def choose_kernels() -> None:
    """Where vLLM would refuse a CPU. Its experts need a GPU to run, but not to be loaded."""
    for module in (compressed_tensors, modelopt):
        module.init_nvfp4_linear_kernel = lambda use_a16=False: DequantizingKernel(NvFp4LinearLayerConfig())
    for module in (experts_of_compressed_tensors, modelopt):
        module.select_nvfp4_moe_backend = lambda **_: (NvFp4MoeBackend.EMULATION, EmulatedExperts)


def load(out: Path, folders: list[str]) -> None:
    for i, folder in enumerate(folders):
        config = EngineArgs(model=folder, **OPTIONS).create_engine_config()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            if not i:
                init_distributed_environment(1, 0, f"file://{out}/store", 0, "gloo")
            destroy_model_parallel()  # the groups depend on the model
            ensure_model_parallel_initialized(1, 1)
            model = initialize_model(vllm_config=config)
            get_model_loader(config.load_config).load_weights(model, config.model_config)
        metadata = {"fused": json.dumps(getattr(model, "packed_modules_mapping", {}))}
        state = {key: value.detach().clone().contiguous() for key, value in model.state_dict().items()}
        save_file(state, out / f"{Path(folder).name}.safetensors", metadata)


def generate(out: Path, folders: list[str]) -> None:
    prompts = [{"prompt_token_ids": [*range(i, i + 4)]} for i in (0, 16, 32)]
    sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
    for folder in folders:
        engine = LLM(model=folder, max_num_seqs=len(prompts), **OPTIONS)
        tokens = [list(found.outputs[0].token_ids) for found in engine.generate(prompts, sampling)]
        (out / f"{Path(folder).name}.json").write_text(json.dumps(tokens))
        del engine
        gc.collect()  # it ends the process group, and the next engine makes another


if __name__ == "__main__":
    choose_kernels()
    command, out, *folders = sys.argv[1:]
    {"load": load, "generate": generate}[command](Path(out), folders)
