"""A factor of a product: one side of a record, as the matrix that it stands for there."""

from typing import Any

from zerofp4.storage import SIDES, MXFP8Storage, NVFP4Storage, Side, record_of


class Operand:
    """One copy of a quantized matrix, as a factor of zerofp4.gemm.

    tensor: an NVFP4Tensor or MXFP8Tensor [M, K], or its record.
    columnwise: take the columnwise copy, which is the transpose [K, M] and contracted over M, instead of the
        rowwise copy [M, K], contracted over K. Blocks of scales lie along the contraction.

    Examples:
        >>> x, w, g = (zerofp4.quantize(torch.randn(64, 64), columnwise=True) for _ in range(3))
        >>> output = zerofp4.gemm(x, w)  # x w^T, of a linear layer with weight w
        >>> grad_input = zerofp4.gemm(g, zerofp4.Operand(w, columnwise=True))  # g w
        >>> columns = zerofp4.Operand(g, columnwise=True), zerofp4.Operand(x, columnwise=True)
        >>> grad_weight = zerofp4.gemm(*columns)  # g^T x

    Raises TypeError for what is not quantized, ValueError for a copy that the tensor does not have, and for a
    stack of matrices, of which tensor[e] is one.
    """

    __slots__ = ("copy", "device", "is_nvfp4", "is_transposed", "record", "shape", "side")

    def __init__(self, tensor: Any, *, columnwise: bool = False):
        self.side = SIDES[columnwise]
        self.record: NVFP4Storage | MXFP8Storage = _quantized("tensor", tensor)
        copy: Side | None = getattr(self.record, self.side)
        if copy is None or copy.data is None:
            shape = tuple(self.record.shape)
            raise ValueError(
                f"the {self.side} copy is to be multiplied, but the tensor of shape {shape} has none: "
                f"quantize with {self.side}=True"
            )
        if getattr(self.record, "experts", None) is not None:
            raise ValueError(
                f"an operand must be one matrix, got a stack of them of shape {tuple(self.record.shape)}: "
                "index the tensor (tensor[e]), or take one of the record's matrices()"
            )
        self.copy, self.device = copy, copy.data.device
        self.is_nvfp4 = isinstance(self.record, NVFP4Storage)
        rows, cols = self.record.matrix
        self.shape = (cols, rows) if columnwise else (rows, cols)
        """(rows, contraction). The copy may hold more of the contraction: the last group of a transform."""
        self.is_transposed = False
        """Whether it is the transpose of what its copy stands for."""

    @classmethod
    def of_rows(cls, record: NVFP4Storage) -> "Operand":
        """For exact products: [K, M], the transpose of the rowwise copy, without a columnwise copy."""
        operand = cls(record)
        operand.shape, operand.is_transposed = operand.shape[::-1], True
        return operand

    @property
    def transform(self) -> str:
        """What the contraction was multiplied with before it was quantized."""
        record = self.record
        if self.side == "rowwise" or not isinstance(record, NVFP4Storage) or not record.hadamard:
            return "no transform"
        return "the Hadamard transform" if record.random_signs else "the Hadamard transform without signs"


def as_operand(name: str, value: Any) -> Operand:
    """`value` as an operand: itself, or the rowwise copy of a tensor or record. TypeError for all else."""
    return value if isinstance(value, Operand) else Operand(_quantized(name, value))


def _quantized(name: str, value: Any) -> NVFP4Storage | MXFP8Storage:
    """The record of `value`. Raises TypeError for what has none."""
    record = record_of(value)
    if not isinstance(record, NVFP4Storage | MXFP8Storage):
        raise TypeError(
            f"{name} must be an NVFP4Tensor, an MXFP8Tensor or the record of one, got {type(value).__name__}"
        )
    return record


def check_pair(a: Operand, b: Operand) -> None:
    """Raises ValueError unless the product a b^T exists and is what its factors were before quantization."""
    if a.is_nvfp4 != b.is_nvfp4:
        formats = ["NVFP4" if operand.is_nvfp4 else "MXFP8" for operand in (a, b)]
        raise ValueError(f"a and b must be in the same format, got {formats[0]} and {formats[1]}")
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            "a and b must have the same contraction size, got "
            f"{a.shape[1]} of a {list(a.shape)} ({a.side}) and {b.shape[1]} of b {list(b.shape)} ({b.side})"
        )
    if a.transform != b.transform:
        raise ValueError(
            "a and b must carry the same transform along the contraction, got "
            f"{a.transform} and {b.transform}"
        )
    if a.device != b.device:
        raise ValueError(f"a and b must be on one device, got {a.device} and {b.device}")
