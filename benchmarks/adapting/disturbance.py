"""Emulated ranks and links that become slow, and the settings of runs that adapt to them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from math import exp
from random import Random
from time import perf_counter

from benchmarks.peers.layout import Layout
from weft.conf.schema import WeftConfig
from weft.engine.engine import WeftEngine

SITES = (2, 2)
SPEED, LINK_SHARE = 0.7, 3.0
"""A slow rank's speed over that of the others, and the factor by which a slow link's rate is divided."""
SLOW_RANK = 1


@contextmanager
def real_time() -> Iterator[None]:
    """Run this thread, and threads and processes that it starts, before other programs, if the host permits it.

    Ranks that compute on processors of their own would not be delayed by other programs either.
    """
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def adaptive_config(
    layout: Layout, cache_dir: str, args: argparse.Namespace, *, cap_bytes: int, adapt_steps: int
) -> WeftConfig:
    """Return the configuration of a run that adapts after ``adapt_steps`` steps that deviate."""
    config = layout.config(cache_dir, timeout_s=args.timeout)
    config.pipeline.adapt, config.pipeline.adapt_steps = True, adapt_steps
    config.pipeline.search_seconds = args.search
    config.pipeline.memory_cap_bytes = cap_bytes
    return config


def set_jitter(engine: WeftEngine, jitter: float, seed: int) -> None:
    """Make the durations of this rank's layers log-normal with deviation ``jitter``, drawn from ``seed`` from now on.

    The n-th forward, input or weight gradient of a layer draws the same number in every schedule.
    """

    def factor(numbers: Mapping[str, Random], op: str) -> float:
        return exp(jitter * numbers[op].gauss())

    for index, stage in engine.module.stages.items():
        numbers = {op: Random(f"{seed} {index} {op}") for op in "FIW"}
        for layer in stage.layers:
            layer.factor = partial(factor, numbers)


def timed_step(engine: WeftEngine) -> float:
    """Return the seconds of a step."""
    start = perf_counter()
    engine.train_batch()
    return perf_counter() - start
