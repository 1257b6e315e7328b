"""Models that fully_shard cuts, what of them must be true, and the collectives that it takes."""

from __future__ import annotations

import dataclasses
import tempfile

import torch
import torch.distributed as dist
from helpers import assert_bytes_equal
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import zerofp4
from zerofp4.integrations import fsdp2

EXPERTS = (5, 18, 34)


class Experts(nn.Module):
    """A stack of matrices in one parameter, as Mixtral's are."""

    def __init__(self, dtype=None):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(EXPERTS, dtype=dtype) / 6)

    def forward(self, x):
        return x[..., : EXPERTS[1]] + torch.einsum("...k,enk->...n", x, self.stack)


class Model(nn.Module):
    """Rows that neither 3 nor 4 ranks nor tiles divide, fewer than ranks, a stack of experts, and parameters
    that stay what they are.
    """

    def __init__(self, dtype=None):
        super().__init__()
        self.first = nn.Linear(48, 22, dtype=dtype)
        self.norm = nn.LayerNorm(22, dtype=dtype)
        self.second = nn.Linear(22, 130, bias=False, dtype=dtype)
        self.small = nn.Linear(130, 2, bias=False, dtype=dtype)
        self.third = nn.Linear(130, 34, dtype=dtype)
        self.experts = Experts(dtype)
        self.lm_head = nn.Linear(18, 10, bias=False, dtype=dtype)

    def forward(self, x):
        x = self.second(torch.tanh(self.norm(self.first(x))))
        x = self.third(x) + self.small(x).sum(-1, keepdim=True)
        return self.lm_head(torch.tanh(self.experts(x)))


CONVERTED = ("first.weight", "second.weight", "small.weight", "third.weight", "experts.stack")


def make_model(world, seed: int = 0, dtype=None, model_class=Model) -> nn.Module:
    torch.manual_seed(seed)
    return model_class(dtype).to(world.device)


def take_experts(module: nn.Module, name: str) -> bool:
    """What prepare's filter_fn is, for the stack and all layers but the head."""
    return not name.startswith("lm_head")


def mesh_of(world, shape: tuple[int, ...] | None = None, names: tuple[str, ...] = ("shard",)) -> DeviceMesh:
    return init_device_mesh(world.device.type, shape or (world.world_size,), mesh_dim_names=names)


def shard(model: nn.Module, mesh: DeviceMesh, **options) -> nn.Module:
    """Every layer a group of its own, and what is left one of the root."""
    for name, module in model.named_children():
        if name != "norm":
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@dataclasses.dataclass
class Run:
    """A prepared, sharded and attached model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    attachment: fsdp2.Attachment

    def backward(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(batch).float().square().mean()
        loss.backward()
        return loss.detach()

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def start(
    world,
    *,
    model: nn.Module | None = None,
    mesh: DeviceMesh | None = None,
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.02),
    amax_groups=lambda model: None,
    columnwise: bool = True,
    **options,
) -> Run:
    model = make_model(world) if model is None else model
    fsdp2.prepare(model, take_experts, amax_groups=amax_groups(model), columnwise=columnwise)
    shard(model, mesh_of(world) if mesh is None else mesh, **options)
    made = optimizer(model.parameters())
    return Run(model, made, fsdp2.attach(model, made))


def batch_of(world, step: int, *, everywhere: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + (0 if everywhere else world.rank))
    return torch.randn(6, 48, generator=generator).to(world.device)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """What layers compute with in place of prepared weights, by name, from an unshard() of all modules until
    the next.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    return {weight.name: module._parameters[name] for module, name, weight in fsdp2.prepared_weights(model)}


def reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def check_gathered(
    model: nn.Module,
    dtype=torch.float32,
    *,
    names=CONVERTED,
    amax: dict | None = None,
    columnwise=(),
    as_values: bool = True,
) -> None:
    """What is gathered is quantize() of the whole master, byte for byte: the codes of this rank's rows, the
    scales, and what layers compute with, which is an NVFP4Tensor, or, as_values, plain.
    """
    state = model.state_dict()
    masters = {name: whole(state[name]) for name in names}
    weights = {weight.name: weight for *_, weight in fsdp2.prepared_weights(model)}
    found = gathered(model)
    assert sorted(found) == sorted(names)
    for name, tensor in found.items():
        assert tensor.dtype == dtype
        expected = zerofp4.quantize(
            masters[name].to(tensor.device, dtype), columnwise=name in columnwise, amax=(amax or {}).get(name)
        )
        check_own(weights[name], expected)
        if as_values:
            assert type(tensor) is nn.Parameter, name
            assert_bytes_equal(tensor.detach(), expected.dequantize(), f"{name}: values")
            continue
        buffers = dict(tensor.record.buffers())
        assert buffers.keys() >= dict(expected.record.buffers()).keys()
        assert (tensor.columnwise_data is not None) == (name in columnwise)
        for buffer_name, buffer in expected.record.buffers():
            assert_bytes_equal(buffers[buffer_name], buffer, f"{name}: {buffer_name}")
    reshard(model)


def check_own(weight: fsdp2.weight.Weight, expected: zerofp4.NVFP4Tensor) -> None:
    """What a rank has of a weight before it is gathered: codes of its own rows, and all scales."""
    first, rows = weight.placement.first_row, weight.placement.rows
    own = expected.rowwise_data[first : first + rows].to(weight.codes.device)
    assert_bytes_equal(weight.own_codes(), own.flatten(), f"{weight.name}: own codes")
    for name, buffer in weight.record.buffers():
        given = expected.record.buffer(name)
        if given is not None:
            assert_bytes_equal(buffer, given.to(buffer.device), f"{weight.name}: own {name}")


class Collectives(TorchDispatchMode):
    """The collectives that this rank calls inside, as (name, bytes of the input, its dtype)."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, int, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensor = args[1] if func._opname.startswith("_allgather_base") else args[0]
            tensor = tensor[0] if isinstance(tensor, list) else tensor
            self.calls.append((func._opname.strip("_"), tensor.nbytes, tensor.dtype))
        return func(*args, **(kwargs or {}))

    def named(self, name: str) -> list[tuple[str, int, torch.dtype]]:
        return [call for call in self.calls if call[0] == name]


def inject(model: nn.Module, step: int) -> None:
    """Gradients that depend on the step alone: the same of every parameter in a world of any size."""
    for i, p in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(7919 * step + i)
        full = torch.randn(p.shape, generator=generator)
        mesh = p.device_mesh
        pieces = torch.chunk(full, mesh.size(-1))
        rank = mesh.get_local_rank(mesh.ndim - 1)
        own = pieces[rank] if rank < len(pieces) else full[:0]
        options = {"run_check": False, "shape": p.shape, "stride": p.stride()}
        p.grad = DTensor.from_local(own.to(p.device), mesh, p.placements, **options)


def injected_steps(run: Run, steps) -> None:
    for step in steps:
        inject(run.model, step)
        run.optimizer.step()
        run.optimizer.zero_grad()


def assert_same_masters(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert_bytes_equal(whole(value), whole(theirs[name]), name)


def folder(world) -> str:
    """The same on every rank."""
    found = [tempfile.mkdtemp(prefix="zerofp4-fsdp2-") if world.rank == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]
