"""accelerate's FSDP2 on a CPU."""

from __future__ import annotations

from typing import Any


def with_fsdp2(accelerator: Any, plugin: Any) -> Any:
    """The accelerator, which shards with this plugin from now on, as all that the process makes later do.

    accelerate offers FSDP on GPUs alone; nothing that it calls needs one.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return accelerator
