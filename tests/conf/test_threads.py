"""Threads of ranks work on their rank's GPU, because one module starts them."""

import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.conf.host.threads import Thread, executor

ROOT = Path(__file__).parents[2]
WITHOUT_A_GPU = {
    "engine/supervision/agent/reports.py",
    "engine/supervision/driver/files.py",
    "engine/parallel/in_process.py",
    "inference/worker/gate.py",
}
"""Files whose threads run in processes without a GPU, or with vLLM's."""


@pytest.fixture
def devices(monkeypatch):
    """The current GPU of each thread, by a stand-in for torch.cuda."""
    current = threading.local()
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: getattr(current, "device", 0),
        set_device=lambda device: setattr(current, "device", device),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return cuda


def test_a_thread_has_the_device_of_the_thread_that_starts_it(devices):
    found = []
    thread = Thread(lambda: found.append(devices.current_device()), name="some")
    devices.set_device(3)
    thread.start()
    thread.join()
    assert found == [3] and thread.daemon


def test_an_executor_has_the_device_of_the_thread_that_makes_it(devices):
    devices.set_device(2)
    made = executor("some")
    devices.set_device(5)
    assert made.submit(devices.current_device).result() == 2
    made.shutdown()


def test_ranks_start_threads_by_one_module():
    starts = re.compile(r"\bthreading\.Thread\(|\bThreadPoolExecutor\(")
    files = [file for folder in ("comm", "engine", "inference") for file in (ROOT / folder).rglob("*.py")]
    found = {str(file.relative_to(ROOT)) for file in files if starts.search(file.read_text())}
    assert found <= WITHOUT_A_GPU, "start a rank's threads with weft.conf.host.threads"
