"""State dicts of values, for what can save and load nothing else."""

from typing import Any

from torch import nn

from zerofp4.tensors import QuantizedTensor


def register_plain_state_dict(model: nn.Module) -> None:
    """Make the state dicts of a model hold plain values instead of quantized weights.

    model: its state_dict(), and those of its modules, hold the weights' values in their dtype from now on,
        and load_state_dict() quantizes what it is given. Trainer, accelerate and safetensors need that.

    Examples:
        >>> zerofp4.convert_model(model)
        >>> zerofp4.register_plain_state_dict(model)
        >>> torch.save(model.state_dict(), folder / "model.pt")

    The weights stay quantized. Quantizing values does not always give the same codes: to resume training,
    load the optimizer too, whose masters the weights then follow.
    """
    for module in model.modules():
        if _with_values not in module._state_dict_hooks.values():
            module._register_state_dict_hook(_with_values)


def _with_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for key, value in state_dict.items():
        if isinstance(value, QuantizedTensor) and key.startswith(prefix):
            state_dict[key] = value.detach().dequantize()
