"""Weights of messages, as in OpenAI's format: an assistant's message of weight 0 is not in the loss."""

from __future__ import annotations

import datasets
import pytest

from tests.engine.data.test_chat import BRACKETS, CHATML, ENDING
from weft.conf.schema import DataConfig, DataKind
from weft.engine.data import check_source, encode_first, unused_lines
from weft.engine.data.chat import ChatEncoder
from weft.engine.data.documents import IGNORED
from weft.engine.data.messages import Conversation
from weft.engine.data.pairs import Pair, pair_fault
from weft.engine.data.tokenizer import CHAT_TEMPLATE

CALL = {"type": "function", "function": {"name": "sum", "arguments": {"x": 2}}}
CALLING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% for c in m.tool_calls or [] %}{% generation %}"
    "CALL {{ c.function.name }};{% endgeneration %}{% endfor %}{% generation %}{{ m.content }}<|end_turn|>"
    "{% endgeneration %}{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
)
"""One range of tags for each call, and one for the text."""


def talk(*weights):
    """A conversation whose answers have these weights. None leaves the key out."""
    answers = [{"tool_calls": [CALL, CALL]}, {}, {}]
    messages = []
    for number, (weight, more) in enumerate(zip(weights, answers, strict=True)):
        more |= {} if weight is None else {"weight": weight}
        messages += [{"role": "user", "content": f"ask {number}", "weight": 0}]
        messages += [{"role": "assistant", "content": f"it is {number}", **more}]
    return messages


def learnt(tokenizer, template, messages, prompted=0):
    encoder = ChatEncoder(tokenizer, ("messages",), template=template, limit=512)
    columns = encoder([Conversation(messages, prompted=prompted)], [0])
    return tokenizer.decode([token for token in columns["labels"][0] if token != IGNORED])


@pytest.mark.parametrize("template", [CHATML, BRACKETS, ENDING, CHAT_TEMPLATE, CALLING])
@pytest.mark.parametrize(
    ("weights", "numbers"), [((0, 1, None), {1, 2}), ((1, 0, 0), {0}), ((0, 0.0, 1.0), {2}), ((None, 0, 1), {0, 2})]
)
def test_a_turn_of_weight_0_is_not_in_the_loss(tokenizer, template, weights, numbers):
    text = learnt(tokenizer, template, talk(*weights))
    assert {number for number in range(3) if f"it is {number}" in text} == numbers
    assert "ask" not in text
    if template is CALLING:
        assert text.count("CALL") == (2 if 0 in numbers else 0)


def test_weights_hold_after_a_prompt(tokenizer):
    for template in (CHATML, CALLING):
        assert "it is 2" in learnt(tokenizer, template, talk(1, 0, 1), prompted=2)
        assert "it is 0" not in learnt(tokenizer, template, talk(1, 0, 1), prompted=2)


def test_a_template_whose_tags_depend_on_later_messages_is_refused(tokenizer):
    last = (
        "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"message 4: the chat template marks other turns with {% generation %}"):
        learnt(tokenizer, last, talk(0, 1, 1))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (("0", 1, 1), r'message 2 has weight "0"; give 0 to leave it out of the loss, or 1'),
        ((1, 0.5, 1), r"message 4 has weight 0\.5; give 0"),
        ((1, True, 1), r"message 4 has weight true; give 0"),
        ((1, False, 1), r"message 4 has weight false; give 0"),
        ((1, -1, 1), r"message 4 has weight -1; give 0"),
        ((1, [0], 1), r"message 4 has weight \[0\]; give 0"),
        ((0, 0, 0), r"every message of the assistant has weight 0, so nothing can be learnt; remove the row"),
    ],
)
def test_other_weights_are_refused_in_one_line(write, weights, message):
    path = write("rows.jsonl", [{"messages": talk(1, 1, 1)}, {"messages": talk(*weights)}])
    with pytest.raises(ValueError, match=rf"^data\.path={path}: line 2: {message}") as caught:
        check_source(DataConfig(kind=DataKind.chat, path=path))
    assert "\n" not in str(caught.value)


def test_a_weight_of_1_on_a_users_message_is_refused(write):
    path = write("rows.jsonl", [{"messages": [{"role": "user", "content": "a", "weight": 1}, *talk(1, 1, 1)]}])
    with pytest.raises(ValueError, match=r"weight 1 and the role user, but only the assistant's are in the loss"):
        check_source(DataConfig(kind=DataKind.chat, path=path))


def test_weights_are_used_in_every_form_and_kind_of_file(tokenizer, write, tmp_path):
    shared = [
        {"from": "human", "value": "ask", "weight": 0},
        {"from": "gpt", "value": "it is 1", "weight": 0},
        {"from": "human", "value": "ask", "weight": 0},
        {"from": "gpt", "value": "it is 2", "weight": 1},
    ]
    rows = [{"messages": talk(0, 0, 1)}, {"messages": talk(1, 1, 1)}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    for path in (
        write("shared.jsonl", [{"conversations": shared}]),
        write("rows.jsonl", rows),
        str(tmp_path / "rows.parquet"),
    ):
        data = DataConfig(kind=DataKind.chat, path=path, chat_template=CHATML, sequence_length=512)
        seen = check_source(data)
        labels = encode_first(data, tokenizer).labels
        text = tokenizer.decode([token for token in labels if token != IGNORED])
        assert "it is 2" in text and "it is 1" not in text
        assert not any("weight" in line.rpartition(": ")[2] for line in unused_lines(data, tokenizer, seen))


def test_an_answer_of_a_pair_has_no_weight_of_0():
    prompt, answer = [{"role": "user", "content": "a"}], {"role": "assistant", "content": "b"}
    fault = pair_fault(Pair(prompt, [answer | {"weight": 0}], [answer]))
    assert fault == "a message of an answer has weight 0, but an answer counts as a whole; remove the weight"
    assert pair_fault(Pair([*prompt, answer | {"weight": 0}, *prompt], [answer | {"weight": 1}], [answer])) is None
