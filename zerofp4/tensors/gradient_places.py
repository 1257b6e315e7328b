"""Where the gradient of a parameter is to lie: products write it there, and autograd takes it as p.grad.

A gradient that lies in the wrong memory is silently wrong, so a product writes into the place of a parameter
only where all of this holds, and returns ordinary memory in every other case:

- The engine is about to accumulate into this very parameter, by a plain backward pass: not for
  autograd.grad, which may not touch what p.grad lies in, not for create_graph, whose gradients have a graph,
  and not for a copy of the parameter, whose accumulation is another node.
- p.grad is None: what is there is added to by autograd, with its rounding, and the hooks of parameters are
  called, which a product that returned None for a sum of its own would keep from running.
- No hook of the parameter sees its gradients, which it may keep; and autocast is off, which would choose
  another dtype for the product.
- Nobody else has the gradient that lay there last: `b.grad = a.grad` makes it that of another parameter.
- Nothing that an earlier product wrote there is on its way: no product of this backward pass has written
  there, nor is the tensor of one before alive, as where an error, or a backward pass inside of another, came
  in between. (In one pass the tensor may be gone, and another with its memory, which a hook of the product
  has made of it, waits for the gradient of another use of the weight.)

Autograd takes the tensor over without a copy. Where it adds another gradient to it first, it does so in new
memory, since what is written here shares its storage.
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
    """Memory of a parameter's shape, in which its gradients are to lie as long as this object lives, or until
    the parameter gets another place.
    """

    def __init__(self, parameter: torch.Tensor, view: torch.Tensor):
        self._parameter, self._view = parameter, view
        self._given: TensorWeakRef | None = None
        """Until it is p.grad: torch swaps no tensor that has a weak reference, and autograd clones one that
        has another strong reference.
        """
        self._last: torch.Tensor | None = None
        self._last_pass = -1
        self._lock = threading.Lock()
        _places[id(parameter)] = self

    def is_awaited(self) -> bool:
        """Whether a gradient is here that has not become p.grad yet: nothing may be written over it."""
        return self._given is not None and self._given() is not None

    def note(self, gradient: torch.Tensor) -> None:
        """It lies here, and is p.grad."""
        self._given, self._last = None, gradient

    def is_kept(self, gradient: torch.Tensor | None) -> bool:
        """Whether somebody has the gradient that lay here last, beside the parameter, whose p.grad this is:
        it may be that of another one by now, and nothing is to be written over it.
        """
        if self._last is None or self._last is gradient:
            return False
        # Python's references: self._last and the argument. C++'s: that of the Python object.
        return sys.getrefcount(self._last) > 2 or self._last._use_count() > 1

    def give(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The memory as a new tensor, with a version of its own; None where nothing may be written there."""
        view = self._view
        if self._parameter is not parameter or view.dtype != dtype or view.device != parameter.device:
            return None
        number = torch._C._current_graph_task_id()  # that of a pass inside of another is larger
        with self._lock:  # of two threads that go back through the same parameter
            if number <= self._last_pass:
                return None
            if self.is_awaited() or parameter.grad is not None:  # in this order: it is that, and then this
                return None
            if self.is_kept(None):
                return None
            given = view.data
            self._given, self._last_pass = TensorWeakRef(given), number
            return given


def gradient_place(node: Any, index: int, dtype: torch.dtype) -> torch.Tensor | None:
    """In a backward pass, memory for the gradient of the node's input of this number, a parameter, in which
    it is to be written, and which is to be returned; None where the gradient belongs into other memory.

    node: the context of an autograd.Function. dtype: of the gradient, which has the parameter's shape.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not _places:
        return None
    accumulation = node.next_functions[index][0]
    with torch._C.DisableTorchFunctionSubclass():
        parameter = getattr(accumulation, "variable", None)
        place = _places.get(id(parameter))
        if place is None or parameter._backward_hooks or torch.is_autocast_enabled(parameter.device.type):
            return None
        return place.give(parameter, dtype) if _is_executed(accumulation) else None


def _is_executed(accumulation: Any) -> bool:
    """Whether the backward pass that runs adds to p.grad."""
    try:
        return torch._C._will_engine_execute_node(accumulation)
    except RuntimeError:  # autograd.grad wants the gradient for itself; or nothing runs
        return False
