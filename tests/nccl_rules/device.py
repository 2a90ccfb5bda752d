"""The emulated device of one rank: streams that run operations in launch order, and what its host has waited for."""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

POLL_S = 0.002
QUIET = (
    *(f"nccl_rules/{name}.py" for name in ("device", "group", "host")),
    *("/torch/", "/deepspeed/", "contextlib.py", "comm/sums.py"),
)
"""Places that are not the caller whom a report should name."""


class StuckError(RuntimeError):
    """A rank waits for what will not come; says where every rank stands."""


class Device:
    """The work launched on one rank's device, and the waits of its host.

    Compute runs on the calling thread, which therefore stands for the compute stream: a `Work.wait()`
    that on a GPU lets that stream wait does block here, and is not counted. What blocks the host of a
    GPU is counted in ``host_waits``, by place.
    """

    def __init__(self, rank: int, store: dist.Store, job: dist.Store, limit_s: float) -> None:
        """Give up with `StuckError` what waits longer than ``limit_s``.

        Args:
            rank: its number.
            store: of this attempt.
            job: store of all attempts.
            limit_s: seconds.
        """
        self.rank = rank
        self.host_waits: Counter[str] = Counter()
        self.leave: Callable[[], None] = lambda: None
        """Ends the rules of this attempt, on the thread that has joined."""
        self._store, self._job, self._limit_s = store, job, limit_s
        self._running: dict[Operation, None] = {}
        stacks = os.memfd_create("stacks")
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        job.set(f"stacks/{rank}", f"{os.getpid()} /proc/{os.getpid()}/fd/{stacks} {os.readlink('/proc/self/fd/2')}")

    def launch(self, stream: Stream, what: str, run: Callable[[], Any]) -> Operation:
        """Queue ``run`` on ``stream``, behind what was launched there before."""
        operation = Operation(self, what)
        self._running[operation] = None
        stream.put(operation, run)
        return operation

    def ended(self, operation: Operation) -> None:
        """The operation holds the device no longer."""
        self._running.pop(operation, None)

    def record_event(self) -> Event:
        """Return an event behind all that the device was given."""
        return Event(list(self._running))

    def forget(self) -> None:
        """Go on as if what is stuck had never been launched, and nothing counted."""
        self._running.clear()
        self.host_waits.clear()

    def waits(self, why: str) -> None:
        """The host of a GPU would wait here."""
        self.host_waits[f"{why} at {place()}"] += 1

    def synchronise(self, why: str) -> None:
        """The host waits until everything that was launched has ended, as behind spinning kernels it must."""
        self.waits(why)
        for operation in list(self._running):
            if not operation.over.wait(self._limit_s):
                self._give_up(f"{why} behind {operation.what}")

    def await_(self, operation: Operation) -> None:
        """Wait until ``operation`` has ended; errors as of `hold`."""
        if not operation.over.wait(self._limit_s):
            self._give_up(operation.what)

    def hold(self, ended: Callable[[], bool], what: str) -> None:
        """Wait until ``ended``.

        Raises:
            StuckError: it takes longer than the limit.
        """
        limit = monotonic() + self._limit_s
        while not ended():
            if monotonic() > limit:
                self._give_up(what)
            sleep(POLL_S)

    def _give_up(self, what: str) -> None:
        mine = f"rank {self.rank} waits for {what}, called from {place()}"
        self._store.set(f"stuck/{self.rank}", mine)
        sleep(1.0)  # other ranks that are stuck give up at about the same time
        every = [mine]
        for rank in range(dist.get_world_size()):
            if rank != self.rank and self._store.check([f"stuck/{rank}"]):
                every.append(self._store.get(f"stuck/{rank}").decode())
        raise StuckError("\n".join([*sorted(every), *map(self._stacks_of, range(dist.get_world_size()))]))

    def _stacks_of(self, rank: int) -> str:
        """Return where all threads of a rank are, and what it has printed."""
        pid, stacks, output = self._job.get(f"stacks/{rank}").decode().split(" ")
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGUSR1)
            sleep(0.5)
        texts = (Path(file).read_text() for file in (stacks, output) if Path(file).is_file())
        return "\n".join([f"rank {rank}, process {pid}:", *texts])


class Event:
    """See `torch.cuda.Event`."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations

    def query(self) -> bool:
        """Return True if all that was launched before has ended."""
        return all(operation.has_ended() for operation in self._operations)


class Operation(dist.Work):
    """Something that was launched; see `torch.distributed.Work`."""

    def __init__(self, device: Device, what: str) -> None:
        super().__init__()
        self.what = what
        self._device, self.over = device, threading.Event()
        self._error: BaseException | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Let the compute stream wait; with a time-out, ProcessGroupNCCL blocks the host."""
        if timeout is not None:
            self._device.waits("wait(timeout)")
        self._device.await_(self)
        if self._error is not None:
            raise self._error
        return True

    def has_ended(self) -> bool:
        """True if it is over."""
        return self.over.is_set()

    is_completed = has_ended

    def is_success(self) -> bool:
        """True if it is over and went well."""
        return self.over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def finish(self, error: BaseException | None) -> None:
        """Called by the stream."""
        self._error = error
        self._device.ended(self)
        self.over.set()

    def get_future(self) -> torch.futures.Future:
        """Completed at once: only the sequence of launches is asked for it."""
        future: torch.futures.Future = torch.futures.Future()
        self.wait()
        future.set_result([])
        return future


class Stream:
    """A communicator's stream: a thread that runs operations one after the other.

    A kernel that waits for a rank that has died spins until its communicator is aborted, and says nothing then.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue = queue.SimpleQueue()
        self._aborted = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, operation: Operation, run: Callable[[], Any]) -> None:
        self._work.put((operation, run))

    def close(self) -> None:
        """End the thread when what is queued has ended."""
        self._work.put(None)

    def abort(self) -> None:
        """End what is queued and what waits for a peer that has died; who waits for it goes on, with garbage."""
        self._aborted.set()
        self.close()

    def _run(self) -> None:
        while (found := self._work.get()) is not None:
            operation, run = found
            try:
                if not self._aborted.is_set():
                    run()
                operation.finish(None)
            except BaseException as error:
                if lost := "gloo/transport" in str(error):
                    self._aborted.wait()
                operation.finish(None if lost else error)
            del found, operation, run  # a tensor must not live on in an idle stream


def place(depth: int = 4) -> str:
    """Who called: the innermost frames that are neither torch's, DeepSpeed's nor the rules' own."""
    names, frame = list[str](), sys._getframe(1)
    while frame is not None and len(names) < depth:  # `traceback.extract_stack` would read the sources
        code = frame.f_code
        if not any(part in code.co_filename for part in QUIET):
            names.append(f"{'/'.join(code.co_filename.split('/')[-2:])}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(names)
