"""Counts the bytes that a step sends between two hosts, and compares them with those of the model.

From tests/:

    python -m distributed.two_hosts                           two hosts of two ranks, all with all others
    python -m distributed.two_hosts --way reduce_scatter      the default of several hosts
    python -m distributed.two_hosts --way nvfp4               means of hosts, in this format
    python -m distributed.two_hosts --ranks 3 --rate 100      three ranks each; a link of 100 Mbit/s each way

The hosts are network namespaces of this machine, joined by a pair of veth devices whose rate `tc` limits.
Each runs `torchrun --nnodes 2` on the CPU with gloo. The script needs Linux, root, and the commands `ip`,
`tc` and `unshare`, and removes the namespaces however it ends.

Ranks take steps of ZeroFP4Optimizer with FusedAdamW over NVFP4 weights, and read what the device of their
host has sent and received. The difference between many steps and a few has no set-up in it. What counts is
the payload of TCP: 66 bytes of each frame are headers (14 of Ethernet, 20 of IPv4, 32 of TCP with
timestamps), and an acknowledgement is nothing else. Votes are counted too; the model has gradients, amaxes
and codes.

The model is sent_of(), with one rule of gloo: its reduce-scatter is an all-reduce, so gradients go
around the ring twice.

The status is 0 where the bytes are within 3% of the model's, and where describe() has those that gradients
take between hosts in few bits; and 2 where no namespaces can be made.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULE = ("-m", "distributed.two_hosts")  # beside this file lie folders that are called as modules of Python
HOSTS, DEVICE, ADDRESS, PORT = 2, "veth0", "10.77.0.{}", 29500
WAYS = {
    "collective": {"reduction": "ordered"},
    "reduce_scatter": {},
    **{wire: {"between_hosts": wire} for wire in ("bf16", "mxfp8", "nvfp4")},
}
"""Arguments of Communication, by what the model calls the way."""
AROUND_TWICE = ("reduce_scatter",)
"""Ways whose gradients gloo all-reduces in place of a reduce-scatter."""
FEW_BITS = {"bf16": 2, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16 + 4 / (16 * 128)}
"""Bytes of an element between hosts: its own, and its part of the scales of blocks and strips."""
HEADERS = 66
TOLERANCE = 0.03
WEIGHTS, SHAPE = 4, (1024, 1024)
STEPS, FEW_STEPS = 10, 2


# The hosts


class NoNamespaces(Exception):
    """No namespaces, or no link between them, can be made here; the message has the command and its error."""


def run(*command: str) -> str:
    """Its output. Raises NoNamespaces where it fails, or there is no such command."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise NoNamespaces(str(error)) from error
    except subprocess.CalledProcessError as error:
        raise NoNamespaces(f"{' '.join(command)}: {error.stderr.strip()}") from error


