from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weft.conf.schema import DataConfig, DataKind
from weft.engine.data import check_source, unused_lines

GOOD = '{"text": "one"}\n'
TALK = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


def talk(messages) -> str:
    return TALK + json.dumps({"messages": messages}) + "\n"


TEXT_FAULTS = {
    "empty file": ("a.jsonl", "", "it holds no row; give a file with documents"),
    "blank lines": ("a.jsonl", "\n\n", "it holds no row"),
    "malformed line": ("a.jsonl", GOOD + "\n" + '{"text": "tw\n', r"line 3: not JSON \(.*column 10\); write one"),
    "cut line": ("a.jsonl", GOOD + '{"text": ', "line 2: not JSON"),
    "missing field": ("a.jsonl", GOOD + '{"txt": "two", "n": 1}\n', r"line 2: no field text, but txt, n; .*text_field"),
    "no object": ("a.jsonl", GOOD + "3\n", "line 2: not an object but a number; write rows such as"),
    "number": ("a.jsonl", GOOD + '{"text": 3}\n', "line 2: field text is a number, not text"),
    "null": ("a.jsonl", GOOD * 4 + '{"text": null}\n', "line 5: field text is nothing"),
    "latin-1": ("a.jsonl", GOOD.encode() + '{"text": "ä"}'.encode("latin-1"), "line 2: not UTF-8"),
    "json list": ("a.json", '[{"text": "a"}, {"txt": "b"}]', "entry 2: no field text, but txt"),
    "broken json list": ("a.json", '[{"text": "a"},\n {"text" "b"}]', "line 2: not JSON .*correct the list"),
    "json lines": ("a.json", GOOD + "nonsense", "line 2: not JSON"),
    "empty text": ("a.txt", " \n\n", "it holds no row"),
    "binary text": ("a.txt", b"fine\n\xff\xfe\n", "line 2: not UTF-8"),
    "suffix": ("a.xlsx", "text\none\n", r"files of kind \.xlsx are not read; convert it to one of \.jsonl, \.json"),
    "no object but a list": ("a.jsonl", '[{"text": "a"}]', "line 1: not an object but a list; write rows such as"),
    "cells": ("a.csv", "text,n\none,1\ntwo\n", "line 3: 1 values for 2 columns; quote values that contain ','"),
    "open quote": ("a.csv", 'text\none\n"two\n', "line 3: not a row .*; write the file again"),
    "column twice": ("a.tsv", "text\ttext\na\tb\n", "column text is there twice"),
    "other separator": ("a.csv", "text;n\none;1\n", "line 2: no field text, but text;n; add it"),
    "head alone": ("a.csv", "text\n", "it holds no row"),
    "cut": ("a.jsonl.gz", gzip.compress(GOOD.encode() * 9)[:-9], r"not decompressed \(.*\); write"),
    "damaged": ("a.jsonl.xz", b"xz", "not decompressed"),
    "damaged bz2": ("a.jsonl.bz2", b"BZnonsense", "not decompressed"),
    "zst": ("a.jsonl.zst", b"", r"files of kind \.zst are not read"),
    "not compressed": ("a.csv.gz", "text\n", "not decompressed"),
    "no suffix": ("a", "text\n", r"files of kind \(no suffix\) are not read"),
    "no parquet": ("a.parquet", "PAR?", "not a Parquet file"),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXT_FAULTS)
def test_faults_in_texts_are_named_with_their_line(tmp_path, case):
    name, content, message = TEXT_FAULTS[case]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"data\.path={path}: {message}"):
        check_source(DataConfig(kind=DataKind.text, path=str(path)))


