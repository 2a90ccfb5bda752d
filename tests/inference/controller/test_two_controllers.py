"""Two controllers, each a process of its own, in front of the same worker: what they accept together, and when one is
killed."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

from weft.conf.host.processes import free_port

KEY = "the key of this test"
DEADLINE_S = 4.0
PROMPT = {"prompt": [1] * 200, "max_tokens": 1}
COMPUTING_S = 0.4
AT_ONCE = 2
TAKE_OVER_S = 8.0
"""In which what a killed controller had accepted counts no longer: `inference.controller.probe_s`, on a busy host."""


@contextlib.contextmanager
def servers(folder):
    """The processes of two controllers, their ports, and their worker's URL."""
    worker, *ports = (free_port() for _ in range(3))
    clients = folder / "clients.yaml"
    clients.write_text(f"alice: {{key: alice, at_once: {AT_ONCE}}}\n")
    clients.chmod(0o600)
    board = folder / "boards" / "rank0.board"
    settings = [
        f"inference.controller.workers=[{{url: http://127.0.0.1:{worker}, boards: [{board}]}}]",
        f"inference.controller.deadline_s={DEADLINE_S}",
        f"inference.controller.clients={clients}",
        "inference.controller.max_queue=500",
    ]
    env = os.environ | {"WEFT_API_KEY": KEY, "VLLM_API_KEY": KEY}
    script = Path(__file__).with_name("site_worker.py")
    commands = [[sys.executable, script, str(worker), str(COMPUTING_S), board.parent]]
    commands += [[WEFT, "controller", f"inference.controller.port={port}", *settings] for port in ports]
    processes = [subprocess.Popen(words, env=env) for words in commands]
    try:
        yield processes[1:], ports, f"http://127.0.0.1:{worker}"
    finally:
        for process in processes:
            process.kill()
            process.wait()


WEFT = Path(sys.executable).with_name("weft")


class Client:
    """A client of two controllers, and the seconds until each answer with status 200."""

    def __init__(self, ports, key):
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.http = httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=60, trust_env=False)
        self.took_s, self.refused = [], []

    async def send(self, number, path="/v1/completions"):
        """Send a prompt once; its status."""
        begun_s = time.monotonic()
        answer = await self.http.post(self.urls[number % 2] + path, json=PROMPT)
        if answer.status_code == 200:
            self.took_s.append(time.monotonic() - begun_s)
        else:
            assert answer.headers["retry-after"]
            self.refused.append(answer.status_code)
        return answer.status_code

    async def send_until_answered(self, number):
        """Send a prompt until it is answered: to the other controller if the connection breaks."""
        while True:
            with contextlib.suppress(httpx.TransportError):
                if await self.send(number) == 200:
                    return
                number -= 1
                await asyncio.sleep(0.1)
            number += 1

    async def until_ready(self):
        async with asyncio.timeout(60):
            for url in self.urls:
                while True:
                    with contextlib.suppress(httpx.TransportError):
                        if (await self.http.get(f"{url}/ready")).status_code == 200:
                            break
                    await asyncio.sleep(0.1)


async def exercise(processes, ports, worker):
    everyone, alice = Client(ports, KEY), Client(ports, "alice")
    await everyone.until_ready()

    async def most_at_once():
        return (await everyone.http.get(f"{worker}/metrics")).json()["running"]

    async def accepted(numbers):
        await asyncio.gather(*map(everyone.send, numbers))
        return await most_at_once()

    one, both = [0] * 30, range(30)
    await accepted(both)  # to measure the worker's speed, which changes with the host's load
    by_one, by_both, by_one_later, by_both_later, by_one_last = [
        await accepted(each) for each in (one, both) * 2 + (one,)
    ]
    assert set(everyone.refused) == {503} and by_one >= 3
    assert max(by_both, by_both_later) <= 1.5 * max(by_one, by_one_later, by_one_last), "as by the deadline of one"
    await most_at_once()
    await asyncio.gather(*(alice.send(number) for number in range(8 * AT_ONCE)))
    assert await most_at_once() <= AT_ONCE and set(alice.refused) == {429}, "limits hold for both together"
    alice.took_s.clear()
    # Her requests are at the first controller when it is killed.
    sending = [asyncio.create_task(alice.send_until_answered(0)) for _ in range(AT_ONCE)]
    await asyncio.sleep(0.1)
    processes[0].kill()
    begun_s = time.monotonic()
    while await alice.send(1) != 200:
        await asyncio.sleep(0.05)
    assert time.monotonic() - begun_s <= TAKE_OVER_S + (AT_ONCE + 1) * COMPUTING_S
    await asyncio.gather(*sending)
    assert len(alice.took_s) == AT_ONCE + 1, "each request is answered once"


def test_two_controllers_accept_what_one_would_and_one_takes_over_when_the_other_is_killed(tmp_path):
    with servers(tmp_path) as parts:
        asyncio.run(exercise(*parts))
