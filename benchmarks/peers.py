"""What our operations are compared with in the same process: a bf16 copy, the reference in PyTorch, and
packages of others: this is written for torchao 0.18, gemlite 0.6.0 and fouroversix 1.0.5.
"""

from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from benchmarks import rules
from benchmarks.session import Session
from benchmarks.workloads import Tensors
from zerofp4 import reference
from zerofp4.format import BLOCK, E2M1_MAX, E4M3_MAX, MXFP8_BLOCK, MXFP8_DATA_DTYPE

Call = Callable[[], object]

FIRST_WITH_E2M1 = 10  # major compute capability that converts to E2M1 in one instruction

EXACT = {"emulate_precision_casts": True}
"""torch.compile's options without which a value that is rounded to bfloat16 on its way stays a float32."""


class Part(NamedTuple):
    """A function to be compiled, and what it is called with."""

    function: Callable[..., object]
    arguments: Sequence
    options: dict | None = None


def attempt(session: Session, name: str, ours: dict, make: Callable[[], Call]) -> dict | None:
    """Time what `make` returns beside our row, with its bytes; if it raises, say that it is left out."""
    try:
        run = make()
        run()
        session.clock.synchronize()  # an error of its kernels is its own, too
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        session.say(f"{name} is left out: {reason or type(error).__name__}")
        return None
    row = session.time(name, run, rules.counted_as(ours))
    session.compare(ours, row)
    return row


def compiled(*parts: Part) -> Call:
    """A call of functions under torch.compile, one after the other."""
    torch.compiler.reset()  # or what was compiled for other sizes is compiled again for variable ones
    calls = [
        (torch.compile(function, dynamic=False, options=options), arguments)
        for function, arguments, options in parts
    ]
    return lambda: [function(*arguments) for function, arguments in calls]


def reference_compile(session: Session, ours: dict, *parts: Part) -> None:
    """Time the reference of our row under torch.compile. Left out for want of a C++ compiler, say."""
    attempt(session, f"reference_compile_{ours['name']}", ours, lambda: compiled(*parts))


# A step of the cast


def bf16_copy(session: Session, tensors: Tensors, ours: dict) -> None:
    """What users do today: the flat FP32 masters rounded into a flat bf16 buffer."""
    copy, owned = torch.empty_like(tensors.flat, dtype=torch.bfloat16), tensors.workload.owned
    name, moved = f"bf16_copy/{tensors.workload.part_name}", rules.Moved(6 * owned, "6n", owned)
    session.compare(ours, session.time(name, lambda: copy.copy_(tensors.flat), moved))


def references(session: Session, tensors: Tensors, ours: dict) -> None:
    """The reference in PyTorch, eager and compiled, where the workload is one weight owned whole."""
    workload = tensors.workload
    (shape, shard), *others = workload.pieces
    if others or shard.numel != workload.elements:
        return
    master = tensors.flat.view(shape)
    eager = session.time(f"reference_eager_{ours['name']}", lambda: cast(master), rules.counted_as(ours))
    session.compare(ours, eager)
    reference_compile(session, ours, Part(cast, [master]))


