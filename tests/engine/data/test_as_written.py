"""Local rows are read as their files have them: text stays text, and calls of tools reach the template unchanged."""

from __future__ import annotations

import json
from dataclasses import replace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weft.conf.schema import DataConfig, DataKind
from weft.engine.data import build_loader, check_source, encode_first, require_encodable, tokens, unused_lines
from weft.engine.data.documents import IGNORED

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|turn|>{{ m.role }}\n"
    "{% if m.name is defined %}{{ m.name | tojson }}: {% endif %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}CALL {{ c | tojson }}{% endfor %}<|end_turn|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end_turn|>{% endif %}\n{% endfor %}"
)


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def talk(calls, **more):
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": calls, **more},
        {"role": "tool", "content": "low"},
        {"role": "assistant", "content": "done"},
    ]


TEXT_PART = {"type": "text"}
TOOL_ROWS = [
    {"messages": talk([call("tide", {"port": "Bergen"})]), "tools": [tool("tide", port={"type": "string"})]},
    {
        "messages": talk([call("sum", {"x": 1, "y": [1, 2]})]),
        "tools": [tool("sum", x={"type": "integer", "enum": [1]})],
    },
    {
        "messages": talk([call("tide", {"city": "Oslo", "port": "x"})]),
        "tools": [tool("tide"), tool("sum", content={"type": "x"})],
    },
    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]},
]
"""Rows whose tools and arguments have different keys and types."""


def config(path, tmp_path, **more) -> DataConfig:
    given = {"kind": DataKind.chat, "sequence_length": 400, "packing": False, "shuffle": False} | more
    return DataConfig(path=str(path), cache_dir=str(tmp_path / "cache"), **given)


def read(data: DataConfig, tokenizer, count: int) -> list[tuple[str, str]]:
    """Return the text of ``count`` rows, and the part that the loss counts."""
    check_source(data)
    encode_first(data, tokenizer)
    loader = build_loader(data, tokenizer, microbatch_size=1, replica=0, num_replicas=1, seed=0)
    found = []
    for _ in range(count):
        batch = next(loader)
        labels = batch["labels"][0]
        ids = batch["input_ids"][0][: int(batch["attention_mask"].sum())] if "attention_mask" in batch else None
        assert ids is not None
        found.append((tokenizer.decode(ids), tokenizer.decode(labels[labels != IGNORED])))
    assert loader.state_dict()["epoch"] == 0
    loader.close()
    return found


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_tools_and_calls_are_those_of_the_file(tokenizer, tmp_path, suffix, streaming):
    path = tmp_path / f"rows{suffix}"
    path.write_text("\n".join(map(json.dumps, TOOL_ROWS)) if suffix == ".jsonl" else json.dumps(TOOL_ROWS))
    rendered = read(config(path, tmp_path, chat_template=TEMPLATE, streaming=streaming), tokenizer, 4)
    for (text, counted), row in zip(rendered, TOOL_ROWS, strict=True):
        expected = tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), chat_template=TEMPLATE, tokenize=False
        )
        assert text == expected
        calls = row["messages"][1].get("tool_calls")
        assert counted.startswith(f"CALL {json.dumps(calls[0])}<|end_turn|>" if calls else "you")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["parquet", "saved", "json columns", "text column"])
def test_tables_do_not_add_keys_of_other_rows(tokenizer, tmp_path, form, streaming):
    rows = [TOOL_ROWS[0], TOOL_ROWS[2], TOOL_ROWS[3]]
    table = [{"messages": row["messages"], "tools": row.get("tools")} for row in rows]
    features = None
    if form == "json columns":
        anything = datasets.List(datasets.Json())
        features = datasets.Features({"messages": anything, "tools": anything})
    if form == "text column":
        table = [{**row, "tools": row["tools"] and json.dumps(row["tools"])} for row in table]
    made = datasets.Dataset.from_dict({name: [row[name] for row in table] for name in table[0]}, features=features)
    path = tmp_path / ("saved" if form == "saved" else "rows.parquet")
    made.save_to_disk(path) if form == "saved" else made.to_parquet(path)
    texts = [
        text for text, _ in read(config(path, tmp_path, chat_template=TEMPLATE, streaming=streaming), tokenizer, 3)
    ]
    expected = [
        tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), chat_template=TEMPLATE, tokenize=False)
        for row in rows
    ]
    assert ["".join(sorted(text)) for text in texts] == ["".join(sorted(text)) for text in expected]
    assert "null" not in texts[0] and "city" not in texts[0]


