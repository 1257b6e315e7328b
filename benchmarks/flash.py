"""FlashOptim's AdamW as an arm of the fidelity benchmark. It needs a GPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from benchmarks import peers


class Flash:
    """FlashAdamW with those methods of ZeroFP4Optimizer that the benchmark calls. Gradients are float32.

    groups: of all parameters of the model, with names. Raises as peers.flash_adamw.
    """

    def __init__(self, model: nn.Module, groups: Sequence[dict[str, Any]], **options: Any):
        self.model = model
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        self.inner = peers.flash_adamw(groups, **options)
        self.step, self.zero_grad = self.inner.step, self.inner.zero_grad

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def names(self) -> list[str]:
        return [name for group in self.param_groups for name in group["param_names"]]

    def clip_grad_norm_(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def gathered_masters(self) -> list[torch.Tensor]:
        masters = self.inner.get_fp32_model_state_dict(self.model)
        return [masters[name] for name in self.names]

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "weights": self.model.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of its own, or of a ZeroFP4Optimizer over the same groups."""
        if "inner" in state_dict:
            self.model.load_state_dict(state_dict["weights"])
            self.inner.load_state_dict(state_dict["inner"])
            return
        masters, state = {}, {}
        for name, (number, pieces) in zip(self.names, sorted(state_dict["state"].items()), strict=True):
            whole = {key: piece.whole() for key, piece in pieces.items()}
            masters[name] = whole["master"]
            state[int(number)] = {key: whole[key] for key in ("exp_avg", "exp_avg_sq")} | {
                "step": whole["step"].long().cpu(),
                "error_bits": torch.zeros_like(whole["master"], dtype=torch.int8),
            }
        self.inner.load_state_dict(self.inner.state_dict() | {"state": state})
        self.inner.set_fp32_model_state_dict(self.model, masters)
