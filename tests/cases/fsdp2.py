"""Models that fully_shard shards, what must be true of them, and the collectives that they call."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
import torch.distributed as dist
from helpers import assert_bytes_equal
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zerofp4
from zerofp4.integrations import fsdp2
from zerofp4.launch import World

EXPERTS = (5, 18, 34)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Experts(nn.Module):
    """A stack of matrices in one parameter, as Mixtral's are."""

    def __init__(self, dtype=None):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(EXPERTS, dtype=dtype) / 6)

    def forward(self, x):
        return x[..., : EXPERTS[1]] + torch.einsum("...k,enk->...n", x, self.stack)


class Model(nn.Module):
    """Rows that neither 3 nor 4 ranks nor tiles divide, fewer rows than ranks, a stack of experts, and
    parameters that are not converted.
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


def make_model(world, seed: int = 0, model_class=Model) -> nn.Module:
    torch.manual_seed(seed)
    return model_class().to(world.device)


def take_experts(module: nn.Module, name: str) -> bool:
    """prepare's filter_fn: the stack and all layers but the head."""
    return not name.startswith("lm_head")


def mesh_of(world, shape: tuple[int, ...] | None = None, names: tuple[str, ...] = ("shard",)) -> DeviceMesh:
    return init_device_mesh(world.device.type, shape or (world.world_size,), mesh_dim_names=names)


def shard(model: nn.Module, mesh: DeviceMesh, **options) -> nn.Module:
    """Every layer is a group of its own; the root has the remaining parameters."""
    for name, module in model.named_children():
        if name != "norm":
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@dataclasses.dataclass
class Run:
    """A prepared, sharded and attached model; its batches differ between ranks, unless they are alike."""

    world: World
    model: nn.Module
    optimizer: torch.optim.Optimizer
    attachment: fsdp2.Attachment

    @torch.no_grad()
    def output(self, step: int) -> torch.Tensor:
        return self.model(batch_of(self.world, step))

    def backward(self, step: int, *, alike: bool = False) -> torch.Tensor:
        loss = self.model(batch_of(self.world, step, alike=alike)).float().square().mean()
        loss.backward()
        return loss.detach()

    def step(self, step: int, *, alike: bool = False) -> torch.Tensor:
        loss = self.backward(step, alike=alike)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def inject(self, steps) -> None:
        """Steps of gradients that depend on the number of the step alone."""
        for step in steps:
            inject(self.model, step)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> dict[str, fsdp2.weight.Weight]:
        return {weight.name: weight for *_, weight in fsdp2.prepared_weights(self.model)}

    def masters(self) -> dict[str, torch.Tensor]:
        return masters_of(self.model)

    def check(self, dtype=torch.float32, **options) -> None:
        check_gathered(self.model, dtype, **options)


def start(
    world,
    *,
    model: nn.Module | None = None,
    mesh: DeviceMesh | None = None,
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.02),
    amax_groups=lambda model: None,
    columnwise: bool | None = None,
    kind: dict | None = None,
    wrap=lambda model: None,
    **options,
) -> Run:
    """kind: block and four_over_six. wrap: what is done between prepare and fully_shard; what it returns is
    the model then. options: those of fully_shard.
    """
    model = make_model(world) if model is None else model
    kind = {"columnwise": columnwise, "amax_groups": amax_groups(model), **(kind or {})}
    fsdp2.prepare(model, take_experts, **kind)
    model = wrap(model) or model
    shard(model, mesh or mesh_of(world), **options)
    made = optimizer(model.parameters())
    return Run(world, model, made, fsdp2.attach(model, made))


def batch_of(world, step: int, *, alike: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + (0 if alike else world.rank))
    return torch.randn(6, 48, generator=generator).to(world.device)