def test_calls_in_sharegpt_s_form_are_calls(tokenizer, write, tmp_path):
    """Otherwise they are turns of an unknown role, which are not learnt."""
    call_text = json.dumps({"name": "tide", "arguments": {"port": "Bergen"}})
    said = [("human", "tide?"), ("function_call", call_text), ("observation", "low"), ("gpt", "It is low.")]
    rows = [
        {"conversations": [{"from": who, "value": what} for who, what in said], "tools": json.dumps([tool("tide")])}
    ]
    ((text, counted),) = read(config(write("a.jsonl", rows), tmp_path, chat_template=TEMPLATE), tokenizer, 1)
    assert counted == f"CALL {json.dumps(call('tide', {'port': 'Bergen'}))}<|end_turn|>It is low.<|end_turn|>"
    assert "<|turn|>tool\nlow" in text and text.startswith(json.dumps([tool("tide")]))


def test_arguments_that_the_template_quotes_again_are_named(tokenizer, write, tmp_path):
    """OpenAI's API writes arguments as JSON text, and most templates expect objects."""
    path = write("a.jsonl", [{"messages": talk([call("tide", '{"port": "Bergen"}')])}])
    for written, lines in (("c | tojson", 1), ("c.function.arguments", 0)):
        data = config(path, tmp_path, chat_template=TEMPLATE.replace("c | tojson", written))
        found = unused_lines(data, tokenizer, check_source(data))
        assert len(found) == lines and all("quotes again: write objects" in line for line in found)


PARTS = [{"type": "text", "text": "you"}, {"type": "text", "text": " there"}]
READS_PARTS = TEMPLATE.replace("m.content or ''", "m.content | map(attribute='text') | join")


def test_content_in_parts_is_rendered_by_a_template_that_reads_parts(tokenizer, write, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": PARTS}]}]
    path = write("a.jsonl", rows)
    ((text, counted),) = read(config(path, tmp_path, chat_template=READS_PARTS), tokenizer, 1)
    assert text == tokenizer.apply_chat_template(rows[0]["messages"], chat_template=READS_PARTS, tokenize=False)
    assert counted == "you there<|end_turn|>"
    with pytest.raises(ValueError, match="message 2 has its content in parts, which the chat template does not read"):
        encode_first(config(path, tmp_path, chat_template=TEMPLATE), tokenizer)


@pytest.mark.parametrize("reads", ["m.content if m.content is string else ''", "'' + m.content"])
def test_a_question_in_parts_is_not_lost(tokenizer, write, tmp_path, reads):
    """A template may leave out what is not a string, or fail, and the first rows may have plain text."""
    template = TEMPLATE.replace("{{ m.content }}", f"{{{{ {reads} }}}}")
    asked = [[{"role": "user", "content": content}] for content in ("hello", PARTS)]
    good, bad = ([{"role": "assistant", "content": text}] for text in ("so", "no"))
    chats = write("a.jsonl", [{"messages": each + good} for each in asked])
    pairs = write("b.jsonl", [{"prompt": each, "chosen": good, "rejected": bad} for each in asked])
    for kind, path in (DataKind.chat, chats), (DataKind.preference, pairs):
        data = replace(config(path, tmp_path, chat_template=template), kind=kind)
        with pytest.raises(ValueError, match=r"line 2: message 1 has its content in parts, which .* does not read"):
            require_encodable(data, tokenizer, check_source(data))


def test_a_column_of_a_type_that_nothing_reads_is_no_obstacle(tokenizer, tmp_path):
    odd = pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))
    talks = pa.array([[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]])
    for names, problem in (
        (("odd", "messages"), None),
        (("messages", "other"), r"column messages is map<.*give a list"),
    ):
        pq.write_table(pa.table(dict(zip(names, (odd, talks), strict=True))), tmp_path / "a.parquet")
        data = config(tmp_path / "a.parquet", tmp_path)
        if problem is None:
            assert [counted for _, counted in read(data, tokenizer, 1)] == ["b<|end_turn|>"]
        else:
            with pytest.raises(ValueError, match=problem):
                check_source(data)


