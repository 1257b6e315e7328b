"""FSDP2 gathers the scales of blocks of 1x16 behind the codes."""

import pytest
import torch
from cases.fsdp2 import make_model, masters_of, start, unsharded
from helpers import assert_bytes_equal

import zerofp4
from distributed.fsdp2.test_fsdp2 import CHOSEN, ROWS, Mlp
from distributed.run import on_ranks
from zerofp4 import FourOverSix, ops
from zerofp4.integrations.fsdp2 import gathered


@on_ranks(2)
def test_layers_multiply_what_is_gathered(world):
    """Gathered again in each pass, into memory that was freed, and with swizzled scales."""

    class Layers(Mlp):
        def __init__(self):
            super().__init__(zerofp4.nn.Linear)

        def forward(self, x):
            recipe = zerofp4.nn.NVFP4Recipe(
                weight_block=(1, 16), backward="dequantized", stochastic_rounding=False
            )
            with zerofp4.nn.autocast(recipe):
                return x + self.down(torch.tanh(self.up(x)))

    names = ("up.weight", "down.weight")
    patch = pytest.MonkeyPatch()
    patch.setattr(gathered, "has_fp4_tensor_cores", lambda device: True)
    with patch.context():
        run = start(world, model=make_model(world, model_class=Layers), kind=CHOSEN)
        for step in range(3):
            masters = masters_of(run.model)
            with unsharded(run.model) as found:
                for name in names:
                    expected = zerofp4.quantize(masters[name], scale_layouts=("swizzled",), **CHOSEN)
                    for buffer_name, buffer in expected.record.buffers():
                        own = found[name].record.buffer(buffer_name)
                        assert_bytes_equal(own, buffer, f"{name}: {buffer_name}")
            run.step(step)
        run.check(names=names, as_values=False)
    patch.undo()


@on_ranks(2)
@pytest.mark.parametrize("has_tensor_cores", [True, False])
def test_columns_are_made_where_products_read_them(world, has_tensor_cores):
    names, patch = ("up.weight", "down.weight"), pytest.MonkeyPatch()
    patch.setattr(ops, "has_fp4_tensor_cores", lambda device: has_tensor_cores)
    run = start(world, model=make_model(world, model_class=lambda: Mlp(zerofp4.nn.Linear)))
    patch.undo()
    run.step(0)
    run.check(names=names, columnwise=names if has_tensor_cores else (), as_values=False)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"four_over_six": FourOverSix()}, r"four_over_six needs block \(1, 16\) here, got \(16, 16\)"),
        ({**ROWS, "columnwise": True}, r"columnwise=True needs block \(16, 16\)"),
        ({"block": (1, 32)}, r"block must be \(16, 16\) or \(1, 16\)"),
    ],
)
def test_what_is_refused(kind, message):
    model = torch.nn.Linear(16, 16)
    with pytest.raises(ValueError, match=message):
        zerofp4.integrations.fsdp2.prepare(model, **kind)
    assert type(model.weight) is torch.nn.Parameter
