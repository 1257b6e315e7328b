"""Training steps over slow links between hosts, which one machine emulates."""

import argparse
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerofp4
from benchmarks.fsdp2 import LLAMA_8B, Decoder
from benchmarks.large import LR, Made, ddp
from benchmarks.ranks import MEGABYTES, Timer, free_memory
from benchmarks.session import Session
from zerofp4.launch import World, read_variable
from zerofp4.ops import MEANS_FORMATS
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer

SENT_BYTES = {"cuda": 2**28, "cpu": 2**20}
"""What a rank sends as the link is measured."""
BASE = "reduce_scatter"
"""The way that the others are compared with."""


class Way(NamedTuple):
    """A way to train: what a row says of it, and a function that makes the model ready and its optimizer."""

    rule: str
    make: Callable[[Decoder], Made]


def sharded(model: Decoder) -> Made:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy, reshard_after_forward=False)
    return model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def ours(**options: str) -> Callable[[Decoder], Made]:
    """options: of Communication."""

    def make(model: Decoder) -> Made:
        zerofp4.convert_model(model.bfloat16(), block=(16, 16))
        communication = Communication(transport="collective", **options)
        own = {"lr": LR, "communication": communication}
        return model, ZeroFP4Optimizer(model.named_parameters(), FusedAdamW, **own)

    return make


WAYS = {
    "zero1": Way("bf16: DDP, `ZeroRedundancyOptimizer`, no masters", lambda m: ddp(m.bfloat16())),
    "fully_shard": Way("bf16: `fully_shard` that keeps weights gathered, FP32 masters", sharded),
    BASE: Way('NVFP4 weights, `reduction="reduce_scatter"`', ours(reduction="reduce_scatter")),
} | {
    format: Way(f'NVFP4 weights, `between_hosts="{format}"`', ours(between_hosts=format))
    for format in MEANS_FORMATS
}


def emulate(options: argparse.Namespace) -> None:
    """Give consecutive ranks a host of their own, before the process group is made. NCCL and ZeroFP4 tell
    hosts apart by NCCL_HOSTID. Between hosts NCCL then has sockets alone, inside each what it always has.
    With one channel, and pieces of one size, the link is as fast for sends as for collectives: by default
    collectives have two sockets over loopback, and sends one.

    Raises ValueError unless each host gets as many ranks.
    """
    rank, ranks = (read_variable(os.environ, name) or 0 for name in ("RANK", "WORLD_SIZE"))
    if ranks == 0 or ranks % options.hosts:
        raise ValueError(
            f"--hosts {options.hosts}: each needs as many ranks of torchrun, which starts {ranks}"
        )
    host = rank * options.hosts // ranks
    os.environ |= {"NCCL_HOSTID": f"emulated {host}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=lo"}
    os.environ |= {"NCCL_MAX_NCHANNELS": "1", "NCCL_P2P_NET_CHUNKSIZE": str(2**19)}


def hosts(session: Session, options: argparse.Namespace, world: World) -> None:
    """Training steps of hosts that one machine emulates, by what crosses the link between them.

    Layers of Llama-3-8B's shape without embeddings, their optimizer's step included. NCCL takes the ranks for
    those of several hosts (NCCL_HOSTID), which it connects by sockets over loopback: `link` is their rate. So
    bytes between hosts take as long as on a slow network; delays of switches and other jobs are not there.
    """
    timer, steps = Timer(session, world, options.repeats), {}
    count_link(timer, options.hosts)
    for way in options.ways:
        steps[way] = measure(timer, options, way)
        free_memory(session.device)
    for way in [way for way in steps if way != BASE] if BASE in steps else ():
        rule = f"step over that of {BASE}, in one process, emulated hosts"
        timer.count(f"{way}/step_over_{BASE}", "ratio", steps[way] / steps[BASE], rule)


def count_link(timer: Timer, hosts: int) -> None:
    """Rates of what each rank sends, all at once: to its counterpart on the next host, as means travel,
    and to the next rank of a ring, as collectives do.
    """
    world, nbytes = timer.world, SENT_BYTES[timer.device.type]
    distance = world.world_size // hosts
    sent, received = (torch.zeros(nbytes, dtype=torch.uint8, device=timer.device) for _ in range(2))
    ends = (world.rank + distance) % world.world_size, (world.rank - distance) % world.world_size
    pairs = list(zip((dist.isend, dist.irecv), (sent, received), ends, strict=True))
    gathered = torch.empty(world.world_size * nbytes, dtype=torch.uint8, device=timer.device)

    def exchange() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(*pair) for pair in pairs]):
            work.wait()

    def gather() -> None:
        dist.all_gather_into_tensor(gathered, sent)

    end = f"{nbytes >> 20} MiB, {world.backend} over loopback"
    rate = nbytes / timer.time(exchange) / 1e6
    timer.count("link", "gigabytes_per_second", rate, f"sent by each rank to the next emulated host, {end}")
    rate = nbytes * (world.world_size - 1) / timer.time(gather) / 1e6
    timer.count("ring", "gigabytes_per_second", rate, f"sent by each rank in an all-gather of as much, {end}")


def measure(timer: Timer, options: argparse.Namespace, way: str) -> float:
    """Milliseconds of a step, with the rows of a way."""
    shape, device, world = LLAMA_8B.reduced(options.scale, options.layers), timer.device, timer.world
    torch.manual_seed(0)
    with device:
        model = Decoder(shape)
        torch.manual_seed(world.rank)
        x = torch.randn(1, options.tokens, shape.hidden, dtype=torch.bfloat16)
    rule, make = WAYS[way]
    model, optimizer = make(model)
    losses = []

    def step() -> None:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    found = timer.ms(f"{way}/step", step, f"both passes and the optimizer's step, {rule}")
    rate = options.tokens * world.world_size / (found / 1e3)
    timer.count(f"{way}/tokens", "tokens_per_second", rate, "of all ranks")
    timer.count(f"{way}/loss", "loss", losses[-1].item(), f"of rank 0 in step {len(losses)}")
    if isinstance(optimizer, ZeroFP4Optimizer):
        nbytes = sum(optimizer.describe()["bytes_sent"].values())
        timer.count(f"{way}/sent", "megabytes", nbytes / MEGABYTES, "by rank 0 in a step, by describe()")
    return found
