"""FSDP2 gathers the scales of blocks of 1x16 behind the codes."""

import pytest
import torch
import torch.distributed as dist
from cases.fsdp2 import make_model, masters_of, start, unsharded
from helpers import assert_bytes_equal
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

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


@on_ranks(2)
def test_masters_that_are_offloaded(world):
    """Their amaxes are reduced on the CPU, and their codes gathered on the GPU."""
    on_gpu = world.device.type == "cuda"
    group = dist.new_group(backend="cpu:gloo,cuda:nccl" if on_gpu else None)
    mesh = DeviceMesh.from_group(group, world.device.type, mesh_dim_names=("shard",))
    run = start(world, mesh=mesh, kind=ROWS, offload_policy=CPUOffloadPolicy(pin_memory=on_gpu))
    run.step(0)
    run.check()


@on_ranks(3)
def test_what_is_trained_does_not_depend_on_the_ranks_and_loads(world):
    one, other = start(world, kind=ROWS), start(world, model=make_model(world, 1), kind=ROWS)
    one.inject(range(2))
    other.model.load_state_dict(one.model.state_dict())
    other.output(0)
    other.check()
    for name, master in one.masters().items():
        assert_bytes_equal(other.masters()[name], master, name)


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
