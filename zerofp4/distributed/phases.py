"""Under which names a profiler finds the parts of a step of many ranks."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch.autograd import profiler

PHASES = {
    "scan": "NaN scan",
    "vote": "vote",
    "gradients": "gradients travel, and their mean",
    "norm": "gradient norm",
    "update": "update",
    "amaxes": "amaxes, and their reduction",
    "cast": "scales and cast",
    "weights": "weights travel",
    "transpose": "transpose",
}
"""By name, what people read. gradients, amaxes and weights are what describe() of a ZeroFP4Optimizer calls
them; where an update adds up the gradients of all ranks as it reads them, or leaves the amaxes of what it
writes, that is its own part.
"""

PREFIX = "zerofp4::"
"""Of a phase's name in a trace of torch.profiler."""

Work = TypeVar("Work", bound=Callable[..., Any])


def in_phase(phase: str, work: Work) -> Work:
    """`work` as it is; while a profiler is on, with a range of the phase's name around each call. Of ranges
    within each other the innermost one counts.

    A record_function takes the host 10 us, profiler or not, and a step of 14 buckets comes by here a hundred
    times: so this asks first.
    """
    if not profiler._is_profiler_enabled:
        return work

    def named(*arguments: Any, **options: Any) -> Any:
        with profiler.record_function(PREFIX + phase):
            return work(*arguments, **options)

    return named  # type: ignore[return-value]
