"""A process that has imported all modules, and forks ranks on request.

Importing torch, DeepSpeed and transformers takes seconds, whereas a fork takes milliseconds. The forkserver runs no
threads and uses no GPU, so that forking is safe. Every process ends with its parent: the forkserver with its agent, and
ranks with the forkserver.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from weft.conf.host.private import credentials_in
from weft.conf.host.processes import end_process, end_with_parent, freeze_imports
from weft.engine.supervision.messages import MOST_BYTES, AgentCommand, Fork, Forked, Imported, Signal, decode, encode

TARGET = "weft.recipes.train:run"
PRELOAD = ("torch", "deepspeed", "transformers", "weft.recipes.preloaded")


class EarlyAgent:
    """An agent that runs checks until it receives its command. It is a `Starter` of this host's first agent."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = PRELOAD) -> None:
        self._socket, theirs = socket.socketpair()
        self._has_command = False
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.agent", *modules],
                stdin=theirs.fileno(),
                start_new_session=True,
                env=environment,
            )

    def run(self, target: str, arguments: Sequence[str]) -> int:
        """Run a function in a fork of the forkserver, with this process's output, and return its exit code."""
        environment = credentials_in(os.environ)
        with self._socket.makefile("r") as answers:
            self._send(Fork(name=target, target=target, arguments=list(arguments), environment=environment))
            answer = answers.readline()
        return int(answer) if answer else 1  # the imports have failed, and have printed why

    def start(self, command: AgentCommand) -> subprocess.Popen[bytes]:
        """Send the agent its command, once. See `Starter`."""
        assert not self._has_command, "another agent is another process"
        self._send(command)
        self._has_command = True
        self._socket.close()
        return self.process

    def close(self) -> None:
        """End the agent, unless it has received its command."""
        if not self._has_command:
            self._socket.close()
            self.process.kill()
            self.process.wait()

    def _send(self, message: Fork | AgentCommand) -> None:
        try:
            self._socket.sendall(encode(message) + b"\n")
        except OSError as error:
            raise ValueError(
                f"the agent of this host has ended (exit code {self.process.wait()}); what it printed tells why"
            ) from error


def read_command(modules: Sequence[str]) -> tuple[AgentCommand | None, ForkServer | None]:
    """Return the command on standard input, and the forkserver that imports ``modules`` (None without modules).

    The command is None if the other end has closed.
    """
    if not modules:
        line = sys.stdin.readline()
        return (decode(line, AgentCommand) if line else None), None
    server = ForkServer(modules)
    with socket.socket(fileno=sys.stdin.fileno()) as driver, driver.makefile("r") as lines:
        for line in lines:
            message = decode(line, Fork | AgentCommand)  # type: ignore[arg-type]
            if isinstance(message, AgentCommand):
                driver.detach()
                return message, server
            code = server.run(message)
            if code is None:
                break
            driver.sendall(f"{code}\n".encode())
    server.close()
    return None, None


ENVIRONMENT = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Variables that keep imports from starting threads, as pyarrow's allocator does."""


