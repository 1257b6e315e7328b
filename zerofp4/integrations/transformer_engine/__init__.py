"""TransformerEngine's NVFP4 tensors as weights of a cast, and our cast behind TransformerEngine's functions.

Once this package is imported, plans and the functions of zerofp4.cast take TransformerEngine's NVFP4Tensor
like ours. They write its own buffers, which are never replaced: codes, both copies of the scales (one byte
per row, in rows of the padded length), and both amaxes. After install(), callers of TransformerEngine's
quantize_master_weights and post_all_gather_processing, such as Megatron-Core, get our cast for such weights.

Nothing here imports TransformerEngine before install() is called. A tensor is recognized by its attributes,
as of versions 2.14 to 2.20. None of this has been run inside TransformerEngine.
"""

from zerofp4.integrations.transformer_engine.install import install, uninstall
from zerofp4.integrations.transformer_engine.records import record_of_tensor
from zerofp4.storage import adapters

__all__ = ["install", "uninstall"]

adapters.append(record_of_tensor)
