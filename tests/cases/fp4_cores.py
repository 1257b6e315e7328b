"""FP4 tensor cores of the CPU: what zerofp4.gemm asks of cuBLASLt, done by the specification."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from zerofp4 import ops, reference
from zerofp4.format import ATOM_COLUMNS, ATOM_ROWS
from zerofp4.gemm import native
from zerofp4.layout import round_up
from zerofp4.nn.quantizers import quantizers_of

NVFP4, MXFP8 = 3, 4  # of Inputs
PRODUCT = sys.modules["zerofp4.gemm.product"]  # zerofp4.gemm is the function
DTYPES = {code: dtype for dtype, code in ops.device.DTYPE_CODES.items()}


@dataclass(frozen=True)
class Problem:
    rows: int
    cols: int
    contraction: int
    inputs: int
    output: torch.dtype
    accumulate: bool
    has_bias: bool


@dataclass
class Cublaslt:
    """What was asked for, and what ran. takes: for which problems there is an algorithm. computes: whether it
    multiplies, or leaves outputs as they are.
    """

    takes: Callable[[Problem], bool] = lambda problem: True
    computes: bool = True
    asked: list[Problem] = field(default_factory=list)
    ran: list[Problem] = field(default_factory=list)

    def find(self, index, rows, cols, contraction, inputs, output, a_t, b_t, accumulate, alignments):
        assert contraction % 32 == 0 and cols % 16 == 0 and not a_t and not b_t and inputs in (NVFP4, MXFP8)
        has_bias = alignments[2] != 0
        problem = Problem(rows, cols, contraction, inputs, DTYPES[output], accumulate, has_bias)
        assert not (has_bias and (accumulate or problem.output == torch.float32))
        self.asked.append(problem)
        return _Product(self, problem) if self.takes(problem) else None


@dataclass
class _Product:
    library: Cublaslt
    problem: Problem
    workspace: int = 0

    def run(self, target, a, b, a_scale, b_scale, alpha, bias, output, workspace) -> None:
        p = self.problem
        self.library.ran.append(p)
        if not self.library.computes:
            return
        left, right = (self._operand(p.rows, a, a_scale), self._operand(p.cols, b, b_scale))
        out = _memory(output, (p.rows, p.cols), p.output)
        result = left @ right.t()
        if alpha:
            result = result * _memory(alpha, (1,), torch.float32).double()
        if bias:
            result = result + _memory(bias, (p.cols,), p.output).double()
        out.copy_(result + out.double() if p.accumulate else result)

    def _operand(self, rows: int, codes: int, scale: int) -> torch.Tensor:
        """float64, without the global scale."""
        block = 16 if self.problem.inputs == NVFP4 else 32
        blocks = self.problem.contraction // block
        padded = round_up(rows, ATOM_ROWS), round_up(blocks, ATOM_COLUMNS)
        swizzled = _memory(scale, padded, torch.uint8)
        compact = reference.unswizzle_scale(swizzled)[:rows, :blocks].contiguous()
        if self.problem.inputs == NVFP4:
            data = _memory(codes, (rows, self.problem.contraction // 2), torch.uint8)
            return reference.nvfp4_operand(data, compact.view(torch.float8_e4m3fn), 1)
        data = _memory(codes, (rows, self.problem.contraction), torch.uint8)
        return reference.mxfp8_operand(data.view(torch.float8_e4m3fn), compact.view(torch.float8_e8m0fnu))


def _memory(place: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = (ctypes.c_uint8 * count).from_address(place)
    return torch.frombuffer(raw, dtype=dtype).view(shape)


@contextmanager
def fp4_cores() -> Iterator[Cublaslt]:
    """While it is open the native backend runs on the CPU."""
    library = Cublaslt()
    known: dict[tuple, _Product | None] = {}

    def find(index, *problem):
        key = *problem[:-1], problem[-1][2] != 0  # alignments are those of the CPU's memory
        if key not in known:
            known[key] = library.find(index, *problem)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "why_not", lambda device: None)
        patch.setattr(ops.product, "_by_cublaslt", lambda a, b, scales: bool(scales))
        patch.setattr(ops.product, "_product", find)
        patch.setattr(PRODUCT, "_refused", set())
        quantizers_of.cache_clear()
        yield library
    quantizers_of.cache_clear()
