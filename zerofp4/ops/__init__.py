"""The native extension behind torch.library operators and plan stages: nothing else imports zerofp4._C.

device.py says where a call runs, stages.py has the stages of plans, operators.py the operators on given
tensors.
"""

from zerofp4.ops.device import build_info, check_cuda
from zerofp4.ops.operators import quantize_into
from zerofp4.ops.stages import (
    ERROR_WORD,
    HASH_WORD,
    HEADER_WORDS,
    PEER_ERROR,
    PLAN_MISMATCH,
    CastItem,
    CastStages,
    TransposeStage,
)

__all__ = [
    "ERROR_WORD",
    "HASH_WORD",
    "HEADER_WORDS",
    "PEER_ERROR",
    "PLAN_MISMATCH",
    "CastItem",
    "CastStages",
    "TransposeStage",
    "build_info",
    "check_cuda",
    "quantize_into",
]
