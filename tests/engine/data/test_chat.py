from unittest.mock import Mock

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from weft.conf.schema import DataConfig, DataKind, WeftConfig
from weft.engine.data import build_loader, check_source, encode_first, require_encodable
from weft.engine.data.chat import ChatEncoder, label
from weft.engine.data.documents import IGNORED
from weft.engine.data.messages import chat_columns, messages_of
from weft.engine.data.spans import ChatTemplate
from weft.engine.data.tokenizer import CHAT_TEMPLATE
from weft.recipes import finish

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is 2?"},
    {"role": "assistant", "content": "it is 2.\nreally"},
    {"role": "user", "content": "it is 2."},
    {"role": "assistant", "content": "it is 4"},
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }} </s>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
"""No header before an answer, so that nothing is added for a generation prompt."""
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The last answer is rendered unlike the earlier ones."""
OPENING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""The prompt opens reasoning that the history does not show."""
ENDING = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% else %}{{ eos_token }}{% endif %}"
)
"""One closing token after everything, instead of one per turn."""

CASES = {
    "chatml": (CHATML, ["it is 2.\nreally<|im_end|>\n", "it is 4<|im_end|>\n"]),
    "brackets": (BRACKETS, [" it is 2.\nreally </s>", " it is 4 </s>"]),
    "thinking": (THINKING, ["it is 2.\nreally<|im_end|>\n", "<think>\n\n</think>\n\nit is 4<|im_end|>\n"]),
    "opening": (OPENING, ["it is 2.\nreally<|im_end|>\n", "it is 4<|im_end|>\n"]),
    "ending": (ENDING, ["it is 2.\nreally\n", "it is 4\n<|eos|>"]),
    "tags": (CHAT_TEMPLATE, ["it is 2.\nreally<|end_turn|>", "it is 4<|end_turn|>"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_assistants_turns_are_found_with_what_closes_them(tokenizer, case):
    template, expected = CASES[case]
    text, spans = ChatTemplate(template, tokenizer).render(TALK)
    assert text == tokenizer.apply_chat_template(TALK, chat_template=template, tokenize=False)
    assert [text[start:end] for start, end in spans] == expected


@pytest.mark.parametrize("name", ["chatml", "brackets", "thinking", "opening"])
def test_comparing_renderings_agrees_with_tags(tokenizer, name):
    """A template with tags put in by hand is the judge of the one without."""
    untagged, expected = CASES[name]
    spans = ChatTemplate(untagged, tokenizer).render(TALK)[1]
    tagged = {
        "chatml": CHATML.replace(
            "{{ m.content }}<|im_end|>\n",
            "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
            "{% else %}{{ m.content }}<|im_end|>\n{% endif %}",
        ),
        "brackets": BRACKETS.replace(
            " {{ m.content | trim }} </s>", "{% generation %} {{ m.content | trim }} </s>{% endgeneration %}"
        ),
    }.get(name)
    if tagged:
        assert ChatTemplate(tagged, tokenizer).render(TALK)[1] == spans
    assert len(spans) == len(expected)


@pytest.mark.parametrize("content", ["", " spaced out \n", "<|im_end|>", "assistant\n", "ünïcödé 漢字 🙂"])
@pytest.mark.parametrize("template", [CHATML, THINKING, OPENING])
def test_any_content_is_found(tokenizer, template, content):
    talk = [{**m, "content": content} if m["role"] == "assistant" else m for m in TALK]
    text, spans = ChatTemplate(template, tokenizer).render(talk)
    assert [text[start:end].removeprefix("<think>\n\n</think>\n\n") for start, end in spans] == [
        f"{content}<|im_end|>\n"
    ] * 2


def test_an_assistant_that_speaks_first_is_found(tokenizer):
    text, spans = ChatTemplate(CHATML, tokenizer).render(TALK[2:])
    assert [text[start:end] for start, end in spans] == CASES["chatml"][1]


def test_a_template_that_hides_its_turns_is_refused(tokenizer):
    hidden = "{% for m in messages %}{{ m.role }}{{ m.content | length }} {% endfor %}"
    with pytest.raises(ValueError, match=r"message 3: .*\{% generation %\}"):
        ChatTemplate(hidden, tokenizer).render(TALK)


@pytest.mark.parametrize("template", [CHATML, CHAT_TEMPLATE])
def test_answers_in_a_prompt_do_not_count(tokenizer, template):
    """Count the completion only, as TRL's SFT trainer does."""
    row = {"prompt": TALK[:4], "completion": TALK[4:]}
    encoder = ChatEncoder(tokenizer, ("prompt", "completion"), template=template, limit=1000)
    columns = encoder([encoder.value_of(row)], [0])
    learnt = tokenizer.decode([token for token in columns["labels"][0] if token != IGNORED])
    assert learnt.startswith("it is 4<|") and "really" not in learnt


def test_a_row_that_the_template_refuses_is_found_before_the_run(tokenizer, write, tmp_path):
    strict = CHATML + "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    path = write("a.jsonl", [{"messages": TALK[1:]}] * 9 + [{"messages": TALK}])
    data = DataConfig(kind=DataKind.chat, path=path, chat_template=strict, cache_dir=str(tmp_path))
    encode_first(data, tokenizer)
    with pytest.raises(ValueError, match=r"a\.jsonl: line 10: the chat template refuses .*: no system role"):
        require_encodable(data, tokenizer, check_source(data))
    write("a.jsonl", [{"messages": TALK[1:]}])
    require_encodable(data, tokenizer, check_source(data))


def test_a_refusal_of_the_template_names_the_conversation(tokenizer):
    strict = CHATML + "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    encoder = ChatEncoder(tokenizer, ("messages",), template=strict, limit=100)
    with pytest.raises(ValueError, match=r"data.messages_field=messages: conversation 6: .*no system role"):
        encoder([TALK], [5])


def test_labels_cover_tokens_that_share_a_character_with_a_span():
    offsets = [(0, 3), (3, 5), (5, 5), (5, 9), (9, 12), (12, 14)]
    assert label(range(10, 16), offsets, [(4, 6), (12, 14)]) == [IGNORED, 11, IGNORED, 13, IGNORED, 15]
    assert label(range(10, 16), offsets, []) == [IGNORED] * 6


@pytest.mark.parametrize("case", CASES)
def test_what_is_learnt_decodes_to_the_assistants_text(tokenizer, case):
    template, expected = CASES[case]
    columns = ChatEncoder(tokenizer, ("messages",), template=template, limit=1000)([TALK], [0])
    learnt = [token for token in columns["labels"][0] if token != IGNORED]
    assert "".join(tokenizer.decode(learnt).split()) == "".join("".join(expected).split())
    assert (
        columns["input_ids"][0]
        == tokenizer.apply_chat_template(TALK, chat_template=template, tokenize=True, return_dict=True)["input_ids"]
    )


def test_the_mask_is_transformers_own(tokenizer):
    theirs = tokenizer.apply_chat_template(TALK, return_assistant_tokens_mask=True, return_dict=True)
    columns = ChatEncoder(tokenizer, ("messages",), template="", limit=1000)([TALK], [0])
    assert [int(token != IGNORED) for token in columns["labels"][0]] == theirs["assistant_masks"]


def test_long_conversations_are_cut_and_those_without_an_answer_left_are_left_out(tokenizer):
    encoder = ChatEncoder(tokenizer, ("messages",), template="", limit=40)
    columns = encoder([TALK, [{"role": "user", "content": "x" * 500}, TALK[2]], TALK[1:3]], range(3))
    assert columns["truncated"] == [True, True, False]
    assert columns["length"][:2] == [40, 0]
    assert [len(ids) for ids in columns["labels"]] == columns["length"]


def test_a_loader_of_conversations_counts_what_it_lost(write, tokenizer, tmp_path):
    rows = [
        {"messages": TALK},
        {"messages": TALK[1:3]},
        {"messages": [{"role": "user", "content": "x" * 500}, TALK[2]]},
    ]
    config = DataConfig(
        kind=DataKind.chat, path=write("talk.jsonl", rows), sequence_length=48, cache_dir=str(tmp_path / "cache")
    )
    loader = build_loader(config, tokenizer, microbatch_size=1, replica=0, num_replicas=1, seed=0)
    assert "2 conversations" in loader.description
    assert "1 truncated, 1 left out" in loader.description
    batch = next(loader)
    assert "<|turn|>assistant" in tokenizer.decode(batch["input_ids"][0])
    learnt = batch["labels"][0]
    assert "what is" not in tokenizer.decode(learnt[learnt != IGNORED])
    loader.close()


def test_a_tokenizer_without_template_is_refused(tokenizer, tmp_path):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|eos|>")
    with pytest.raises(ValueError, match=r"data.chat_template=''.*set it to a Jinja template or a file"):
        ChatEncoder(bare, ("messages",), template="", limit=64)
    with pytest.raises(ValueError, match=r"data.chat_template=nowhere.jinja: neither"):
        ChatEncoder(bare, ("messages",), template="nowhere.jinja", limit=64)
    file = tmp_path / "own.jinja"
    file.write_text(CHATML)
    assert ChatEncoder(bare, ("messages",), template=str(file), limit=64)([TALK[1:3]], [0])["length"][0]


def test_the_cache_is_of_one_field(tokenizer, write, tmp_path):
    talks = {name: [TALK[1], {"role": "assistant", "content": name}] for name in ("one", "two")}
    config = DataConfig(kind=DataKind.chat, path=write("a.jsonl", [talks]), sequence_length=64, cache_dir=str(tmp_path))
    for name in talks:
        config.messages_field = name
        loader = build_loader(config, tokenizer, microbatch_size=1, replica=0, num_replicas=1, seed=0)
        learnt = [token for token in next(loader)["labels"][0].tolist() if token != IGNORED]
        loader.close()
        assert tokenizer.decode(learnt) == f"{name}<|end_turn|>"


ASKED, ANSWER = {"role": "user", "content": "what is 2?"}, {"role": "assistant", "content": "it is 2."}
FORMS = {
    "messages": {"messages": [ASKED, ANSWER]},
    "sharegpt": {"conversations": [{"from": "human", "value": "what is 2?"}, {"from": "gpt", "value": "it is 2."}]},
    "sharegpt, in messages": {
        "messages": [{"from": "user", "value": "what is 2?"}, {"from": "assistant", "value": "it is 2."}]
    },
    "messages, in conversations": {"conversations": [ASKED, ANSWER]},
    "texts": {"prompt": "what is 2?", "completion": "it is 2."},
    "lists": {"prompt": [ASKED], "completion": [ANSWER]},
    "alpaca": {"instruction": "what is 2?", "input": "", "output": "it is 2."},
    "alpaca without input": {"instruction": "what is 2?", "output": "it is 2.", "id": 3},
}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_conversation_is_learnt_alike(tokenizer, tmp_path, form, streaming, suffix):
    rows = datasets.Dataset.from_list([FORMS[form]] * 3)
    path = str(tmp_path / f"a{suffix}")
    rows.to_parquet(path) if suffix == ".parquet" else rows.to_json(path)
    config = DataConfig(
        kind=DataKind.chat, path=path, sequence_length=64, streaming=streaming, cache_dir=str(tmp_path / "cache")
    )
    check_source(config)
    encode_first(config, tokenizer)
    loader = build_loader(config, tokenizer, microbatch_size=1, replica=0, num_replicas=1, seed=0)
    batch = next(loader)
    loader.close()
    text = "<|bos|><|turn|>user\nwhat is 2?<|end_turn|><|turn|>assistant\nit is 2.<|end_turn|>"
    assert tokenizer.decode(batch["input_ids"][0]).startswith(text)
    learnt = tokenizer.decode([token for token in batch["labels"][0].tolist() if token != IGNORED])
    assert learnt.startswith("it is 2.<|end_turn|>") and "user" not in learnt


def test_an_input_follows_its_instruction():
    row = {"instruction": "add", "input": "1 and 2", "output": "3"}
    columns = chat_columns(row, "messages")
    assert [m["content"] for m in messages_of(row, columns)] == ["add\n\n1 and 2", "3"]


def test_a_field_that_was_named_is_the_only_one_looked_for():
    assert chat_columns(["prompt", "completion", "messages"], "messages") == ("messages",)
    assert chat_columns(["prompt", "completion"], "dialog") == ()
    assert chat_columns(["prompt", "output"], "messages") == ()


BROKEN_TEMPLATES = {
    "syntax": (
        "{% for m in messages %}\n{{ m.content",
        r"(?s)data\.chat_template=.*not a Jinja template \(line 2: .*correct",
    ),
    "unknown tag": ("{% frob %}", r"not a Jinja template \(line 1: "),
    "type": ("{{ messages[0].content + 1 }}", "conversation 1: the chat template refuses the conversation: "),
    "division": ("{{ messages[0].content }}{{ 1 // 0 }}", "the chat template refuses the conversation: .*zero"),
    "refusal": ("{{ raise_exception('no') }}", "the chat template refuses the conversation: no$"),
}


@pytest.mark.parametrize("case", BROKEN_TEMPLATES)
def test_a_broken_template_is_found_with_the_first_row(tokenizer, write, case):
    template, message = BROKEN_TEMPLATES[case]
    config = DataConfig(kind=DataKind.chat, path=write("a.jsonl", [FORMS["messages"]]), chat_template=template)
    with pytest.raises(ValueError, match=message):
        encode_first(config, tokenizer)


def test_an_export_has_the_template_that_was_trained_with(tokenizer, tmp_path, monkeypatch):
    """Otherwise the model is asked in another form than it learnt to answer in."""
    file = tmp_path / "mine.jinja"
    file.write_text(CHATML)
    config = WeftConfig()
    config.data.kind, config.data.chat_template = DataKind.chat, str(file)
    monkeypatch.setattr(finish, "export", lambda engine, folder, *, tokenizer, **_: tokenizer.save_pretrained(folder))
    monkeypatch.setattr(finish, "print_once", lambda text: None)
    monkeypatch.setattr(finish.dist, "barrier", lambda: None)
    engine = Mock(correct_measurements=list)
    finish.finish(config, engine, tokenizer, tmp_path)
    exported = PreTrainedTokenizerFast.from_pretrained(tmp_path / "export")
    assert exported.apply_chat_template(TALK, tokenize=False) == ChatTemplate(CHATML, tokenizer).render(TALK)[0]
    assert tokenizer.chat_template == CHAT_TEMPLATE
    config.data.chat_template = ""
    finish.finish(config, engine, tokenizer, tmp_path)
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "export").chat_template == CHAT_TEMPLATE
