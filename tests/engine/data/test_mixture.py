import json
from collections import Counter
from itertools import islice

import pytest
import torch

from weft.conf.schema import DataConfig, DataKind, SourceConfig
from weft.engine.data import build_loader, check_source


@pytest.fixture
def mixture(tmp_path, write):
    """Two sources of 40 and 90 documents, of which the first has three quarters of the tokens."""
    first = write("a.jsonl", [{"text": f"alpha {n} " * (1 + n % 4)} for n in range(40)])
    second = write("b.jsonl", [{"body": f"beta {n} " * (1 + n % 3)} for n in range(90)])
    sources = [SourceConfig(path=first, weight=3), SourceConfig(path=second, text_field="body")]
    return DataConfig(
        kind=DataKind.text, sources=sources, sequence_length=16, shuffle_buffer=13, cache_dir=str(tmp_path / "cache")
    )


def open_loader(data, tokenizer, *, size=1, replica=0, replicas=1, seed=3, evaluation=False):
    return build_loader(
        data, tokenizer, microbatch_size=size, replica=replica, num_replicas=replicas, seed=seed, evaluation=evaluation
    )


def read(loader, count):
    try:
        return list(islice(loader, count))
    finally:
        loader.close()


def equal(left, right):
    return all(torch.equal(left[name], right[name]) for name in ("input_ids", "labels", "position_ids"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_two_resumed_mixtures_give_the_same_batches_on_other_replicas(mixture, tokenizer, streaming, shuffle):
    mixture.streaming, mixture.shuffle = streaming, shuffle
    other = DataConfig(**{**vars(mixture), "sources": mixture.sources[::-1], "shuffle_buffer": 7})
    for data in (mixture, other):
        undisturbed = read(open_loader(data, tokenizer), 400)
        for stopped_after in (1, 20, 90):  # in blocks of the first, a middle and a later pass over both sources
            before = open_loader(data, tokenizer, size=1, replica=1, replicas=2)
            read(before, stopped_after)
            state = json.loads(json.dumps(before.state_dict()))
            for replica in range(3):
                after = open_loader(data, tokenizer, size=1, replica=replica, replicas=3)
                after.load_state_dict(state)
                for number, batch in enumerate(read(after, 20)):
                    assert equal(batch, undisturbed[2 * stopped_after + 3 * number + replica])


def documents(loader, tokenizer, count=None):
    """Read one document per sequence, and return each text with its number of tokens."""
    batches = loader if count is None else read(loader, count)
    return [
        (tokenizer.decode(batch["input_ids"][0], skip_special_tokens=True), 1 + int((batch["labels"] >= 0).sum()))
        for batch in batches
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_each_prefix_has_the_configured_shares_of_tokens(mixture, tokenizer, streaming):
    mixture.streaming, mixture.packing, mixture.sequence_length, mixture.shuffle = streaming, False, 64, False
    tokens = {"alpha": 0, "beta": 0}
    for text, length in documents(open_loader(mixture, tokenizer), tokenizer, 300):
        tokens[text.split()[0]] += length
        assert abs(tokens["alpha"] / 3 - tokens["beta"]) <= 64


@pytest.mark.parametrize("streaming", [False, True])
def test_an_exhausted_source_ends_and_the_others_continue(mixture, tokenizer, streaming):
    mixture.sources[0].epochs, mixture.sources[1].epochs = 1, 2
    mixture.streaming, mixture.packing, mixture.sequence_length = streaming, False, 64
    loader = open_loader(mixture, tokenizer)
    count = loader.sequences(1)
    found = Counter(text for text, _ in documents(loader, tokenizer, count))
    assert sorted(times for text, times in found.items() if "alpha" in text) == 40 * [1]
    assert sorted(times for text, times in found.items() if "beta" in text) == 90 * [2]
    again = documents(loader, tokenizer, count)  # every source is limited: the mixture begins again
    assert Counter(text for text, _ in again) == found


def test_a_mixture_holds_out_a_part_of_each_source(mixture, tokenizer):
    mixture.eval_fraction, mixture.packing, mixture.sequence_length = 0.2, False, 64
    held_out = {text for text, _ in documents(open_loader(mixture, tokenizer, evaluation=True), tokenizer)}
    trained = {text for text, _ in documents(open_loader(mixture, tokenizer), tokenizer, 200)}
    assert {text.split()[0] for text in held_out} == {"alpha", "beta"}
    assert not held_out & trained


def test_another_weight_or_seed_does_not_resume(mixture, tokenizer):
    state = open_loader(mixture, tokenizer).state_dict()
    with pytest.raises(ValueError, match="restore them, or start over"):
        open_loader(mixture, tokenizer, seed=4).load_state_dict(state)
    mixture.sources[0].weight = 2
    with pytest.raises(ValueError, match="restore them, or start over"):
        open_loader(mixture, tokenizer).load_state_dict(state)


def test_a_fault_of_a_source_names_the_source(mixture, write):
    mixture.sources[1].path = write("c.jsonl", [{"body": "one"}, {"body": 2}])
    with pytest.raises(ValueError, match=r"data.sources\[1\]: .*c.jsonl: line 2: field body is a number"):
        check_source(mixture)
    mixture.sources[1].path = "/missing/file.jsonl"
    with pytest.raises(ValueError, match=r"data.sources\[1\]: data.path=/missing/file.jsonl: does not exist"):
        check_source(mixture)
