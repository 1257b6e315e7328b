"""install and uninstall: which of Megatron-Core's functions are replaced, and by what."""

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from zerofp4.integrations.megatron import casting, layout
from zerofp4.tensors import NVFP4Tensor

KNOWN_VERSIONS = ("0.18", "0.19")
"""Of Megatron-Core, in which the replaced functions were read and run."""

_replaced: list[tuple[Any, str, Any]] = []
"""What install() has replaced: (module or class, name, old value)."""


def install() -> None:
    """Let Megatron-Core's DistributedDataParallel and DistributedOptimizer train NVFP4 weights.

    They cast with cast_master_weights_to_nvfp4, keep and gather packed codes, laid out like the masters, save
    and load values, and let weights follow loaded masters. TransformerEngine is not needed; its own tensors
    are handled as before. Call it before the model is given to DistributedDataParallel, with
    use_distributed_optimizer and fp4_param_gather set there. A second call changes nothing.

    Raises ImportError without Megatron-Core, RuntimeError for a version other than KNOWN_VERSIONS, or one
    that lacks a function to replace; nothing is changed then.
    """
    if _replaced:
        return
    found = list(_replacements(_Megatron()))
    for owner, name, value in found:
        _replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)


def uninstall() -> None:
    """Restore Megatron-Core. Models with NVFP4 weights in its buffers can no longer train."""
    while _replaced:
        setattr(*_replaced.pop())


def is_installed() -> bool:
    return bool(_replaced)


class _Megatron:
    """The modules of a known version, by the end of their names."""

    def __init__(self):
        try:
            core = importlib.import_module("megatron.core")
        except ImportError as error:
            raise ImportError(
                f"Megatron-Core cannot be imported ({error}): pip install megatron-core"
            ) from error
        version = getattr(core, "__version__", "of no version")
        if ".".join(version.split(".")[:2]) not in KNOWN_VERSIONS:
            raise RuntimeError(
                f"Megatron-Core {version} was found, and zerofp4 knows {', '.join(KNOWN_VERSIONS)}: others "
                "may lay out, cast or gather NVFP4 weights in other ways, and nothing would say so"
            )
        self.version = version

    def __getitem__(self, name: str) -> Any:
        return importlib.import_module(f"megatron.core.{name}")

    def had(self, owner: Any, name: str) -> Any:
        """The present value of a name that is to be replaced; for a method the plain function."""
        value = vars(owner).get(name, self)
        if value is self:
            raise RuntimeError(
                f"Megatron-Core {self.version} has no {owner.__name__}.{name}, which zerofp4 replaces"
            )
        return getattr(value, "__func__", value)


def _replacements(megatron: _Megatron) -> Iterator[tuple[Any, str, Any]]:
    """(module or class, name, new value)"""
    fp4, fp8 = megatron["fp4_utils"], megatron["fp8_utils"]
    buffers = megatron["distributed.param_and_grad_buffer"]
    optimizers = megatron["optimizer.distrib_optimizer"]

    def is_packed(parameter: Any) -> bool:
        grouped = getattr(fp4, "is_grouped_nvfp4tensor", None)
        return fp4.is_nvfp4tensor(parameter) or (grouped is not None and grouped(parameter))

    def made(owner: Any, name: str, function: Callable, *options: Any) -> tuple[Any, str, Any]:
        bind = functools.partialmethod if isinstance(owner, type) else functools.partial
        return owner, name, bind(function, megatron.had(owner, name), *options)

    # is_nvfp4tensor() reads these at each call.
    theirs = megatron.had(fp4, "FP4_TENSOR_CLASS") if megatron.had(fp4, "HAVE_TE_FP4_TENSOR_CLASS") else None
    yield fp4, "HAVE_TE_FP4_TENSOR_CLASS", True
    yield fp4, "FP4_TENSOR_CLASS", NVFP4Tensor if theirs is None else (NVFP4Tensor, theirs)
    for function, owners in (
        (casting.modify_nvfp4_rowwise_storage, (fp4, buffers)),
        (casting.quantize_nvfp4_param_shard, (fp4, optimizers)),
        (casting.te_post_all_gather_processing, (fp4, fp8)),
    ):
        _, name, value = made(owners[0], function.__name__, function)
        # Other modules import it by name; in 0.18 not all of these.
        yield from ((owner, name, value) for owner in owners if name in vars(owner))
    if "_unwrap_parameter_data" in vars(fp8):  # only saves time; some versions lack it
        yield made(fp8, "_unwrap_parameter_data", casting.unwrap_parameter_data)
    buffer = buffers._ParamAndGradBuffer
    yield made(buffer, "_compute_nvfp4_packed_layout", layout.compute_packed_layout, is_packed)
    optimizer, name = optimizers.DistributedOptimizer, "_compute_per_buffer_param_layout"
    compute = functools.partial(layout.compute_buffer_layout, megatron.had(optimizer, name), is_packed)
    yield optimizer, name, staticmethod(compute)
    yield made(optimizer, "__init__", layout.construct)
    yield made(optimizer, "load_state_dict", casting.load, lambda state: "param_state" in state)
    yield made(optimizer, "load_parameter_state_from_dp_zero", casting.load, lambda state: True)
    fsdp = megatron["distributed.fsdp.mcore_fsdp_adapter"].FullyShardedDataParallel
    yield made(fsdp, "__init__", layout.construct_fsdp)
    nested_values = megatron["dist_checkpointing.dict_utils"].nested_values
    for module in ("serialization", "tensor_aware_state_dict"):
        for name in ("save_preprocess", "load_preprocess"):
            owner = megatron[f"dist_checkpointing.{module}"]
            yield made(owner, name, casting.preprocess, nested_values)