DATES = [
    "2019-11-30",
    "2019-11-30T10:00:00Z",
    "10:30:00",
    "7",
    "1.50",
    "true",
    "null",
    " spaced ",
    "one\u2028two\u0085three",
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["completion", "messages", "conversations", "output", "text"])
def test_text_that_looks_like_another_type_stays_text(tokenizer, write, tmp_path, kind, streaming):
    """Test a file with one odd row alone, and with a second file of ordinary text."""

    def row(answer):
        return {
            "completion": {"prompt": "2020-01-01", "completion": answer},
            "messages": {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]},
            "conversations": {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": answer}]},
            "output": {"instruction": "2020-01-01", "output": answer},
            "text": {"text": answer},
        }[kind]

    write("mixed/a.jsonl", [row("in Bergen")])
    write("mixed/b.jsonl", [row(answer) for answer in DATES])
    alone = write("alone.jsonl", [row(answer) for answer in DATES])
    for path, answers in ((alone, DATES), (str(tmp_path / "mixed"), ["in Bergen", *DATES])):
        data = config(path, tmp_path, streaming=streaming, kind=DataKind.text if kind == "text" else DataKind.chat)
        counted = [text for _, text in read(data, tokenizer, len(answers))]
        closing = "<|eos|>" if kind == "text" else "<|end_turn|>"
        assert counted == [answer + closing for answer in answers]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_files_may_have_other_columns_than_the_first(tokenizer, write, tmp_path, suffix, streaming):
    rows = [
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": f"a{n}"}]} for n in range(4)
    ]
    more = [rows[0], {**rows[1], "id": "x1"}, {**rows[2], "source": 3, "id": 7}, {"score": None, **rows[3]}]
    for number, row in enumerate(more):
        path = tmp_path / "many" / f"{number}.{suffix}"
        write(f"many/{number}.jsonl", [row])
        if suffix == "parquet":
            datasets.Dataset.from_list([row]).to_parquet(path)
            path.with_suffix(".jsonl").unlink()
    found = read(config(tmp_path / "many", tmp_path, streaming=streaming), tokenizer, 4)
    assert [counted for _, counted in found] == [f"a{n}<|end_turn|>" for n in range(4)]


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_of_an_agent_trace_are_ordinary_columns(tokenizer, write, tmp_path, streaming):
    row = {"id": "1", "source": "forum", "model": "none", "system_prompt": "be brief", **TOOL_ROWS[3]}
    found = read(config(write("a.jsonl", [row] * 3), tmp_path, streaming=streaming), tokenizer, 3)
    assert [counted for _, counted in found] == ["you<|end_turn|>"] * 3


def test_an_input_that_only_later_rows_have_is_learnt(tokenizer, write, tmp_path):
    rows = [{"instruction": "a", "output": "b"}, {"instruction": "add", "input": "1 and 2", "output": "3"}]
    found = read(config(write("a.jsonl", rows), tmp_path), tokenizer, 2)
    assert "add\n\n1 and 2" in found[1][0]


