"""Products of quantized matrices: one function, two backends; and those of groups of rows."""

# ruff: noqa: F401
from zerofp4.gemm.grouped import GroupedOperand, grouped_gemm, grouped_wgrad, groups_of_rows, why_not_grouped
from zerofp4.gemm.operand import Operand
from zerofp4.gemm.product import BACKENDS, chosen_backend, gemm
