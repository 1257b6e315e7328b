"""One step of many ranks: buckets, transports of gradients and weights, and the program of a step.

Neighbouring parameters of one kind make a bucket, which is sharded over all ranks: its gradients are one
exchange, its weights one all-gather in place, and a step works on one bucket while others travel.
"""

from zerofp4.engine.backward import ArrivingMeans, BackwardSchedule
from zerofp4.engine.buckets import (
    Updated,
    Wire,
    build_buffers,
    check_gradient_dtype,
    gradient_dtype,
    make_wire,
    set_gradient_dtype,
)
from zerofp4.engine.collective import CollectiveTransport
from zerofp4.engine.flat import (
    ALIGNMENT,
    DenseBuffer,
    FlatBuffer,
    PackedBuffer,
    Sharding,
    with_own_storage,
)
from zerofp4.engine.gradient_memory import (
    GradientMemory,
    Gradients,
    GradientSnapshot,
    are_sendable,
    attributes,
    gradients_of,
    in_order,
    is_sendable,
)
from zerofp4.engine.hosts import Hosts, HostTransport, find_ways
from zerofp4.engine.late_gather import LateGathers
from zerofp4.engine.peer import PeerTransport
from zerofp4.engine.peers import Peers
from zerofp4.engine.step import Step
from zerofp4.engine.transport import Arrived, Transport, check_gradients, describe_buckets

__all__ = [
    "ALIGNMENT",
    "Arrived",
    "ArrivingMeans",
    "BackwardSchedule",
    "CollectiveTransport",
    "DenseBuffer",
    "FlatBuffer",
    "GradientMemory",
    "GradientSnapshot",
    "Gradients",
    "HostTransport",
    "Hosts",
    "LateGathers",
    "PackedBuffer",
    "PeerTransport",
    "Peers",
    "Sharding",
    "Step",
    "Transport",
    "Updated",
    "Wire",
    "are_sendable",
    "attributes",
    "build_buffers",
    "check_gradient_dtype",
    "check_gradients",
    "describe_buckets",
    "find_ways",
    "gradient_dtype",
    "gradients_of",
    "in_order",
    "is_sendable",
    "make_wire",
    "set_gradient_dtype",
    "with_own_storage",
]
