"""Streams that begin with a worker's token are those of the decode server, only sooner."""

import asyncio
import json
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inference.controller.fake_workers import DECODE, EVENTS, MODELS, PATH, FakeWorkers, controller
from tests.inference.controller.test_controller_server import METRICS, ask, server
from weft.inference.controller.begin import Begin, may_begin
from weft.inference.requests import DRAWN, GIVEN

CHAT_PATH = "/v1/chat/completions"
COMPLETION = {"model": "tiny", "prompt": "one two three", "max_tokens": 9, "stream": True}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9, "stream": True}
TOKENS = {7: "Wörter", 8: " and", 9: ' "created":5', 10: "", 11: "\n\nend"}
PROMPT = [1, 2, 3]


def body_of(kind, **fields):
    return (CHAT if kind == "chat" else COMPLETION) | fields


def prefilled(kind, token, *, with_tokens=False, **choice):
    """A worker's response as vLLM writes it."""
    ids = {"token_ids": [token] if with_tokens else None}
    given = {"index": 0, "logprobs": None, "finish_reason": "length", "stop_reason": None} | ids
    head = {"id": "cmpl-a", "object": "text_completion", "created": 1, "model": "tiny", "usage": {"prompt_tokens": 3}}
    if kind == "chat":
        head["prompt_token_ids"] = PROMPT if with_tokens else None
        given["message"] = {"role": "assistant", "content": TOKENS[token]}
    else:
        given |= {"text": TOKENS[token], "prompt_token_ids": PROMPT if with_tokens else None}
    return head | {"choices": [given | choice]}


def stock(kind, groups, *, with_tokens=False):
    """The events of a stock server's stream, each with the tokens of a group."""
    events, head = [], {"id": "cmpl-a", "object": "chat.completion.chunk", "created": 5, "model": "tiny"}
    ends = {"logprobs": None, "finish_reason": None}
    if kind == "chat":
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}} | ends
        events.append(
            head | {"choices": [role], "prompt_token_ids": PROMPT if with_tokens else None, "prompt_text": None}
        )
    for number, group in enumerate(groups):
        text, ids = "".join(TOKENS[token] for token in group), list(group) if with_tokens else None
        last = {"finish_reason": "length"} if number == len(groups) - 1 else {}
        if kind == "chat":
            choice = {"index": 0, "delta": {"content": text}} | ends | last | {"token_ids": ids}
        else:
            first = PROMPT if with_tokens and not number else None
            choice = {"index": 0, "text": text} | ends | {"stop_reason": None, "prompt_token_ids": first} | last
            choice |= {"token_ids": ids}
        events.append(head | {"object": head["object"] if kind == "chat" else "text_completion", "choices": [choice]})
    events.append(head | {"choices": [], "usage": {"prompt_tokens": 3}})
    return [b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() for event in events] + [
        b"data: [DONE]"
    ]


async def streamed(begin, parts):
    async def stream():
        for part in parts:
            yield part

    return begin.events + b"".join([part async for part in begin.rest(stream())])


