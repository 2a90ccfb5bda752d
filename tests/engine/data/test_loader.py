from __future__ import annotations

import json
import threading
from itertools import islice, repeat

import numpy as np
import pytest
import torch
from datasets import IterableDataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.data.test_packing import document
from weft.conf.schema import DataConfig, DataKind
from weft.engine.data import build_loader
from weft.engine.data import loader as loader_module
from weft.engine.data.documents import IGNORED, InMemory, Part
from weft.engine.data.encode import TextEncoder
from weft.engine.data.loader import MicrobatchLoader, Share
from weft.engine.data.order import Order
from weft.engine.data.packing import lay_out_contiguous, lay_out_whole
from weft.engine.data.source import Block, StreamedSource


class Blocks:
    """A source of numbered tokens in blocks of given document lengths."""

    description = identity = "made up"

    def __init__(self, *blocks: list[int]):
        self._blocks, ids = [], iter(range(1, 10**6))
        for lengths in blocks:
            self._blocks.append(InMemory([document([next(ids) for _ in range(n)]) for n in lengths]))

    def blocks(self, start, shuffle):
        for number in range(start.get("number", 0), len(self._blocks)):
            yield Block(self._blocks[number], {"number": number})


def share(
    source, *, size=2, replica=0, replicas=1, lay_out=lay_out_contiguous, seed=7, shuffle=True, endless=True, ahead=0
):
    order = Order(source=source, lay_out=lay_out, sequence_length=8, shuffle=shuffle, seed=seed, endless=endless)
    return MicrobatchLoader(
        Share(
            order=order,
            microbatch_size=size,
            replica=replica,
            num_replicas=replicas,
            packing=True,
            pad=0,
            ahead=ahead,
        )
    )


def rows(loader, count: int) -> list[list[int]]:
    """The sequences of the next micro-batches."""
    try:
        return [row for batch in islice(loader, count) for row in batch["input_ids"].tolist()]
    finally:
        loader.close()


SOURCES = st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=12), min_size=1, max_size=3)


@settings(deadline=None, max_examples=40)
@given(SOURCES, st.integers(1, 3), st.integers(1, 4), st.sampled_from([lay_out_contiguous, lay_out_whole]))
def test_replicas_share_one_global_order(blocks, size, replicas, lay_out):
    source, steps = Blocks(*blocks), 5
    alone = rows(share(source, size=1, lay_out=lay_out), steps * size * replicas)
    for replica in range(replicas):
        got = rows(share(source, size=size, replica=replica, replicas=replicas, lay_out=lay_out), steps)
        expected = [alone[(k * replicas + replica) * size + row] for k in range(steps) for row in range(size)]
        assert got == expected


