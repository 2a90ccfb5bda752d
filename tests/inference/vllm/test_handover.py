"""A stock vLLM decodes from the KV cache that a gated worker computed in bubbles: the P/D proxy protocol,
as a proxy speaks it to the controller."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uvicorn

from weft.conf.schema import KvConnector, WeftConfig
from weft.inference.controller.server import app_of, server_config
from weft.inference.worker.command import command, environment, kv_transfer, workers_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

PATIENCE_S = 600.0
"""In which a server has to start, and a request that is refused because the machine is busy is sent again."""

NUM_PROMPTS = 5
OUTPUT, LONG = 16, 500
BLOCKS = 20
PREFILL_FIRST = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
KEY = "the key of this test"
BEARER = f"Bearer {KEY}"
PORTS = {"controller": 18300, "prefill": 18301, "decode": 18302}


def ask(port, body, request_id, *, again=True):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "X-Request-Id": request_id, "Authorization": BEARER},
    )
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if not again or error.code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(int(error.headers["Retry-After"]))


def end_with_waiting_prompt(training, process):
    """The answer to a prompt that waits for a bubble while its worker is ended."""
    training.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    with ThreadPoolExecutor(1) as sender:
        waiting = sender.submit(ask, PORTS["prefill"], {"prompt": [1] * 600, "max_tokens": 1}, "waiting", again=False)
        time.sleep(3.0)
        assert not waiting.done()
        os.killpg(process.pid, signal.SIGTERM)
        with pytest.raises(urllib.error.HTTPError) as caught:
            waiting.result()
    process.wait(PATIENCE_S)
    return caught.value


def prompt_tokens(port, source):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    lines = [line for line in text.splitlines() if "prompt_tokens_by_source" in line and f'"{source}"' in line]
    return sum(float(re.split(r"\s+", line)[-1]) for line in lines if "_total" in line)


def until_ready(port, process, log, *, patience_s=PATIENCE_S):
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    pytest.fail(f"no server on port {port}:\n{log.read_text()[-4000:]}")


@contextlib.contextmanager
def server(words, env, port, log):
    with (
        log.open("wb") as out,
        subprocess.Popen(words, env=env, stdout=out, stderr=out, start_new_session=True) as process,
    ):
        try:
            yield process, lambda: until_ready(port, process, log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


@contextlib.contextmanager
def controller(config):
    served = uvicorn.Server(server_config(app_of(config, {"WEFT_API_KEY": KEY}), config.inference.controller))
    thread = threading.Thread(target=served.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        served.should_exit = True
        thread.join(10)


def stage_process(log, stage):
    return int(re.findall(rf"\(Worker_PP{stage} pid=(\d+)\)", log.read_text())[-1])


@contextlib.contextmanager
def servers(model, folder, stages, arguments=(), connector=KvConnector.nixl):
    """A stand-in for training, a worker in its bubbles, a stock instance that decodes, and a controller."""
    config = WeftConfig()
    config.cluster.ranks = config.pipeline.stages = stages
    config.inference.boards = str(folder / "boards")
    prefill = config.inference.prefill
    prefill.model, prefill.connector, prefill.first_port = str(model), connector, PORTS["prefill"]
    prefill.stages = stages
    prefill.max_tokens, prefill.cost_dir, prefill.arguments = 2048, str(folder), ["--dtype", "float32"]
    config.inference.controller.port, config.inference.controller.deadline_s = PORTS["controller"], 30.0
    worker = workers_of(config)[0]
    outer = dict(os.environ, VLLM_CPU_NUM_OF_RESERVED_CPU="1", VLLM_NIXL_SIDE_CHANNEL_PORT="15600")
    package = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).absolute()
    words = command(config, worker, python=sys.executable, num_gpus=0, trace_file=str(folder / "trace.jsonl"))
    env = environment(config, worker, outer, key=KEY, package=package)
    stock = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32"]
    stock += ["--port", str(PORTS["decode"]), "--max-model-len", "2048", "--kv-cache-memory-bytes", str(2**28)]
    stock += ["--enforce-eager", "--no-enable-prefix-caching", "--distributed-executor-backend"]
    stock += [words[words.index("--distributed-executor-backend") + 1]]
    stock += ["--kv-transfer-config", json.dumps(kv_transfer(prefill, on_cpu=True)), *arguments]
    stock_env = env | {"VLLM_NIXL_SIDE_CHANNEL_PORT": "15700"}
    trainer = [sys.executable, Path(__file__).with_name("trainer.py"), worker.boards[0], "0.04", "0.01"]
    if stages > 1:
        trainer = [sys.executable, Path(__file__).with_name("opposite_trainers.py"), "0.2", *worker.boards]
    with (
        subprocess.Popen(trainer, stdout=subprocess.DEVNULL) as training,
        server(words, env, PORTS["prefill"], folder / "prefill.log") as (prefilling, prefill_ready),
        server(stock, stock_env, PORTS["decode"], folder / "decode.log") as (_, decode_ready),
        controller(config),
    ):
        try:
            prefill_ready()
            decode_ready()
            time.sleep(2 * config.inference.controller.probe_s)
            yield training, prefilling
        finally:
            training.kill()


def prefill(ids, name):
    """Have the controller compute a prompt; what a decoder needs to fetch it."""
    first = body_of(ids) | {"stream": False, "max_tokens": 1, "kv_transfer_params": PREFILL_FIRST}
    return ask(PORTS["controller"], first, name)["kv_transfer_params"]


def decode(ids, name, transfer=None, output=OUTPUT):
    """Tokens of the stock instance, which fetches the prompt by ``transfer`` or computes it itself."""
    body = body_of(ids) | {"max_tokens": output} | ({"kv_transfer_params": transfer} if transfer else {})
    return ask(PORTS["decode"], body, name)["choices"][0]["token_ids"]


def body_of(ids):
    return {"prompt": ids, "temperature": 0.0, "return_token_ids": True}


def prompts():
    draw = random.Random(7)
    return [[draw.randrange(256) for _ in range(draw.randint(600, 1500))] for _ in range(NUM_PROMPTS)]


@pytest.mark.parametrize("connector", [KvConnector.nixl, KvConnector.wan])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_stock_instance_decodes_what_was_prefilled_in_bubbles(model, tmp_path, stages, connector):
    with servers(model, tmp_path, stages, connector=connector) as (training, prefilling):
        # Clients may give requests the same name.
        transfers = [prefill(ids, "request") for ids in prompts()]
        assert all(transfer["do_remote_prefill"] is True for transfer in transfers)
        handed = [decode(ids, "request", transfer) for ids, transfer in zip(prompts(), transfers, strict=True)]
        fetched = prompt_tokens(PORTS["decode"], "external_kv_transfer")
        computed = prompt_tokens(PORTS["decode"], "local_compute")
        normal = [decode(ids, f"normal-{number}") for number, ids in enumerate(prompts())]
        # The worker ends between prefill and decode, with another prompt waiting.
        transfer = prefill(prompts()[0], "last")
        refusal = end_with_waiting_prompt(training, prefilling)
        recomputed = decode(prompts()[0], "last", transfer)
    assert handed == normal
    assert fetched == sum(map(len, prompts()))
    assert computed == 0
    assert recomputed == normal[0]
    assert (refusal.code, refusal.headers["Retry-After"]) == (503, "1")


@pytest.mark.parametrize("connector", [KvConnector.nixl, KvConnector.wan])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_stock_instance_computes_itself_what_a_killed_worker_had_prefilled(model, tmp_path, stages, connector):
    ids, other, *_ = prompts()
    with servers(model, tmp_path, stages, connector=connector) as (_, prefilling):
        decode(other, "connected", prefill(other, "connected"))
        transfer = prefill(ids, "killed")
        os.killpg(prefilling.pid, signal.SIGKILL)
        prefilling.wait(PATIENCE_S)
        before = prompt_tokens(PORTS["decode"], "local_compute")
        handed = decode(ids, "killed", transfer)
        computed = prompt_tokens(PORTS["decode"], "local_compute") - before
        assert handed == decode(ids, "normal")
        assert computed >= len(ids)


def test_a_stock_instance_computes_what_a_stopped_stage_had_prefilled_which_then_writes_nothing(model, tmp_path):
    from weft.inference.worker.vllm_nixl import PUSH_S

    ids, other, waiting, *_ = prompts()
    # So few blocks that each prompt gets those of the one before.
    with servers(model, tmp_path, 2, ["--num-gpu-blocks-override", str(BLOCKS)]) as _, ThreadPoolExecutor(2) as sender:
        decode(other, "connected", prefill(other, "connected"))
        transfer = prefill(ids, "stopped")
        stage = stage_process(tmp_path / "prefill.log", 1)
        os.kill(stage, signal.SIGSTOP)
        before, begun_s = prompt_tokens(PORTS["decode"], "local_compute"), time.monotonic()
        handed = decode(ids, "stopped", transfer)
        took_s = time.monotonic() - begun_s
        computed = prompt_tokens(PORTS["decode"], "local_compute") - before
        long = sender.submit(decode, other, "long", output=LONG)
        late = sender.submit(prefill, waiting, "waiting")
        while prompt_tokens(PORTS["decode"], "local_compute") - before - computed < len(other):
            time.sleep(0.1)
        os.kill(stage, signal.SIGCONT)
        untouched = long.result()
        before = prompt_tokens(PORTS["decode"], "external_kv_transfer")
        fetched = decode(waiting, "waiting", late.result())
        assert prompt_tokens(PORTS["decode"], "external_kv_transfer") - before == len(waiting)
        assert handed == decode(ids, "normal")
        assert untouched == decode(other, "normal", output=LONG)
        assert fetched == decode(waiting, "normal")
    assert computed >= len(ids)
    assert PUSH_S <= took_s < 2 * PUSH_S
