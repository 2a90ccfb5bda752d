"""The tokenizer of a run: the model's own, or a BPE trained on the embedded corpus."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from weft.conf.host.owners import is_trusted, own_folder
from weft.conf.schema import DataConfig, ModelConfig
from weft.engine.data.corpus import load_corpus

VOCABULARY = 4096
"""Vocabulary size of the corpus tokenizer (byte-level BPE), without special tokens."""
PAD, BOS, EOS, TURN, END_TURN = "<|pad|>", "<|bos|>", "<|eos|>", "<|turn|>", "<|end_turn|>"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|turn|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end_turn|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end_turn|>{% endif %}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
"""Chat template of the corpus tokenizer, so that chat data can be tried without a download."""


def load_tokenizer(model: ModelConfig, data: DataConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``model.tokenizer``, or else of ``model.path``, or else train one on the corpus.

    Training takes seconds, and its result is cached in ``data.cache_dir``.

    Raises:
        ValueError: the folder or hub repository has no tokenizer that can be loaded.
    """
    field = "model.tokenizer" if model.tokenizer else "model.path"
    source = model.tokenizer or model.path
    if not source:
        return corpus_tokenizer(Path(data.cache_dir).expanduser())
    try:
        return AutoTokenizer.from_pretrained(
            os.path.expanduser(source), trust_remote_code=model.trust_remote_code, use_fast=True
        )
    except Exception as error:  # any: tokenizers raises Exception itself
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{field}={source}: no tokenizer can be loaded ({reason}); "
            "set model.tokenizer to a folder or hub name that has one"
        ) from error


def corpus_tokenizer(cache: Path) -> PreTrainedTokenizerBase:
    """Return the BPE of this Python's embedded corpus from the cache. Train it if the cache has none of this user."""
    corpus = load_corpus()
    own_folder(cache, "data.cache_dir")
    folder = cache / f"tokenizer-{corpus.sha256[:12]}-{VOCABULARY}"
    if not folder.exists() or not is_trusted(folder):
        with FileLock(f"{folder}.lock"):
            if folder.exists() and not is_trusted(folder):
                os.rename(folder, tempfile.mkdtemp(prefix=f".{folder.name}-untrusted-", dir=cache))
            if not folder.exists():
                _publish(train_bpe(corpus.texts), folder)
    return AutoTokenizer.from_pretrained(folder)


def vocabulary_for(words: int, members: int) -> int:
    """Return a new model's vocabulary size: the number of tokens, rounded up so that the tensor group can divide it.

    Args:
        members: size of the tensor group (``parallel.tensor``).
    """
    return -(-words // members) * members


def train_bpe(texts: Iterable[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on ``texts``, with special tokens for padding, documents and turns. Deterministic."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [PAD, BOS, EOS, TURN, END_TURN]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary + len(special),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens=[TURN, END_TURN],
        chat_template=CHAT_TEMPLATE,
    )


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hex hash of everything that affects the ids of a text. It is equal on every machine."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    if backend is not None:  # earlier calls set it, and every later call overrides it
        rules = {key: value for key, value in rules.items() if key not in ("truncation", "padding")}
    parts = [type(tokenizer).__name__, rules, {k: str(v) for k, v in tokenizer.special_tokens_map.items()}]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def require_rows(tokenizer: PreTrainedTokenizerBase, rows: int, model: ModelConfig) -> None:
    """Check that the model's embedding has a vector for every token of a tokenizer.

    Raises:
        ValueError: a token's id is not below ``rows``, the size of the model's vocabulary.
    """
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= rows)
    if not beyond:
        return
    (first, token), (last, _) = beyond[0], beyond[-1]
    field, remedy = f"model.overrides.vocab_size={rows}", f"set it to {last + 1} or more, or leave it out"
    if model.path:
        field = f"model.tokenizer={model.tokenizer}" if model.tokenizer else f"model.path={model.path}"
        remedy = (
            f"call model.resize_token_embeddings({last + 1}) and save the model, or give the tokenizer that it was "
            "trained with as model.tokenizer"
        )
    raise ValueError(
        f"{field}: the tokenizer has {len(tokenizer)} tokens and the model {rows} rows of embeddings, so {len(beyond)} "
        f"tokens, such as {token!r} ({first}), have none; {remedy}"
    )


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id for padding: the padding token, or else the end-of-text token, or else 0.

    Documents never attend to padding, and it never counts in the loss.
    """
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in known if token is not None)


def _publish(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    draft = tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)
    try:
        tokenizer.save_pretrained(draft)
        os.rename(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
