"""Whether the masters of an optimizer are of one step."""

import contextlib
from collections.abc import Iterator

from zerofp4.distributed import error_text


class Soundness:
    """Whether the masters of this rank are of one step, so that an optimizer may go on and be saved."""

    def __init__(self):
        self.broken: RuntimeError | None = None
        """As `broken` of ZeroFP4Optimizer. Only the text of the error is kept: a traceback holds frames."""
        self.is_between = False
        """Whether a backward pass has updated masters since the last step()."""

    @property
    def obstacle(self) -> str | None:
        """Why what is saved now must not be loaded."""
        if self.broken is not None:
            return f"{self.broken}: it must not be saved"
        if self.is_between:
            return "a backward pass has updated masters: call step() before they are saved"
        return None

    @contextlib.contextmanager
    def breaking(self, call: str, in_buckets: bool = False) -> Iterator[None]:
        """What is raised inside leaves the optimizer broken; in_buckets: only after a bucket's update."""
        try:
            yield
        except BaseException as error:
            if not in_buckets or (self.is_between and self.broken is None):
                self.mark_broken(call, error)
            raise

    def mark_broken(self, call: str, error: BaseException) -> None:
        self.broken = RuntimeError(
            f"{call} was left in the middle ({error_text(error)}), and masters may be of two steps"
        )

    def raise_if_broken(self) -> None:
        if self.broken is not None:
            raise RuntimeError(
                f"the optimizer is of no more use: {self.broken}. Load a checkpoint (load_state_dict()), or "
                "build a new optimizer"
            ) from self.broken
