"""Over which ranks parameters are sharded."""

from typing import NamedTuple

import torch.distributed as dist


class Sharding(NamedTuple):
    """group: each element of the parameters is owned by one of its ranks; None is a world of one. copy: where
    ranks outside of it hold the same parameters, sharded in the same way, this rank's number among those that
    own the same elements; None where there are no such ranks. replicas: with this rank, the ranks of other
    such groups that own the same elements and average their gradients together; None without any.
    """

    group: dist.ProcessGroup | None
    copy: int | None = None
    replicas: dist.ProcessGroup | None = None

    @property
    def is_counted(self) -> bool:
        """Whether a norm over all ranks takes the elements that this rank owns, not those of another copy."""
        return not self.copy