BROKEN = {
    "half a pair": (r'{"messages": [{"role": "user", "content": "a\ud83d"}, {"role": "assistant", "content": "b"}]}',
                    r"line 1: field 'messages\[0\]\.content' has half of a surrogate pair .*write it whole"),
    "half in a tool": (r'{"tools": [{"a\udc00": 1}], "messages": [{"role": "assistant", "content": "b"}]}',
                       r"line 1: field 'tools\[0\]\.a.*' has half of a surrogate pair"),
    "key twice": ('{"messages": [{"role": "assistant", "content": "a", "content": "b"}]}',
                  'line 1: an object has the key "content" twice; leave one of them'),
    "column twice": ('{"messages": [], "messages": []}', 'line 1: an object has the key "messages" twice'),
    "brackets": ("[" * 100_000, "line 1: not read .*recursion"),
    "digits": ('{"messages": ' + "9" * 5000 + "}", "line 1: not read .*digits"),
    "tools": ('{"tools": "none", "messages": [{"role": "assistant", "content": "b"}]}',
              "line 1: column tools holds a text; give a list of JSON schemas"),
    "null": ('{"messages": [{"role": "assistant", "content": null}]}',
             "line 1: message 1 has role, content, not content; its content is null: give it text, or tool_calls"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_json_is_named_with_its_line_and_field(tmp_path, case):
    line, message = BROKEN[case]
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=message) as error:
        check_source(config(tmp_path / "a.jsonl", tmp_path))
    assert "\n" not in str(error.value) and str(error.value).startswith("data.path=")
    str(error.value).encode()


def test_whole_pairs_are_characters(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d\\ude00b"}\n')
    ((text, _),) = read(config(tmp_path / "a.jsonl", tmp_path, kind=DataKind.text), tokenizer, 1)
    assert text == "<|bos|>a😀b<|eos|>"


def test_what_nothing_reads_is_named(tokenizer, write, tmp_path):
    rows = [{**row, "id": 1, "weight": 2} for row in TOOL_ROWS]
    rows[0]["messages"] = talk([call("tide", {})], refusal="x", name="me", audio=None)
    path = write("a.jsonl", rows)
    data = config(path, tmp_path, chat_template=TEMPLATE)
    assert unused_lines(data, tokenizer, check_source(data)) == [
        f"{path}: columns that nothing reads: id, weight; keys of conversations that the chat template does not show: "
        "refusal"
    ]
    data.chat_template = ""  # the tokenizer's shows no tools
    (line,) = unused_lines(data, tokenizer, check_source(data))
    assert line.endswith("does not show: name, refusal, tool_calls, tools")
    plain = config(write("b.jsonl", [{"text": "a"}]), tmp_path, kind=DataKind.text)
    assert unused_lines(plain, tokenizer, check_source(plain)) == []


@pytest.mark.parametrize("is_empty", [True, False])
@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "go", "output": " "},
        {"prompt": "go", "completion": ""},
        {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": ""}]},
        {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": [TEXT_PART | {"text": ""}]}]},
        {"conversations": [{"from": "human", "value": "go"}, {"from": "gpt", "value": "\n"}]},
    ],
)
def test_rows_whose_answers_are_all_empty_are_named(tokenizer, write, tmp_path, row, is_empty):
    filled = json.loads(json.dumps(row).replace('" "', '"up"').replace('""', '"up"').replace('"\\n"', '"up"'))
    path = write("a.jsonl", [filled, row, row] if is_empty else [filled] * 3)
    data = config(path, tmp_path)
    named = f"{path}: 2 conversations teach only to say nothing: all answers are empty, first {path}: line 2"
    assert unused_lines(data, tokenizer, check_source(data)) == ([named] if is_empty else [])


@pytest.mark.parametrize("form", ["saved", "parquet"])
def test_what_nothing_reads_of_a_table_is_named(tokenizer, tmp_path, form):
    made = datasets.Dataset.from_list([{"id": 1, "messages": talk([call("tide", {"a": "b"})], refusal="x")}])
    path = tmp_path / ("saved" if form == "saved" else "a.parquet")
    made.save_to_disk(path) if form == "saved" else made.to_parquet(path)
    data = config(path, tmp_path, chat_template=TEMPLATE)
    assert unused_lines(data, tokenizer, check_source(data)) == [
        f"{path}: columns that nothing reads: id; keys of conversations that the chat template does not show: refusal"
    ]


@pytest.mark.parametrize("packing", [False, True])
def test_first_row_is_read_no_further_than_its_sequence(tokenizer, write, tmp_path, packing, monkeypatch):
    monkeypatch.setattr(tokens, "WINDOW", 1000)
    path = write("a.jsonl", [{"text": "what is 2? " * 10_000}])
    data = config(path, tmp_path, sequence_length=64, kind=DataKind.text, packing=packing)
    whole = tokenizer("what is 2? " * 30)["input_ids"]
    assert encode_first(data, tokenizer).ids.tolist() == whole[:64]


@pytest.mark.parametrize("length", [8, 60])
def test_answers_behind_the_sequence_length_are_refused_at_the_start(tokenizer, write, tmp_path, length):
    rows = [{"prompt": "x" * 200, "completion": "b"}] * 3
    data = config(write("a.jsonl", rows), tmp_path, sequence_length=length)
    with pytest.raises(ValueError, match=rf"data\.sequence_length={length}: every answer of .*begins with token \d+; "):
        encode_first(data, tokenizer)
    write("a.jsonl", [*rows, {"prompt": "a", "completion": "b"}])
    if length == 60:
        assert len(encode_first(data, tokenizer).ids)
