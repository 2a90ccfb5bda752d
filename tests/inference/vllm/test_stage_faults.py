"""Faults of a worker of two stages while prompts arrive: each prompt is answered, or is to be sent again."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.inference.vllm.test_handover import BEARER, KEY, controller, stage_process, until_ready
from tests.inference.vllm.test_recipe import WEFT
from weft.conf.schema import WeftConfig

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(4800),
    pytest.mark.skipif(not WEFT.exists(), reason=f"needs {WEFT}: make test-vllm"),
]

CONTROLLER, WORKER = 18950, 18951
CLIENTS, PROMPTS = 6, 12
AGAIN_S = 1200.0
"""Seconds in which a worker is restarted and answers again."""


class Clients:
    """Clients that send prompts without end, and what they got: status, and the first token by prompt."""

    def __init__(self):
        draw = random.Random(3)
        self.prompts = [[draw.randrange(256) for _ in range(draw.randint(5, 1200))] for _ in range(PROMPTS)]
        self.statuses, self.tokens = [], [set() for _ in self.prompts]

    async def send(self, first):
        url = f"http://127.0.0.1:{CONTROLLER}/v1/completions"
        async with httpx.AsyncClient(timeout=AGAIN_S, headers={"Authorization": BEARER}) as client:
            number = first
            while True:
                body = {"prompt": self.prompts[number], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
                answer = await client.post(url, json=body)
                self.statuses.append(answer.status_code)
                if answer.status_code == 200:
                    self.tokens[number].add(answer.json()["choices"][0]["token_ids"][0])
                else:
                    assert answer.status_code in (429, 503), answer.text
                    await asyncio.sleep(int(answer.headers["retry-after"]))
                number = (number + 1) % PROMPTS

    async def until_served(self):
        """Wait until more prompts are answered than were on their way."""
        begun, deadline_s = self.statuses.count(200), time.monotonic() + AGAIN_S
        while self.statuses.count(200) < begun + 3 * CLIENTS:
            assert time.monotonic() < deadline_s, self.statuses[-20:]
            await asyncio.sleep(0.2)

    async def until_refused(self):
        begun, deadline_s = self.statuses.count(503), time.monotonic() + AGAIN_S
        while self.statuses.count(503) == begun:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.2)


@contextlib.contextmanager
def training(boards):
    words = [sys.executable, Path(__file__).with_name("opposite_trainers.py"), "0.2", *boards]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "up\n"
            yield
        finally:
            process.kill()


async def break_and_serve(clients, boards, log):
    """Send prompts while a stage is killed and one is stopped, a board is deleted, and training restarts."""
    async with asyncio.TaskGroup() as group:
        senders = [group.create_task(clients.send(number)) for number in range(CLIENTS)]
        with training(boards):
            await clients.until_served()
            for stage, number in ((1, signal.SIGKILL), (0, signal.SIGSTOP)):
                os.kill(stage_process(log, stage), number)
                await clients.until_refused()
                await clients.until_served()
            boards[1].unlink()
            await clients.until_served()
        await clients.until_refused()
        with training(boards):
            await clients.until_served()
        for sender in senders:
            sender.cancel()


def test_every_prompt_is_answered_or_to_be_sent_again_whatever_happens_to_a_stage(model, tmp_path):
    boards = [tmp_path / "boards" / f"rank{rank}.board" for rank in range(2)]
    settings = [
        "cluster.ranks=2",
        "pipeline.stages=2",
        f"inference.boards={tmp_path / 'boards'}",
        f"inference.prefill.model={model}",
        "inference.prefill.stages=2",
        "inference.prefill.max_tokens=2048",
        f"inference.prefill.first_port={WORKER}",
        f"inference.prefill.python={sys.executable}",
        f"inference.prefill.cost_dir={tmp_path}",
        "inference.prefill.yield_cores=false",
        "inference.prefill.arguments=[--dtype,float32]",
    ]
    config, clients, log = WeftConfig(), Clients(), tmp_path / "serve"
    config.cluster.ranks, config.inference.boards = 2, str(tmp_path / "boards")
    prefill, config.inference.controller.port = config.inference.prefill, CONTROLLER
    prefill.stages, prefill.first_port, prefill.max_tokens = 2, WORKER, 2048
    config.inference.controller.deadline_s = 60.0
    env = dict(os.environ, OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", DS_ACCELERATOR="cpu", WEFT_API_KEY=KEY)
    env.pop("PYTHONPATH", None)
    with log.open("wb") as out:
        serving = subprocess.Popen([str(WEFT), "serve", *settings], env=env, stdout=out, stderr=out)
    try:
        until_ready(WORKER, serving, log, patience_s=AGAIN_S)
        with controller(config):
            asyncio.run(break_and_serve(clients, boards, tmp_path / "boards" / "worker0.log"))
    finally:
        serving.terminate()
        serving.wait(120)
    assert all(len(tokens) == 1 for tokens in clients.tokens), "one prompt, one first token"
    assert log.read_text().count("again in") == 2, log.read_text()