@settings(deadline=None, max_examples=40)
@given(SOURCES, st.integers(0, 6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_a_resumed_run_goes_on_with_any_number_of_replicas(blocks, drawn, size, replicas, new_size, new_replicas):
    source = Blocks(*blocks)
    before = share(source, size=size, replica=replicas - 1, replicas=replicas)
    rows(before, drawn)
    state = json.loads(json.dumps(before.state_dict()))
    assert state["consumed"] == drawn * size * replicas
    alone = rows(share(source, size=1), state["consumed"] + 4 * new_size * new_replicas)[state["consumed"] :]
    for replica in range(new_replicas):
        after = share(source, size=new_size, replica=replica, replicas=new_replicas)
        after.load_state_dict(state)
        expected = [alone[(k * new_replicas + replica) * new_size + row] for k in range(4) for row in range(new_size)]
        assert rows(after, 4) == expected


@settings(deadline=None, max_examples=40)
@given(SOURCES, st.integers(0, 6), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=3), st.data())
def test_what_is_left_out_is_the_same_for_any_number_of_replicas(blocks, drawn, ranges, data):
    """In the run that leaves it out, and in one that resumes it."""
    counts = st.integers(1, 3)
    size, replicas, new_size, new_replicas = (data.draw(counts) for _ in range(4))
    source, steps = Blocks(*blocks), 3
    out = {number for first, count in ranges for number in range(first, first + count)}
    last = (drawn * size * replicas) + steps * new_size * new_replicas + len(out)
    alone = rows(share(source, size=1), last)
    kept = [row for number, row in enumerate(alone) if number not in out]
    numbers = [number for number in range(last + 1) if number not in out]

    before = share(source, size=size, replicas=replicas)
    for first, count in ranges:
        before.leave_out(first, first + count)
    assert rows(before, drawn) == [kept[k * replicas * size + row] for k in range(drawn) for row in range(size)]
    done = drawn * size * replicas
    assert before.consumed == numbers[done]
    state = json.loads(json.dumps(before.state_dict()))
    for replica in range(new_replicas):
        after = share(source, size=new_size, replica=replica, replicas=new_replicas)
        after.load_state_dict(state)
        own = [kept[done + (k * new_replicas + replica) * new_size + r] for k in range(steps) for r in range(new_size)]
        assert rows(after, steps) == own


def test_loader_counts_tokens_without_padding():
    loader = share(Blocks([3, 8, 2, 5]), lay_out=lay_out_whole, endless=False)
    counted = sum(np.count_nonzero(batch["input_ids"].numpy()) for batch in loader)
    loader.close()
    assert loader.tokens == counted == 18


def test_what_was_read_stays_read():
    loader = share(Blocks([8] * 40), size=1)
    expected = rows(share(Blocks([8] * 40), size=1), 10)
    assert rows(loader, 3) == expected[:3]
    loader.leave_out(1, 5)
    loader.leave_out(1, 5)
    assert (loader.left_out, loader.consumed) == (((1, 5),), 5)
    assert rows(loader, 2) == expected[5:7]
    state = loader.state_dict()
    del state["left_out"]  # a checkpoint from before there was any
    loader.load_state_dict(state)
    assert loader.left_out == ()


@settings(deadline=None, max_examples=40)
@given(SOURCES, st.integers(0, 3), st.sampled_from([lay_out_contiguous, lay_out_whole]))
def test_the_sequences_of_some_passes_are_known_before_they_are_read(blocks, epochs, lay_out):
    loader = share(Blocks(blocks[0]), size=1, lay_out=lay_out)
    count = loader.sequences(epochs)
    rows(loader, count)
    assert loader.epoch == epochs
    assert count <= loader.sequences(epochs + 0.5) <= loader.sequences(epochs + 1)
    for _ in range(loader.sequences(epochs + 1) - count):
        next(loader)
    assert loader.epoch == epochs + 1
    loader.close()


@settings(deadline=None, max_examples=40)
@given(SOURCES, st.booleans())
def test_an_epoch_holds_every_token_once(blocks, shuffle):
    source = Blocks(*blocks)
    loader = share(source, size=1, shuffle=shuffle)
    total = sum(map(sum, blocks))
    epochs: dict[int, list[int]] = {}
    for batch in loader:
        epoch = loader.state_dict()["epoch"]
        if epoch == 2:
            break
        epochs.setdefault(epoch, []).extend(batch["input_ids"].flatten().tolist())
    loader.close()
    for ids in epochs.values():
        assert sorted(token for token in ids if token) == list(range(1, total + 1))
    if not shuffle:
        assert epochs[0] == epochs[1]


def test_epochs_and_seeds_differ():
    source = Blocks([8] * 20)
    first = rows(share(source, size=1), 40)
    assert first[:20] != first[20:] and sorted(first[:20]) == sorted(first[20:])
    assert first != rows(share(source, size=1, seed=8), 40)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_evaluation_is_one_pass_in_which_replicas_draw_equally_many(replicas):
    source = Blocks([8] * 7)
    seen: list[int] = []
    for replica in range(replicas):
        loader = share(source, size=2, replica=replica, replicas=replicas, endless=False)
        batches, again = list(loader), list(loader)
        assert len(batches) == -(-7 // (2 * replicas))
        assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(batches, again, strict=True))
        for batch in batches:
            assert batch["input_ids"].shape == (2, 8)
            empty = (batch["input_ids"] == 0).all(1)
            assert (batch["labels"][empty] == IGNORED).all()
            seen += batch["input_ids"][~empty].flatten().tolist()
    assert sorted(seen) == list(range(1, 57))


def test_a_position_in_other_data_is_refused():
    loader = share(Blocks([8] * 7))
    with pytest.raises(ValueError, match=r"checkpoint.resume=never"):
        share(Blocks([8] * 7), seed=8).load_state_dict(loader.state_dict())


def test_data_without_a_document_is_an_error_rather_than_a_hang():
    with pytest.raises(ValueError, match="not one document"):
        next(share(Blocks()))


def test_the_microbatches_of_a_step_are_prepared_during_the_step_before(monkeypatch):
    made, prepared = [], threading.Event()
    convert = loader_module.collate

    def collate(*args, **named):
        made.append(1)
        if len(made) == 2 * 9:  # one step read, and the next
            prepared.set()
        return convert(*args, **named)

    monkeypatch.setattr(loader_module, "collate", collate)
    loader = share(Blocks([8] * 64), ahead=9)
    loader.peek(9)
    assert prepared.wait(10)
    loader.close()


# The same properties through Hugging Face datasets, from a file.


@pytest.fixture
def config(write, tmp_path):
    texts = [{"text": f"question {n}: what is {n}?\n" * (1 + n % 9)} for n in range(150)]
    for part in range(3):
        write(f"data/part{part}.jsonl", texts[part::3])
    return DataConfig(
        kind=DataKind.text,
        path=str(tmp_path / "data"),
        sequence_length=32,
        shuffle_buffer=40,
        cache_dir=str(tmp_path / "cache"),
    )


def build(config, tokenizer, *, replica=0, replicas=1, evaluation=False):
    return build_loader(
        config,
        tokenizer,
        microbatch_size=2,
        replica=replica,
        num_replicas=replicas,
        seed=3,
        evaluation=evaluation,
    )


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", [False, True])
@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.integers(0, 150))
def test_resuming_is_exact_at_any_point(config, tokenizer, streaming, packing, drawn):
    config.streaming, config.packing = streaming, packing
    whole = build(config, tokenizer)
    for _ in range(drawn):
        next(whole)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = [build(config, tokenizer, replica=r, replicas=2) for r in range(2)]
    for loader in resumed:
        loader.load_state_dict(state)
    for step in range(6):
        expected, got = next(whole), next(resumed[step % 2])
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[name], got[name]) for name in expected)
    for loader in (whole, *resumed):
        loader.close()


