"""The names that a checkpoint of transformers has for the parameters of a model in memory."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn


class Rows(NamedTuple):
    """Rows of a parameter that a checkpoint has as a matrix of its own: all of them, or a part of an expert.

    name: in the checkpoint. first, count: rows of the parameter, flattened to two dimensions.
    """

    name: str
    first: int
    count: int

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


def check_model(model: nn.Module) -> Any:
    """Raise TypeError for what is no model of transformers, ImportError without transformers 5."""
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion  # noqa: F401
    except ImportError as error:
        raise ImportError("zerofp4.serving needs transformers 5: pip install transformers") from error
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a PreTrainedModel of transformers, got {type(model).__name__}: give the model "
            "inside of a wrapper"
        )
    return model


def checkpoint_names(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, str | None]:
    """By key of the model's state dict, the name of that tensor in a checkpoint; None for one that
    transformers cuts or transforms when it saves.
    """
    stand_ins = {
        key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for key, tensor in tensors.items()
    }
    names = {id(tensor): name for name, tensor in as_saved(model, stand_ins).items()}
    return {key: names.get(id(tensor)) for key, tensor in stand_ins.items()}


def as_saved(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What save_pretrained of transformers would write of these entries of the model's state dict."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def rows_as_saved(model: nn.Module, key: str, shape: torch.Size) -> list[Rows]:
    """The matrices that transformers cuts a parameter into when it saves, as experts are cut.

    Raises ValueError where they are not pieces of its rows, in their order.
    """
    numbers = torch.arange(shape[:-1].numel(), dtype=torch.int64, device="cpu")
    numbers = numbers.view(*shape[:-1], 1).repeat_interleave(2, dim=-1)
    found = []
    for name, part in as_saved(model, {key: numbers}).items():
        first, count = int(part.flatten()[0]), part.shape[:-1].numel()
        if not torch.equal(part.reshape(-1, 2), numbers.view(-1, 2)[first : first + count]):
            raise ValueError(
                f"{key} is quantized, and transformers saves {name} as a transformed tensor: leave it out of "
                "convert_model with filter_fn"
            )
        found.append(Rows(name, first, count))
    return found
