"""One step of many ranks: buckets, transports of gradients and weights, and the program of a step.

Neighbouring parameters of one kind make a bucket, which is sharded over all ranks: its gradients are one
exchange, its weights one all-gather in place, and a step works on one bucket while others travel.
"""

from zerofp4.engine.assignment import Trained, build_buckets, find_bucket_mb, kind_key
from zerofp4.engine.backward import ArrivingMeans, BackwardSchedule, Rounds
from zerofp4.engine.buckets import (
    ALIGNMENT,
    Bucket,
    GradientMemory,
    Gradients,
    GradientSnapshot,
    Sharding,
    add_gradient_hooks,
    are_sendable,
    gradient_dtype,
    is_sendable,
    joined,
    with_own_storage,
    write_master,
    zeros_on,
)
from zerofp4.engine.collective import CollectiveTransport
from zerofp4.engine.late_gather import LateGathers
from zerofp4.engine.peer import PeerTransport
from zerofp4.engine.peers import Peers
from zerofp4.engine.step import NOTHING, UPDATE_DTYPES, Arrived, Step, Transport, are_as_sent, check_gradients
from zerofp4.engine.topology import Hosts, find_hosts, find_peers, host_name

__all__ = [
    "ALIGNMENT",
    "NOTHING",
    "UPDATE_DTYPES",
    "Arrived",
    "ArrivingMeans",
    "BackwardSchedule",
    "Bucket",
    "CollectiveTransport",
    "GradientMemory",
    "GradientSnapshot",
    "Gradients",
    "Hosts",
    "LateGathers",
    "PeerTransport",
    "Peers",
    "Rounds",
    "Sharding",
    "Step",
    "Trained",
    "Transport",
    "add_gradient_hooks",
    "are_as_sent",
    "are_sendable",
    "build_buckets",
    "check_gradients",
    "find_bucket_mb",
    "find_hosts",
    "find_peers",
    "gradient_dtype",
    "host_name",
    "is_sendable",
    "joined",
    "kind_key",
    "with_own_storage",
    "write_master",
    "zeros_on",
]