def die_with(parent: int) -> None:
    """Make the kernel kill this process when ``parent`` ends, which must be its parent process."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before this call
        os.kill(os.getpid(), signal.SIGKILL)


class ForkServer:
    """The agent's handle of its forkserver process.

    Attributes:
        socket: carries one JSON message per packet.
        ready: True once the imports are done.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self.ready = False
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, str(os.getpid()), str(theirs.fileno()), *modules]
        with theirs:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**ENVIRONMENT, **os.environ},
            )

    def run(self, fork: Fork) -> int | None:
        """Run a function in a fork, with this process's output. Return its exit code, or None without a forkserver."""
        if not self.ready and self.receive() is None:
            return None
        socket.send_fds(self.socket, [encode(fork)], [1, 2])
        while (message := self.receive()) is not None:
            if isinstance(message, Forked) and message.code is not None:
                return message.code
        return None

    def receive(self) -> Imported | Forked | None:
        """Return the next message, or None if the forkserver has ended.

        Raises:
            BlockingIOError: the socket does not block, and there is no message.
        """
        try:
            data = self.socket.recv(MOST_BYTES)
        except BlockingIOError:
            raise
        except OSError:
            data = b""
        if not data:
            return None
        message: Imported | Forked = decode(data, Imported | Forked)  # type: ignore[arg-type]
        if isinstance(message, Imported):
            self.ready = True
            if len(message.threads) > 1:
                print(f"weft agent: imports have started threads: {message.threads}", file=sys.stderr, flush=True)
        return message

    def close(self) -> None:
        """End the forkserver and all processes that it has forked."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


def main(argv: Sequence[str]) -> int:
    """Run ``PARENT SOCKET MODULE ...``: import the modules, then fork on request until the socket closes."""
    parent, descriptor, *modules = argv
    die_with(int(parent))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.disable()  # a garbage collection would scan all modules imported so far
    for module in modules:
        import_module(module)
    # Collections in a rank then skip imported objects. Scanning them takes a quarter of a second, and copies memory
    # pages that all ranks share.
    freeze_imports()
    gc.enable()
    with socket.socket(fileno=int(descriptor)) as agent:
        threads = [Path("/proc/self/task", task, "comm").read_text().strip() for task in os.listdir("/proc/self/task")]
        agent.send(encode(Imported(threads=threads)))
        fork = _Children(agent).serve()
    return _become(fork) if fork else 0


class _Children:
    """Forks ranks and reports their ends."""

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._poll = select.poll()
        self._poll.register(agent, select.POLLIN)
        self._running: dict[int, tuple[str, int]] = {}  # by file descriptor of the process: its name and pid

    def serve(self) -> Fork | None:
        """Fork and reap processes. In a forked process, return its command. In this process, return None at the end."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor != self._agent.fileno():
                    self._reap(descriptor)
                    continue
                data, files, _, _ = socket.recv_fds(self._agent, MOST_BYTES, 2)
                if not data:
                    return None
                message: Fork | Signal = decode(data, Fork | Signal)  # type: ignore[arg-type]
                if isinstance(message, Signal):
                    self._send_signal(message)
                elif self._fork(message, files):
                    return message

    def _fork(self, fork: Fork, files: list[int]) -> bool:
        """Fork a process. Return True in the forked process, and False in this one."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with(parent)
            os.setsid()  # subprocesses of a rank are in its process group, and end with it
            for descriptor in self._running:
                os.close(descriptor)
            for target, descriptor in zip((1, 2), files, strict=True):
                os.dup2(descriptor, target)
                os.close(descriptor)
            return True
        for descriptor in files:
            os.close(descriptor)
        process = os.pidfd_open(pid)
        self._running[process] = (fork.name, pid)
        self._poll.register(process, select.POLLIN)
        self._agent.send(encode(Forked(name=fork.name, pid=pid)))
        return False

    def _reap(self, descriptor: int) -> None:
        name, pid = self._running.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # the number of the group is not reused until this rank is reaped
        _, status = os.waitpid(pid, 0)
        self._agent.send(encode(Forked(name=name, pid=pid, code=os.waitstatus_to_exitcode(status))))

    def _send_signal(self, signal: Signal) -> None:
        for known, pid in self._running.values():
            if known == signal.name:
                os.kill(pid, signal.number)


def _become(fork: Fork) -> NoReturn:
    """Run the function of ``fork`` with its environment and arguments, and exit."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    os.environ.update(fork.environment)
    sys.argv = [fork.target, *fork.arguments]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    module, _, function = fork.target.partition(":")
    end_process(_result_of(partial(getattr(import_module(module), function), fork.arguments)))


def _result_of(run: Callable[[], int]) -> int:
    try:
        return run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except Exception:
        sys.excepthook(*sys.exc_info())
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
