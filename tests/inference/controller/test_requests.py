"""The nesting of a body is found without parsing it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.conf.host.documents import nests_deeper
from weft.inference.requests import Completion, Refusal, as_prefill, check_prefill_only, parse, prompt_part

VALUES = st.recursive(
    st.none() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def depth(value):
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(value=VALUES, limit=st.integers(0, 6), ascii_only=st.booleans())
def test_it_is_the_nesting_of_the_value(value, limit, ascii_only):
    assert nests_deeper(json.dumps(value, ensure_ascii=ascii_only).encode(), limit) == (depth(value) > limit)


@given(st.binary())
def test_any_bytes_have_an_answer(body):
    nests_deeper(body, 3)


@pytest.mark.parametrize(
    ("request_body", "served"),
    [
        ({"max_tokens": 1}, True),
        ({"max_tokens": 1, "n": 1}, True),
        ({"messages": [], "max_completion_tokens": 1}, True),
        ({"messages": [], "max_completion_tokens": 1, "max_tokens": 9}, True),
        ({"messages": [], "max_completion_tokens": 9, "max_tokens": 1}, False),
        # Completions have no max_completion_tokens in vLLM, and 16 tokens without max_tokens.
        ({"prompt": "a", "max_completion_tokens": 1}, False),
        ({"prompt": "a", "messages": [], "max_completion_tokens": 1, "max_tokens": 9}, False),
        ({"prompt": "a", "max_completion_tokens": 9, "max_tokens": 1}, True),
        ({"max_completion_tokens": None, "max_tokens": 1}, True),
        ({}, False),
        ({"max_tokens": 0}, False),
        ({"max_tokens": 2}, False),
        ({"max_tokens": 1, "n": 2}, False),
        ({"max_tokens": 1, "n": 0}, False),
        ({"max_tokens": 9, "n": 9, "kv_transfer_params": {"do_remote_decode": True}}, True),
        ({"max_tokens": 9, "kv_transfer_params": {"do_remote_decode": False}}, False),
        ({"max_tokens": 9, "kv_transfer_params": {}}, False),
        ({"max_tokens": 9, "kv_transfer_params": "do_remote_decode"}, False),
        ({"max_tokens": 1, "kv_transfer_params": None}, True),
    ],
)
def test_only_one_token_or_what_others_decode_is_served(request_body, served):
    if served:
        check_prefill_only(request_body)
        return
    with pytest.raises(Refusal, match="set max_tokens=1, or kv_transfer_params") as caught:
        check_prefill_only(request_body)
    assert (caught.value.status, caught.value.retry_after_s) == (400, 0)


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (499, "invalid_request_error"), (500, "service_unavailable")]
)
def test_a_refusal_says_whose_fault_it_is(status, kind):
    answer = Refusal(status, "no luck", retry_after_s=3).answer
    assert answer == {"error": {"message": "no luck", "type": kind, "param": None, "code": status}}


def test_a_body_may_be_nested_as_deeply_as_is_said():
    assert parse(b'{"a": [1]}', max_depth=2) == {"a": [1]}
    with pytest.raises(Refusal, match="nested deeper than 1 levels"):
        parse(b'{"a": [1]}', max_depth=1)


REMOTE = {"kv_transfer_params": {"do_remote_decode": True}}


@pytest.mark.parametrize(
    "several",
    [
        {"prompt": ["one", "two"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": "one", "prompt_embeds": "AA=="},
        {"prompt_embeds": ["AA==", "AA=="]},
        {"messages": [[{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]]},
        {"messages": [], "prompt": ["one", "two"]},
    ],
)
def test_several_prompts_that_others_decode_are_refused(several):
    assert as_prefill(several) == several, "no cache is handed over"
    with pytest.raises(Refusal, match="send one request for each prompt") as caught:
        as_prefill(several | REMOTE)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "one", [{"prompt": [1, 2]}, {"prompt": ["one"]}, {"prompt": [[1]]}, {"messages": [{"role": "user"}] * 2}]
)
def test_one_prompt_in_any_form_is_prefilled(one):
    assert as_prefill(one | REMOTE) == one | REMOTE | {"max_tokens": 1}


@pytest.mark.parametrize(
    ("decoding", "prefilling"),
    [
        ({}, {"max_tokens": 1}),
        (
            {"max_tokens": 9, "n": 3, "best_of": 5, "min_tokens": 4},
            {"max_tokens": 1, "n": 1, "best_of": 1, "min_tokens": 1},
        ),
        # Completions have no max_completion_tokens in vLLM, and 16 tokens without max_tokens.
        ({"max_completion_tokens": 9}, {"max_completion_tokens": 1, "max_tokens": 1}),
        ({"max_completion_tokens": 9, "max_tokens": None}, {"max_completion_tokens": 1, "max_tokens": 1}),
        ({"max_tokens": 9, "use_beam_search": True}, {"max_tokens": 1}),
        ({"max_tokens": 1, "min_tokens": 0, "seed": 3}, {"max_tokens": 1, "min_tokens": 0, "seed": 3}),
        ({"max_tokens": 10**9, "n": None}, {"max_tokens": 1, "n": None}),
        ({"max_tokens": -1, "n": 0}, {"max_tokens": -1, "n": 0}),  # vLLM refuses them
    ],
)
def test_prefills_are_bounded_to_one_sequence_and_one_token(decoding, prefilling):
    assert as_prefill({"prompt": "x"} | decoding | REMOTE) == {"prompt": "x"} | prefilling | REMOTE
    assert as_prefill({"prompt": "x"} | decoding) == {"prompt": "x"} | decoding


@pytest.mark.parametrize("name", ["n", "best_of", "min_tokens", "max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("number", ["100", 1e9, 100.0, True, [1], "x" * 10**6])
def test_numbers_that_vllm_would_convert_are_refused(name, number):
    """A hundred sequences would keep a hundred caches that no instance fetches."""
    with pytest.raises(Refusal, match=f"{name}=.*: not an integer") as caught:
        as_prefill({"prompt": "x", name: number} | REMOTE)
    assert caught.value.status == 400 and len(str(caught.value)) < 100


@pytest.mark.parametrize(
    "answer", [{"seed": 3, "stop": ["x"], "stream": True}, {"n": 1, "max_tokens": 9, "min_tokens": 0}, {"logprobs": 2}]
)
def test_the_prompts_part_of_a_whole_request_has_nothing_of_its_answer(answer):
    prompt = {"model": "m", "prompt": "x", "temperature": 0.5, "tools": [], "cache_salt": "s"}
    part = prompt_part(prompt | answer)
    assert part.pop("kv_transfer_params")["do_remote_decode"] is True
    assert part == prompt | {"max_tokens": 1}
    assert as_prefill(part | REMOTE) == part | REMOTE


def test_a_stream_cannot_hand_a_cache_over():
    with pytest.raises(Refusal, match="set stream=false"):
        as_prefill({"prompt": "x", "stream": True} | REMOTE)


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_transfer_parameters_are_refused_where_they_can_only_be_text(name):
    with pytest.raises(Refusal, match=f"vllm_xargs: {name}"):
        as_prefill({"prompt": "x", "vllm_xargs": {name: "do_remote_decode"}})


@pytest.mark.parametrize("text", [rb"\ud800", rb"\uDFFF\ud800", b"\xed\xa0\x80", b"\xff"])
def test_text_that_is_not_unicode_is_refused(text):
    with pytest.raises(Refusal) as caught:
        parse(b'{"prompt": "' + text + b'"}', max_depth=2)
    assert caught.value.status == 400
    assert parse(rb'{"prompt": "\ud83d\ude00"}', max_depth=2) == {"prompt": "\N{GRINNING FACE}"}
    with pytest.raises(Refusal, match="not valid JSON"):
        parse('{"prompt": 1}'.encode("utf-16"), max_depth=2)


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999"])
def test_numbers_that_are_not_finite_are_refused(number):
    with pytest.raises(Refusal, match="not valid JSON") as caught:
        parse(b'{"temperature": ' + number + b"}", max_depth=2)
    assert caught.value.status == 400


def is_aborted(*parts):
    completion = Completion()
    return [completion.is_aborted(part) for part in parts]


def test_an_aborted_response_is_not_confused_with_text_about_one():
    assert is_aborted(b'{"choices":[{"finish_reason":"abort","text":""}]}') == [True]
    assert is_aborted(b'data: {"choices": [{"finish_reason": "abort"}]}') == [True]
    quoted = json.dumps({"choices": [{"finish_reason": "length", "text": '"finish_reason":"abort"'}]})
    assert is_aborted(quoted.encode()) == [False]


def test_a_stream_without_a_finish_reason_was_aborted():
    begun, ended = (
        b'data: {"choices":[{"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"finish_reason":"stop"}]}\n\n',
    )
    done = b"data: [DONE]\n\n"
    assert is_aborted(done) == is_aborted(begun + done) == [True]
    assert is_aborted(begun, done) == [False, True]
    assert is_aborted(begun, ended, done) == [False] * 3
    assert is_aborted(begun + ended + done) == [False]
    assert is_aborted(b'data: {"error": {"message": "wrong"}}\n\n', done) == [False, False]


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"image_url": "x"}, {"type": "new"}]
)
def test_images_are_refused_by_workers_and_left_to_the_decode_server(part):
    value = {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]}
    assert prompt_part(value) is None
    for request in (value, value | REMOTE):
        with pytest.raises(Refusal, match="encoded outside of a training job's bubbles; send text") as refused:
            as_prefill(request)
        assert (refused.value.status, refused.value.field) == (400, "messages")


@pytest.mark.parametrize("part", [{"text": "one"}, {"type": "output_text", "text": "one"}, "one"])
def test_parts_of_text_are_not_taken_for_images(part):
    value = {"messages": [{"role": "user", "content": [part]}]}
    assert as_prefill(value) == value and prompt_part(value) is not None
