"""The extensions behind torch.library operators and plan stages: nothing else imports zerofp4._C and
zerofp4._autograd.

device.py says where a call runs and what a plan keeps there, tensor_lists.py what a step asks of hundreds of
tensors, and whether storage has moved. stages.py has the stages of plans, optimizer.py the launches of an
optimizer step, the other files one operator on given tensors each: schema, fake and backends.
"""

from zerofp4.ops import extension  # noqa: F401, I001 (first: it says how to build the extensions)
from zerofp4.ops import layouts, mxfp8, transpose  # noqa: F401 (they register operators)
from zerofp4.ops.autograd import native_linear
from zerofp4.ops.build import build_info
from zerofp4.ops.dequantize import (
    neutral_amax,
    stacked_values_of,
    values_of,
    values_of_many,
    write_values,
)
from zerofp4.ops.device import (
    NativePlan,
    check_cuda,
    current_stream,
    has_fp4_tensor_cores,
    is_capturing,
    target_of,
)
from zerofp4.ops.grouped import grouped_shapes
from zerofp4.ops.grouped_values import grouped_values
from zerofp4.ops.hardware import SLOW_ON_CPU, check_capability, code_for
from zerofp4.ops.layer import configure_layer, layer_scheme, native_layer
from zerofp4.ops.layouts import change_scales
from zerofp4.ops.operator import backend, fake, is_plain_call
from zerofp4.ops.optimizer import (
    MAX_PEERS,
    SQUARES,
    AdamWItem,
    AdamWStage,
    Barrier,
    MultiTensor,
    PeerRows,
    RankGradients,
    adamw_options,
    add_squares,
    average,
    average_rows,
    find_nonfinite,
    norm_of_squares,
)
from zerofp4.ops.padded import padded_scale
from zerofp4.ops.product import add_scaled_product, product_values, scaled_product, write_scaled_product
from zerofp4.ops.quantize import (
    Quantization,
    choice_arguments,
    draw_rng_state,
    quantize_into,
    rng_state_shape,
)
from zerofp4.ops.records import buffer_reader, flatten_method
from zerofp4.ops.stages import (
    ERROR_WORD,
    GATHER_FAILED,
    GATHER_OTHER,
    GATHER_PRESENT,
    GATHER_REFUSED,
    GATHER_VECTOR,
    GATHER_WITHOUT_STEP,
    HASH_WORD,
    HEADER_WORDS,
    PEER_ERROR,
    PLAN_MISMATCH,
    STATUS_RANK_SHIFT,
    CastItem,
    GatherHeader,
    GatherRun,
    MasterPiece,
    PostStage,
    load_cast,
    load_gather,
)
from zerofp4.ops.tensor_lists import (
    Addresses,
    addresses_of,
    gradients_of,
    increment_versions,
    plain_facts,
    pointers,
    state_facts,
    tensor_facts,
    versions_of,
)

__all__ = [
    "ERROR_WORD",
    "GATHER_FAILED",
    "GATHER_OTHER",
    "GATHER_PRESENT",
    "GATHER_REFUSED",
    "GATHER_VECTOR",
    "GATHER_WITHOUT_STEP",
    "HASH_WORD",
    "HEADER_WORDS",
    "MAX_PEERS",
    "PEER_ERROR",
    "PLAN_MISMATCH",
    "SLOW_ON_CPU",
    "SQUARES",
    "STATUS_RANK_SHIFT",
    "AdamWItem",
    "AdamWStage",
    "Addresses",
    "Barrier",
    "CastItem",
    "GatherHeader",
    "GatherRun",
    "MasterPiece",
    "MultiTensor",
    "NativePlan",
    "PeerRows",
    "PostStage",
    "Quantization",
    "RankGradients",
    "adamw_options",
    "add_scaled_product",
    "add_squares",
    "addresses_of",
    "average",
    "average_rows",
    "backend",
    "buffer_reader",
    "build_info",
    "change_scales",
    "check_capability",
    "check_cuda",
    "choice_arguments",
    "code_for",
    "configure_layer",
    "current_stream",
    "draw_rng_state",
    "fake",
    "find_nonfinite",
    "flatten_method",
    "gradients_of",
    "grouped_shapes",
    "grouped_values",
    "has_fp4_tensor_cores",
    "increment_versions",
    "is_capturing",
    "is_plain_call",
    "layer_scheme",
    "load_cast",
    "load_gather",
    "native_layer",
    "native_linear",
    "neutral_amax",
    "norm_of_squares",
    "padded_scale",
    "plain_facts",
    "pointers",
    "product_values",
    "quantize_into",
    "rng_state_shape",
    "scaled_product",
    "stacked_values_of",
    "state_facts",
    "target_of",
    "tensor_facts",
    "values_of",
    "values_of_many",
    "versions_of",
    "write_scaled_product",
    "write_values",
]
