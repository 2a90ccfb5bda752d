"""Tests of the loss's tokens under public models' chat templates: the assistant's turns, to the token."""

from __future__ import annotations

import json
from datetime import datetime
from itertools import groupby

import pytest

from tests.engine.data.templates import TEMPLATES, template_tokenizer
from weft.conf.schema import DataConfig, DataKind
from weft.engine.data import check_source, unused_lines
from weft.engine.data.chat import ChatEncoder
from weft.engine.data.documents import IGNORED
from weft.engine.data.messages import Conversation

NOW = datetime(2026, 1, 2)
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is 2?"},
    {"role": "assistant", "content": "it is 2.\nreally"},
    {"role": "user", "content": "and 3?"},
    {"role": "assistant", "content": "it is 3"},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "<b>no</b> thanks"},
]
ANSWERS = ["it is 2.\nreally", "it is 3", "<b>no</b> thanks"]
CLOSINGS = {
    "phi3": ["<|end|>\n", "<|end|>\n<|eos|>"],
    "llama3": ["<|eot_id|>"],
    "llama3.1": ["<|eot_id|>"],
    "mistral": ["<|eos|>"],
    "gemma": ["<end_of_turn>\n"],
    "zephyr": ["<|eos|>\n"],
    "granite": ["<|end_of_text|>\n"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "command-r": ["<|END_OF_TURN_TOKEN|>"],
    "gpt-oss": ["<|end|>", "<|return|>"],
}
"""The text that closes a turn, and the last one if that is closed in another way; the default is ChatML's."""
OPENINGS = {"mistral": " ", "gpt-oss": "<|channel|>final<|message|>"}
"""The text that a generation writes before its answer."""
CALL = {"id": "123456789", "type": "function", "function": {"name": "tide", "arguments": {"port": "Bergen"}}}
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}
CALLED = {
    "llama3.1": '{"name": "tide", "parameters": {"port": "Bergen"}}<|eot_id|>',
    "qwen2.5": '<tool_call>\n{"name": "tide", "arguments": {"port": "Bergen"}}\n</tool_call><|im_end|>\n',
    "qwen3": '<tool_call>\n{"name": "tide", "arguments": {"port": "Bergen"}}\n</tool_call><|im_end|>\n',
    "mistral": '[TOOL_CALLS] [{"name": "tide", "arguments": {"port": "Bergen"}, "id": "123456789"}]<|eos|>',
    "granite": '<|tool_call|>[{"name": "tide", "arguments": {"port": "Bergen"}}]<|end_of_text|>\n',
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>tide\n```json\n{"port": "Bergen"}\n'
    "```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    "gpt-oss": ' to=functions.tide<|channel|>commentary json<|message|>{"port": "Bergen"}<|call|>',
}
"""The text of a turn that calls a tool."""


@pytest.fixture(scope="module")
def tokenizer():
    return template_tokenizer()


def learnt(tokenizer, name, messages, tools=None) -> list[str]:
    """The texts that count; the ids are those of `apply_chat_template`."""
    encoder = ChatEncoder(tokenizer, ("messages",), template=TEMPLATES[name], limit=10_000, now=NOW)
    columns = encoder([Conversation(messages, tools)], [0])
    ids, labels = columns["input_ids"][0], columns["labels"][0]
    assert (
        ids
        == tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=TEMPLATES[name], return_dict=True, strftime_now=NOW.strftime
        )["input_ids"]
    )
    assert all(label in (token, IGNORED) for token, label in zip(ids, labels, strict=True))
    spans = groupby(zip(ids, labels, strict=True), lambda each: each[1] != IGNORED)
    return [tokenizer.decode([token for token, _ in span]) for counts, span in spans if counts]


def turns(name, answers):
    first, *last = CLOSINGS.get(name, ["<|im_end|>\n"])
    closings = [first] * (len(answers) - 1) + [*last, first][:1]
    return [OPENINGS.get(name, "") + answer + closing for answer, closing in zip(answers, closings, strict=True)]


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_turn_ends_at_its_closing_token(tokenizer, name, system):
    answers = [*ANSWERS]
    if name == "qwen3":
        answers[-1] = f"<think>\n\n</think>\n\n{answers[-1]}"
    assert learnt(tokenizer, name, TALK if system else TALK[1:]) == turns(name, answers)


@pytest.mark.parametrize("name", ["llama3", "qwen2.5", "phi3", "chatml", "gpt-oss"])
def test_answer_at_the_beginning_counts_alone(tokenizer, name):
    """Without messages, templates leave out the system's turn or the beginning of sequence, but not with them."""
    assert learnt(tokenizer, name, TALK[4:]) == turns(name, ANSWERS[1:])


@pytest.mark.parametrize("name", ["llama3", "qwen2.5", "phi3", "chatml", "granite", "gpt-oss"])
def test_answers_in_a_row_end_at_their_closing_tokens(tokenizer, name):
    talk = [*TALK[:3], TALK[4], *TALK[5:]]
    assert "".join(learnt(tokenizer, name, talk)) == "".join(turns(name, ANSWERS))


