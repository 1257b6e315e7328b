"""TransformerEngine's own tensor class, from its Python files: casts write it, and the stand-in is like it.

Its package cannot be imported without a GPU and its libraries. The four files of the tensor can, where
whatever else they import, the compiled extension foremost, is a mock. Nothing of the mocks is compared.
"""

from __future__ import annotations

import copy
import importlib.machinery
import importlib.util
import inspect
import math
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
from cases import te_stand_in
from cases.transformer_engine import SHAPES, check, places

import zerofp4
import zerofp4.integrations.transformer_engine

ROOT = "transformer_engine"
FOLDERS = ("", ".pytorch", ".pytorch.tensor", ".pytorch.tensor.storage")
FILES = {
    f"{ROOT}.pytorch.{name}"
    for name in (
        "quantized_tensor",
        "tensor._quantization_helpers",
        "tensor.nvfp4_tensor",
        "tensor.storage.nvfp4_tensor_storage",
    )
}
installed = importlib.util.find_spec(ROOT)
if installed is None or installed.origin is None:
    pytest.skip("transformer-engine is not installed (its Python files are enough)", allow_module_level=True)


class Mocked(types.ModuleType):
    """Has every name."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, mock.MagicMock(name=name))
        return getattr(self, name)


class Finder:
    """The files themselves are found as ever; what else is of the package, is mocked."""

    def find_spec(self, name, path, target=None):
        inside = name.startswith(f"{ROOT}.") or name == f"{ROOT}_torch"
        return importlib.machinery.ModuleSpec(name, self) if inside and name not in FILES else None

    def create_module(self, spec):
        module = Mocked(spec.name)
        module.__path__ = []
        if spec.name == f"{ROOT}.pytorch.constants":
            module.NVFP4_BLOCK_SCALING_SIZE = 16
        if spec.name == f"{ROOT}.pytorch.utils":
            module.round_up_to_nearest_multiple = lambda value, multiple: (
                math.ceil(value / multiple) * multiple
            )
        return module

    def exec_module(self, module) -> None: ...


@pytest.fixture(scope="module")
def tensors():
    """The module of NVFP4Tensor."""
    before = {name for name in sys.modules if name.startswith(ROOT)}
    if before:
        pytest.skip("TransformerEngine itself is imported")
    finder = Finder()
    sys.meta_path.insert(0, finder)
    for name in FOLDERS:
        package = sys.modules[ROOT + name] = types.ModuleType(ROOT + name)
        package.__path__ = [str(Path(installed.origin).parent.joinpath(*name.split(".")))]
    yield importlib.import_module(f"{ROOT}.pytorch.tensor.nvfp4_tensor")
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.startswith(ROOT)]:
        del sys.modules[name]


class Quantizer(te_stand_in.NVFP4Quantizer):
    def copy(self) -> Quantizer:
        return copy.copy(self)


def theirs(tensors, like: te_stand_in.NVFP4Tensor) -> torch.Tensor:
    """Its tensor with copies of the stand-in's buffers."""
    buffers = {name.removeprefix("_"): b.clone() for name, b in te_stand_in.buffers_of(like).items()}
    settings = {"fp4_dtype": like._fp4_dtype, "quantizer": Quantizer(), "with_gemm_swizzled_scales": False}
    return tensors.NVFP4Tensor(
        shape=tuple(like.shape), dtype=like.dtype, device=like.device, **buffers, **settings
    )


def test_casts_write_its_own_tensors(tensors):
    weights = [theirs(tensors, te_stand_in.make(shape)) for shape in SHAPES]
    masters, starts = [torch.randn(weight.numel()) for weight in weights], [0] * len(weights)
    before = places(weights)
    for _ in range(2):
        zerofp4.cast_master_weights_to_nvfp4(weights, masters, starts)
        zerofp4.all_gather_nvfp4(weights, starts, [master.numel() for master in masters])
        zerofp4.post_all_gather_processing(weights)
        check(weights, masters)
        masters = [master.neg() for master in masters]
    assert places(weights) == before
    weights[1].update_usage(rowwise_usage=True, columnwise_usage=False)
    zerofp4.cast_master_weights_to_nvfp4(weights, masters, starts)
    zerofp4.post_all_gather_processing(weights)
    assert weights[1]._columnwise_data is None
    check(weights, masters)


def test_the_stand_in_has_its_attributes_and_layouts(tensors):
    mine = te_stand_in.make((48, 288))
    its = theirs(tensors, mine)
    own = {"_dtype", "_requires_grad"}
    assert set(vars(its)) - own == set(vars(mine))
    for shape in SHAPES:
        for columnwise in (False, True):
            got = tensors.NVFP4Quantizer.get_scale_shape(None, shape, columnwise)
            assert got == mine._quantizer.get_scale_shape(shape, columnwise)
    arguments = inspect.signature(tensors.NVFP4Quantizer).parameters
    for name in ("with_2d_quantization", "with_rht", "stochastic_rounding", "row_scaled_nvfp4"):
        assert name in arguments and hasattr(mine._quantizer, name)
