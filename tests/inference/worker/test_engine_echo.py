"""When a decode server's health says that its engine is stopped, with processes in the engine's place."""

import asyncio
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.inference.worker.test_middleware import app_of
from weft.inference.worker import engine_echo
from weft.inference.worker.engine_echo import EngineEcho
from weft.inference.worker.vllm_middleware import KeyMiddleware

BUSY = "print(flush=True)\nwhile True: pass"
WAITING = "print(flush=True)\nimport time; time.sleep(3600)"


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
    for name, limit_s in (("BEAT_S", 0.1), ("STALE_S", 0.95), ("STUCK_S", 3.0)):
        monkeypatch.setattr(engine_echo, name, limit_s)


@pytest.fixture
def engine(request):
    """A process of this one."""
    with subprocess.Popen([sys.executable, "-c", request.param], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


async def problem_in_time(echo, call):
    while not (problem := echo.problem(call)):
        await asyncio.sleep(0.01)
    return problem


@pytest.mark.parametrize(
    ("engine", "problem"),
    [(BUSY, "the engine has not responded for 3 s"), (WAITING, "the engine has not run for 1 s")],
    indirect=["engine"],
)
async def test_an_engine_that_computes_has_longer_than_one_that_does_not_run(engine, problem):
    echo, calls, engine_returns = EngineEcho(), [], asyncio.Event()

    async def call():
        calls.append(True)
        await engine_returns.wait()

    assert await asyncio.wait_for(problem_in_time(echo, call), 20) == problem
    assert len(calls) == 1, "one call at a time"
    engine_returns.set()
    while echo.problem(call):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("engine", [BUSY], indirect=True)
async def test_the_health_of_a_decode_server_whose_engine_is_stopped_is_503(engine):
    """The engine returns calls while it runs."""

    async def is_paused():
        while b"T" in subprocess.check_output(["ps", "-o", "stat=", str(engine.pid)]):
            await asyncio.sleep(0.05)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    middleware = KeyMiddleware(app)
    application = app_of(engine_client=SimpleNamespace(is_paused=is_paused))
    scope = {"type": "http", "method": "GET", "path": "/health", "headers": [], "app": application}

    async def status():
        sent = []

        async def send(message):
            sent.append(message)

        await middleware(scope, None, send)
        return sent[0]["status"]

    async def until(expected):
        while await status() != expected:
            await asyncio.sleep(0.01)

    async with asyncio.timeout(20):
        for _ in range(20):
            assert await status() == 200
            await asyncio.sleep(0.05)
        os.kill(engine.pid, signal.SIGSTOP)
        await until(503)
        os.kill(engine.pid, signal.SIGCONT)
        await until(200)


async def test_an_engine_that_has_ended_is_left_to_vllms_health_check():
    async def call():
        raise RuntimeError("the engine is dead")

    echo = EngineEcho()
    for _ in range(3):
        assert not echo.problem(call)
        await asyncio.sleep(0.01)
