"""Products of quantized matrices: one function, two backends."""

from zerofp4.gemm.operand import Operand
from zerofp4.gemm.product import BACKENDS, chosen_backend, gemm

__all__ = ["BACKENDS", "Operand", "chosen_backend", "gemm"]
