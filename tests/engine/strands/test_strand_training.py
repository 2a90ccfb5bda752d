"""The engine on ranks of their own: steps whose strand pairs are interleaved are those of halves, bit by bit."""

import pytest

from tests.engine.parallel.axis_training import pair_config
from tests.engine.strands.strand_training import trained
from weft.tools.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 2
FOUR = {
    "tensor 2, dropout, recomputed": {"tensor": 2, "stages": 2, "dropout": 0.2, "checkpointing": True},
    "context 2": {"context": 2, "stages": 2},
    "context 2, ZeRO-1, recomputed": {"context": 2, "stages": 2, "zero": 1, "checkpointing": True},
    "context 2, ZeRO-3, dropout": {"context": 2, "stages": 2, "zero": 3, "dropout": 0.2},
    "tensor 2, between sites": {"tensor": 2, "stages": 2, "sites": (1, 1)},
    "context 2, between sites, recomputed": {"context": 2, "stages": 2, "sites": (1, 1), "checkpointing": True},
    "expert 2, ZeRO-1": {"arch": "mixtral", "expert": 2, "stages": 2, "zero": 1},
    "expert 2, recomputed": {"arch": "mixtral", "expert": 2, "stages": 2, "checkpointing": True},
}
"""Keywords of `pair_config`."""


def require_equal(world, cases, folder):
    configs = [pair_config(pairs, str(folder), **case) for case in cases.values() for pairs in ("never", "always")]
    for rank, runs in enumerate(run_ranks(world, trained, configs, STEPS, timeout_s=800)):
        for name, alone, together in zip(cases, runs[::2], runs[1::2], strict=True):
            assert alone["steps"] == together["steps"], (name, rank)
            assert alone["weights"] == together["weights"], (name, rank)
            assert not alone["handovers"] and not alone["strand threads"] and not together["strand threads"]
            assert min(together["handovers"]) >= 3, f"{name}: strands did not switch inside of layers"
            assert together["plans"], f"{name}: nothing was planned"


def test_four_ranks(tmp_path):
    require_equal(4, FOUR, tmp_path)


def test_a_fold_of_four_stages_on_eight_ranks(tmp_path):
    require_equal(8, {"tensor 2 x stages 4": {"tensor": 2, "stages": 4, "layers": 8, "microbatches": 8}}, tmp_path)
