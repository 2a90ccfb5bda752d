"""The job's group is made without a device bound to it, which DeepSpeed would bind on GPUs."""

import pytest

from tests.engine.joining import what_deepspeed_finds
from weft.tools.ranks import run_ranks


@pytest.mark.slow
def test_the_group_is_there_before_deepspeed_comes():
    assert run_ranks(1, what_deepspeed_finds) == [(True, False)]