@pytest.mark.parametrize("streaming", [False, True])
def test_training_and_held_back_documents_are_apart_and_complete(config, tokenizer, streaming):
    config.streaming, config.eval_fraction = streaming, 0.2
    held = count_ids(build(config, tokenizer, evaluation=True))
    config.eval_fraction = 0.0
    training = build(config, tokenizer)
    all_ids = epoch_ids(training)
    config.eval_fraction = 0.2
    kept = epoch_ids(build(config, tokenizer))
    assert 0 < sum(held.values()) < 0.5 * sum(all_ids.values())
    assert {t: held.get(t, 0) + kept.get(t, 0) for t in all_ids} == all_ids


def count_ids(batches) -> dict[int, int]:
    ids, counts = np.unique(np.concatenate([b["input_ids"].flatten() for b in batches]), return_counts=True)
    return {int(i): int(c) for i, c in zip(ids, counts, strict=True) if i != 0}


def epoch_ids(loader) -> dict[int, int]:
    def one_epoch():
        for batch in loader:
            if loader.state_dict()["epoch"]:
                break
            yield batch
        loader.close()

    return count_ids(one_epoch())


def test_a_streamed_resume_reads_no_more_than_a_block_again(config, tokenizer, monkeypatch):
    config.streaming = True
    loader = build(config, tokenizer)
    while loader.state_dict()["block"] < 2:
        next(loader)
    state = loader.state_dict()
    loader.close()
    resumed = build(config, tokenizer)
    encoder = resumed._share.order.source._encoder
    numbers: list[int] = []
    encode = type(encoder).__call__
    monkeypatch.setattr(
        type(encoder), "__call__", lambda self, values, rows: (numbers.extend(rows), encode(self, values, rows))[1]
    )
    resumed.load_state_dict(state)
    next(resumed)
    resumed.close()
    assert numbers[0] == 80, "two blocks of 40 documents are not read again"


def test_streamed_files_change_places_from_epoch_to_epoch(config, tokenizer):
    config.streaming, config.shuffle_buffer, config.packing = True, 1, False
    loader = build(config, tokenizer)
    first: dict[int, str] = {}
    while len(first) < 8:
        batch = next(loader)
        first.setdefault(loader.state_dict()["epoch"], tokenizer.decode(batch["input_ids"][0][:6]))
    loader.close()
    assert len(set(first.values())) > 1


def test_closing_amid_an_endless_block_of_a_stream_leaves_no_thread(tokenizer):
    started = threading.Event()

    def rows():
        started.set()
        yield from repeat({"text": "word"})

    rows_of_block = {"block_documents": 10**9, "part": Part(fraction=0.0, evaluation=False)}
    encoder = TextEncoder(tokenizer, "text")
    loader = share(StreamedSource(IterableDataset.from_generator(rows), encoder, name="endless", **rows_of_block))
    threading.Thread(target=next, args=(loader, None), daemon=True).start()
    started.wait()
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "weft-prefetch"]
