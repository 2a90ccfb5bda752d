"""The loader: the micro-batches that one replica takes from the global order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from math import ceil
from typing import Any

from transformers import PreTrainedTokenizerBase

from weft.conf.schema import DataConfig, DataKind
from weft.engine.data.batch import Batch, collate
from weft.engine.data.open import open_source
from weft.engine.data.order import Cursor, Order, Ranges, sequences
from weft.engine.data.packing import lay_out_contiguous, lay_out_single, lay_out_whole
from weft.engine.data.prefetch import Prefetch
from weft.engine.data.source import Source, StreamedSource
from weft.engine.data.tokenizer import padding_id

BATCHES_AHEAD = 4
"""Micro-batches to prepare in advance."""
BLOCKS_AHEAD = 1
"""Blocks to read and lay out while the previous one is in use."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """One replica's share of the global order, and how its sequences become tensors."""

    order: Order
    microbatch_size: int
    replica: int
    num_replicas: int
    packing: bool
    pad: int

    def microbatches(self, cursor: Cursor, left_out: Ranges = ()) -> Iterator[tuple[Batch, Cursor, int]]:
        """This replica's micro-batches from ``cursor`` on, each with the cursor after it and its number of tokens.

        Rows that the end of a pass cannot fill hold only padding.

        Args:
            left_out: sequences of the global order to go past.
        """
        blocks = Prefetch(self.order.blocks(cursor), BLOCKS_AHEAD)
        upcoming = sequences(blocks, cursor, left_out)
        first = self.replica * self.microbatch_size
        try:
            while drawn := list(islice(upcoming, self.microbatch_size * self.num_replicas)):
                rows = [placed.documents(at) for placed, at in drawn[first : first + self.microbatch_size]]
                rows += [[] for _ in range(self.microbatch_size - len(rows))]
                batch = collate(rows, self.order.sequence_length, self.pad, packing=self.packing)
                placed, at = drawn[-1]
                yield batch, placed.at(at + 1), sum(len(piece.ids) for pieces in rows for piece in pieces)
        finally:
            blocks.close()


class MicrobatchLoader(Iterator[Batch]):
    """Iterates over the micro-batches of one replica. Every rank of its pipeline builds an equal loader.

    The k-th micro-batch after the start, or after resuming at sequence n, holds the global sequences
    n + (k R + r) B to n + (k R + r + 1) B for replica r of R, counted without those that are `left_out`.
    Training data is endless. For evaluation, ``iter`` starts one pass over the data, filled up with
    rows without labels so that every replica gets the same number of micro-batches.
    """

    def __init__(self, share: Share) -> None:
        """Start at the first sequence. Reading starts with the first ``next``."""
        self._share = share
        self._cursor = Cursor()
        self._left_out: list[tuple[int, int]] = []
        self._lengths: dict[int, int] = {}
        self._ahead: Prefetch[tuple[Batch, Cursor, int]] | None = None
        self.tokens = 0
        """Number of tokens read by this replica, without padding."""

    @property
    def description(self) -> str:
        """One line of text about the data."""
        return self._share.order.source.description

    @property
    def consumed(self) -> int:
        """Sequences of the global order before the next micro-batch, over all replicas and passes."""
        consumed = self._cursor.consumed
        for first, after in self._left_out:
            if first <= consumed < after:
                consumed = after
        return consumed

    @property
    def epoch(self) -> float:
        """Number of passes over the data so far, fractional if the data is loaded and not streamed."""
        epoch = self._cursor.epoch
        if isinstance(self._share.order.source, StreamedSource):
            return float(epoch)
        if epoch not in self._lengths:
            self._lengths = {epoch: self._share.order.num_sequences(epoch)}
        return epoch + self._cursor.sequence / max(1, self._lengths[epoch])

    def sequences(self, epochs: float) -> int:
        """Return the number of sequences in the first ``epochs`` passes over loaded data. ``epochs`` may be fractional.

        Raises:
            ValueError: the data has no document.
        """
        whole = int(epochs)
        counts = [self._share.order.num_sequences(epoch) for epoch in range(ceil(epochs))]
        if not all(counts):
            raise ValueError(f"data.path: {self.description}: not one document with text; give it some")
        return sum(counts[:whole]) + ceil(sum(counts[whole:]) * (epochs - whole))

    def __iter__(self) -> MicrobatchLoader:
        if not self._share.order.endless:
            self._seek(Cursor())
        return self

    def __next__(self) -> Batch:
        """The next micro-batch.

        Raises:
            StopIteration: the pass has ended (evaluation only).
            ValueError: the source has a row that cannot be encoded, or no document.
        """
        if self._ahead is None:
            self._ahead = Prefetch(self._share.microbatches(self._cursor, self.left_out), BATCHES_AHEAD)
        batch, self._cursor, tokens = next(self._ahead)
        self.tokens += tokens
        return batch

    @property
    def left_out(self) -> Ranges:
        """Ranges of the global order that are gone past, by the number of their first sequence and the one after."""
        return tuple(self._left_out)

    def leave_out(self, first: int, after: int) -> None:
        """From the next micro-batch on, go past the sequences from ``first`` to before ``after``.

        They are numbered in the global order over all passes, as `consumed` counts; what has been read
        stays read.
        """
        self._seek(self._cursor)
        self._left_out = sorted({*self._left_out, (first, after)})

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last micro-batch, as JSON values, the same on all replicas."""
        left_out = [list(each) for each in self._left_out]
        return {"order": self._share.order.identity, "left_out": left_out, **asdict(self._cursor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. The number of replicas and the micro-batch size may have changed.

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
        """Stop reading ahead. A later ``next`` resumes at the same position."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

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
    evaluation: bool = False,
    source: Source | None = None,
) -> MicrobatchLoader:
    """Open the data, tokenise it unless it is cached, and start at its first sequence.

    Args:
        source: what `open_source` returned for the same, where it is open already.
        microbatch_size: sequences per micro-batch.
        replica: index of the replica. All ranks of its pipeline get equal loaders.
        evaluation: make one pass over ``data.eval_split`` or the held-out documents in a fixed
            order, instead of endless training data.

    Raises:
        ValueError: the data cannot be read or encoded. The message names the field and the row.
    """
    if not 0 <= replica < num_replicas:
        raise ValueError(f"replica={replica}: there are {num_replicas} replicas, numbered from 0")
    if microbatch_size < 1:
        raise ValueError(f"train.microbatch_size={microbatch_size}: give at least 1 sequence")
    lay_out = lay_out_whole if data.kind is DataKind.chat else lay_out_contiguous
    order = Order(
        source=source or open_source(data, tokenizer, evaluation=evaluation),
        lay_out=lay_out if data.packing else lay_out_single,
        sequence_length=data.sequence_length,
        shuffle=data.shuffle,
        seed=seed,
        endless=not evaluation,
    )
    return MicrobatchLoader(
        Share(
            order=order,
            microbatch_size=microbatch_size,
            replica=replica,
            num_replicas=num_replicas,
            packing=data.packing,
            pad=padding_id(tokenizer),
        )
    )
