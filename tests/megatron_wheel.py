"""Where the tests find Megatron-Core: its wheels want Python 3.12, and more than they say."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from helpers import collect_garbage
from megatron_on_cpu import megatron_here

from zerofp4.integrations import megatron
from zerofp4.integrations.megatron.hook import KNOWN_VERSIONS

VARIABLE = "ZEROFP4_MEGATRON"
"""Names a folder with an unpacked wheel."""
FETCHED = Path(__file__).resolve().parents[1] / "build" / "megatron"
"""Where scripts/setup_env.sh unpacks one."""


@functools.cache
def why_no_megatron() -> str | None:
    """None where `import megatron.core` finds a version that is known, from now on; else why not."""
    found = _version()
    for folder in (os.environ.get(VARIABLE), str(FETCHED)):
        if not _is_known(found) and folder and Path(folder, "megatron", "core").is_dir():
            sys.path.insert(0, folder)  # the ranks that tests start look where this process looks
            found = _version()
    if _is_known(found):
        return None
    what = "is not installed" if found is None else f"{found} is installed"
    return f"megatron-core {what}, neither {VARIABLE} nor {FETCHED} has one of {' or '.join(KNOWN_VERSIONS)}"


def _version() -> str | None:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_known(version: str | None) -> bool:
    return version is not None and ".".join(version.split(".")[:2]) in KNOWN_VERSIONS


@contextlib.contextmanager
def installed() -> Iterator[None]:
    megatron.install()
    try:
        yield
    finally:
        megatron.uninstall()


@contextlib.contextmanager
def megatron_groups(tp: int = 1, pp: int = 1, ep: int = 1) -> Iterator[ModuleType]:
    """The hook is installed, and the ranks form Megatron's groups. Yields the module megatron_gpt."""
    with groups_forgotten():
        from megatron.core import parallel_state

        megatron.install()
        parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
        if torch.cuda.is_available():
            from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

            model_parallel_cuda_manual_seed(0)
        yield importlib.import_module("distributed.integrations.megatron_gpt")


@contextlib.contextmanager
def groups_forgotten() -> Iterator[None]:
    """Megatron can be imported; at the end its groups and the hook are gone."""
    before = set(dist.distributed_c10d._world.pg_map)
    with megatron_here():
        from megatron.core import parallel_state

        try:
            yield
        finally:
            megatron.uninstall()
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_global_memory_buffer()
            made = [group for group in dist.distributed_c10d._world.pg_map if group not in before]
            _forget(parallel_state, made)


def _forget(parallel_state: ModuleType, groups: list[dist.ProcessGroup]) -> None:
    """destroy_model_parallel() leaves some of the groups that were made, and torch all of them.

    groups: in the order in which they were made, which ranks that share some agree on. NCCL ends a group
    together with the other ranks.
    """
    for name, value in list(vars(parallel_state).items()):
        if any(
            isinstance(held, dist.ProcessGroup) for held in (value if isinstance(value, list) else [value])
        ):
            setattr(parallel_state, name, None)
    for group in reversed(groups):
        dist.destroy_process_group(group)
    collect_garbage()
