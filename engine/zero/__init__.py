"""ZeRO: gradients, optimiser state and weights sharded over the replicas of a pipeline."""

from weft.engine.zero.bf16_adamw import Bf16AdamW
from weft.engine.zero.bucket import Bucket
from weft.engine.zero.collectives import Collectives
from weft.engine.zero.comparison import Comparison, ReplicasDiffer
from weft.engine.zero.finite import REMEDY, NonFiniteError
from weft.engine.zero.lamb import Lamb
from weft.engine.zero.members import Fragment
from weft.engine.zero.optimizer import ShardedOptimizer
from weft.engine.zero.sharding import Sharding
from weft.engine.zero.skipping import SkippedTooOften, Skips

__all__ = [
    "REMEDY",
    "Bf16AdamW",
    "Bucket",
    "Collectives",
    "Comparison",
    "Fragment",
    "Lamb",
    "NonFiniteError",
    "ReplicasDiffer",
    "ShardedOptimizer",
    "Sharding",
    "SkippedTooOften",
    "Skips",
]
