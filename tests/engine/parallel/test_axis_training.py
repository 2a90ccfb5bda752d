"""Losses do not depend on how the work of layers is shared out."""

from functools import cache

import pytest

from tests.engine.parallel.axis_training import axis_config
from tests.engine.tiny import many_losses, reference_losses
from weft.tools.ranks import run_ranks

STEPS = 5
# Keywords of axis_config, and the replicas that four ranks make.
CASES = [
    (2, {"context": 2, "microbatches": 2}),
    (1, {"context": 2, "stages": 2}),
    (1, {"context": 2, "stages": 2, "zero": 1, "schedule": "auto", "checkpointing": True}),
    (2, {"context": 2, "zero": 3, "microbatches": 2}),
    (4, {"arch": "mixtral", "expert": 2, "microbatches": 1}),
    (4, {"arch": "mixtral", "expert": 4, "zero": 3, "microbatches": 1}),
    (2, {"arch": "mixtral", "expert": 2, "stages": 2, "zero": 1, "microbatches": 2}),
    (2, {"arch": "mixtral", "expert": 2, "context": 2, "zero": 2, "microbatches": 2}),
]


@cache
def _expected(arch: str) -> list[float]:
    """Of plain Hugging Face; where routers balance, of Weft on one rank: it weighs their loss by labels."""
    if arch == "mixtral":
        return run_ranks(1, many_losses, [axis_config(arch)], STEPS)[0][0]
    return run_ranks(1, reference_losses, axis_config(arch), 1, STEPS)[0]


@pytest.mark.slow
def test_losses_are_those_of_one_process():
    configs = [axis_config(**case) for _, case in CASES]
    for found in run_ranks(4, many_losses, configs, STEPS, timeout_s=400):
        for (_, case), losses in zip(CASES, found, strict=True):
            assert losses == pytest.approx(_expected(case.get("arch", "llama")), rel=1e-5), case
