"""Whole answers of LoRA adapters, and of chats with a grammar, equal a stock server's, with prompts in bubbles."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.inference.vllm.test_recipe import (
    KEY,
    OUTPUT,
    PORTS,
    TOOL,
    WEFT,
    end,
    get,
    metric,
    prompts,
    raw,
    tokens_from,
    until,
)
from tests.inference.vllm.test_stages import write_adapter
from weft.inference.requests import GIVEN

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not WEFT.exists(), reason=f"needs {WEFT}: make test-vllm"),
]

BOTH, DECODER, WORKER = ("one", "two"), "three", "four"
"""Adapters that both servers have, and those of one server."""


@pytest.fixture(scope="module")
def serving(model, tmp_path_factory):
    """The folder of `weft serve --with-decode`, whose servers have adapters, with a stand-in for training."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate((*BOTH, DECODER, WORKER)):
        write_adapter(folder / name, model, seed)

    def arguments(*names):
        modules = ",".join(f"'{name}={folder / name}'" for name in (*BOTH, *names))
        common = "--dtype,float32,--no-enable-prefix-caching,--enable-lora,--max-loras,2,--max-cpu-loras,4"
        return f"[{common},--lora-modules,{modules}]"

    settings = {
        "cluster.ranks": 1,
        "pipeline.stages": 1,
        "inference.boards": folder / "boards",
        "inference.prefill.model": model,
        "inference.prefill.python": sys.executable,
        "inference.prefill.cost_dir": folder,
        "inference.prefill.yield_cores": "false",
        "inference.prefill.first_port": PORTS["8301"],
        "inference.prefill.first_side_port": PORTS["5600"],
        "inference.prefill.arguments": arguments(WORKER),
        "inference.decode.port": PORTS["8400"],
        "inference.decode.side_port": PORTS["5700"],
        "inference.decode.arguments": arguments(DECODER),
        "inference.controller.port": PORTS["8300"],
        "inference.controller.deadline_s": 600,
    }
    words = [WEFT, "serve", "--with-decode", *(f"{name}={value}" for name, value in settings.items())]
    env = dict(os.environ, OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", DS_ACCELERATOR="cpu", WEFT_API_KEY=KEY)
    env.pop("PYTHONPATH")
    trainer = [sys.executable, Path(__file__).with_name("trainer.py"), folder / "boards" / "rank0.board", "0.2", "0.05"]
    log = folder / "log"
    (folder / "boards").mkdir(mode=0o700)
    with log.open("wb") as out:
        serve = subprocess.Popen(words, cwd=folder, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            assert until(lambda: get("8301", "/health"), serve), f"no answer\n{log.read_text()[-6000:]}"
            with subprocess.Popen(trainer, stdout=subprocess.DEVNULL) as training:
                try:
                    assert until(lambda: json.loads(get("8300", "/ready") or "{}").get("serving"), serve)
                    yield folder
                finally:
                    training.kill()
        finally:
            serve.send_signal(signal.SIGTERM)
            end(serve)


def body_of(adapter, text):
    return {"model": adapter, "prompt": text, "max_tokens": OUTPUT, "temperature": 0, "return_token_ids": True}


async def all_at_once(port, bodies):
    """The tokens of the answers to all requests, which are sent at once."""
    answers = await asyncio.gather(*(asyncio.to_thread(raw, port, body, "/v1/completions") for body in bodies))
    return [choices[0]["token_ids"] for _, choices in answers]


def test_answers_of_several_adapters_at_once_equal_those_of_a_stock_server_one_by_one(model, serving):
    texts = prompts()[:30]
    adapters = [(str(model), *BOTH)[number % 3] for number in range(len(texts))]
    bodies = [body_of(adapter, text) for adapter, text in zip(adapters, texts, strict=True)]
    computed = tokens_from("local_compute")
    answered = asyncio.run(all_at_once("8300", bodies))
    assert tokens_from("local_compute") == computed, "the worker has computed the prompts"
    assert metric("8300", 'weft_answers_total{prefill="bubble"') == len(texts)
    alone = [raw("8400", body, "/v1/completions")[1][0]["token_ids"] for body in bodies]
    assert answered == alone
    base = [raw("8400", body_of(str(model), text), "/v1/completions")[1][0]["token_ids"] for text in texts]
    changed = [ours != without for ours, without in zip(answered, base, strict=True)]
    assert not any(changed[::3]) and sum(changed) > len(texts) / 3


def test_an_adapter_of_the_decode_server_alone_is_answered_and_others_are_refused_as_by_a_stock_server(serving):
    fallback = 'weft_answers_total{prefill="decode",reason="worker"}'
    before = metric("8300", fallback)
    for number, (adapter, status) in enumerate(((DECODER, 200), (WORKER, 404), ("none", 404))):
        body = body_of(adapter, f"the pipeline {number}")
        answers = [raw(port, body, "/v1/completions") for port in ("8300", "8400")]
        for answer in answers:
            assert answer[0] == status
        if status == 200:
            tokens = [choices[0]["token_ids"] for _, choices in answers]
            assert tokens[0] == tokens[1]
        else:
            assert answers[0] == answers[1] and adapter in answers[0][1]
    assert metric("8300", fallback) - before == 2  # the worker has computed the prompt of its own adapter
    listed = {one["id"] for one in json.loads(get("8300", "/v1/models"))["data"]}
    assert listed >= {*BOTH, DECODER} and WORKER not in listed


def test_chats_with_a_grammar_use_bubbles_and_equal_those_of_a_stock_server(serving):
    chat = {"model": "one", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0}
    schema = {"name": "a", "schema": {"type": "object"}}
    fields = [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": schema}, "logprobs": True, "top_logprobs": 2},
        {"tools": [TOOL], "tool_choice": "required"},
        {"truncate_prompt_tokens": -1},
    ]
    before, computed = metric("8300", 'weft_answers_total{prefill="bubble"'), tokens_from("local_compute")
    answers = [raw("8300", chat | field, "/v1/chat/completions") for field in fields]
    assert metric("8300", 'weft_answers_total{prefill="bubble"') - before == sum(status == 200 for status, _ in answers)
    assert tokens_from("local_compute") == computed, "the worker has computed the prompts"
    assert answers == [raw("8400", chat | field, "/v1/chat/completions") for field in fields]
    assert [status for status, _ in answers[:2]] == [200, 200]


STREAMED = {
    "completion": ("/v1/completions", {"prompt": "the pipeline"}),
    "with tokens": ("/v1/completions", {"prompt": "a bubble of training", "return_token_ids": True}),
    "of an adapter": ("/v1/completions", {"prompt": "the pipeline", "model": BOTH[0]}),
    "sampled": ("/v1/completions", {"prompt": "one token of", "temperature": 0.8, "allowed_token_ids": [40]}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    "chat with tokens": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "again"}], "return_token_ids": True},
    ),
    "of one token": ("/v1/completions", {"prompt": "the end", "max_tokens": 1}),
    "with an end": ("/v1/completions", {"prompt": "the stop", "stop": ["x"]}),
    "too long": ("/v1/completions", {"prompt": "the pipeline", "max_tokens": 1_000_000}),
}


