"""The lines of docs/serving.md, as they stand there: the openai client and vLLM's own proxy get what a stock server
answers, without training, and while training goes on."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WEFT = Path(os.environ.get("WEFT_BIN", ROOT / ".venv" / "bin")).absolute() / "weft"
PROXY = Path(os.environ.get("TOY_PROXY", ROOT / ".cache" / "toy_proxy_server.py")).absolute()

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not WEFT.exists(), reason=f"needs {WEFT}: make test-vllm"),
]

WORDS = "a pipeline leaves each rank idle in gaps that are known in advance and a prompt can be computed there"
NUM_REQUESTS = 200
OUTPUT = 8
STARTING_S, ANSWERING_S = 1000.0, 700.0
PORTS = {"8000": "18500", "8300": "18501", "8301": "18502", "8400": "18503", "5600": "15800", "5700": "15801"}
"""Default ports, and those of this test."""
FEATURES = {
    "seed of a long prompt": {"prompt": [1] * 5000, "seed": 4},
    "several at zero temperature": {"n": 2},
    "several": {"n": 2, "temperature": 0.8, "seed": 3},
    "sampling": {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 50},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
    "unknown model": {"model": "none"},
    "logprobs": {"logprobs": 2},
    "stop": {"stop": ["e"]},
    "prompts": {"prompt": ["one", "two"]},
    "echo": {"echo": True, "logprobs": 1},
    "usage": {"stream_options": {"include_usage": True}},
    "json": {"response_format": {"type": "json_object"}},
    "beams": {"use_beam_search": True, "n": 2, "stream": False},
    "bias": {"logit_bias": {"65": 50}, "min_tokens": 3},
    "best of": {"best_of": 2, "n": 1},
    "suffix": {"suffix": "ends", "stream": False},
    "priority": {"priority": 1},
    "user": {"user": "someone"},
    "token ids": {"prompt": [1, 2, 3, 4]},
    "embeddings": {"prompt": None, "prompt_embeds": "AA=="},
    "truncated": {"prompt": list(range(200)), "truncate_prompt_tokens": 7},
    "truncated to the server's length": {"prompt": [1] * 3000, "truncate_prompt_tokens": -1},
    "log probabilities of the prompt": {"prompt_logprobs": 1, "stream": False},
    "structured": {"structured_outputs": {"choice": ["one", "two"]}},
}
KEY = "the key of this test"
BEARER = f"Bearer {KEY}"
CONNECT = """
import encodings.idna, os, socket, sys
os.setuid(54321)
for port in sys.argv[1:]:
    try:
        with socket.create_connection(("127.0.0.1", int(port)), timeout=3) as end:
            end.sendall(b"POST /invocations HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 0\\r\\n\\r\\n")
            print(port, end.recv(12).decode("latin-1") or "closed")
    except (ConnectionError, TimeoutError):  # sealed listeners of ranks drop what is sent
        print(port, "closed")
