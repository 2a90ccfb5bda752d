"""Texts of any length are tokenised as in one piece, and around them each special token stands once."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from weft.engine.data import tokens as tokens_module
from weft.engine.data.chat import ChatEncoder
from weft.engine.data.encode import TextEncoder
from weft.engine.data.tokens import tokens_of, windows

WORDS = ["what", "is", "2", "question", "answer", "  ", "\n", "\n\n", "ünï", "漢字", "🙂", "it's", "aaaaaaaa", "x" * 40]


def text_of(length: int, seed: int) -> str:
    rng = random.Random(seed)
    parts: list[str] = []
    while sum(map(len, parts)) < length:
        parts.append(rng.choice(WORDS) + rng.choice(["", " ", " ", ", "]))
    return "".join(parts)


def metaspace(model, trainer) -> PreTrainedTokenizerFast:
    """As Llama 2: no words, so that merges may span spaces; a prefix at the beginning of a text."""
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Metaspace()
    made.train_from_iterator([text_of(200, n) for n in range(50)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")


@pytest.fixture(scope="module")
def tokenizers(tokenizer):
    special = ["<unk>", "<s>", "</s>"]
    bpe = trainers.BpeTrainer(vocab_size=400, special_tokens=special)
    return {
        "words": tokenizer,
        "no words": metaspace(models.BPE(unk_token="<unk>"), bpe),
        "unigram": metaspace(
            models.Unigram(), trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>")
        ),
    }


@pytest.mark.parametrize("name", ["words", "no words", "unigram"])
@pytest.mark.parametrize("seed", range(6))
def test_windows_give_the_tokens_of_the_whole_text(tokenizers, monkeypatch, name, seed):
    monkeypatch.setattr(tokens_module, "WINDOW", 900)
    monkeypatch.setattr(tokens_module, "OVERLAP", 400)
    text = text_of(6000, seed) if seed < 4 else "a" * 5000 + "b" * (seed * 300)
    whole = tokenizers[name](text, add_special_tokens=False, return_offsets_mapping=True)
    parts = list(windows(tokenizers[name], text))
    assert len(parts) > 1 or seed >= 4
    ids, spans = ([each for part in parts for each in part[n]] for n in (0, 1))
    if name == "unigram":  # of segmentations with equal probabilities, sums from another beginning choose another
        assert tokenizers[name].decode(ids) == tokenizers[name].decode(whole["input_ids"])
        assert len(ids) == len(whole["input_ids"]) and spans[-1] == whole["offset_mapping"][-1]
        return
    assert ids == whole["input_ids"] and spans == whole["offset_mapping"]
    (some,) = tokens_of(tokenizers[name], [text], limit=50)
    assert some.ids[:50] == whole["input_ids"][:50] and len(some.ids) > 50


def test_text_that_agrees_nowhere_is_tokenised_whole(tokenizers, monkeypatch):
    monkeypatch.setattr(tokens_module, "WINDOW", 100)
    monkeypatch.setattr(tokens_module, "OVERLAP", 10)  # fewer than AGREEING tokens
    text = text_of(3000, 9)
    ids = [token for some, _ in windows(tokenizers["words"], text) for token in some]
    assert ids == tokenizers["words"](text, add_special_tokens=False)["input_ids"]


def test_batches_of_texts_keep_their_order(tokenizer, monkeypatch):
    monkeypatch.setattr(tokens_module, "WINDOW", 300)
    monkeypatch.setattr(tokens_module, "AT_ONCE", 500)
    texts = [text_of(length, length) for length in (100, 250, 900, 10, 299, 400, 0, 30)]
    whole = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert [found.ids for found in tokens_of(tokenizer, texts)] == whole


def test_a_limit_bounds_the_work_of_a_long_text(tokenizer):
    """A conversation of megabytes for 64 tokens: what is tokenised does not grow with the text."""
    seen = []

    class Counting:
        is_fast = True

        def __call__(self, texts, **options):
            seen.append(len(texts) if isinstance(texts, str) else sum(map(len, texts)))
            return tokenizer(texts, **options)

    text = "what is 2? " * (1 << 19)
    tracemalloc.start()
    (found,) = tokens_of(Counting(), [text], limit=64, spans=True)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert sum(seen) <= 3 * tokens_module.WINDOW and not found.complete and len(found.ids) > 64


@pytest.mark.parametrize("packing", [False, True])
def test_long_conversation_is_labelled_as_a_short_one(tokenizer, monkeypatch, packing):
    talk = [{"role": "user", "content": "what is 2?"}, {"role": "assistant", "content": text_of(5000, 1)}]
    encoder = ChatEncoder(tokenizer, ("messages",), template="", limit=100)
    whole = encoder([talk], [0])
    monkeypatch.setattr(tokens_module, "WINDOW", 900)
    monkeypatch.setattr(tokens_module, "OVERLAP", 400)
    assert {**encoder([talk], [0]), "key": 0} == {**whole, "key": 0}
    behind = [{"role": "user", "content": text_of(5000, 1)}, talk[1]]
    assert encoder([behind], [0])["length"] == [0] and encoder([behind], [0])["truncated"] == [True]


SPECIAL = {
    "bos": ("<|bos|> $A", [1], [2]),
    "both": ("<|bos|> $A <|eos|>", [1], [2]),
    "two before": ("<|turn|> <|bos|> $A", [3, 1], [2]),
    "nothing": ("$A", [], [2]),
}


@pytest.mark.parametrize("case", SPECIAL)
@pytest.mark.parametrize("own_begin", [False, True])
@pytest.mark.parametrize("own_end", [False, True])
def test_special_tokens_stand_once(tokenizer, case, own_begin, own_end):
    """A text may have them already, such as one that a chat template has rendered."""
    single, before, after = SPECIAL[case]
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    ids = [(name, backend.token_to_id(name)) for name in ("<|bos|>", "<|eos|>", "<|turn|>")]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>")
    names = {token: name for name, token in ids}
    text = "".join(names[t] for t in before) * own_begin + "what is 2?" + "<|eos|>" * own_end
    bare = tokenizer("what is 2?", add_special_tokens=False)["input_ids"]
    found = TextEncoder(made, "text")([text, "what is 2?"], [0, 1])["input_ids"]
    assert found == [[*before, *bare, *after]] * 2


def test_words_that_are_not_cut_have_no_special_token_inside(tokenizer):
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a b") == pre.pre_tokenize_str("a b")
    text = "<|bos|><|bos|>what"
    assert TextEncoder(tokenizer, "text")([text], [0])["input_ids"][0].count(1) == 2, "what a text says twice stays"


@pytest.mark.parametrize("text", ["-" * 50_000, "ha " * 20_000])
def test_repetitive_text_is_read_no_further_than_its_limit(tokenizer, monkeypatch, text):
    """Windows of a repetitive text agree nowhere, so that each next one would be larger."""
    monkeypatch.setattr(tokens_module, "WINDOW", 1000)
    encoded, encode = [], tokens_module._encode
    monkeypatch.setattr(tokens_module, "_encode", lambda *given: (encoded.append(given[2:]), encode(*given))[1])
    (tokens,) = tokens_of(tokenizer, [text], limit=8, spans=True)
    assert encoded == [(0, 1000)] and not tokens.complete
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens.ids) == len(tokens.spans) > 8 and tokens.ids[:9] == whole[:9]