CHAT_FAULTS = {
    "text": (talk("hello"), "line 2: it holds a text; give a list of messages"),
    "empty": (talk([]), "line 2: it holds an empty list"),
    "list of texts": (talk(["hello"]), "line 2: message 1 is a text; give a mapping with role and content"),
    "other names": (
        talk([{"speaker": "human", "text": "hi"}]),
        "line 2: message 1 has speaker, text, not role and content; name its parts",
    ),
    "no content": (talk([{"role": "user"}]), "line 2: message 1 has role, not content"),
    "parts": (
        talk([{"role": "user", "content": [{"type": "text"}]}]),
        "line 2: message 1 has a content that is a list; give text, or a list of parts of type text",
    ),
    "no assistant": (
        talk([{"role": "user", "content": "a"}, {"role": "gpt", "content": "b"}]),
        r"line 2: no message has the role assistant \(found: user, gpt\)",
    ),
    "missing": (
        '{"dialog": []}\n',
        r"line 1: no field messages, but dialog; .*data\.messages_field .*\(messages; conversations; prompt and",
    ),
    "empty conversations": ('{"conversations": []}\n', "line 1: it holds an empty list"),
    "no completion": ('{"prompt": "a", "completion": null}\n', "line 1: message 2 has role, content, not content"),
    "mixed": (
        TALK + '{"prompt": "a", "completion": "b"}\n',
        "line 2: its conversation is in prompt, and that of rows before in messages; write all alike",
    ),
    "no value": (
        '{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": null}]}\n',
        "line 1: message 2 has role, content, not content; its content is null",
    ),
    "a call that is not JSON": (
        '{"conversations": [{"from": "gpt", "value": "a"}, {"from": "function_call", "value": "tide()"}]}\n',
        r"line 1: message 2 has role, tool_calls, not content; it calls nothing: .*function_call: JSON with a name",
    ),
    "no calls": (
        talk([{"role": "assistant", "content": None, "tool_calls": []}]),
        "line 2: message 1 has role, content, tool_calls, not content; it calls nothing",
    ),
    "no instruction": (
        '{"instruction": null, "input": "1 and 2", "output": "3"}\n',
        "line 1: message 1 has role, content, not content; its content is null",
    ),
    "an input that is no text": (
        '{"instruction": "add", "input": [1, 2], "output": "3"}\n',
        "line 1: message 1 has a content that is a list",
    ),
    "answers in the prompt only": (
        '{"prompt": [{"role": "assistant", "content": "a"}], "completion": [{"role": "user", "content": "b"}]}\n',
        r"line 1: no message has the role assistant \(found: user\)",
    ),
    "nobody answers": (
        '{"conversations": [{"from": "human", "value": "a"}]}\n',
        r"line 1: no message has the role assistant \(found: user\)",
    ),
}


@pytest.mark.parametrize("case", CHAT_FAULTS)
def test_faults_in_conversations_say_what_was_found(tmp_path, case):
    content, message = CHAT_FAULTS[case]
    path = tmp_path / "talk.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"data\.path={path}: {message}"):
        check_source(DataConfig(kind=DataKind.chat, path=str(path)))


