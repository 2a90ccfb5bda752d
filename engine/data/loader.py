"""The loader: one replica's micro-batches from the global order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import cycle, islice
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from weft.conf.schema import DataConfig, DataKind
from weft.engine.data.documents import IGNORED, Document
from weft.engine.data.host_loader import HostBlocks, HostLoader
from weft.engine.data.mixture import MixedSource
from weft.engine.data.open import open_source
from weft.engine.data.order import Cursor, Order, Placed, Ranges, sequences
from weft.engine.data.packing import lay_out_contiguous, lay_out_single, lay_out_whole
from weft.engine.data.pairs import lay_out_pairs, rows_of
from weft.engine.data.prefetch import Prefetch
from weft.engine.data.source import Source, StreamedSource
from weft.engine.data.tokenizer import padding_id
from weft.engine.deal import dealt

Batch = dict[str, Tensor]
"""A micro-batch of B sequences of S tokens on the CPU.

``input_ids`` and ``labels`` are int64 [B, S]. A label of -100 is ignored. Labels are not shifted, because the model
shifts them. With packing there are ``position_ids`` [B, S]. ``attention_mask`` (1 for tokens, 0 for padding) is present
only if a sequence is padded without packing.
"""


def collate(rows: Sequence[Sequence[Document]], sequence_length: int, pad: int, *, packing: bool) -> Batch:
    """Concatenate the pieces of documents in each sequence, and return them as a micro-batch.

    The positions of each piece start at 0, and its first label is ignored. So no loss and (with Hugging Face's packed
    attention) no attention crosses into another document. With packing, the rest of a sequence is a further document of
    padding. Without packing, the rest is masked.
    """
    shape = (len(rows), sequence_length)
    ids = np.full(shape, pad, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    positions = np.empty(shape, dtype=np.int64)
    mask = np.ones(shape, dtype=np.int64)
    for row, pieces in enumerate(rows):
        at = 0
        for piece in pieces:
            end = at + len(piece.ids)
            ids[row, at:end] = piece.ids
            labels[row, at + 1 : end] = piece.labels[1:]
            positions[row, at:end] = np.arange(end - at)
            at = end
        positions[row, at:] = np.arange(sequence_length - at)
        if at:  # a row without documents attends to its padding, because a softmax over nothing is NaN
            mask[row, at:] = 0
    batch = {"input_ids": ids, "labels": labels}
    if packing:
        batch["position_ids"] = positions
    elif not mask.all():
        batch["attention_mask"] = mask
    return {name: torch.from_numpy(values) for name, values in batch.items()}


BATCHES_AHEAD = 4
"""Smallest number of micro-batches to prepare in advance."""
BLOCKS_AHEAD = 1
"""Number of blocks to read and lay out while the previous block is in use."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """One replica's share of the global order, and the conversion of its sequences into tensors."""

    order: Order
    host: HostBlocks | None = None
    """The order's blocks, made by the host's loader. None makes them in this process."""
    microbatch_size: int
    """Documents or packed sequences of a micro-batch; of preference pairs, half of its sequences."""
    replica: int
    num_replicas: int
    packing: bool
    pairs: bool = False
    pad: int
    ahead: int = 0
    """Micro-batches to prepare in advance if more than `BATCHES_AHEAD`. Those of a step, which a rank reads at once."""

    def read_ahead(
        self, cursor: Cursor, left_out: Ranges = (), rounds: Sequence[Sequence[int]] = ()
    ) -> Prefetch[tuple[Batch, Cursor, int]]:
        """Return this replica's micro-batches from ``cursor`` on, each with the next cursor and its number of tokens.

        At the end of a pass, a replica may have too few sequences. Sequences of padding then fill its micro-batch.

        Args:
            left_out: sequences of the global order to skip.
            rounds: for each round of a step, the replicas whose micro-batches this one reads. Empty means its own.
        """
        blocks = Prefetch(self.host.read(cursor) if self.host else self.order.blocks(cursor), BLOCKS_AHEAD)
        upcoming = sequences(blocks, cursor, left_out)
        microbatches = self._microbatches(upcoming, rounds or [(self.replica,)])
        return Prefetch(microbatches, max(self.ahead, BATCHES_AHEAD), source=blocks)

    def _microbatches(
        self, upcoming: Iterator[tuple[Placed, int]], rounds: Sequence[Sequence[int]]
    ) -> Iterator[tuple[Batch, Cursor, int]]:
        turns, size = cycle(rounds), self.microbatch_size
        while drawn := list(islice(upcoming, size * self.num_replicas)):
            placed, at = drawn[-1]
            after = placed.at(at + 1)
            for first in (replica * size for replica in next(turns)):
                rows = [placed.documents(at) for placed, at in drawn[first : first + size]]
                rows += [[] for _ in range(size - len(rows))]
                rows = rows_of(rows) if self.pairs else rows
                batch = collate(rows, self.order.sequence_length, self.pad, packing=self.packing)
                yield batch, after, sum(len(piece.ids) for pieces in rows for piece in pieces)


