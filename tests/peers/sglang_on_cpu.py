"""Runs in an environment of SGLang, as a program: what SGLang's loader makes of exports, on a CPU.

python sglang_on_cpu.py OUT FOLDER...   writes parameters as SGLang's loader leaves them

The files are OUT/NAME.safetensors, with the name of the folder.

SGLang's own configuration, models and `load_weights` run as for a Blackwell GPU. The repacking of weights for
kernels, which follows, is left out.
"""

import importlib
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from unittest import mock

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

import torch
from safetensors.torch import save_file

STAND_INS = ("torchvision", "tvm_ffi", "vllm")
"""What SGLang imports for images and kernels, and loading does not call."""


class StandIn(types.ModuleType):
    """Has every name; one that begins with a capital is a class, of which others can be derived."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {}) if name[0].isupper() else mock.MagicMock(name=name)
        setattr(self, name, found)
        return found


class Finder:
    def find_spec(self, name, path, target=None):
        is_needed = name.partition(".")[0] in STAND_INS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_needed else None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module): ...


def load(out: Path, folders: list[str]) -> None:
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
    from sglang.srt.runtime_context import SpawnRanks, override_platform, publish
    from sglang.srt.server_args import ServerArgs

    DefaultModelLoader.postprocess_weights = staticmethod(lambda model, target_device: None)
    torch.cuda.get_device_capability = lambda *_: (10, 0)
    for i, folder in enumerate(folders):
        arguments = ServerArgs(model_path=folder, device="cpu", dtype="bfloat16", skip_tokenizer_init=True)
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        if not i:
            init_distributed_environment(1, 0, f"file://{out}/store", 0, "gloo")
            initialize_model_parallel()
            initialize_dp_attention(arguments)
        initialize_moe_config()
        config = ModelConfig.from_server_args(arguments)
        with override_platform(is_blackwell=True):
            loader = get_model_loader(LoadConfig(), config)
            model = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
        state = {key: value.detach().clone().contiguous() for key, value in model.state_dict().items()}
        save_file(state, out / f"{Path(folder).name}.safetensors")


if __name__ == "__main__":
    importlib.import_module("transformers.image_utils")  # looks for torchvision, and can do without it
    sys.meta_path.insert(0, Finder())
    out, *folders = sys.argv[1:]
    load(Path(out), folders)