def cast(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, rowwise scales and amax of a whole [M, K] master for a bfloat16 weight."""
    x = master.bfloat16()
    amax = reference.tensor_amax(x)
    return *quantize(x, amax, BLOCK), amax


# The reference of single operations, a copy at a time: torch.compile takes no more at once


def quantize(x: torch.Tensor, amax: torch.Tensor, block_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the rowwise copy."""
    scale = reference.block_scale(reference.block_amax(x, block_rows), amax)
    return reference.pack(reference.encode(x, scale, amax, block_rows)), scale


def quantize_transformed(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the columnwise copy with the Hadamard transform, in blocks of 1x16."""
    return quantize(reference.hadamard_transform(x).t().contiguous(), amax, 1)


def swizzle(scale: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Compact scales of 1x16 blocks of a [rows, cols] matrix."""
    return reference.swizzle_scale(reference.expand_scale(scale, rows, cols, 1))


def quantize_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements of the rowwise copy, and its scales as uint8: torch.compile has no E8M0 on a CPU."""
    scale = reference.mxfp8_scale(reference.mxfp8_block_amax(x)).view(torch.uint8)
    factor = reference.mxfp8_encode(scale).repeat_interleave(MXFP8_BLOCK, 1)[:, : x.shape[1]]
    return reference.float_to_e4m3(x.float() * factor), scale


# Packages. Their bytes are not ours: they round otherwise, or clamp. Each function gives the call that is
# timed, or raises what its package does, ImportError where there is none.


def packages(session: Session, ours: dict, **peers: Callable[[], Call]) -> None:
    """Time what packages, by name, do in place of our row; one that cannot run is said to be left out."""
    for package, make in peers.items():
        row = attempt(session, f"{package}_{ours['name']}", ours, make)
        if row is not None:
            row["package"] = f"{package} {version_of(package)}"


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a source tree on PYTHONPATH
        return "of unknown version"


def torchao_nvfp4(x: torch.Tensor, amax: torch.Tensor) -> Call:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    return compiled(Part(nvfp4_quantize, (x, BLOCK, amax / (E4M3_MAX * E2M1_MAX))))


def gemlite_nvfp4(x: torch.Tensor, amax: torch.Tensor) -> Call:
    """Its Triton kernel of version 5, the one for a scale that is given."""
    import gemlite
    from gemlite.quant_utils import scale_activations_nvfp4

    if torch.cuda.get_device_capability(x.device)[0] < FIRST_WITH_E2M1:
        gemlite.set_ptx_fp4_pack(False)  # it asks only the assembler whether there is such an instruction
    scale = E4M3_MAX * E2M1_MAX / amax
    return lambda: scale_activations_nvfp4(x, scale)


def fouroversix_nvfp4(
    x: torch.Tensor, amax: torch.Tensor, block_rows: int, scale_rule: str = "static_6"
) -> Call:
    """Its Triton kernel, which writes swizzled scales and on Hopper converts to E2M1 by comparisons."""
    from fouroversix import QuantizationConfig, quantize_to_fp4

    config = QuantizationConfig(
        backend="triton", block_scale_2d=block_rows > 1, scale_rule=scale_rule, kwargs={"x_amax": amax}
    )
    return lambda: quantize_to_fp4(x, config)


def torchao_swizzle(scale: torch.Tensor) -> Call:
    from torchao.prototype.mx_formats.utils import to_blocked

    return compiled(Part(to_blocked, (scale,)))


def torchao_quantize_mxfp8(x: torch.Tensor) -> Call:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    arguments = (x, MXFP8_DATA_DTYPE, MXFP8_BLOCK, ScaleCalculationMode.RCEIL)
    return compiled(Part(to_mx, arguments))


def torchao_dequantize_mxfp8(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Call:
    """It takes the scales as bytes too, and torch.compile knows no E8M0 on some devices."""
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    arguments = (data, scale.view(torch.uint8), MXFP8_DATA_DTYPE, MXFP8_BLOCK, dtype)
    return compiled(Part(to_dtype, arguments))


# Optimizers


def flash_adamw(parameters: Iterable, **options: object) -> torch.optim.Optimizer:
    """FlashOptim 0.1.4's, with masters of 24 bits and moments of 8. Raises ImportError without flashoptim,
    NotImplementedError on a CPU.
    """
    from flashoptim import FlashAdamW

    return FlashAdamW(parameters, **options)


def torchao_offload(parameters: Iterable, **options: object) -> torch.optim.Optimizer:
    """torchao's, with a copy of parameters, their gradients and torch's fused AdamW in host memory. Raises
    ImportError without torchao.
    """
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(parameters, torch.optim.AdamW, fused=True, **options)


def zero_redundancy(parameters: Iterable, **options: object) -> torch.optim.Optimizer:
    """torch's fused AdamW of bfloat16 parameters without masters, its state sharded by whole parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        parameters, torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **options
    )
