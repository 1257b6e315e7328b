"""One step of many ranks: buckets, the exchange of each, and the program of a step.

Neighbouring parameters of one kind make a bucket, which is sharded over all ranks: its gradients are one
exchange, its weights one all-gather in place, and a step works on one bucket while others travel.
"""

# ruff: noqa: F401
from zerofp4.engine.assignment import build_buckets, find_bucket_mb
from zerofp4.engine.buckets import (
    CHUNK,
    Bucket,
    GradientMemory,
    Gradients,
    Sharding,
    Trained,
    gradient_dtype,
    is_sendable,
    joined,
    with_own_storage,
    write_master,
    zeros_on,
)
from zerofp4.engine.exchange import (
    ABSTAIN,
    UPDATE_DTYPES,
    Abstain,
    Arrived,
    BucketExchange,
    CollectiveExchange,
    check_gradients,
    collective_exchanges,
    in_place,
)
from zerofp4.engine.hosts import hosts_exchanges
from zerofp4.engine.late_gather import LateGathers
from zerofp4.engine.offload import Offload, OffloadedExchange, OffloadedPlan, find_threads
from zerofp4.engine.overlap import BackwardSchedule, SumSchedule, UpdateSchedule
from zerofp4.engine.peers import Peers, find_hosts, find_peers, host_name, peer_exchanges
from zerofp4.engine.step import Step, Update
