"""Every rewrite gives the bits of torch's own collective, whatever the mesh, the chunks, the size and the dtype."""

import pytest

from tests.comm.collectives.equal import hold_against_torch
from weft.tools.ranks import run_ranks


@pytest.mark.slow
def test_rewrites_equal_torchs_collectives():
    assert run_ranks(8, hold_against_torch, 120, timeout_s=100) == [[]] * 8
