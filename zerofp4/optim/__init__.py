"""Optimizers for models with NVFP4 weights."""

from zerofp4.optim.adamw import FusedAdamW
from zerofp4.optim.build import Communication
from zerofp4.optim.export import (
    AveragedMasters,
    check_one_rank_has_all,  # noqa: F401 (for serving)
    gather_masters,  # noqa: F401 (for inspect and serving)
    master_state_dict,
    named_tensors,  # noqa: F401 (for serving)
    own_values,  # noqa: F401 (for serving)
    unconvert_model,
)
from zerofp4.optim.moments import scales_shape, suits_compact  # noqa: F401 (for inspect)
from zerofp4.optim.zero import ZeroFP4Optimizer

__all__ = [
    "AveragedMasters",
    "Communication",
    "FusedAdamW",
    "ZeroFP4Optimizer",
    "master_state_dict",
    "unconvert_model",
]
