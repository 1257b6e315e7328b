"""A step of many ranks: what lies in which bucket, how gradients travel, and what is done while what travels.

Parameters of one kind that are neighbours make a bucket, sharded over all ranks: so its gradients are one
exchange, its weights one gather in place, and a step works on one bucket while the ranks exchange another.
"""

from zerofp4.engine.arrivals import Arrivals
from zerofp4.engine.buckets import Updated, build_buffers
from zerofp4.engine.description import describe_buckets
from zerofp4.engine.early import EarlyReducer
from zerofp4.engine.early_peer import EarlyPeerReducer
from zerofp4.engine.exchange import GradientReducer
from zerofp4.engine.flat import ALIGNMENT, DenseBuffer, FlatBuffer, PackedBuffer, Sharding
from zerofp4.engine.gradients import FlatGradients, GradientViews
from zerofp4.engine.host_reducer import HostReducer, Hosts, join_host
from zerofp4.engine.local_reducer import LocalReducer
from zerofp4.engine.peer_reducer import PeerReducer
from zerofp4.engine.peers import TRANSPORTS, Peers, join_peers
from zerofp4.engine.places import GradientPlaces, are_sendable, is_sendable
from zerofp4.engine.publication import Publication
from zerofp4.engine.stretches import Brought
from zerofp4.engine.wire import Wire, check_gradient_dtype, gradient_dtype, make_wire, set_gradient_dtype

__all__ = [
    "ALIGNMENT",
    "TRANSPORTS",
    "Arrivals",
    "Brought",
    "DenseBuffer",
    "EarlyPeerReducer",
    "EarlyReducer",
    "FlatBuffer",
    "FlatGradients",
    "GradientPlaces",
    "GradientReducer",
    "GradientViews",
    "HostReducer",
    "Hosts",
    "LocalReducer",
    "PackedBuffer",
    "PeerReducer",
    "Peers",
    "Publication",
    "Sharding",
    "Updated",
    "Wire",
    "are_sendable",
    "build_buffers",
    "check_gradient_dtype",
    "describe_buckets",
    "gradient_dtype",
    "is_sendable",
    "join_host",
    "join_peers",
    "make_wire",
    "set_gradient_dtype",
]
