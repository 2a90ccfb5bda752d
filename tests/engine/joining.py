"""A rank that joins its job, seen from DeepSpeed."""

import deepspeed
import torch.distributed as dist

from weft.engine.distributed import init_distributed


def what_deepspeed_finds() -> tuple[bool, bool]:
    """True if the group is there before DeepSpeed is asked for one, and whether a device is bound to it."""
    found = []
    join = deepspeed.init_distributed

    def noting(*args: object, **settings: object) -> None:
        found.append(dist.is_initialized())
        join(*args, **settings)

    deepspeed.init_distributed = noting
    init_distributed(30.0)
    init_distributed(30.0)
    assert dist.group.WORLD is not None and found[0] == found[1]
    return found[0], dist.group.WORLD.bound_device_id is not None