"""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def lines_of_the_document(model: Path, folder: Path) -> str:
    """The recipe's shell lines, with folders and ports of this test's own. Training waits for a file."""
    text = (ROOT / "docs" / "serving.md").read_text()
    (script,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    own = {
        "$PWD/served": str(model),
        "$PWD/.venv-vllm/bin/python": sys.executable,
        "weft launch": "until [ -e training ]; do sleep 1; done; weft launch",
        "weft ": f"{WEFT} ",
        "recipe=serving": "recipe=serving inference.controller.port=8300 inference.prefill.first_port=8301 "
        "inference.prefill.first_side_port=5600 inference.decode.port=8400 inference.decode.side_port=5700 "
        # Answers that are to be compared are computed, not remembered.
        "inference.decode.arguments=[--dtype,float32,--no-enable-prefix-caching] "
        # It is answers that are tested, also on a host that is busy with other things.
        f"inference.prefill.yield_cores=false inference.controller.deadline_s={ANSWERING_S} "
        f"inference.boards={folder}/boards "
        f"inference.prefill.cost_dir={folder} train.output_dir={folder}/runs",
    }
    for old, new in own.items():
        assert old in script, old
        script = script.replace(old, new)
    for old, new in PORTS.items():
        script = re.sub(rf"\b{old}\b", new, script)
    return script


@pytest.fixture(scope="module")
def serving(model, tmp_path_factory):
    """The document's lines as they run, in whose folder a file named `training` begins training."""
    folder = tmp_path_factory.mktemp("serving")
    env = dict(os.environ, OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", DS_ACCELERATOR="cpu", WEFT_API_KEY=KEY)
    env.pop("PYTHONPATH")
    log = folder / "log"
    with log.open("wb") as out:
        shell = subprocess.Popen(
            ["bash", "-c", lines_of_the_document(model, folder)],
            cwd=folder,
            env=env,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        assert until(lambda: get("8300", "/ready"), shell), f"no answer\n{log.read_text()[-6000:]}"
        yield folder
    finally:
        os.killpg(shell.pid, signal.SIGTERM)  # `weft serve` ends its servers, which are sessions of their own
        end(shell)
    assert not get("8301", "/health") and not get("8400", "/health")


@pytest.fixture(scope="module")
def training(serving):
    """The same, while training publishes bubbles."""
    (serving / "training").touch()
    assert until(lambda: json.loads(get("8300", "/ready") or "{}").get("serving")), (serving / "log").read_text()[
        -6000:
    ]
    return serving


def until(succeeds, shell: subprocess.Popen | None = None, wait_s: float = 1.0) -> bool:
    deadline = time.monotonic() + STARTING_S
    while time.monotonic() < deadline and (shell is None or shell.poll() is None):
        if succeeds():
            return True
        time.sleep(wait_s)
    return False


def get(port: str, path: str) -> str:
    """The text of an answer; empty without one."""
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{PORTS[port]}{path}", headers={"Authorization": BEARER})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode() or "ok"
    except (OSError, urllib.error.URLError):
        return ""


def prompts() -> list[str]:
    """Texts of 5 to 90 tokens, of which some begin alike."""
    draw = random.Random(11)
    words = WORDS.split()
    begin = " ".join(draw.choice(words) for _ in range(5))
    return [
        (begin if number % 4 == 0 else "") + " ".join(draw.choice(words) for _ in range(draw.randint(2, 10)))
        for number in range(NUM_REQUESTS)
    ]


def client_of(port: str):
    from openai import AsyncOpenAI

    url = f"http://127.0.0.1:{PORTS[port]}/v1"
    return AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=ANSWERING_S)


async def complete(port: str, model: Path, texts: list[str]) -> tuple[list[tuple[int, ...]], int]:
    """The tokens that the openai client gets for all of them at once, without a second attempt; and the number of
    tokens of the prompts."""
    async with client_of(port) as client:
        found = await asyncio.gather(
            *(
                client.completions.create(
                    model=str(model),
                    prompt=text,
                    max_tokens=OUTPUT,
                    temperature=0.0,
                    # Half of the vocabulary stands for no text.
                    extra_body={"return_token_ids": True},
                )
                for text in texts
            ),
            return_exceptions=True,
        )
    errors = [answer for answer in found if isinstance(answer, BaseException)]
    assert not errors, f"{len(errors)} of {len(texts)} failed, the first with {errors[0]!r}"
    return [tuple(answer.choices[0].token_ids) for answer in found], sum(answer.usage.prompt_tokens for answer in found)


async def stream(port: str, model: Path, texts: list[str]) -> tuple[list[tuple[int, ...]], int]:
    """The tokens that are streamed to the openai client for all of them at once: of completions, and of a chat for
    every tenth text; and the number of answers that came in several parts."""
    given = {"model": str(model), "max_tokens": OUTPUT, "temperature": 0.0, "stream": True}
    given["extra_body"] = {"return_token_ids": True}
    async with client_of(port) as client:

        async def parts(answer):
            # The first part of a chat has no token. A busy server joins parts.
            found = [getattr(part.choices[0], "token_ids", None) async for part in await answer]
            return [part for part in found if part]

        def chat(text):
            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
            return client.chat.completions.create(messages=messages, **given)

        completions = [client.completions.create(prompt=text, **given) for text in texts]
        answers = await asyncio.gather(*map(parts, completions + [chat(text) for text in texts[::10]]))
    return [tuple(chain.from_iterable(answer)) for answer in answers], sum(len(answer) > 1 for answer in answers)


def tokens_from(source: str) -> float:
    """Prompt tokens of the decoding server by where their cache came from."""
    return metric("8400", "prompt_tokens_by_source", f'"{source}"')


def metric(port: str, *parts: str, kind: str = "_total _count") -> float:
    """The sum of the samples whose lines have all parts, and one of the words of ``kind``."""
    lines = get(port, "/metrics").splitlines()
    lines = [line for line in lines if line[:1] != "#" and all(part in line for part in parts)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if any(end in line for end in kind.split(" ")))


def raw(port: str, body: dict, path: str) -> tuple[int, object]:
    """The status of an answer, and its choices; of a stream the text, log probabilities and reasons of its events."""
    headers = {"Content-Type": "application/json", "Authorization": BEARER}
    request = urllib.request.Request(f"http://127.0.0.1:{PORTS[port]}{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWERING_S) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]
    if not body.get("stream"):
        return 200, json.loads(text)["choices"]
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events.pop() == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    joined = {}
    for choice in choices:
        one = joined.setdefault(choice["index"], {"text": "", "logprobs": [], "reason": None})
        one["text"] += choice["text"]
        one["logprobs"] += (choice["logprobs"] or {}).get("token_logprobs", [])
        one["reason"] = choice["finish_reason"]
    return 200, (joined, "usage" in events[-1])


def compare_features(model: Path) -> None:
    """Assert that each feature gets from the controller what a stock server answers."""
    for name, field in FEATURES.items():
        body = {
            "model": str(model),
            "prompt": "the pipeline",
            "max_tokens": 4,
            "temperature": 0,
            "stream": True,
        } | field
        assert raw("8300", body, "/v1/completions") == raw("8400", body, "/v1/completions"), name
    tools = {"tools": [TOOL], "tool_choice": "none"}
    json_object = {"response_format": {"type": "json_object"}}
    for field in (
        *({}, tools, tools | {"tool_choice": "required"}, {"tools": 3}),
        *({"logprobs": True, "top_logprobs": 2}, json_object),
    ):
        chat = {"model": str(model), "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | field
        answers = [raw(port, chat | {"temperature": 0}, "/v1/chat/completions") for port in ("8300", "8400")]
        assert answers[0] == answers[1], field


def test_without_training_streams_and_features_equal_a_stock_server(model, serving):
    assert until(lambda: "so the decode server computes prompts itself" in (serving / "log").read_text())
    texts = prompts()[:20]
    (streamed, _), (stock, _) = (asyncio.run(stream(port, model, texts)) for port in ("8300", "8400"))
    assert streamed == stock
    assert metric("8300", "weft_answers_total", 'prefill="decode",reason="no bubble"') == 22
    compare_features(model)
    assert tokens_from("external_kv_transfer") == metric("8300", 'weft_answers_total{prefill="bubble"') == 0


def test_two_hundred_streams_at_once_equal_a_stock_server(model, training):
    texts, computed = prompts(), tokens_from("local_compute")
    streamed, in_parts = asyncio.run(stream("8300", model, texts))
    assert tokens_from("local_compute") == computed, "workers have computed the prompts"
    assert tokens_from("external_kv_transfer") > 0
    assert metric("8300", 'weft_answers_total{prefill="bubble"') == len(streamed) == NUM_REQUESTS * 11 // 10
    stock, _ = asyncio.run(stream("8400", model, texts))
    assert streamed == stock and len(set(streamed)) > 100  # not one answer for all
    assert all(len(tokens) == OUTPUT for tokens in streamed) and in_parts > len(streamed) / 2
    compare_features(model)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_no_listener_serves_another_user(serving):
    import psutil

    assert until(lambda: get("8301", "/health"))
    own = psutil.Process().children(recursive=True)
    ends = [end for each in own for end in each.net_connections("tcp") if end.status == psutil.CONN_LISTEN]
    ports = {str(end.laddr.port) for end in ends if end.laddr.ip in ("127.0.0.1", "0.0.0.0", "::")}
    assert {PORTS[name] for name in ("8300", "8301", "8400", "5600", "5700")} < ports
    found = subprocess.run([sys.executable, "-c", CONNECT, *ports], capture_output=True, text=True, check=True).stdout
    refusals = dict(line.split(" ", 1) for line in found.splitlines())
    assert refusals.keys() == ports
    answered = {port: text for port, text in refusals.items() if text != "closed"}
    # Routes that a worker does not have are unknown before the key is looked at.
    assert answered == {PORTS["8300"]: "HTTP/1.1 404", PORTS["8301"]: "HTTP/1.1 404", PORTS["8400"]: "HTTP/1.1 401"}


def test_a_client_that_disconnects_ends_its_work(model, training):
    def running(port):
        return metric(port, "vllm:num_requests_running", kind="")

    def leave(body, port):
        body = json.dumps({"model": str(model), "stream": True, "ignore_eos": True} | body).encode()
        with socket.create_connection(("127.0.0.1", int(PORTS["8300"]))) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(
                f"{head}Authorization: {BEARER}\r\nContent-Type: application/json\r\n\r\n".encode() + body
            )
            assert until(lambda: running(port), wait_s=0.05)
        assert until(lambda: not running(port), wait_s=0.05)

    generated = metric("8400", "vllm:generation_tokens")
    leave({"prompt": "the pipeline", "max_tokens": 8000}, "8400")
    leave({"prompt": [1] * 4000, "max_tokens": 8}, "8301")
    assert metric("8400", "vllm:generation_tokens") - generated < 8000


@pytest.mark.skipif(not PROXY.exists(), reason=f"needs {PROXY}: make test-vllm, with the network")
def test_two_hundred_at_once_through_vllms_proxy_equal_a_stock_server(model, training):
    words = [sys.executable, PROXY, "--port", PORTS["8000"], "--prefiller-host", "127.0.0.1", "--prefiller-port"]
    words += [PORTS["8300"], "--decoder-host", "127.0.0.1", "--decoder-port", PORTS["8400"]]
    earlier = [tokens_from(source) for source in ("external_kv_transfer", "local_compute")]
    late = metric("8300", "lateness_seconds_count")
    env = os.environ | {"OPENAI_API_KEY": KEY}  # which the proxy sends to both servers
    with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as proxy:
        try:
            assert until(lambda: get("8000", "/healthcheck"), proxy)
            texts = prompts()
            answers, asked = asyncio.run(complete("8000", model, texts))
        finally:
            proxy.terminate()
    fetched, computed = tokens_from("external_kv_transfer") - earlier[0], tokens_from("local_compute") - earlier[1]
    stock, _ = asyncio.run(complete("8400", model, texts))
    late = metric("8300", "lateness_seconds_count") - late
    assert len(answers) == NUM_REQUESTS and answers == stock
    assert len(set(answers)) > 100  # not one answer for all
    assert (fetched, computed) == (asked, 0)
    assert late == NUM_REQUESTS
    steps = list((training / "runs" / "serving").glob("metrics.jsonl"))
    assert steps and len(steps[0].read_text().splitlines()) > 10


def end(shell: subprocess.Popen) -> None:
    """Wait for the shell's children to end by themselves, then end what is left."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline and children(shell.pid):
        shell.poll()
        time.sleep(0.2)
    for pid in children(shell.pid):
        os.kill(pid, signal.SIGKILL)
    shell.wait()


def children(session: int) -> list[int]:
    """Processes of a session that run."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (OSError, psutil.Error):
            continue
    return found
