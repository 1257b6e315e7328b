"""Parameters of which some are updated as whole matrices, and what their optimizer is equal to."""

from __future__ import annotations

import torch
from cases.optim import make_parameters, plain_masters

from zerofp4.optim import FusedAdamW

# Ragged tiles, one row, one column, wide and tall, a stack of five, one of one.
MATRICES = [
    ((34, 48), torch.bfloat16, True),
    ((16, 34), torch.float32, True),
    ((130, 66), torch.float16, True),
    ((2, 66), torch.bfloat16, True),
    ((5, 18, 34), torch.bfloat16, True),
    ((31, 51), torch.bfloat16, False),
    ((1, 40), torch.float32, False),
    ((7, 1), torch.float32, False),
    ((1, 6, 9), torch.float32, False),
    ((66, 130), torch.float16, True),
]
OTHERS = [
    ((96, 24), torch.bfloat16, False),  # an embedding
    ((34, 64), torch.bfloat16, True),
    ((7,), torch.bfloat16, False),
    ((), torch.float32, False),
    ((300,), torch.float32, False),
]
MUON = {"lr": 0.02, "weight_decay": 0.1}
BESIDE = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "fused": (FusedAdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}),
}


def make_groups(device, beside: str, seed: int = 0) -> tuple[list, list[dict]]:
    """All parameters, and groups of them: those of Muon's class come in two, around the others."""
    matrices, others = make_parameters(device, seed, MATRICES), make_parameters(device, seed + 1, OTHERS)
    optimizer_class, options = BESIDE[beside]
    groups = [
        {"params": matrices[:4]},
        {"params": others, "optimizer_class": optimizer_class, **options},
        {"params": matrices[4:], "lr": 0.05},
    ]
    return [*matrices[:4], *others, *matrices[4:]], groups


def matrices_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor] if tensor.dim() <= 2 else [tensor[e] for e in range(len(tensor))]


class OneProcess:
    """Optimizers over whole FP32 masters, of which Muon's are matrices, in the order of the groups."""

    def __init__(self, groups: list[dict], optimizer_class=torch.optim.Muon, **defaults):
        self.parameters = [p for group in groups for p in group["params"]]
        self.masters = plain_masters(self.parameters)
        masters, self.optimizers = iter(self.masters), []
        self._pairs: list[tuple[torch.Tensor, int, int | None]] = []  # what is updated, of which, its matrix
        i = 0
        for group in groups:
            own, updated = dict(group), []
            beside = own.pop("optimizer_class", None)
            for _ in own.pop("params"):
                master = next(masters)
                parts = [master] if beside else matrices_of(master)
                self._pairs += [(part, i, None if beside else e) for e, part in enumerate(parts)]
                updated += parts
                i += 1
            options = own if beside else {**defaults, **own}
            self.optimizers.append((beside or optimizer_class)(updated, **options))

    def step(self, gradients: list[torch.Tensor | None]) -> None:
        """gradients: of the parameters."""
        for part, i, e in self._pairs:
            gradient = gradients[i]
            if gradient is not None:
                gradient = gradient.to(torch.float32, copy=True)  # torch's foreach SGD writes there
                gradient = gradient if e is None else matrices_of(gradient)[e]
            part.grad = gradient
        for optimizer in self.optimizers:
            optimizer.step()
