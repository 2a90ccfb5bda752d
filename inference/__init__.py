"""Prefill serving in the training pipeline's bubbles: the functions that the core calls, imported at the first call."""

from __future__ import annotations

import argparse
from typing import Any


def observe_bubbles(*args: Any, **options: Any) -> Any:
    """See `weft.inference.board.observer.observe_bubbles`."""
    from weft.inference.board.observer import observe_bubbles

    return observe_bubbles(*args, **options)


def scorers(*args: Any) -> Any:
    """See `weft.inference.worker.command.scorers`."""
    from weft.inference.worker.command import scorers

    return scorers(*args)


def add_simulation_options(parser: argparse.ArgumentParser) -> None:
    """See `weft.inference.placement.simulation.add_options`."""
    from weft.inference.placement.simulation import add_options

    add_options(parser)


def simulate_prefills(*args: Any) -> None:
    """See `weft.inference.placement.simulation.report`."""
    from weft.inference.placement.simulation import report

    report(*args)
