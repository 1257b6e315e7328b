"""Which GPUs the code of a build runs on, and what torch multiplies slowly on this CPU."""

import re
from collections.abc import Sequence

import torch

OLDEST_CAPABILITY = (8, 0)
FP4_CAPABILITY = (10, 0)
"""From here on tensor cores multiply FP4."""


def _slow_on_cpu() -> tuple[torch.dtype, ...]:
    has_mkldnn = torch.backends.mkldnn.is_available()
    # oneDNN takes bfloat16 on any AVX-512, where without AVX512_BF16 it is a fifth as fast as float32.
    emulates = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    slow = {
        torch.bfloat16: not has_mkldnn or emulates or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: not has_mkldnn or not torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return tuple(dtype for dtype in slow if slow[dtype])


SLOW_ON_CPU = _slow_on_cpu()
"""Dtypes that this CPU has no instructions for: torch multiplies them at a fraction of float32's speed. It
follows ONEDNN_MAX_CPU_ISA, as torch does.
"""


def code_for(capability: Sequence[int], architectures: Sequence[str]) -> str | None:
    """The architecture, out of those compiled in, whose code a GPU runs; None when there is none.

    Machine code (sm_90) runs on its own major version from its minor version on. PTX (compute_90) runs on
    that version and on all that are newer, and is compiled when it is first used.
    """
    usable = []
    for name in architectures:
        parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name)
        if parts is None:
            continue
        version, own, machine_code = (int(parts[2]), int(parts[3])), tuple(capability), parts[1] == "sm"
        if version <= own and (version[0] == own[0] or not machine_code):
            usable.append((machine_code, version, name))
    return max(usable)[2] if usable else None


def check_capability(gpu: str, capability: Sequence[int], architectures: Sequence[str]) -> None:
    """Raises RuntimeError unless a build for these architectures runs on a GPU of this compute capability.

    gpu: what messages call it.
    """
    has = f"{gpu} has {capability[0]}.{capability[1]}"
    if tuple(capability) < OLDEST_CAPABILITY:
        oldest = ".".join(map(str, OLDEST_CAPABILITY))
        raise RuntimeError(f"zerofp4 needs compute capability {oldest} or newer, {has}")
    if code_for(capability, architectures) is None:
        raise RuntimeError(
            f"zerofp4 was built for {', '.join(architectures)}, {has}: reinstall it on this machine, or with "
            "ZEROFP4_CUDA_ARCHS=all"
        )
