"""The extensions behind torch.library operators and plan stages: nothing else imports zerofp4._C and
zerofp4._autograd.

schemas.py declares every operator; quantize.py, dequantize.py, scales.py and product.py are their backends.
device.py: where calls run, what plans keep. tensor_lists.py: questions about hundreds of tensors. stages.py:
stages of casts. optimizer.py, means.py: launches of an optimizer step. native.py: the rest.
"""

# ruff: noqa: F401
from zerofp4.ops import extension  # noqa: I001 (first: it says how to build the extensions)
from zerofp4.ops.dequantize import (
    grouped_values,
    mxfp8_values_of_many,
    neutral_amax,
    values_of,
    values_of_many,
)
from zerofp4.ops.device import (
    NativePlan,
    SLOW_ON_CPU,
    check_capability,
    check_cuda,
    code_for,
    cpu_cores,
    current_stream,
    has_fp4_tensor_cores,
    is_capturing,
    target_of,
)
from zerofp4.ops.native import (
    buffer_reader,
    build_info,
    configure_layer,
    configure_linear,
    flatten_method,
    layer_scheme,
    native_layer,
    native_linear,
)
from zerofp4.ops.means import MEANS_FORMATS, MeansLayout, MeansPiece, average_means, round_means
from zerofp4.ops.optimizer import (
    AdamWItem,
    AdamWStage,
    Barrier,
    Decision,
    MAX_PEERS,
    MultiTensor,
    PeerRows,
    RankGradients,
    SQUARES,
    VOTE_FLAGS,
    adamw_options,
    add_squares,
    average,
    find_nonfinite,
    norm_of_squares,
)
from zerofp4.ops.product import add_scaled_product, product_alpha, product_values, scaled_product
from zerofp4.ops.quantize import Quantization, choice_arguments, draw_rng_state, quantize_into
from zerofp4.ops.scales import change_scales, compact_scale, derived_side, padded_scale
from zerofp4.ops.schemas import backend, grouped_shapes, is_plain_call
from zerofp4.ops.stages import (
    CastItem,
    ERROR_WORD,
    GATHER_FAILED,
    GATHER_OTHER,
    GATHER_PRESENT,
    GATHER_REFUSED,
    GATHER_VECTOR,
    GATHER_WITHOUT_STEP,
    GatherHeader,
    GatherRun,
    HASH_WORD,
    HEADER_WORDS,
    MasterPiece,
    PEER_ERROR,
    PLAN_MISMATCH,
    PostStage,
    STATUS_RANK_SHIFT,
    load_cast,
    load_gather,
)
from zerofp4.ops.tensor_lists import (
    Addresses,
    Versions,
    addresses_of,
    gradients_of,
    increment_versions,
    plain_facts,
    pointers,
    state_facts,
    tensor_facts,
)
