"""A worker whose three stages are on two hosts: network namespaces, with monotonic clocks an hour apart."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.inference.vllm.test_recipe import WEFT

pytest.importorskip("weft.tools.netbed", reason="needs the feature wan")
from weft.tools.netbed import Link, NetBed, Node, Topology, missing

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not WEFT.exists(), reason=f"needs {WEFT}: make test-vllm"),
    pytest.mark.skipif(bool(missing()), reason=f"weft netbed: {missing()}"),
    pytest.mark.skipif(not Path("/proc/self/ns/time").exists(), reason="this kernel has no time namespaces"),
]

RANKS = {"a": [0], "b": [1, 2]}
CLOCK_S = 5000
NUM_PROMPTS, LONGEST = 12, 1200
OUTPUT = 4
STARTING_S = 900.0
KEY = "the API key of this test"
PORTS = {"controller": 18970, "worker": 18971, "side": 15970, "stage": 15980, "decode": 18972, "decode side": 15990}
ASK = """
import json, sys, urllib.request
port, key, deadline_s, bodies = json.load(sys.stdin)
answers = []
for body in bodies:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}", "X-Weft-Deadline-S": deadline_s}
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=900) as answer:
        tokens = json.load(answer)["choices"][0]["token_ids"]
        answers.append([tokens, answer.headers["X-Weft-Worker"], answer.headers["X-Weft-Fallback"]])
