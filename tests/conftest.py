"""Settings of every test: one thread per process, no network, no survivors, its own home, the same examples."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import inspect
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import psutil
import pytest

gc.disable()  # until all tests are collected: each search for garbage would look through what is there so far
COROUTINE_LIMIT_S = 120.0
THREAD_LIMIT_S = 10.0
KILLED_S = 10.0
NUM_GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))

# What runs of this user have measured (~/.cache/weft) decides no test; compiled code and models may be shared.
os.environ.setdefault("XDG_CACHE_HOME", str(Path("~/.cache").expanduser()))
os.environ["HOME"] = tempfile.mkdtemp(prefix="weft-tests-")
atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)
for name in ("COLUMNS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # of the user's own job
    os.environ.pop(name, None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WEFT_KEY", "a key for tests, long enough")
os.environ.setdefault("WEFT_FLOAT8_ON_CPU", "1")
if not NUM_GPUS:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


if find_spec("hypothesis"):  # a Python that has a GPU or vLLM, whose tests do without, may lack it
    from hypothesis import HealthCheck, settings

    # The same examples every time, however long one takes; `--hypothesis-profile default` looks for new ones.
    settings.register_profile("weft", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("weft")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that gives this process an emulated GPU; see docs/device.md."""
    parser.addoption("--device", choices=("emulated",), help="the GPU of tests marked `gpu`, if not a real one")


def pytest_configure(config: pytest.Config) -> None:
    """Install the emulated GPU before a test module imports torch."""
    global NUM_GPUS
    if config.getoption("--device"):
        from tests.device import cuda, instrument

        if os.environ.get(instrument.FOLDER):
            instrument.install()
        if cuda.native is None:  # otherwise every Python of this environment has it
            cuda.install(1)
            from tests.device import group

            group.register()
        NUM_GPUS = 1


def pytest_unconfigure(config: pytest.Config) -> None:
    """Write which lines have run on the emulated GPU."""
    if config.getoption("--device"):
        from tests.device import instrument

        instrument.save()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need more GPUs than there are, with a reason that the summary shows."""
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = marker.kwargs.get("count", 1) if marker else 0
        if needed > NUM_GPUS:
            item.add_marker(pytest.mark.skip(reason=f"needs {_gpus(needed)}; this machine has {NUM_GPUS or 'none'}"))


def pytest_collection_finish() -> None:
    """Freeze the imported and collected objects: no garbage collection examines them."""
    gc.freeze()
    gc.enable()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine to its end, within a hard limit."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), COROUTINE_LIMIT_S))
    return True


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Before GPU tests: what each would show, and what it needs."""
    if "gpu" not in config.option.markexpr or "not gpu" in config.option.markexpr:
        return []
    shown = {
        (marker.kwargs.get("count", 1), item.location[0], marker.kwargs["shows"]): None
        for item in items
        if (marker := item.get_closest_marker("gpu"))
    }
    lines = [f"{_gpus(needed):7s} {path}: {shows}" for needed, path, shows in sorted(shown)]
    return [f"what GPU tests show; this machine has {_gpus(NUM_GPUS) if NUM_GPUS else 'no GPU'}:", *lines]


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what a test says it has measured count as measured on a quiet machine, so that nothing measures it anew."""
    monkeypatch.setattr("weft.conf.host.measurements._load", lambda: 0.0)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Make this process the only rank of a job while a module's tests run."""
    from weft.engine.distributed import init_distributed

    with mock.patch.dict(os.environ):
        init_distributed(timeout_s=60)
        yield
        sys.modules["torch.distributed"].destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def _no_rank_left() -> Iterator[None]:
    """Fail a module that leaves this process a rank: a group, or the variable by which other libraries make one."""
    yield
    group, left = sys.modules.get("torch.distributed"), []
    if os.environ.pop("RANK", None):
        left.append("RANK")
    if group and group.is_initialized():
        group.destroy_process_group()
        left.append("a process group")
    assert not left


@pytest.fixture(autouse=True, scope="module")
def _no_thread_left() -> Iterator[None]:
    """Fail a module that leaves a waker or scorer running, which would use what tests of other modules replace."""
    before = set(threading.enumerate())
    yield
    limit = time.monotonic() + THREAD_LIMIT_S
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith(("weft-waker", "weft-scorer")):
            thread.join(max(0.0, limit - time.monotonic()))
            assert not thread.is_alive(), f"{thread.name} is left"


@pytest.fixture(autouse=True)
def _no_fault_of_the_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test on the emulated GPU if kernels failed, or if there was a race or a context on another device."""
    yield
    if request.config.getoption("--device"):
        from tests.device import cuda

        faults = {kind: dict(found) for kind in ("races", "contexts", "errors") if (found := cuda.observed(kind))}
        cuda.forget()
        assert not faults


@pytest.fixture(autouse=True, scope="module")
def _no_process_left() -> Iterator[None]:
    """Kill what a module's tests started and left running, such as ranks of a failed test."""
    before = set(_descendants())
    yield
    left = set(_descendants()) - before
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=KILLED_S)  # who holds one, as `run_on_devices` does, sees that it has ended


def _descendants() -> Iterator[psutil.Process]:
    """Processes below this one, less multiprocessing's own servers, which live as long as it."""
    me = psutil.Process()
    for child in me.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            serves = child.ppid() == me.pid and any("from multiprocessing." in part for part in child.cmdline())
            if not serves:
                yield child