SETTINGS = {
    "split": ({"kind": DataKind.corpus, "eval_split": "test"}, r"data\.eval_split=test: the embedded corpus has no"),
    "missing file": ({"path": "/nowhere/a.jsonl"}, r"data\.path=/nowhere/a\.jsonl: does not exist"),
    "missing relative": ({"path": "./a"}, "does not exist"),
    "missing home": ({"path": "~/nowhere"}, "does not exist"),
    "missing by suffix": ({"path": "corpus.jsonl"}, "does not exist"),
    "missing below": ({"path": "a/b/c"}, "does not exist; give a file, a folder, or a hub name"),
    "fraction": ({"eval_fraction": 1.0}, r"data\.eval_fraction=1\.0: give a share"),
    "length": ({"sequence_length": 1}, r"data\.sequence_length=1: give at least 2"),
    "buffer": ({"shuffle_buffer": 0}, r"data\.shuffle_buffer=0: give at least 1"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_work(case):
    settings, message = SETTINGS[case]
    with pytest.raises(ValueError, match=message):
        check_source(DataConfig(**{"kind": DataKind.text, "path": "owner/name", **settings}))


def test_folders(tmp_path, tokenizer):
    config = DataConfig(kind=DataKind.text, path=str(tmp_path))
    with pytest.raises(
        ValueError, match=r"the folder has no file of kind \.jsonl, \.json, \.ndjson, \.csv, \.tsv, \.parquet, \.txt"
    ):
        check_source(config)
    for name in ("README.md", "dataset_infos.json"):  # as clones of the hub have them
        (tmp_path / name).write_text("{}")
    (tmp_path / "part").mkdir()
    (tmp_path / "part/a.jsonl").write_text(GOOD)
    check_source(config)
    (tmp_path / "part/b.jsonl").write_text(GOOD + "{")
    with pytest.raises(ValueError, match=r"part/b\.jsonl, line 2: not JSON"):
        check_source(config)
    (tmp_path / "part/b.jsonl").unlink()
    for name in ("b.rows.gz", "b.tar.gz", "b.parquet.gz", "b.xlsx", "b.arrow"):
        (tmp_path / "part" / name).write_text("half of the rows")
        for address in (str(tmp_path), f"file://{tmp_path}", f"file://{tmp_path}/part/*"):
            with pytest.raises(ValueError, match=rf"part/{name} \(1 such\) would not be read.*; convert it"):
                check_source(DataConfig(kind=DataKind.text, path=address))
        (tmp_path / "part" / name).unlink()
    (tmp_path / "c.JSONL").write_text(GOOD)
    assert unused_lines(config, tokenizer, check_source(config)) == []
    (tmp_path / "train.jsonl").write_text(GOOD)
    unread = f"{tmp_path}: files of no split that is read: {tmp_path}/c.JSONL, {tmp_path}/part/a.jsonl"
    assert unused_lines(config, tokenizer, check_source(config)) == [unread]
    (tmp_path / "c.txt").write_text("mixed")
    with pytest.raises(ValueError, match=r"the folder mixes \.jsonl, \.txt"):
        check_source(config)


def test_columns_of_parquet(tmp_path):
    path = str(tmp_path / "a.parquet")
    messages = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    datasets.Dataset.from_dict({"body": ["a"], "n": [1], "messages": messages}).to_parquet(path)
    check_source(DataConfig(kind=DataKind.text, path=path, text_field="body"))
    check_source(DataConfig(kind=DataKind.chat, path=path))
    for settings, message in (
        ({"kind": DataKind.text}, r"no column text, but body, n, messages; .*data\.text_field"),
        ({"kind": DataKind.text, "text_field": "n"}, "column n is int64, not text"),
        ({"kind": DataKind.chat, "messages_field": "body"}, "column body is .*list of structs of role and content"),
    ):
        with pytest.raises(ValueError, match=message):
            check_source(DataConfig(path=path, **settings))
    pq.write_table(pa.table([["a"], ["b"]], ["text", "text"]), path)
    with pytest.raises(ValueError, match="column text is there twice; rename one"):
        check_source(DataConfig(kind=DataKind.text, path=path))


ROWS = {
    DataKind.text: ("text", "a", "field text is nothing"),
    DataKind.chat: ("messages", json.loads(TALK)["messages"], "it holds nothing"),
    DataKind.preference: ("chosen", "a", "its prompt is a text, chosen is nothing"),
}


@pytest.mark.parametrize("form", ["parquet", "saved"])
@pytest.mark.parametrize("kind", ROWS)
def test_a_null_in_a_later_row_of_a_table_is_found(tmp_path, kind, form):
    name, value, fault = ROWS[kind]
    made = datasets.Dataset.from_list([{"prompt": "a", "rejected": "b", name: value}] * 40)
    made = datasets.concatenate_datasets([made, made.select([0]).map(lambda row: {name: None}, features=made.features)])
    path = tmp_path / ("saved" if form == "saved" else "a.PARQUET")
    made.save_to_disk(path) if form == "saved" else made.to_parquet(path)
    with pytest.raises(ValueError, match=rf"data\.path={path}: row 41: {fault}"):
        check_source(DataConfig(kind=kind, path=str(path), cache_dir=str(tmp_path)))


def test_a_damaged_table_is_named_with_the_rows_before(tmp_path):
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_dict({"text": [str(n) * 999 for n in range(99)]}).to_parquet(path)
    data = bytearray(path.read_bytes())
    data[4:400] = bytes(396)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"data\.path={path}: after row 0: not read \(.*\); write the file again"):
        check_source(DataConfig(kind=DataKind.text, path=str(path)))


def test_plain_text_has_one_field_and_no_conversations(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("words")
    check_source(DataConfig(kind=DataKind.text, path=str(path)))
    with pytest.raises(ValueError, match=r"the only field of plain text is text"):
        check_source(DataConfig(kind=DataKind.text, path=str(path), text_field="body"))
    with pytest.raises(ValueError, match="plain text holds no conversations"):
        check_source(DataConfig(kind=DataKind.chat, path=str(path)))


def test_what_is_right_passes(tmp_path):
    for name, content in (("a.jsonl", "\ufeff" + GOOD + "\n" + GOOD), ("b.json", '[{"text": "a"}]'), ("c.json", GOOD)):
        path: Path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        check_source(DataConfig(kind=DataKind.text, path=str(path)))
    check_source(DataConfig())
    check_source(DataConfig(kind=DataKind.text, path="owner/name"))
    check_source(DataConfig(kind=DataKind.text, path="imdb"))
