"""What torch.compile asks a quantized tensor in each call of compiled code, without a frame of Python: guards
and the unpacking of subclasses read each buffer of each weight.
"""

from collections.abc import Callable

import zerofp4._C as _C
from zerofp4.format import SCALE_LAYOUTS
from zerofp4.storage import SIDES, side_and_layout, side_names

_AMAXES = {"amax": list(SIDES), "columnwise_amax": ["columnwise"]}


def buffer_reader(name: str) -> Callable:
    """What gives the buffer of tensor.record of this name, one of BUFFERS, for a tensor."""
    if name in _AMAXES:
        return _C.amax_reader(_AMAXES[name])
    return _C.buffer_reader((*side_and_layout(name), name))


def flatten_method(cls: type) -> Callable:
    """The method __tensor_flatten__ of a class of tensors with a record: (names of its buffers, values of
    the fields that its context_fields name).
    """
    return _C.flatten_method(cls, [(*side_and_layout(name), name) for name in side_names(SCALE_LAYOUTS)])
