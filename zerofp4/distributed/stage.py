"""Which stage a collective failed in, which errors of torch do not say."""

import torch
import torch.distributed as dist


class CollectiveError(dist.DistBackendError):
    """A collective did not come to its end: a rank has died, was stopped or is elsewhere, and the process
    group is of no more use. The message names the stage and this rank; of two ranks also the other one. Among
    more nobody here knows who went first: a rank that this one waits for may have failed, and have left,
    because it waited for a third.

    Whoever passes errors on to other ranks raises it as it is: a second collective would wait for the same
    rank, as long again.
    """

    all_ranks_raise = True


class Stage:
    """`with Stage(name, group):` around calls of torch.distributed, and nothing else: what they raise becomes
    a CollectiveError.

    name: of what the ranks do together, as in "averaging gradients".
    """

    __slots__ = ("_group", "_name")

    def __init__(self, name: str, group: dist.ProcessGroup | None):
        self._name, self._group = name, group

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> None:
        # gloo's errors are RuntimeErrors, NCCL's DistBackendErrors, which are those too.
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveError | torch.OutOfMemoryError):
            return
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        # Of a group of two in a larger world the other one may have left because of a third rank.
        who = f"rank {1 - rank}" if size == dist.get_world_size() == 2 else "a rank"
        raise CollectiveError(
            f"{self._name} failed on rank {rank} of {size}: {str(error).splitlines()[0]} ({who} has died, "
            "was stopped or is elsewhere; this process group is of no more use)"
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