json.dump(answers, sys.stdout)
"""
"""A client on a host: its tokens, who computed the prompt, and why not a worker."""


class Hosts:
    """Two hosts, each with a stand-in for its rank and `weft serve`."""

    def __init__(self, bed, model, folder):
        self.bed, self.folder, self.processes = bed, folder, {}
        self.hostfile = folder / "hosts"
        self.hostfile.write_text("".join(f"{bed.address(host)} slots={len(RANKS[host])}\n" for host in RANKS))
        self.settings = [
            f"cluster.hostfile={self.hostfile}",
            "pipeline.stages=3",
            f"inference.prefill.model={model}",
            "inference.prefill.stages=3",
            "inference.prefill.connector=wan",
            "inference.prefill.max_tokens=2048",
            f"inference.prefill.python={sys.executable}",
            f"inference.prefill.cost_dir={folder}",
            "inference.prefill.yield_cores=false",
            "inference.prefill.arguments=[--dtype,float32]",
            "inference.decode.arguments=[--dtype,float32]",
            f"inference.prefill.host={bed.address('a')}",
            f"inference.prefill.first_port={PORTS['worker']}",
            f"inference.prefill.first_side_port={PORTS['side']}",
            f"inference.prefill.first_stage_port={PORTS['stage']}",
            f"inference.decode.port={PORTS['decode']}",
            f"inference.decode.side_port={PORTS['decode side']}",
            f"inference.controller.port={PORTS['controller']}",
        ]

    def start(self, host, name, words):
        env = dict(os.environ, OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", DS_ACCELERATOR="cpu", WEFT_API_KEY=KEY)
        env["WEFT_KEY"] = "k" * 32
        if name != "training":
            env.pop("PYTHONPATH", None)
        clock = ["unshare", "--time", "--fork", "--monotonic", str(CLOCK_S)] if host == "b" else []
        with (self.folder / f"{host}.{name}.log").open("ab") as log:
            words = [*clock, *map(str, words)]
            process = self.bed.popen(host, words, env=env, stdout=log, stderr=log, start_new_session=True)
        self.processes[host, name] = process

    def train(self, host):
        trainer = Path(__file__).with_name("opposite_trainers.py")
        boards = [self.boards(host) / f"rank{rank}.board" for rank in RANKS[host]]
        self.start(host, "training", [sys.executable, trainer, 0.2, *boards])

    def serve(self, host):
        boards = f"inference.boards={self.boards(host)}"
        self.start(
            host, "serve", [WEFT, "serve", "--with-decode", "--trace", self.folder / host, *self.settings, boards]
        )

    def boards(self, host):
        return self.folder / host

    def log(self, host, name="serve"):
        return (self.folder / f"{host}.{name}.log").read_text()

    def wait_for(self, host, pattern, count=1):
        deadline_s = time.monotonic() + STARTING_S
        while len(re.findall(pattern, self.log(host))) < count:
            assert time.monotonic() < deadline_s and self.processes[host, "serve"].poll() is None, self.all_logs()
            time.sleep(0.5)

    def all_logs(self):
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*/*.log")])
        return "\n".join(f"== {file}\n{file.read_text()[-3000:]}" for file in files)

    def ask(self, port, bodies, deadline_s=60):
        words = [sys.executable, "-c", ASK]
        sent = json.dumps([port, KEY, str(deadline_s), bodies])
        done = self.bed.run("a", words, input=sent, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + self.all_logs()
        return json.loads(done.stdout)

    def end(self):
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            for process in self.processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30 if number == signal.SIGTERM else 5)


@pytest.fixture
def hosts(model, tmp_path):
    nodes = Node(name="a", site="one"), Node(name="b", site="other")
    topology = Topology(name=f"stages{os.getpid()}", nodes=nodes, links=(Link(sites=("one", "other"), latency_ms=1.0),))
    with NetBed.up(topology) as bed:
        found = Hosts(bed, model, tmp_path)
        try:
            yield found
        finally:
            found.end()


def stage_process(hosts):
    """The process of the stage on host b."""
    found = subprocess.run(["pgrep", "-f", f"vllm_stage_host --stage 1 --port {PORTS['stage']}"], capture_output=True)
    return int(found.stdout.split()[0])


def test_answers_over_two_hosts_equal_those_of_one_process_also_when_a_host_is_lost(hosts):
    draw = random.Random(3)
    prompts = [[draw.randrange(256) for _ in range(draw.randint(5, LONGEST))] for _ in range(NUM_PROMPTS)]
    bodies = [{"prompt": ids, "max_tokens": OUTPUT, "temperature": 0, "return_token_ids": True} for ids in prompts]
    for host in ("b", "a"):
        hosts.train(host)
        hosts.serve(host)
    assert hosts.processes["b", "serve"].poll() is None
    hosts.wait_for("a", "worker 0: ready after")
    hosts.wait_for("a", "ready, workers compute prompts in bubbles")
    assert all(f"stage {stage} of the worker of" in hosts.log("b") for stage in (1, 2))
    assert "decode server" not in hosts.log("b")
    alone = [tokens for tokens, *_ in hosts.ask(PORTS["decode"], bodies)]
    answers = hosts.ask(PORTS["controller"], bodies)
    assert [tokens for tokens, *_ in answers] == alone
    assert [why for *_, why in answers] == [None] * NUM_PROMPTS, hosts.all_logs()

    steps = [json.loads(line) for line in (hosts.folder / "a" / "worker0.jsonl").read_text().splitlines()]
    assert len(steps) >= NUM_PROMPTS
    for step in steps:  # by the clock of host a, to within a round trip
        for (_, ended_s), (begun_s, _) in pairwise(step["spans"]):
            assert -0.1 < begun_s - ended_s < CLOCK_S / 10

    os.kill(stage_process(hosts), signal.SIGKILL)
    answers = hosts.ask(PORTS["controller"], bodies[:3], deadline_s=5)
    assert [tokens for tokens, *_ in answers] == alone[:3]
    assert all(answers[number][2] for number in range(3))
    hosts.wait_for("b", "stage 1 of the worker of .*ended with code -9")
    hosts.wait_for("a", "worker 0: ready after", count=2)
    deadline_s = time.monotonic() + STARTING_S
    while (answer := hosts.ask(PORTS["controller"], bodies[:1])[0])[2]:
        assert time.monotonic() < deadline_s, hosts.all_logs()
        assert answer[0] == alone[0]
    assert answer[0] == alone[0]
