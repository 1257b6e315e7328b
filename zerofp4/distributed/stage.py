"""Which stage a collective failed in, and whom it was waiting for: errors of torch say neither."""

import torch
import torch.distributed as dist


class CollectiveError(dist.DistBackendError):
    """A collective did not come to its end: a rank has died, was stopped or is elsewhere, and the process
    group is of no more use. The message names the stage, this rank, and the other one where that is known.

    Whoever passes errors on to other ranks raises it as it is: a second collective would wait for the same
    rank, as long again.
    """

    all_ranks_raise = True


class Stage:
    """`with Stage(name, group):` around calls of torch.distributed, and nothing else: what they raise becomes
    a CollectiveError.

    name: of what the ranks do together, as in "averaging gradients". peer: whose part is waited for, by its
    number in the group; None where all take part.
    """

    __slots__ = ("_group", "_name", "_peer")

    def __init__(self, name: str, group: dist.ProcessGroup | None, peer: int | None = None):
        self._name, self._group, self._peer = name, group, peer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> None:
        # gloo's errors are RuntimeErrors, NCCL's DistBackendErrors, which are those too.
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveError | torch.OutOfMemoryError):
            return
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        place = f"on rank {rank} of {size}"
        if self._peer is not None:
            place += f", in its exchange with rank {self._peer}"
        raise CollectiveError(
            f"{self._name} failed {place}: {str(error).splitlines()[0]} (a rank has died, was stopped or is "
            "elsewhere; this process group is of no more use)"
        ) from error


class Pending:
    """A collective that is under way."""

    __slots__ = ("_stage", "_work")

    def __init__(self, work: dist.Work, stage: Stage):
        self._work, self._stage = work, stage

    def wait(self) -> None:
        """As that of torch's work: with NCCL the device's stream waits, else the host."""
        with self._stage:
            self._work.wait()
