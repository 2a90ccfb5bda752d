"""What every test needs: one thread per process, no network, and no process left behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WEFT_KEY", "a key for tests, long enough")
if not HAS_GPU:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU, with a reason that the summary shows."""
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True, scope="module")
def _no_process_left() -> Iterator[None]:
    """Kill what a module's tests started and left running, such as ranks of a failed test."""
    before = set(_descendants())
    yield
    for process in set(_descendants()) - before:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _descendants() -> Iterator[psutil.Process]:
    """Processes below this one, less multiprocessing's own servers, which live as long as it."""
    me = psutil.Process()
    for child in me.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            serves = child.ppid() == me.pid and any("from multiprocessing." in part for part in child.cmdline())
            if not serves:
                yield child