def read(stream):
    """Text, tokens and times of a stream's events, and how it ends."""
    chunks = [json.loads(event[6:]) for event in stream.split(b"\n\n") if event.startswith(b"data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    prompts = [chunk["prompt_token_ids"] for chunk in [*chunks, *choices] if chunk.get("prompt_token_ids")]
    return text, tokens, prompts, choices[-1]["finish_reason"], chunks[-1].get("usage"), {c["created"] for c in chunks}


@given(
    kind=st.sampled_from(["chat", "completion"]),
    tokens=st.lists(st.sampled_from(sorted(TOKENS)), min_size=2, max_size=6),
    cuts=st.sets(st.integers(1, 5)),
    ends=st.sets(st.integers(1, 9)),
    with_tokens=st.booleans(),
)
def test_begin_and_rest_are_the_decode_servers_stream(kind, tokens, cuts, ends, with_tokens):
    """Whichever tokens vLLM sends together, and however its events arrive."""
    bounds = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    groups = [tokens[first:last] for first, last in pairwise(bounds)]
    events = [event + b"\n\n" for event in stock(kind, groups, with_tokens=with_tokens)]
    bounds = [0, *sorted(end for end in ends if end < len(events)), len(events)]
    parts = [b"".join(events[first:last]) for first, last in pairwise(bounds)]
    body = body_of(kind, return_token_ids=with_tokens)
    begin = Begin.of(body, prefilled(kind, tokens[0], with_tokens=with_tokens), tokens[0], 4096)
    found, expected = read(asyncio.run(streamed(begin, parts))), read(b"".join(events))
    assert found[:-1] == expected[:-1]
    assert len(found[-1]) == 1, "all chunks have the same time"


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("with_tokens", [False, True])
def test_a_stream_of_single_tokens_has_the_bytes_of_the_decode_servers(kind, with_tokens):
    events = b"".join(event + b"\n\n" for event in stock(kind, [[7], [8], [11]], with_tokens=with_tokens))
    body = body_of(kind, return_token_ids=with_tokens)
    begin = Begin.of(body, prefilled(kind, 7, with_tokens=with_tokens), 7, 4096)
    created = json.loads(begin.events.partition(b"\n")[0][6:])["created"]
    assert asyncio.run(streamed(begin, [events])) == events.replace(
        b'"created":5,"model', b'"created":%d,"model' % created
    )


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        *((given, True) for given in ({}, {"temperature": 0.7, "top_p": 0.9}, {"stop": None, "echo": False}, {"n": 1})),
        *((given, True) for given in ({"stop": []}, {"stream_options": {"include_usage": True}}, {"user": "u"})),
        *((given, False) for given in ({"stream": False}, {"stream": "true"}, {"stop": ["x"]}, {"logprobs": 0})),
        *((given, False) for given in ({"seed": 0}, {"echo": True}, {"min_tokens": 2}, {"tools": [{}]}, {"new": 1})),
        *(({"truncate_prompt_tokens": most}, most == 2) for most in (2, -1, "2")),
        *((given, False) for given in ({"response_format": {"type": "text"}}, {"stream_options": 3})),
        *((given, False) for given in ({"return_token_ids": 3}, {"stream_options": {"include_usage": "what"}})),
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, False),
    ],
)
def test_only_streams_whose_first_chunk_is_known_begin(field, expected):
    assert may_begin(COMPLETION | field) == expected


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize(
    ("fields", "choice", "token", "longest"),
    [
        ({"max_tokens": 1}, {}, 7, 4096),
        ({}, {"finish_reason": "stop"}, 7, 4096),
        ({}, {}, None, 4096),
        ({}, {}, 7, 11),
        ({"max_tokens": None}, {}, 7, 4),
    ],
)
def test_what_the_decode_server_ends_or_refuses_does_not_begin(kind, fields, choice, token, longest):
    assert Begin.of(body_of(kind, **fields), prefilled(kind, 7, **choice), token, longest) is None


