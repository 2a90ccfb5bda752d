"""Values of any size reach every rank, whole and in order."""

import pytest
import torch.distributed as dist

from weft.comm.exchange import _FIRST_BYTES, broadcast, gather
from weft.engine.distributed import init_distributed
from weft.tools.ranks import run_ranks

SIZES = (0, 1, _FIRST_BYTES - 3, _FIRST_BYTES - 2, _FIRST_BYTES - 1, _FIRST_BYTES, 3 * _FIRST_BYTES, 1 << 20)
"""Characters of a text; two quotes go with it."""


def tell() -> list[str]:
    """Return the values that arrived changed: all sizes from one rank, and one of each rank."""
    init_distributed(60.0)
    me, wrong = dist.get_rank(), []
    for size in SIZES:
        for teller in range(dist.get_world_size()):
            said = "x" * size if me == teller else f"rank {me}"
            wanted = ["x" * size if rank == teller else f"rank {rank}" for rank in range(dist.get_world_size())]
            if gather(said) != wanted:
                wrong.append(f"gather of {size} from {teller}")
            if broadcast("x" * size if me == teller else None, src=teller) != "x" * size:
                wrong.append(f"broadcast of {size} from {teller}")
    return wrong


@pytest.mark.slow
def test_values_of_any_size_arrive():
    assert run_ranks(3, tell) == [[], [], []]
