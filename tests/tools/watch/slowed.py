"""A training run with emulated compute, of which one rank is slower from a step on."""

import os
from pathlib import Path
from time import perf_counter, sleep

from tests.quickstart import train
from weft.engine.engine import WeftEngine
from weft.engine.execution.compute import Compute

WORK_S = 0.03
"""Seconds of a forward, and of a backward."""


def train_slowed(settings: list[str], folder: Path, victim: int, factor: float, first_step: int) -> None:
    """Train on this rank. From ``first_step`` on, computations of rank ``victim`` take ``factor`` times as long."""
    step, rank = 0, int(os.environ["RANK"])

    def lasting(compute):
        def work(*arguments):
            start = perf_counter()
            slow = factor if rank == victim and step >= first_step else 1.0
            compute(*arguments)
            sleep(max(0.0, WORK_S * slow - (perf_counter() - start)))

        return work

    batch = WeftEngine.train_batch

    def counted(engine, *arguments):
        nonlocal step
        step += 1
        return batch(engine, *arguments)

    Compute.forward, Compute.backward = lasting(Compute.forward), lasting(Compute.backward)
    WeftEngine.train_batch = counted
    train(settings, folder)
