"""How long a prompt is taken to be, whatever form of OpenAI's API it comes in."""

import pytest

from weft.inference.controller.prompts import MESSAGE_TOKENS, counter, prompt_tokens
from weft.inference.requests import Refusal


def words(text):
    return len(text.split())


@pytest.mark.parametrize(
    ("request_body", "tokens"),
    [
        ({"prompt": "one two three"}, 3),
        ({"prompt": ""}, 1),
        ({"prompt": "one two three", "truncate_prompt_tokens": 2}, 2),
        ({"prompt": "one two three", "truncate_prompt_tokens": -1}, 3),
        ({"prompt": [5, 6, 7, 8]}, 4),
        ({"prompt": ["one two", "three"]}, 3),
        ({"prompt": [[1, 2], [3, 4, 5]]}, 5),
        ({"prompt": ["one two", [3, 4, 5]]}, 5),
        ({"messages": []}, 1),
        ({"messages": [{"content": "one two"}, {"content": "three"}]}, 3 + 2 * MESSAGE_TOKENS),
        ({"messages": [{"content": [{"text": "one "}, {"type": "image"}, {"text": "two"}, 7]}]}, 2 + MESSAGE_TOKENS),
        ({"messages": [{"content": None}, {"role": "tool"}]}, 2 * MESSAGE_TOKENS),
        ({"messages": [{"content": "one"}], "prompt": "one two three four five six"}, 1 + MESSAGE_TOKENS),
        # As JSON: [{"name": "f", "parameters": "two words"}] has five words.
        ({"messages": [{"content": "one"}], "tools": [{"name": "f", "parameters": "two words"}]}, 6 + MESSAGE_TOKENS),
        ({"messages": [{"content": "one"}], "tools": None, "documents": [{"text": "a b"}]}, 4 + MESSAGE_TOKENS),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": ["a b"]}]}, 3 + MESSAGE_TOKENS),
        ({"messages": [{"role": "tool", "content": "one ", "tool_call_id": "1"}]}, 3 + MESSAGE_TOKENS),
    ],
)
def test_every_form_of_a_prompt_is_counted(request_body, tokens):
    assert prompt_tokens(request_body, words) == tokens


@pytest.mark.parametrize(
    ("request_body", "part"),
    [
        ({}, "prompt: give"),
        ({"prompt": []}, "prompt: give"),
        ({"prompt": 3}, "prompt: give"),
        ({"prompt": ["one", 2]}, "prompt: give"),
        ({"prompt": [[1], {}]}, "prompt: give"),
        ({"prompt": [[]]}, "prompt: give"),
        ({"messages": {}}, "messages: give"),
        ({"messages": [{"content": "one"}, "two"]}, "messages: give"),
    ],
)
def test_what_is_none_is_refused(request_body, part):
    with pytest.raises(Refusal, match=part) as caught:
        prompt_tokens(request_body, words)
    assert caught.value.status == 400


def test_without_a_tokenizer_three_bytes_are_a_token():
    count = counter("")
    assert [count(text) for text in ("", "a", "abc", "abcd", "ää", "\ud800")] == [0, 1, 1, 2, 2, 1]
    with pytest.raises(ValueError, match=r"no such file; give a tokenizer\.json"):
        counter("/nowhere")
