"""One step of many ranks: buckets, the exchange of each, and the program of a step.

Neighbouring parameters of one kind make a bucket, which is sharded over all ranks: its gradients are one
exchange, its weights one all-gather in place, and a step works on one bucket while others travel.
"""

from zerofp4.engine.assignment import Trained, build_buckets, find_bucket_mb, kind_key
from zerofp4.engine.buckets import (
    ALIGNMENT,
    Bucket,
    GradientMemory,
    Gradients,
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
from zerofp4.engine.collective import CollectiveExchange, collective_exchanges
from zerofp4.engine.exchange import (
    ABSTAIN,
    UPDATE_DTYPES,
    Abstain,
    Arrived,
    BucketExchange,
    BucketGradients,
    LocalExchange,
    are_as_sent,
    check_gradients,
    in_place,
)
from zerofp4.engine.late_gather import LateGathers
from zerofp4.engine.overlap import BackwardSchedule, Sent, UpdateSchedule
from zerofp4.engine.peer import peer_exchanges
from zerofp4.engine.peers import Peers
from zerofp4.engine.step import Step, Update
from zerofp4.engine.topology import Hosts, find_hosts, find_peers, host_name

__all__ = [
    "ABSTAIN",
    "ALIGNMENT",
    "UPDATE_DTYPES",
    "Abstain",
    "Arrived",
    "BackwardSchedule",
    "Bucket",
    "BucketExchange",
    "BucketGradients",
    "CollectiveExchange",
    "GradientMemory",
    "Gradients",
    "Hosts",
    "LateGathers",
    "LocalExchange",
    "Peers",
    "Sent",
    "Sharding",
    "Step",
    "Trained",
    "Update",
    "UpdateSchedule",
    "add_gradient_hooks",
    "are_as_sent",
    "are_sendable",
    "build_buckets",
    "check_gradients",
    "collective_exchanges",
    "find_bucket_mb",
    "find_hosts",
    "find_peers",
    "gradient_dtype",
    "host_name",
    "in_place",
    "is_sendable",
    "joined",
    "kind_key",
    "peer_exchanges",
    "with_own_storage",
    "write_master",
    "zeros_on",
]
