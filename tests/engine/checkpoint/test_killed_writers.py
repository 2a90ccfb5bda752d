"""A checkpoint is complete or absent when the process that writes it is killed."""

import itertools
import multiprocessing
import random
import time
from pathlib import Path

import pytest
import torch

from tests.engine.checkpoint.ranks_in_threads import check, save_step
from weft.engine.checkpoint import newest
from weft.engine.checkpoint.folder import candidates


def _save_for_ever(folder: str, first: int) -> None:
    torch.set_num_threads(1)
    for step in itertools.count(first):
        save_step(Path(folder), step, keep=2)


@pytest.mark.slow
def test_sigkill(tmp_path):
    """A process that is killed at random moments while it writes one checkpoint after the other."""
    rng = random.Random(0)
    save_step(tmp_path, 0)
    last = 0
    for _ in range(15):
        child = multiprocessing.get_context("forkserver").Process(
            target=_save_for_ever, args=(str(tmp_path), last + 1), daemon=True
        )
        child.start()
        deadline = time.monotonic() + 30
        while check_started(tmp_path, last) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.1))
        child.kill()
        child.join()
        path = newest(tmp_path)
        step = check(tmp_path, set(range(last, 10**6)))
        assert step > last, "the child wrote nothing"
        assert path is not None
        last = step
        assert len([p for p in candidates(tmp_path) if not p.name.endswith(".old")]) <= 3


def check_started(folder: Path, last: int) -> bool:
    return not any(int(path.name[5:13]) > last + 1 for path in candidates(folder))
