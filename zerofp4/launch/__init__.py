"""Process groups: one call that works alone, under torchrun and under mpirun.

NCCL is used where there are GPUs (one for each rank of a host) and gloo where there are none.
"""

from zerofp4.launch.process_group import (
    DEFAULT_TIMEOUT,
    World,
    backend_for,
    destroy_process_group,
    init_process_group,
    ranks_started,
)

__all__ = [
    "DEFAULT_TIMEOUT",
    "World",
    "backend_for",
    "destroy_process_group",
    "init_process_group",
    "ranks_started",
]