@contextlib.contextmanager
def two_hosts(megabits: float) -> Iterator[list[str]]:
    """The names of two namespaces, joined by a link of this rate each way. Raises NoNamespaces."""
    names = [f"zerofp4-{os.getpid()}-{host}" for host in range(HOSTS)]
    made = []
    try:
        for name in names:
            run("ip", "netns", "add", name)
            made.append(name)
        link = ("ip", "link", "add", DEVICE, "netns", names[0], "type", "veth")
        run(*link, "peer", "name", DEVICE, "netns", names[1])
        for host, name in enumerate(names):
            run("ip", "-n", name, "address", "add", f"{ADDRESS.format(host + 1)}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                run("ip", "-n", name, "link", "set", device, "up")
            limit = ("rate", f"{megabits}mbit", "burst", "256kb", "latency", "400ms")
            run("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "tbf", *limit)
        yield names
    finally:
        for name in made:
            for pid in run("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            run("ip", "netns", "delete", name)


def launch(options: argparse.Namespace, names: list[str]) -> int:
    """Run the ranks of both hosts; the status of the first host that fails, or 0."""
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": DEVICE,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # addresses of a namespace have no names
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(HOSTS)]
    torchrun += ["--nproc-per-node", str(options.ranks), "--master-addr", ADDRESS.format(1)]
    torchrun += ["--master-port", str(PORT)]
    arguments = [f"--{name}={getattr(options, name)}" for name in ("way", "ranks", "rate")]
    started = []
    try:
        for host, name in enumerate(names):
            # A host name of its own, by which ranks tell hosts apart.
            named = ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh"]
            command = ["ip", "netns", "exec", name, *named, *torchrun, "--node-rank", str(host)]
            started.append(subprocess.Popen([*command, *MODULE, "--worker", *arguments], env=environment))
        while any(process.poll() is None for process in started):
            failed = [process.returncode for process in started if process.returncode]
            if failed:
                return failed[0]
            time.sleep(0.1)
        return next((process.returncode for process in started if process.returncode), 0)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)


# A rank


def payload() -> tuple[int, int]:
    """Bytes of TCP without headers that the device which joins the hosts has sent and received, since it was
    made. Of this process's namespace: /sys may be that of another one.
    """
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, found = line.partition(":")
        if name.strip() == DEVICE:
            (received, frames_received), (sent, frames_sent) = (
                map(int, words) for words in (found.split()[0:2], found.split()[8:10])
            )
            return sent - HEADERS * frames_sent, received - HEADERS * frames_received
    raise RuntimeError(f"/proc/net/dev has no {DEVICE}")


def sent_of(
    shapes: list[tuple[int, int]], ranks: int, way: str, of_host: int
) -> dict[str, tuple[float, float]]:
    """By what it is, bytes of a step that a rank sends to its host and to other hosts; bf16 gradients.

    way: how gradients travel. "collective": a rank sends 2n to every other rank. "reduce_scatter": 2N around
        rings. FEW_BITS: 2n of each host's slices to each rank of its own, and means to each other host.
    of_host: ranks of a host, which are numbered host by host.

    Codes, half a byte of an element, are all-gathered around rings; amaxes, 2 bytes of a tile, all-reduced.
    """
    from benchmarks.workloads import elements_of, tiles_of  # torch is for ranks

    elements = elements_of(shapes)
    rings = {"amaxes": 2 * 2 * tiles_of(shapes), "weights": elements / 2}
    to_each = 2 * elements / ranks
    ways = {
        "collective": (to_each * (of_host - 1), to_each * (ranks - of_host)),
        "reduce_scatter": around(2 * elements, ranks, of_host),
    }
    hosts = ranks // of_host
    for wire, size in FEW_BITS.items():
        ways[wire] = to_each * hosts * (of_host - 1), size * elements / ranks * (hosts - 1)
    return {kind: around(nbytes, ranks, of_host) for kind, nbytes in rings.items()} | {"gradients": ways[way]}


def around(nbytes: float, ranks: int, of_host: int) -> tuple[float, float]:
    """Bytes that a rank sends to its host and to other hosts in an all-gather or reduce-scatter of `nbytes`.

    In a ring every rank sends all shares but one to the next rank. A ring through all ranks, host by host,
    leaves each host once. NCCL makes several rings, and each leaves a host from another GPU's network card:
    so 1/of_host of what a rank sends goes to another host.
    """
    sent = nbytes * (ranks - 1) / ranks
    across = sent / of_host if ranks > of_host else 0.0
    return sent - across, across


def model_bytes(way: str, shapes: list[tuple[int, int]], ranks: int) -> dict[str, float]:
    """What one host sends to the other in a step, by what it is. ranks: of a host."""
    sent = sent_of(shapes, HOSTS * ranks, way, of_host=ranks)
    times = {"gradients": 2 if way in AROUND_TWICE else 1}
    return {kind: ranks * times.get(kind, 1) * across for kind, (_, across) in sent.items()}


def work(options: argparse.Namespace) -> int:
    """A rank of one host. The first rank compares and reports; the status is its verdict."""
    import torch
    import torch.distributed as dist

    import zerofp4
    from zerofp4.launch import destroy_process_group, init_process_group
    from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer

    world = init_process_group()
    shapes = [SHAPE] * WEIGHTS
    torch.manual_seed(0)
    weights = (torch.randn(shape, dtype=torch.bfloat16) for shape in shapes)
    parameters = [torch.nn.Parameter(zerofp4.quantize(weight)) for weight in weights]
    communication = Communication(**WAYS[options.way])
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, lr=1e-4, communication=communication)
    for parameter in parameters:
        torch.autograd.backward(parameter, torch.randn(parameter.shape, dtype=torch.bfloat16))

    def take(steps: int) -> tuple[list[int], float]:
        """Payload sent and received by this host meanwhile, and seconds."""
        dist.barrier()
        time.sleep(0.2)  # for the last acknowledgements
        before, begin = payload(), time.perf_counter()
        for _ in range(steps):
            optimizer.step()
        seconds = time.perf_counter() - begin
        dist.barrier()
        time.sleep(0.2)
        return [now - then for now, then in zip(payload(), before, strict=True)], seconds

    take(1)
    (few, few_seconds), (many, seconds) = take(FEW_STEPS), take(FEW_STEPS + STEPS)
    status = 0
    if world.rank == 0:
        described = optimizer.describe()
        how = {name: described[name] for name in ("transport", "hosts", "reduction", "bytes_sent")}
        print(f"describe() of the first rank: {how}")
        found = [(more - less) / STEPS for more, less in zip(many, few, strict=True)]
        status = report(options, shapes, found, (seconds - few_seconds) / STEPS)
        if options.way in FEW_BITS:
            across = sum(bucket["between_hosts"] for bucket in described["buckets"])
            gradients = model_bytes(options.way, shapes, options.ranks)["gradients"] / options.ranks
            print(f"describe() has {across / 1e6:.3f} MB of gradients from a rank to the other host")
            status = status or int(across != gradients)
    destroy_process_group()
    return status


def report(
    options: argparse.Namespace, shapes: list[tuple[int, int]], found: list[float], seconds: float
) -> int:
    model = model_bytes(options.way, shapes, options.ranks)
    total = sum(model.values())
    parts = ", ".join(f"{kind} {nbytes / 1e6:.3f}" for kind, nbytes in model.items())
    print(f"{options.way}: {HOSTS} hosts of {options.ranks} ranks, {WEIGHTS} weights {shapes[0]}, per step")
    print(f"model: {total / 1e6:.3f} MB from each host to the other ({parts})")
    for what, nbytes in zip(("sent", "received"), found, strict=True):
        print(f"{what} by the first host: {nbytes / 1e6:.3f} MB, {nbytes / total:.4f} of the model")
    floor = total / (options.rate * 1e6 / 8)
    print(f"time: {1e3 * seconds:.0f} ms; the model's bytes take the link {1e3 * floor:.0f} ms")
    within = all(abs(nbytes / total - 1) <= TOLERANCE for nbytes in found)
    print(f"{'within' if within else 'NOT within'} {TOLERANCE:.0%} of the model", flush=True)
    return 0 if within else 1


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--way", choices=WAYS, default="collective", help="how gradients travel (default: collective)")
    add("--ranks", type=int, default=2, help="of each host (default: 2)")
    add("--rate", type=float, default=400, help="megabits a second of the link, each way (default: 400)")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse_options()
    if options.worker:
        return work(options)
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda number, _: sys.exit(128 + number))
    try:
        with two_hosts(options.rate) as names:
            return launch(options, names)
    except NoNamespaces as error:
        print(f"no namespaces can be made here: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
