"""What a rank holds of a tensor that is sharded by others."""

import torch
from torch import nn

_PLAIN = torch.Tensor, nn.Parameter
"""What those others are not: the common case at once, since a step asks for each parameter and its state."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor whose memory it is: of a DTensor this rank's own, of one that stands for a master (as
    those that zerofp4.integrations.fsdp2 makes do) that master; any other tensor itself.
    """
    while type(tensor) not in _PLAIN:
        inside = getattr(tensor, "_local_tensor", None)
        if inside is None:
            inside = getattr(tensor, "zerofp4_master", None)
        if inside is None:
            break
        tensor = inside
    return tensor


def local_state(state: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
    """A parameter's state of tensors that kernels can write to."""
    return state and {key: local_of(value) for key, value in state.items()}
