"""FSDP2 with 4-bit all-gathers: prepare before fully_shard, attach after the optimizer exists."""

from zerofp4.integrations.fsdp2.attach import Attachment, attach
from zerofp4.integrations.fsdp2.prepare import prepare
from zerofp4.integrations.fsdp2.state import prepared_weights, zero_state_dict

__all__ = ["Attachment", "attach", "prepare", "prepared_weights", "zero_state_dict"]
