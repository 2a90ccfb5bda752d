"""One controller for workers of several sites, each host a network namespace: a site is cut off, and comes back."""

import asyncio
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import uvicorn

from weft.conf.schema import PrefillWorkerConfig, WeftConfig
from weft.inference.controller.server import app_of, server_config

netbed = pytest.importorskip("weft.tools.netbed", reason="needs the feature wan")
pytestmark = pytest.mark.skipif(bool(netbed.missing()), reason=f"weft netbed: {netbed.missing()}")

KEY = "the key of this test"
SITES = ("east", "west")
PORT, CONTROLLER = 8301, 8300
DEADLINE_S = 12.0
PREFILL = {"prompt": "one two", "kv_transfer_params": {"do_remote_decode": True}}
WHOLE = {"prompt": "one two", "max_tokens": 9}


def topology():
    nodes = tuple(netbed.Node(name=f"{site[0]}0", site=site, uplink_mbps=200) for site in ("hub", *SITES))
    pairs = (("hub", "east"), ("hub", "west"), ("east", "west"))
    return netbed.Topology(
        name=f"sites{os.getpid()}", nodes=nodes, links=tuple(netbed.Link(sites=p, latency_ms=10) for p in pairs)
    )


class Client:
    """A client of a controller, both in one node."""

    def __init__(self, bed, config, faults):
        self.bed, self.config, self.faults = bed, config, faults
        self.answers = []
        """Body, status, number of the worker that computed the prompt or None, and seconds until the answer."""

    async def send(self, client, body):
        begun_s = time.monotonic()
        answer = await client.post("/v1/completions", json=body)
        worker = answer.headers.get("x-weft-worker")
        self.answers.append((body, answer.status_code, worker, time.monotonic() - begun_s))
        if answer.status_code != 200:
            assert answer.status_code == 503 and answer.headers["retry-after"]

    async def send_all(self, client):
        await asyncio.gather(*(self.send(client, body) for body in [PREFILL, WHOLE] * 4))

    async def until_computed_by(self, client, workers):
        """Send prompts until each of these workers, and no other, computes them."""
        async with asyncio.timeout(60):
            while {worker for _, _, worker, _ in self.answers[-8:]} != workers:
                await self.send_all(client)

    async def cut(self, site):
        await asyncio.wrap_future(self.faults.submit(self.bed.cut, "hub", site))

    async def scenario(self):
        app = app_of(self.config, {"WEFT_API_KEY": KEY})
        served = uvicorn.Server(server_config(app, self.config.inference.controller))
        task = asyncio.create_task(served.serve())
        headers, url = {"Authorization": f"Bearer {KEY}"}, f"http://127.0.0.1:{CONTROLLER}"
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
            while not served.started or (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.05)
            await self.until_computed_by(client, {"0", "1"})
            sending = asyncio.create_task(self.send_all(client))  # half of them are on their way to each site
            await asyncio.sleep(0.05)
            await self.cut("east")
            await sending
            assert all(status == 200 for _, status, *_ in self.answers[-8:]), self.answers[-8:]
            await self.until_computed_by(client, {"1"})
            await self.cut("west")
            await self.until_computed_by(client, {None})
            await asyncio.wrap_future(self.faults.submit(self.bed.heal))
            await self.until_computed_by(client, {"0", "1"})
        served.should_exit = True
        await task

    def run(self):
        self.bed.enter("h0")
        asyncio.run(self.scenario())


def test_prompts_of_a_site_that_is_cut_off_are_computed_elsewhere_until_it_is_back(tmp_path):
    config = WeftConfig()
    config.inference.boards, config.inference.decode.enabled = str(tmp_path / "boards"), True
    config.inference.decode.url = f"http://127.0.0.1:{PORT}"
    config.inference.controller.port, config.inference.controller.deadline_s = CONTROLLER, DEADLINE_S
    script, env = Path(__file__).with_name("site_worker.py"), os.environ | {"VLLM_API_KEY": KEY}
    with netbed.NetBed.up(topology()) as bed, ThreadPoolExecutor(1) as faults, ThreadPoolExecutor(1) as thread:
        for node, folder in (("h0", ""), ("e0", tmp_path / "east"), ("w0", tmp_path / "west")):
            bed.popen(node, [sys.executable, script, str(PORT), "0.05", folder], env=env)
        config.inference.controller.workers = [
            PrefillWorkerConfig(url=f"http://{bed.address(node)}:{PORT}") for node in ("e0", "w0")
        ]
        faults.submit(bed.status).result()  # its thread stays where the bed is controlled
        client = Client(bed, config, faults)
        thread.submit(client.run).result()
    assert all(status == 200 for body, status, *_ in client.answers if body is WHOLE), "by the decode server otherwise"
    assert max(took_s for *_, took_s in client.answers) < DEADLINE_S