def events_of(port, path, body):
    """The first event of text, what all say together, and who has computed the prompt. Servers differ in names."""
    sent = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORTS[port]}{path}", json.dumps(body).encode(), sent)
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            text, worker = answer.read().decode(), answer.headers["X-Weft-Worker"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"], None
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert len({(chunk.pop("id"), chunk.pop("created")) for chunk in chunks}) == 1
    for chunk in chunks:
        chunk.pop("system_fingerprint", None)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    said = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    return chunks[: 1 + path.count("chat")], (said, tokens, choices[-1]["finish_reason"], chunks[-1]), worker


@pytest.mark.parametrize("case", STREAMED)
def test_streams_have_the_events_of_a_stock_server(model, serving, case):
    path, fields = STREAMED[case]
    body = {"model": str(model), "max_tokens": OUTPUT, "temperature": 0, "stream": True} | fields
    body["stream_options"] = {"include_usage": True}
    ours, stock = events_of("8300", path, body), events_of("8400", path, body)
    assert ours[:2] == stock[:2]
    assert (ours[2] is None) == (case == "too long")


def test_a_decode_server_continues_a_given_token(model, serving):
    body = body_of(str(model), "the pipeline") | {"kv_transfer_params": {GIVEN: 42}}
    _, given = raw("8400", body, "/v1/completions")
    _, after = raw("8400", body_of(str(model), [*given[0]["prompt_token_ids"], 42]), "/v1/completions")
    assert given[0]["token_ids"][0] == 42
    assert given[0]["token_ids"][1:] == after[0]["token_ids"][:-1]
    for none in (-1, 10**9, "42", None):
        body["kv_transfer_params"] = {GIVEN: none}
        assert (
            raw("8400", body, "/v1/completions")[1]
            == raw("8400", body_of(str(model), "the pipeline"), "/v1/completions")[1]
        )
