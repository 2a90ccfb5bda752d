"""`weft evaluate`: scores held-out data with each checkpoint of a run, by the run's prefill workers.

`weft serve` starts it if ``inference.evaluate.enabled``. The run trains on meanwhile, and logs the results.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from weft.conf import load
from weft.recipes.serving.checks import check_evaluate

POLL_S = 1.0
"""Seconds between looks for a new checkpoint."""


def main(argv: Sequence[str]) -> int:
    """Run ``[recipe=NAME] [key=value ...]`` until a signal ends it. Raise ValueError if the input is invalid."""
    parser = argparse.ArgumentParser(
        prog="weft evaluate",
        usage="weft evaluate [recipe=NAME] [key=value ...]",
        description="Score held-out data with each checkpoint of a run, by the prefill workers of `weft serve`. Pass "
        "the same settings. `weft serve` starts it itself.",
    )
    _, overrides = parser.parse_known_args(argv)
    config = load(overrides)
    check_evaluate(config)
    from weft.recipes.serving.evaluator import Evaluator  # imports torch

    evaluator = Evaluator(config)
    while True:
        evaluator.check()
        time.sleep(POLL_S)