@pytest.mark.parametrize(
    "response", [{}, {"choices": []}, {"choices": [3]}, {"choices": [{}], "usage": None}, {"choices": None}]
)
async def test_a_response_of_another_form_leaves_the_begin_to_the_decode_server(response):
    workers = FakeWorkers(1)
    workers.prefilled = response | {"kv_transfer_params": {DRAWN: 7}}
    async with controller(workers, decode_url=DECODE, continues=True) as client:
        answer = await client.post(PATH, json=COMPLETION)
    assert (answer.status_code, answer.content) == (200, EVENTS)
    assert workers.decoded[0][1]["kv_transfer_params"] == {"do_remote_prefill": True}


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_the_first_chunk_does_not_wait_for_the_decode_server(kind):
    workers = FakeWorkers(1)
    workers.prefilled = prefilled(kind, 7) | {"kv_transfer_params": {DRAWN: 7}}
    workers.events = b"".join(event + b"\n\n" for event in stock(kind, [[7], [8, 9]]))
    workers.gate.clear()
    body = json.dumps(body_of(kind)).encode()
    head = f"POST {CHAT_PATH if kind == 'chat' else PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    async with server(workers, DECODE, continues=True) as (port, _), asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        first = await reader.readuntil(TOKENS[7].encode())
        assert b"text/event-stream" in first and b"x-weft-worker: 0" in first.lower()
        workers.gate.set()
        assert b'"finish_reason":"length"' in await reader.readuntil(b"[DONE]")
        writer.close()
    ((_, sent),) = workers.decoded
    assert sent["kv_transfer_params"] == {"do_remote_prefill": True, GIVEN: 7}


@pytest.mark.parametrize("fault", ["dead", "dying", "leaving", "other", "refused"])
async def test_an_answer_that_has_begun_and_cannot_go_on_ends_with_an_error(fault):
    workers = FakeWorkers(1)
    workers.prefilled = prefilled("completion", 7) | {"kv_transfer_params": {DRAWN: 7}}
    workers.events = b"".join(event + b"\n\n" for event in stock("completion", [[7], [9]]))
    fields = {"temperature": -1} if fault == "refused" else {}
    async with controller(workers, decode_url=DECODE, continues=True) as client:
        assert "error" not in (await client.post(PATH, json=COMPLETION)).text
        workers.fault = {"decode": fault}
        if fault == "other":
            workers.events = b"".join(event + b"\n\n" for event in stock("completion", [[8], [9]]))
        answers = [await client.post(PATH, json=COMPLETION | fields) for _ in range(2)]
    first, last = json.loads(answers[0].text.split("\n\n")[0][6:]), answers[0].text.split("\n\n")[-3:]
    assert (answers[0].status_code, first["choices"][0]["text"]) == (200, TOKENS[7])
    assert json.loads(last[0][6:])["error"]["message"] and last[1:] == ["data: [DONE]", ""]
    # While the decode server is known to have failed, none begins.
    assert (answers[1].status_code == 503) == (fault == "dead")
    assert answers[1].headers.get("retry-after") or fault != "dead"


@pytest.mark.parametrize("continues", [True, False])
async def test_each_admitted_request_is_counted_as_answered_or_refused(continues):
    workers = FakeWorkers(1)
    workers.prefilled = prefilled("completion", 7) | {"kv_transfer_params": {DRAWN: 7}}
    workers.events = b"".join(event + b"\n\n" for event in stock("completion", [[7], [8]]))
    async with controller(workers, decode_url=DECODE, continues=continues) as client:
        for fault in ("", "dying", "leaving", "dead"):
            workers.fault = {"decode": fault}
            await client.post(PATH, json=COMPLETION)
        metrics = (await client.get("/metrics")).text
    for outcome, number in ("answered", 1), ("refused", 3):
        assert f'weft_client_outcomes_total{{client="anybody",outcome="{outcome}"}} {number}.0' in metrics
    assert 'weft_prefill_refusals_total{status="503"} 3.0' in metrics


@pytest.mark.parametrize(
    ("status", "kind", "content"),
    [
        *((200, "text/event-stream", b"data: " + chunk + b"\n\n") for chunk in (b"{", b'{"choices":[3]}', b"3")),
        (200, "text/event-stream", b""),
        (500, "text/plain", b"Internal Server Error"),
        (404, "text/html", b"<html>\n\n</html>"),
        (400, "application/json", b'{\n\n"error": {"message": "no"}}'),
    ],
)
async def test_an_answer_that_has_begun_and_goes_on_as_something_else_ends_with_an_error(status, kind, content):
    workers = FakeWorkers(1)
    workers.prefilled = prefilled("completion", 7) | {"kv_transfer_params": {DRAWN: 7}}

    async def decode(*_):
        return httpx.Response(status, content=content, headers={"content-type": kind})

    workers._decode = decode
    async with controller(workers, decode_url=DECODE, continues=True) as client:
        answer = await client.post(PATH, json=COMPLETION)
    error, *ends = answer.text.split("\n\n")[-3:]
    assert json.loads(error.removeprefix("data: "))["error"]["message"] and ends == ["data: [DONE]", ""]


