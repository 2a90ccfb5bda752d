"""Direct preference optimisation by the example's script is that of one process of plain transformers."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.huggingface.preferences import by_hand, example, on_ranks, pairs
from tests.engine.huggingface.runs import tiny_model
from tests.interpreter import python
from weft.engine.data.tokenizer import train_bpe
from weft.tools.ranks import run_ranks


def test_pairs_become_rows():
    """As TRL's collator for preference data: chosen answers first, labels on answers only."""
    rows = [
        {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6], "ref_chosen_logps": -1.0},
        {"prompt_ids": [7, 8], "chosen_ids": [9], "rejected_ids": [10, 11], "ref_chosen_logps": -3.0},
    ]
    batch = example().collate([row | {"ref_rejected_logps": -2.0} for row in rows])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [7, 8, 9, 0, 0], [1, 2, 3, 6, 0], [7, 8, 10, 11, 0]]
    assert batch["attention_mask"].sum(-1).tolist() == [5, 3, 4, 4]
    assert [(row != -100).nonzero().flatten().tolist() for row in batch["labels"]] == [[3, 4], [2], [3], [2, 3]]
    assert batch["reference"].tolist() == [-1.0, -3.0, -2.0, -2.0]


def test_what_the_reference_says_of_padded_rows_is_what_it_says_of_each():
    """So training begins where nothing is preferred."""
    batch = example().collate(pairs()[:3])
    logits = tiny_model()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(example().answers_logps(logits, batch["labels"]), batch["reference"])


ROWS = {
    "ordinary": {"prompt": "what is 2?", "chosen": " it is 2.", "rejected": " no"},
    "space at the end": {"prompt": "what is 2? ", "chosen": "it is 2.", "rejected": " it is 3."},
    "tokens over the border": {"prompt": "what i", "chosen": "s 2?", "rejected": "t is"},
    "an end of its own": {"prompt": "what", "chosen": " is<|eos|>", "rejected": " is 2<|eos|>"},
    "empty": {"prompt": "", "chosen": "it is", "rejected": ""},
}


@pytest.mark.parametrize("case", ROWS)
def test_prompt_and_answer_are_tokenised_together(case):
    """As TRL's DPOTrainer does, whose rows have the ids of the whole text."""
    tokenizer, row = train_bpe(["what is 2? it is 2. it is 3."] * 9, 300), ROWS[case]
    encoded = example().encode(tokenizer, row, 1024)
    for side in ("chosen", "rejected"):
        text = row["prompt"] + row[side].removesuffix("<|eos|>") + "<|eos|>"
        assert encoded["prompt_ids"] + encoded[f"{side}_ids"] == tokenizer(text)["input_ids"]
    prompt = tokenizer(row["prompt"])["input_ids"]
    assert encoded["prompt_ids"] == prompt[: len(encoded["prompt_ids"])]
    if case in ("ordinary", "an end of its own"):
        assert encoded["prompt_ids"] == prompt
    short = example().encode(tokenizer, row, len(encoded["prompt_ids"]) + 1)
    assert [len(short[f"{side}_ids"]) for side in ("chosen", "rejected")] == [1, 1]
    assert example().encode(tokenizer, row, len(encoded["prompt_ids"])) is None


def test_conversations_are_tokenised_by_the_template():
    tokenizer = train_bpe(["what is 2? it is 2."] * 9, 300)
    prompt = [{"role": "user", "content": "what is 2?"}]
    row = {"prompt": prompt, **{side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}}
    encoded = example().encode(tokenizer, row, 1024)
    assert tokenizer.decode(encoded["prompt_ids"]).endswith("<|turn|>assistant\n")
    assert tokenizer.decode(encoded["chosen_ids"]) == "chosen<|end_turn|>"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_commands_of_the_example_run_as_they_are_typed(tmp_path):
    """With pairs of one length, so that no batch is padded, and a line separator in a text."""
    tokenizer = train_bpe(["what is 2? it is 2."] * 9, 300)
    tokenizer.save_pretrained(tmp_path / "model")
    model = tiny_model()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    row = {"prompt": "what is\u2028 2?", "chosen": " it is", "rejected": " it is"}
    (tmp_path / "pairs.jsonl").write_text((json.dumps(row, ensure_ascii=False) + "\n") * 8, encoding="utf-8")
    script, env = Path(__file__).parents[3] / "examples" / "dpo.py", os.environ | {"OMP_NUM_THREADS": "1"}
    folder, pairs_file, output = (str(tmp_path / name) for name in ("model", "with.jsonl", "out"))
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    for command in (
        [script, "reference", folder, tmp_path / "pairs.jsonl", pairs_file],
        [*torchrun, script, "train", folder, pairs_file, output, "--stages", "2"],
    ):
        done = python(*command, env=env, timeout_s=300)
        assert done.returncode == 0, done.stderr[-3000:]
    assert len(Path(pairs_file).read_text().splitlines()) == 8
    assert list(Path(output).glob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stages"), [(2, 2), (4, 2)], ids=["two stages", "two stages, two replicas"])
def test_preference_training_is_that_of_one_process(tmp_path, ranks, stages):
    run_ranks(ranks, on_ranks, str(tmp_path), stages, timeout_s=200)
    parts = sorted((tmp_path / "trained").glob("*.safetensors"))
    trained, expected = {name: tensor for part in parts for name, tensor in load_file(part).items()}, by_hand()
    assert set(trained) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-4, atol=2e-6)
