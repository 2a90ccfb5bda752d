"""Preference pairs become the tokens that TRL's DPOTrainer makes of them."""

import copy
import json
from functools import cache
from itertools import islice

import pytest
from datasets import Dataset
from tokenizers import processors
from transformers import LlamaConfig, LlamaForCausalLM

from weft.conf.schema import DataConfig, DataKind
from weft.engine.data import build_loader, check_source, require_encodable, unused_lines
from weft.engine.data.pairs import Pair, PairEncoder, rows_of
from weft.engine.data.tokenizer import train_bpe

LIMIT = 48


@cache
def tokenizer():
    return train_bpe(["what is 2? it is 2. it is 3."] * 9, 300)


def say(role, content):
    return {"role": role, "content": content}


QUESTION = say("user", "what is 2?")
ROWS = {
    "ordinary": {"prompt": "what is 2?", "chosen": " it is 2.", "rejected": " no"},
    "space at the end": {"prompt": "what is 2? ", "chosen": "it is 2.", "rejected": " it is 3."},
    "tokens over the border": {"prompt": "what i", "chosen": "s 2?", "rejected": "t is"},
    "an end of its own": {"prompt": "what", "chosen": " is<|eos|>", "rejected": " is 2<|eos|>"},
    "too long": {"prompt": "what is 2?", "chosen": " it is 2." * 60, "rejected": " no"},
    "no prompt": {"chosen": "what is 2? it is 2.", "rejected": "what is 2? no"},
    "messages": {"prompt": [QUESTION], "chosen": [say("assistant", "2")], "rejected": [say("assistant", "3 it is")]},
    "messages without a prompt": {
        "chosen": [QUESTION, say("assistant", "2")],
        "rejected": [QUESTION, say("assistant", "it is 3")],
    },
}


def by_trl(row, folder):
    from trl import DPOConfig, DPOTrainer  # takes two seconds, which processes that only collect tests would spend, too

    config = LlamaConfig(vocab_size=400, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    arguments = DPOConfig(output_dir=str(folder), max_length=LIMIT, use_cpu=True, report_to=[], bf16=False)
    models = [LlamaForCausalLM(config) for _ in range(2)]
    made = DPOTrainer(
        models[0], models[1], arguments, train_dataset=Dataset.from_list([row]), processing_class=tokenizer()
    )
    batch = made.data_collator([made.train_dataset[0]])
    parts = (batch[name].tolist() for name in ("input_ids", "attention_mask", "completion_mask"))
    found = []
    for ids, mask, counts in zip(*parts, strict=True):
        labels = [token if counted else -100 for token, counted in zip(ids, counts, strict=True)]
        found.append((ids[: sum(mask)], labels[: sum(mask)]))
    return found


@pytest.mark.parametrize("case", ROWS)
def test_pair_has_the_tokens_and_labels_of_trl(case, tmp_path):
    columns = PairEncoder(tokenizer(), template="", limit=LIMIT)([Pair.of(ROWS[case])], [0])
    data = DataConfig(
        kind=DataKind.preference,
        path=str(tmp_path / "pairs.jsonl"),
        cache_dir=str(tmp_path / "cache"),
        packing=False,
        sequence_length=LIMIT,
    )
    (tmp_path / "pairs.jsonl").write_text(json.dumps(ROWS[case]) + "\n")
    check_source(data)
    (batch,) = islice(build_loader(data, tokenizer(), microbatch_size=2, replica=0, num_replicas=1, seed=0), 1)
    wanted = by_trl(ROWS[case], tmp_path)
    assert columns["truncated"] == [case == "too long"]
    for row, (ids, labels) in enumerate(wanted):
        assert batch["input_ids"][row, : len(ids)].tolist() == ids
        assert batch["labels"][row].tolist() == [-100, *labels[1:]] + [-100] * (LIMIT - len(ids))


@pytest.mark.parametrize("ends", [False, True])
def test_special_tokens_of_a_text_are_not_repeated(ends):
    made = copy.deepcopy(tokenizer())
    if ends:  # as Llama's with add_eos_token
        (_, bos), (_, eos) = ((each, made.convert_tokens_to_ids(each)) for each in ("<|bos|>", "<|eos|>"))
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", bos), ("<|eos|>", eos)]
        )
    row = {"prompt": "<|bos|>what is 2?", "chosen": " it is 2.", "rejected": " no<|eos|>"}
    (ids,), (labels,) = (
        PairEncoder(made, template="", limit=LIMIT)([Pair.of(row)], [0])[n] for n in ("input_ids", "labels")
    )
    assert made.decode(ids) == "<|bos|>what is 2? it is 2.<|eos|><|bos|>what is 2? no<|eos|>"
    assert made.decode([label for label in labels if label >= 0]) == " it is 2.<|eos|> no<|eos|>"


