"""Whole models under torch.compile while an optimizer trains them: one graph without a break, no graph made
anew after a step, and the bytes of the model without it.
"""

import pytest
import torch
from helpers import assert_all_equal
from tensor_helpers import values
from torch import nn

import zerofp4
from zerofp4.nn import Linear, NVFP4Recipe, autocast
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("fresh_compiler")]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 48), nn.LayerNorm(48), nn.Linear(48, 64)

    def forward(self, x, *first):
        """first: is_first_microbatch, of layers."""
        return self.down(torch.tanh(self.norm(self.up(x, *first))), *first)


def copied(parameter: nn.Parameter) -> torch.Tensor:
    """Its values, which the next step writes over."""
    if isinstance(parameter, zerofp4.NVFP4Tensor):
        return parameter.detach().dequantize()
    return parameter.detach().clone()


class Run:
    """A model in training. Under torch.compile it may be compiled only in the first step."""

    def __init__(self, device, is_compiled: bool, layers: bool):
        torch.manual_seed(0)
        self.model = Model().to(device, torch.bfloat16)
        zerofp4.convert_model(self.model, lambda module, name: isinstance(module, nn.Linear), layers=layers)
        assert isinstance(self.model.up, Linear) == layers
        self.optimizer = ZeroFP4Optimizer(self.model.named_parameters(), FusedAdamW, lr=0.02)
        self.is_compiled, self.call = is_compiled, self.model
        if is_compiled:
            self.call = torch.compile(self.model, fullgraph=True, backend="aot_eager")

    def step(self, number: int, batches, recipe: NVFP4Recipe | None) -> list[torch.Tensor]:
        """Losses of the micro-batches, and what the weights have become."""
        torch.manual_seed(number)
        stance = "fail_on_recompile" if self.is_compiled and number else "default"
        losses = []
        for i, x in enumerate(batches):
            with torch.compiler.set_stance(stance):
                if recipe is None:
                    y = self.call(x)
                else:
                    with autocast(recipe):
                        y = self.call(x, i == 0)
            loss = (y - x).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [*losses, *map(copied, self.model.parameters())]


RECIPES = {
    "weights": None,
    "layers": NVFP4Recipe(),
    "layers, dequantized": NVFP4Recipe(backward="dequantized"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_training_in_one_graph(device, name):
    """Of two micro-batches, the second of which takes the cached weights of layers."""
    recipe = RECIPES[name]
    compiled, eager = (Run(device, is_compiled, recipe is not None) for is_compiled in (True, False))
    for number in range(3):
        batches = [values(32, 64, device=device, seed=2 * number + part) for part in range(2)]
        found, expected = (run.step(number, batches, recipe) for run in (compiled, eager))
        assert_all_equal(found, expected, f"step {number}: result")
    assert expected[0] != expected[1]
