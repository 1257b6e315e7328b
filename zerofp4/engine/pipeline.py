"""The order in which a step works on its buckets.

A stage of a bucket begins with what the ranks do together (an exchange of gradients, a reduction of amaxes, a
gather of codes) and ends with what this rank does with the outcome. The first is queued on the network's own
stream, behind everything that is on the current stream by then; the second waits for it on the current
stream, never on the host. So while bucket i is updated, the amaxes of bucket i - 1 are reduced and the codes
of bucket i - 2 gathered, all from one thread, in an order that only depends on the number of buckets: ranks
that agree on that cannot wait for each other's collectives crosswise. (Ranks that share memory send codes at
the end of the cast, in the same order.)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple


def _nothing(bucket: int) -> None: ...


class Stage(NamedTuple):
    """Both take the number of a bucket. start: begins a collective, or nothing. finish: waits for it in the
    current stream, and queues what this rank does then.
    """

    finish: Callable[[int], None]
    start: Callable[[int], None] = _nothing


def run_in_turns(count: int, stages: Sequence[Stage]) -> None:
    """Take buckets [0, count) through the stages. In turn t stage s has bucket t - s: first all collectives
    begin, then each stage finishes, so that what a bucket began travels while those behind it compute.
    """
    for turn in range(count + len(stages) - 1):
        work = [(stage, turn - s) for s, stage in enumerate(stages) if 0 <= turn - s < count]
        for stage, bucket in work:
            stage.start(bucket)
        for stage, bucket in work:
            stage.finish(bucket)