def test_turn_with_the_text_of_another_inside_is_refused(tokenizer, monkeypatch):
    """Gemma 4 renders a tool's response between a call and the same message's content."""
    inside = (
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{{ messages[loop.index].content }}{% endif %}{{ m.content }}"
    )
    text = "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }} " + inside + "<|im_end|>{% endfor %}"
    monkeypatch.setitem(TEMPLATES, "inside", text + "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}")
    talk = [TALK[1], {"role": "assistant", "content": "so", "tool_calls": [CALL]}, {"role": "tool", "content": "low"}]
    with pytest.raises(ValueError, match="message 2: the chat template does not show where this assistant turn begins"):
        learnt(tokenizer, "inside", talk)


@pytest.mark.parametrize("content", ["", None])
@pytest.mark.parametrize("name", CALLED)
def test_call_of_a_tool_counts_in_the_loss(tokenizer, name, content):
    content = None if name == "deepseek" else content
    talk = [
        *TALK[:2],
        {"role": "assistant", "content": content, "tool_calls": [CALL]},
        {"role": "tool", "name": "tide", "tool_call_id": "123456789", "content": "low"},
        {"role": "assistant", "content": "The tide is low."},
        *TALK[5:],
    ]
    last = "<think>\n\n</think>\n\n<b>no</b> thanks" if name == "qwen3" else "<b>no</b> thanks"
    assert learnt(tokenizer, name, talk, [TOOL]) == [CALLED[name], *turns(name, ["The tide is low.", last])]


@pytest.mark.parametrize("arguments", [{}, {"n": 3}, {"port": "", "deep": [{"x": None}]}, '{"port": "Bergen"}'])
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_call_with_any_arguments_counts(tokenizer, name, arguments):
    call = {"type": "function", "function": {"name": "tide", "arguments": arguments}}
    talk = [
        TALK[1],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "low"},
        *TALK[4:],
    ]
    first, *_, last = learnt(tokenizer, name, talk, [TOOL])
    assert "tide" in first and first.endswith(("<|im_end|>\n", "<|call|>")) and "thanks" in last


def test_reasoning_counts_where_the_template_shows_it(tokenizer):
    talk = [TALK[1], {"role": "assistant", "content": "it is 2", "reasoning_content": "hm", "thinking": "hm"}]
    assert learnt(tokenizer, "qwen3", talk) == ["<think>\nhm\n</think>\n\nit is 2<|im_end|>\n"]
    assert learnt(tokenizer, "gpt-oss", talk) == [
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>it is 2<|return|>"
    ]
    earlier = [TALK[1], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nit is 2"}, *TALK[5:]]
    assert learnt(tokenizer, "qwen3", earlier)[0] == "it is 2<|im_end|>\n"


def test_call_that_the_template_hides_is_refused(tokenizer):
    talk = [TALK[1], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    with pytest.raises(ValueError, match=r"message 2 has tool_calls .* does not show them; set data\.chat_template"):
        learnt(tokenizer, "chatml", talk)


HIDDEN = {
    "phi3": ["tool"],
    "zephyr": ["tool"],
    "llama3.1": ["assistant"],
    "granite": ["assistant"],
    "qwen2.5": ["system"],
    "qwen3": ["system"],
    "chatml": [],
    "deepseek": [],
}
"""By template, the roles of `OFTEN_LOST` that it leaves out."""
OFTEN_LOST = [
    *TALK[1:2],
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "name": "tide", "tool_call_id": "123456789", "content": "low"},
    {"role": "system", "content": "be kind"},
    *TALK[3:5],
]


@pytest.mark.parametrize("name", HIDDEN)
def test_messages_that_the_template_leaves_out_are_named(tokenizer, name, tmp_path):
    """Such as a system's message in the middle, an answer of a tool, and text beside a call."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": OFTEN_LOST}))
    data = DataConfig(kind=DataKind.chat, path=str(path), chat_template=TEMPLATES[name], sequence_length=400)
    lines = unused_lines(data, tokenizer, check_source(data))
    text = f"roles of messages whose content the chat template does not show: {', '.join(HIDDEN[name])}"
    assert any(line.endswith(text) for line in lines) == bool(HIDDEN[name]), lines


OPEN = "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{% endfor %}"
"""A role's token ends the turn before it, and nothing the last turn, as in GLM-4's template."""


@pytest.mark.parametrize("name", [*TEMPLATES, "open"])
@pytest.mark.parametrize("end", ["", "<|eos|>"])
def test_answers_that_no_token_closes_are_named(tokenizer, name, end, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [*TALK[1:2], {"role": "assistant", "content": f"it is 2.{end}\n"}]}))
    template = TEMPLATES.get(name, OPEN)
    data = DataConfig(kind=DataKind.chat, path=str(path), chat_template=template, sequence_length=400)
    lines = unused_lines(data, tokenizer, check_source(data))
    assert any("does not learn to stop" in line for line in lines) == (name == "open" and not end), lines