def inject(model: nn.Module, step: int) -> None:
    """Gradients that depend on the step alone: equal on all ranks, and few bits, whose mean is exact."""
    for i, p in enumerate(model.parameters()):
        drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(7919 * step + i))
        gradient = drawn.bfloat16().float()
        p.grad = torch.empty_like(p, dtype=torch.float32)
        if isinstance(p, DTensor):  # with no source, each rank cuts its own shard and nothing is sent
            cut = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
            p.grad.to_local().copy_(cut.to_local())  # a mesh of GPUs has masters in host memory, too
        else:
            p.grad.copy_(gradient)


def masters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole tensors of a state dict. Collective."""
    state = model.state_dict()
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for n, v in state.items()}


@contextlib.contextmanager
def unsharded(model: nn.Module):
    """By name, what layers compute with in place of prepared weights, while all modules are gathered."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    yield {weight.name: module._parameters[name] for module, name, weight in fsdp2.prepared_weights(model)}
    for module in sharded:
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
    """Gathered is quantize() of the whole master, byte for byte: the codes of this rank's rows, the scales,
    and what layers compute with, which is an NVFP4Tensor or, as_values, a plain parameter.
    """
    masters = masters_of(model)
    weights = {weight.name: weight for *_, weight in fsdp2.prepared_weights(model)}
    with unsharded(model) as found:
        assert sorted(found) == sorted(names)
        for name, tensor in found.items():
            assert tensor.dtype == dtype
            master, weight = masters[name].to(tensor.device, dtype), weights[name]
            options = {"columnwise": name in columnwise, "block": weight.block}
            options |= {"four_over_six": weight.four_over_six, "stacked": master.dim() == 3}
            expected = zerofp4.quantize(master, amax=(amax or {}).get(name), **options)
            check_own(weight, expected)
            if as_values:
                assert type(tensor) is nn.Parameter, name
                assert_bytes_equal(tensor.detach(), expected.dequantize(), f"{name}: values")
                continue
            buffers = dict(tensor.record.buffers())
            assert buffers.keys() >= dict(expected.record.buffers()).keys()
            assert (tensor.columnwise_data is not None) == (name in columnwise)
            for buffer_name, buffer in expected.record.buffers():
                assert_bytes_equal(buffers[buffer_name], buffer, f"{name}: {buffer_name}")


def check_own(weight: fsdp2.weight.Weight, expected: zerofp4.NVFP4Tensor) -> None:
    """What a rank has of a weight before it is gathered: codes of its own rows, and all scales, or those of
    its own rows where they travel.
    """
    first, rows = weight.placement.first_row, weight.placement.rows
    own = expected.rowwise_data.view(expected.shape[0], -1)[first : first + rows].to(weight.codes.device)
    assert_bytes_equal(weight.own_codes(), own.flatten(), f"{weight.name}: own codes")
    for name, buffer in weight.record.buffers():
        given = expected.record.buffer(name)
        if name == "rowwise_scale" and weight.scales is not None:
            each = buffer.shape[0] // weight.placement.shape[0]
            chosen = slice(first * each, (first + rows) * each)
            buffer, given = buffer[chosen], given[chosen]
        if given is not None:
            assert_bytes_equal(buffer, given.to(buffer.device), f"{weight.name}: own {name}")


class Collectives(TorchDispatchMode):
    """The collectives that this rank calls inside, as (name, bytes of the input, its dtype), and the sizes of
    their groups.
    """

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, int, torch.dtype]] = []
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensor = args[1] if func._opname.startswith("_allgather_base") else args[0]
            tensor = tensor[0] if isinstance(tensor, list) else tensor
            self.calls.append((func._opname.strip("_"), tensor.nbytes, tensor.dtype))
            group = next(given for given in args if isinstance(given, torch.ScriptObject))
            self.sizes.append(dist.ProcessGroup.unbox(group).size())
        return func(*args, **(kwargs or {}))

    def named(self, name: str) -> list[tuple[str, int, torch.dtype]]:
        return [call for call in self.calls if call[0] == name]