class MicrobatchLoader(Iterator[Batch]):
    """Iterator over the micro-batches of one replica. Every rank of the replica builds an equal loader.

    The k-th micro-batch after the start, or after resuming at sequence n, has the global sequences n + (k R + r) B to n
    + (k R + r + 1) B for replica r of R, unless `deal` has moved some. Sequences that are `left_out` do not count.
    Training data is endless. For evaluation, ``iter`` starts one pass over the data. Sequences without labels fill it
    up, so that every replica has the same number of micro-batches.
    """

    def __init__(self, share: Share) -> None:
        """Start at the first sequence. The first ``next`` starts reading."""
        self._share = share
        self._cursor = Cursor()
        self._left_out: list[tuple[int, int]] = []
        self._counts: tuple[int, ...] = ()
        self._rounds: Sequence[Sequence[int]] = ()
        self._lengths: dict[int, int] = {}
        self._ahead: Prefetch[tuple[Batch, Cursor, int]] | None = None
        self._peeked: deque[tuple[Batch, Cursor, int]] = deque()
        self.tokens = 0
        """Number of tokens that this replica has read, without padding."""

    @property
    def description(self) -> str:
        """One line of text about the data source."""
        return self._share.order.source.description

    @property
    def consumed(self) -> int:
        """Number of sequences of the global order before the next micro-batch, over all replicas and passes."""
        consumed = self._cursor.consumed
        for first, after in self._left_out:
            if first <= consumed < after:
                consumed = after
        return consumed

    @property
    def epoch(self) -> float:
        """Number of passes over the data so far, as a fraction.

        For streams and mixtures, only completed passes count.
        """
        epoch = self._cursor.epoch
        if not self.is_countable:
            return float(epoch)
        return epoch + self._cursor.sequence / max(1, self._length(epoch))

    @property
    def is_countable(self) -> bool:
        """True if the sequences of a pass can be counted without reading the data. Streams and mixtures cannot."""
        return not isinstance(self._share.order.source, StreamedSource | MixedSource)

    def _length(self, epoch: int) -> int:
        if epoch not in self._lengths:
            self._lengths = {epoch: self._share.order.num_sequences(epoch)}
        return self._lengths[epoch]

    def sequences(self, epochs: float) -> int:
        """Return the number of sequences in the first ``epochs`` passes over the data. ``epochs`` may be a fraction.

        A stream is read for this.

        Raises:
            ValueError: a pass has no document.
        """
        whole = int(epochs)
        counts = [self._length(epoch) for epoch in range(ceil(epochs))]
        if not all(counts):
            raise ValueError(f"data.path: {self.description}: not one document with text; give it some")
        return sum(counts[:whole]) + ceil(sum(counts[whole:]) * (epochs - whole))

    def __iter__(self) -> MicrobatchLoader:
        if not self._share.order.endless:
            self._seek(Cursor())
        return self

    def __next__(self) -> Batch:
        """Return the next micro-batch.

        Raises:
            StopIteration: the pass has ended (evaluation only).
            ValueError: the source has a row that cannot be encoded, or no document.
        """
        self.peek(1)
        if not self._peeked:
            raise StopIteration
        batch, self._cursor, tokens = self._peeked.popleft()
        self.tokens += tokens
        return batch

    def peek(self, count: int) -> list[Batch]:
        """Return the next ``count`` micro-batches, or fewer at the end of a pass, without reading past them."""
        if self._ahead is None:
            self._ahead = self._share.read_ahead(self._cursor, self.left_out, self._rounds)
        self._peeked.extend(islice(self._ahead, max(0, count - len(self._peeked))))
        return [batch for batch, _, _ in islice(self._peeked, count)]

    @property
    def left_out(self) -> Ranges:
        """Skipped ranges of the global order: the number of the first sequence, and the number after the last one."""
        return tuple(self._left_out)

    def leave_out(self, first: int, after: int) -> None:
        """Skip the sequences from ``first`` to ``after - 1``, beginning with the next micro-batch.

        They are numbered in the global order over all passes, as in `consumed`. Micro-batches that were already read
        are not affected.
        """
        self._seek(self._cursor)
        self._left_out = sorted({*self._left_out, (first, after)})

    def deal(self, counts: Sequence[int]) -> None:
        """Read ``counts[r]`` micro-batches of each step on replica r from now on. All ranks call it between two steps.

        All replicas together read the same sequences in each step as without it. See `weft.engine.deal.dealt`.

        Raises:
            ValueError: ``counts`` is for another number of replicas, or `dealt` refuses it.
        """
        if self._counts == (counts := tuple(counts)):
            return
        own, replicas = self._share.replica, self._share.num_replicas
        if len(counts) != replicas:
            raise ValueError(f"counts={list(counts)}: there are {replicas} replicas; give one number for each")
        rounds: list[list[int]] = [[] for _ in range(sum(counts) // replicas)]
        for number in dealt(counts)[own]:
            rounds[number // replicas].append(number % replicas)
        moved: Sequence[Sequence[int]] = () if len(set(counts)) == 1 else rounds
        if moved != self._rounds:
            self._seek(self._cursor)
        self._counts, self._rounds = counts, moved

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last micro-batch, as JSON values, which are the same on all replicas."""
        left_out = [list(each) for each in self._left_out]
        return {"order": self._share.order.identity, "left_out": left_out, **asdict(self._cursor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. The number of replicas and the micro-batch size may have changed.

        Raises:
            ValueError: the state is of other data, another seed or another sequence length.
        """
        if state["order"] != self._share.order.identity:
            raise ValueError(
                f"data.path: {self.description}: the checkpoint was written with other data, or another train.seed "
                "or data setting; restore them, or start over with checkpoint.resume=never"
            )
        cursor = {name: value for name, value in state.items() if name not in ("order", "left_out")}
        self._seek(Cursor(**cursor))
        self._left_out = [(first, after) for first, after in state.get("left_out", ())]

    def close(self) -> None:
        """Stop reading in advance. A later ``next`` continues at the same position."""
        if self._ahead is not None:
            if self._share.host is not None:
                self._share.host.interrupt()
            self._ahead.close()
            self._ahead = None
            self._peeked.clear()

    def _seek(self, cursor: Cursor) -> None:
        self.close()
        self._cursor = cursor


def build_loader(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    microbatch_size: int,
    replica: int,
    num_replicas: int,
    seed: int,
    ahead: int = 0,
    evaluation: bool = False,
    source: Source | None = None,
    host: HostLoader | None = None,
) -> MicrobatchLoader:
    """Return a loader that starts at the first sequence. Data is tokenised unless the result is cached.

    Args:
        replica: index of the replica. All ranks of a replica get equal loaders.
        ahead: micro-batches of a step, which are prepared during the step before it.
        evaluation: make one pass in a fixed order over ``data.eval_split`` or the held-out documents, instead of
            endless passes over the training data.
        source: result of `open_source` for the same data. None opens the data.
        host: the loader of this host, for streamed data. None reads the data in this process.

    Raises:
        ValueError: the data cannot be read or encoded, or an argument is out of range. The message names the setting.
    """
    if not 0 <= replica < num_replicas:
        raise ValueError(f"replica={replica}: there are {num_replicas} replicas, numbered from 0")
    if microbatch_size < 1:
        raise ValueError(f"train.microbatch_size={microbatch_size}: give at least 1 sequence")
    return MicrobatchLoader(
        Share(
            order=open_order(data, tokenizer, seed=seed, evaluation=evaluation, source=source),
            host=None if host is None else HostBlocks(host, evaluation=evaluation),
            microbatch_size=microbatch_size // data.kind.sequences,
            replica=replica,
            num_replicas=num_replicas,
            packing=data.packing,
            pairs=data.kind is DataKind.preference,
            pad=padding_id(tokenizer),
            ahead=ahead,
        )
    )


def open_order(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    evaluation: bool,
    source: Source | None = None,
    now: datetime | None = None,
) -> Order:
    """Return the global order of the data's sequences. Arguments as in `build_loader` and `open_source`."""
    lay_out = lay_out_whole if data.kind is DataKind.chat else lay_out_contiguous
    alone = lay_out_pairs if data.kind is DataKind.preference else lay_out_single
    return Order(
        source=source or open_source(data, tokenizer, evaluation=evaluation, now=now),
        lay_out=lay_out if data.packing else alone,
        sequence_length=data.sequence_length,
        shuffle=data.shuffle,
        seed=seed,
        endless=not evaluation,
    )