@pytest.mark.parametrize("listed", [3, [], [{}], [{"id": "tiny", "max_model_len": None}]])
async def test_a_decode_server_that_does_not_say_how_long_answers_are_begins_them(listed):
    workers = FakeWorkers(1)
    workers.models = {"data": listed}
    workers.prefilled = prefilled("completion", 7) | {"kv_transfer_params": {DRAWN: 7}}
    async with controller(workers, decode_url=DECODE, continues=True) as client:
        answer = await client.post(PATH, json=COMPLETION)
    assert (answer.status_code, answer.content) == (200, EVENTS)


async def test_answers_begin_by_what_the_decode_server_lists_now():
    workers = FakeWorkers(1)
    workers.prefilled = prefilled("completion", 7) | {"kv_transfer_params": {DRAWN: 7}}
    workers.events = b"".join(event + b"\n\n" for event in stock("completion", [[7], [8]]))
    body = COMPLETION | {"model": "adapter"}
    async with controller(workers, decode_url=DECODE, continues=True, probe_s=0.05) as client, asyncio.timeout(20):

        async def wait_until(has_begun):
            while ("x-server" not in (await client.post(PATH, json=body)).headers) != has_begun:
                await asyncio.sleep(0.01)

        await wait_until(False)
        workers.models = {"data": [*MODELS["data"], {"id": "adapter"}]}
        await wait_until(True)
        workers.models = {"data": [{"id": "tiny", "max_model_len": 5}, {"id": "adapter"}]}
        await wait_until(False)


async def test_an_answer_that_has_begun_waits_while_the_queue_is_full():
    workers = FakeWorkers(1)
    workers.prefilled = prefilled("completion", 7) | {"kv_transfer_params": {DRAWN: 7}}
    workers.events = b"".join(event + b"\n\n" for event in stock("completion", [[7], [8]]))
    workers.fault = {"decode": "full"}
    async with controller(workers, decode_url=DECODE, continues=True) as client, asyncio.timeout(20):
        pending = asyncio.create_task(client.post(PATH, json=COMPLETION))
        while len(workers.decoded) < 2:
            await asyncio.sleep(0.01)
        workers.fault = {}
        answer = await pending
    assert read(answer.content)[0] == TOKENS[7] + TOKENS[8] and answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_client_that_leaves_an_answer_that_has_begun_ends_it_at_the_decode_server(is_full):
    workers = FakeWorkers(1)
    workers.prefilled = prefilled("completion", 7) | {"kv_transfer_params": {DRAWN: 7}}
    workers.events = b"".join(event + b"\n\n" for event in stock("completion", [[7], [8]]))
    workers.gate.clear()
    workers.fault = {"decode": "full" if is_full else ""}
    body = json.dumps(COMPLETION).encode()
    async with server(workers, DECODE, continues=True) as (port, _), asyncio.timeout(20):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (PATH.encode(), len(body)) + body)
        while not workers.decoded:
            await asyncio.sleep(0.01)
        writer.close()
        if is_full:
            asked = -1
            while asked != len(workers.decoded):  # it is not asked again
                asked = len(workers.decoded)
                await asyncio.sleep(1.0)
        else:
            while "stream" not in workers.cancelled:
                await asyncio.sleep(0.01)
            while b'outcomes_total{client="anybody",outcome="abandoned"} 1.0' not in await ask(port, METRICS):
                await asyncio.sleep(0.01)