def test_pair_without_tokens_of_an_answer_is_left_out():
    encoder = PairEncoder(tokenizer(), template="", limit=LIMIT)
    long = {"prompt": "what is 2?" * 30, "chosen": " it", "rejected": " no"}
    assert encoder([Pair.of(long), Pair.of(ROWS["ordinary"])], [0, 1])["length"][0] == 0


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "what", "chosen": "is", "rejected": 3}, "chosen is a text, rejected is a number; give texts"),
        (
            {"prompt": [QUESTION], "chosen": "is", "rejected": "no"},
            "its prompt is a list, chosen is a text, rejected is a text",
        ),
        ({"prompt": "what", "chosen": "is"}, "no fields chosen and rejected"),
        ({"chosen": [say("assistant", "2")], "rejected": [say("assistant", "3")]}, "add the column prompt"),
        (
            {"prompt": [QUESTION], "chosen": [say("user", "2")], "rejected": [say("user", "3")]},
            "no message has the role",
        ),
    ],
)
def test_row_that_is_no_pair_is_refused_with_its_line(row, problem, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(json.dumps(ROWS["ordinary"]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=f"line 2.*{problem}"):
        check_source(DataConfig(kind=DataKind.preference, path=str(tmp_path / "pairs.jsonl"), packing=False))


@pytest.mark.parametrize("form", ["jsonl", "saved"])
def test_pairs_of_equal_answers_are_named_before_the_run(form, tmp_path):
    equal = [{**ROWS["ordinary"], "rejected": ROWS["ordinary"]["chosen"]}, {"chosen": "it is", "rejected": "it is"}]
    rows, path = [ROWS["ordinary"], *equal], tmp_path / "pairs.jsonl"
    if form == "saved":
        Dataset.from_list(rows[:2] * 2).save_to_disk(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(kind=DataKind.preference, path=str(path), packing=False, cache_dir=str(tmp_path / "cache"))
    where = "row 2" if form == "saved" else "line 2"
    named = f"{path}: 2 pairs teach nothing, because chosen and rejected are equal, first {path}: {where}"
    assert unused_lines(data, tokenizer(), check_source(data)) == [named]


QUESTIONS_ONLY = (
    "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content or '' }}{% endfor %}{{ tools | tojson }}"
)


def test_what_the_template_leaves_out_of_pairs_is_named_before_the_run(tmp_path):
    system, calls = say("system", "be brief"), [{"type": "function", "function": {"name": "tide", "arguments": {}}}]
    thought = {**say("assistant", "3 it is"), "reasoning_content": "hm"}
    row = {"tools": [{"name": "tide"}], "prompt": [system, QUESTION], "chosen": ROWS["messages"]["chosen"]}
    (path := tmp_path / "pairs.jsonl").write_text(json.dumps({**row, "rejected": [thought]}) + "\n")
    data = DataConfig(kind=DataKind.preference, path=str(path), packing=False, chat_template=QUESTIONS_ONLY)
    assert unused_lines(data, tokenizer(), check_source(data)) == [
        f"{path}: keys of conversations that the chat template does not show: reasoning_content; "
        "roles of messages whose content the chat template does not show: system"
    ]
    path.write_text(json.dumps({**row, "rejected": [{**say("assistant", ""), "tool_calls": calls}]}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: message 3 has tool_calls .* does not show them; set data\.chat_"):
        require_encodable(data, tokenizer(), check_source(data))


def test_chosen_answers_are_the_first_half_of_a_microbatch_and_reading_ahead_changes_nothing(tmp_path):
    rows = [{"prompt": "what is", "chosen": f" {n}", "rejected": f" it {n}"} for n in range(6)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(
        kind=DataKind.preference, path=str(tmp_path / "pairs.jsonl"), cache_dir=str(tmp_path), packing=False
    )

    def loader():
        return build_loader(data, tokenizer(), microbatch_size=4, replica=0, num_replicas=1, seed=0)

    plain, peeking = list(islice(loader(), 5)), loader()
    assert [batch["input_ids"].tolist() for batch in peeking.peek(3)] == [b["input_ids"].tolist() for b in plain[:3]]
    state, read = None, []
    for batch in islice(peeking, 5):
        read.append(batch["input_ids"].tolist())
        state = state or peeking.state_dict()
        peeking.peek(2)
    assert read == [batch["input_ids"].tolist() for batch in plain]
    peeking.load_state_dict(state)
    assert next(peeking)["input_ids"].tolist() == read[1]
    texts = tokenizer().batch_decode(plain[0]["input_ids"], skip_special_tokens=True)
    assert ["it" in text for text in texts] == [False, False, True, True]
    assert rows_of([[]]) == [[], []]
