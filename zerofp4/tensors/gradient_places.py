"""Buffers that gradients of parameters are to be written to: products write there, and autograd takes the
result as p.grad without a copy.

A gradient in the wrong memory is silently wrong. So a product uses the buffer only if all of this holds:

- The engine is about to accumulate into this very parameter in a plain backward pass: not autograd.grad, not
create_graph, not a copy of the parameter, whose accumulation is another node.
- p.grad is None. (Autograd adds to an existing one, with its rounding, and calls the parameter's hooks.)
- The parameter has no hook that may keep its gradients, and autocast, which may choose another dtype, is off.
- Nobody else holds the gradient that lay there last: `b.grad = a.grad` makes it that of another parameter.
- The buffer is free: no gradient tensor over it, of this pass or of one that failed or encloses it, is alive.

If autograd adds another gradient first, it does so in new memory, since the buffer's storage is shared.
"""

import sys
import threading
import weakref
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

_places: "weakref.WeakValueDictionary[int, GradientPlace]" = weakref.WeakValueDictionary()
"""By id of the parameter: an attribute would go with its copies."""


class GradientPlace:
    """A buffer of a parameter's shape for its gradients, until the parameter gets another one."""

    def __init__(self, parameter: torch.Tensor, view: torch.Tensor):
        self._parameter, self._view = parameter, view
        self._given: TensorWeakRef | None = None
        """Until it is p.grad. Weak: autograd clones a gradient with a second strong reference."""
        self._last: torch.Tensor | None = None
        self._last_pass = -1
        self._lock = threading.Lock()
        _places[id(parameter)] = self

    def is_awaited(self) -> bool:
        """Whether the buffer holds a gradient that is not p.grad yet."""
        return self._given is not None and self._given() is not None

    def note(self, gradient: torch.Tensor) -> None:
        """The gradient in the buffer has become p.grad."""
        self._given, self._last = None, gradient

    def is_kept(self, gradient: torch.Tensor | None) -> bool:
        """Whether anyone but the parameter holds the last gradient. gradient: the parameter's p.grad."""
        if self._last is None or self._last is gradient:
            return False
        # Python's references: self._last and the argument. C++'s: that of the Python object.
        return sys.getrefcount(self._last) > 2 or self._last._use_count() > 1

    def give(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The buffer as a new tensor, with its own version counter; None if it may not be written to."""
        view = self._view
        if self._parameter is not parameter or view.dtype != dtype or view.device != parameter.device:
            return None
        number = torch._C._current_graph_task_id()  # larger in a nested pass
        with self._lock:  # two threads may go back through one parameter
            if number <= self._last_pass:
                return None
            if (
                self.is_awaited() or parameter.grad is not None
            ):  # in this order: first the one, then the other
                return None
            if self.is_kept(None):
                return None
            given = view.data
            self._given, self._last_pass = TensorWeakRef(given), number
            return given


def gradient_place(node: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """The buffer for the gradient of a node's second input, the weight, or None."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not _places:
        return None
    accumulation = node.next_functions[1][0]
    with torch._C.DisableTorchFunctionSubclass():
        parameter = getattr(accumulation, "variable", None)
        place = _places.get(id(parameter))
        if place is None or parameter._backward_hooks or torch.is_autocast_enabled(parameter.device.type):
            return None
        return place.give(parameter, dtype) if _is_executed(accumulation) else None


def _is_executed(accumulation: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(accumulation)
    except RuntimeError:  # autograd.grad wants the gradient for itself; or nothing runs
        return False
