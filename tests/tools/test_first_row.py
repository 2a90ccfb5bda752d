"""The first row of data as a dry run shows it."""

import json

import pytest

from weft.conf import load
from weft.engine.data.tokenizer import train_bpe
from weft.tools.dry_run import MOST_CHARACTERS, first_row_lines, show
from weft.tools.preflight import check_data


@pytest.fixture
def words(tmp_path):
    train_bpe(["what is 2? it is 2."], 300).save_pretrained(tmp_path / "words")
    return f"model.tokenizer={tmp_path}/words"


def lines(tmp_path, words, row, *settings):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return first_row_lines(
        load(["recipe=sft", "model.arch=llama", words, f"data.path={tmp_path}/rows.jsonl", *settings])
    )


def test_what_the_loss_counts_is_marked(tmp_path, words):
    head, *text = lines(tmp_path, words, {"prompt": "what is 2?", "completion": "it is 2."})
    assert "tokens, of which" in head and "count in the loss, «these»" in head
    assert "\n".join(text).count("«") == 1 and "assistant\n«it is 2.<|end_turn|>»" in "\n".join(text)


def test_a_text_counts_as_a_whole(tmp_path, words):
    head, *text = lines(tmp_path, words, {"text": "it is 2."}, "data.kind=text")
    assert head.endswith("all of which count") and "it is 2." in text[0] and "«" not in text[0]


def test_a_long_row_that_would_steer_the_terminal_is_short_and_printable(tmp_path, words):
    row = {"prompt": "\x1b[2J\r" * 5000, "completion": "it is 2."}
    _, *text = lines(tmp_path, words, row, "data.sequence_length=100000")
    assert len("\n".join(text)) < MOST_CHARACTERS + 20 and all(line.isprintable() for line in text)
    assert any("\\x1b[2J\\r" in line.replace(" ", "") for line in text)


def test_columns_that_nothing_reads_follow_the_row(tmp_path, words):
    *_, last = lines(tmp_path, words, {"prompt": "what is 2?", "completion": "it is 2.", "wieght": 1})
    assert last == f"{tmp_path}/rows.jsonl: columns that nothing reads: wieght"


FAULTS = {
    "row": ({"prompt": 3, "completion": "it is 2."}, [], "message 1 has a content that is a number"),
    "null": ({"prompt": "a", "completion": None}, [], "its content is null"),
    "cut": (
        {"prompt": "a" * 99, "completion": "b"},
        ["data.sequence_length=8"],
        "data.sequence_length=8: every answer",
    ),
    "template": (
        {"prompt": "a", "completion": "b"},
        ["data.chat_template='{{ 1 // 0 }}'"],
        "the chat template refuses",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_dry_run_refuses_the_data_that_a_run_refuses(tmp_path, words, case):
    row, settings, message = FAULTS[case]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = load(["recipe=sft", "model.arch=llama", words, f"data.path={tmp_path}/rows.jsonl", *settings])
    for check in (check_data, show):
        with pytest.raises(ValueError, match=message) as error:
            check(config)
        assert "\n" not in str(error.value)


def test_a_row_that_cannot_be_encoded_is_the_error_of_the_report(tmp_path, words):
    with pytest.raises(ValueError, match="message 1 has a content that is a number"):
        lines(tmp_path, words, {"prompt": 3, "completion": "it is 2."})


def test_data_that_comes_with_weft_is_not_shown():
    assert first_row_lines(load(["recipe=quickstart"])) == []
