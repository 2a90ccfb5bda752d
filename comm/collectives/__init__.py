"""Partitioned collectives (Centauri): described as values, rewritten by primitive, group and workload.

Descriptions and costs need no torch; `weft.comm.collectives.communicator` executes them. A
reduce-scatter of a flat buffer over two nodes of two ranks:

    group = Group(ranks=(0, 1, 2, 3), nodes=(0, 0, 1, 1))
    collective = Collective.flat(Primitive.reduce_scatter, group, num_elements=4096, itemsize=4)
    choice = choose(collective, costs)                    # or plain(collective)
    print(choice.rewrite)                           # reduce_scatter intra 2, reduces inter 2 | 2 chunks

    communicator = Communicator.open([group], device=device, timeout_s=600)  # a collective call
    handle = communicator.start(choice.rewrite, gradients, shard)            # returns immediately
    ...                                             # compute
    handle.wait()                                   # shard holds this rank's sum

All-gather takes (shard, full), all-reduce (tensor, tensor). All ranks of the group start the
same rewrites in the same order. To average, scale before or after.
"""

from weft.comm.collectives.collective import Collective, Primitive
from weft.comm.collectives.costs import AlphaBeta, CollectiveCosts
from weft.comm.collectives.group import Group, LinkClass, Mesh
from weft.comm.collectives.rewrite import Rewrite, Step, plain
from weft.comm.collectives.space import Choice, choose

__all__ = [
    "AlphaBeta",
    "Choice",
    "Collective",
    "CollectiveCosts",
    "Group",
    "LinkClass",
    "Mesh",
    "Primitive",
    "Rewrite",
    "Step",
    "choose",
    "plain",
]
