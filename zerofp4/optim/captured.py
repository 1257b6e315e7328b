"""A step of several ranks in a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch

from zerofp4.ops import is_capturing
from zerofp4.optim.bucketed import BucketedStep
from zerofp4.optim.build import overlaps_forward
from zerofp4.optim.nonfinite import NonfiniteGradients
from zerofp4.optim.param_groups import check_finite
from zerofp4.optim.state import ShardedState
from zerofp4.optim.votes import Votes


class CapturedSteps(ShardedState):
    """What step() of several ranks is while a CUDA graph is captured: what the ranks agree on in each replay
    is found and read on the device, and all else is as they agreed in the last step that was not captured.
    """

    _bucketed: BucketedStep
    _votes: Votes
    _nonfinite: NonfiniteGradients
    _cleared: int
    _agreed_in_sequence: bool | None
    """What the ranks agreed on in the last step; None before the first."""

    def _is_captured(self) -> bool:
        return self._votes.world_size > 1 and is_capturing(self.found_inf.device)

    @torch.no_grad()
    def _capture_step(self, closure: Callable[[], Any] | None) -> None:
        obstacle = self._find_capture_obstacle(closure)
        if obstacle is not None:
            raise RuntimeError(f"step() of {self._votes.world_size} ranks cannot be captured: {obstacle}")
        self._follow_masters()
        self._tell_unheard()
        gradients = self._gradients()
        self._watch.check(self.param_groups)
        check_finite(self.param_groups)
        present = self._votes.repeat(gradients)
        self._cleared = 0
        nonfinite = self._nonfinite
        self._push_options()
        # What may raise comes before all that ranks do together: NCCL ends no group of which a collective was
        # captured in a graph that never came to be.
        prepared = self._bucketed.prepare(gradients, present, None, nonfinite.found)
        nonfinite.hear_on_device(self._votes.agree_on_device(self._word(gradients)))
        self._bucketed.run(prepared, present, lambda update: self._publish(nonfinite.found, update=update))
        self._pull_options()
        nonfinite.count()
        self._steps += 1

    def _find_capture_obstacle(self, closure: Callable[[], Any] | None) -> str | None:
        if closure is not None:
            return "what a closure computes is not known before"
        if self._reduced is not None:
            return "clip_grad_norm_ has reduced the gradients"
        if self._rounds is not None:
            return "gradients travel before it"
        if overlaps_forward(self._overlap):
            return "weights travel behind it"
        obstacle = self._bucketed.find_obstacle()
        if obstacle is None and self._agreed_in_sequence:
            return "another rank has to do one thing after the other"
        return obstacle
