"""Ring attention: each member's keys and values are passed round the ring, and every member attends to each block.

While attention to one block is computed, the next block is transferred. Outputs of blocks are merged by their
log-sum-exps, so scores are never materialised as a whole. During a layer a member stores its own keys and values and
two further blocks. In the backward, keys and values are passed round once more, followed one step later by their
gradients. Each member adds its contribution, and the last step returns the gradients to the owner.
(Liu et al. 2023, "Ring Attention with Blockwise Transformers", with the merge of Rabe and Staats 2021.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.engine.parallel import blocks, zigzag
from weft.engine.parallel.axis import AxisGroup
from weft.engine.parallel.blocks import Block


@dataclass(frozen=True)
class Seen:
    """A mask other than the plain causal one.

    Attributes:
        of: returns the mask [B or 1, 1, Q, K] for query positions [Q] and key positions [K] in the whole sequence.
        only_earlier: whether no query attends to later positions, so that later chunks can be skipped.
        reach: number of positions that a query attends to, counted back from itself. None means all.
    """

    of: Callable[[Tensor, Tensor], Tensor]
    only_earlier: bool
    reach: int | None


class Part(NamedTuple):
    """Some queries of a member, and the keys of a block that they attend to.

    Attributes:
        rows: indices of the queries in the member's part of the sequence.
        columns: indices of the keys in the block.
        causal: whether a query attends to keys up to its own index. Otherwise it attends to all ``columns``.
    """

    rows: slice
    columns: slice
    causal: bool = False


@dataclass(frozen=True)
class Ring:
    """The settings of one member's attention in a layer, besides queries, keys and values.

    Attributes:
        group: a context group, whose members' parts of the sequence are zigzag.
        scale: factor of the scores.
        seen: the mask. None means plain causal.
    """

    group: AxisGroup
    scale: float
    seen: Seen | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute attention of this member's queries to the keys of all members.

        Args:
            query: this member's queries, [B, heads, S / members, D].
            key: [B, key and value heads, S / members, D].
            value: [B, key and value heads, S / members, Dv].

        Returns:
            The output, [B, heads, S / members, Dv].
        """
        return _Attention.apply(query, key, value, self)

    def parts(self, owner: int, length: int) -> list[Part]:
        """Return the parts of a member's block that this member's queries attend to, in whole chunks.

        Args:
            owner: index of the member whose keys the block has.
            length: number of a member's positions.
        """
        chunk, size = length // 2, self.group.size
        mine, theirs = (zigzag.chunks_of(size, index) for index in (self.group.index, owner))
        if owner == self.group.index and self.seen is None:
            return [Part(slice(0, length), slice(0, length), causal=True)]
        visible = [[self._sees(query, key, chunk) for key in theirs] for query in mine]
        halves = [_covered(chunks, chunk) for chunks in visible]
        if halves[0] == halves[1] and halves[0] is not None:
            return [Part(slice(0, length), halves[0])]
        rows = slice(0, chunk), slice(chunk, length)
        return [Part(half, columns) for half, columns in zip(rows, halves, strict=True) if columns is not None]

    def _sees(self, query: int, key: int, chunk: int) -> bool:
        """True if any query of one chunk may attend to a key of another chunk, or of the same chunk."""
        seen = self.seen or Seen(lambda *_: NotImplemented, only_earlier=True, reach=None)
        if seen.only_earlier and key > query:
            return False
        nearest = (query - key - 1) * chunk + 1  # from the first query to the last key, of different chunks
        return seen.reach is None or nearest < seen.reach

    def block(self, query: Tensor, key: Tensor, value: Tensor, part: Part, owner: int) -> Block:
        """Return a part's queries, keys and values, and its mask as a bias of the scores."""
        bias = None
        if self.seen is not None:
            length, device = query.shape[2], query.device
            rows, columns = (self._positions(index, length, device) for index in (self.group.index, owner))
            seen = self.seen.of(rows[part.rows], columns[part.columns])
            bias = torch.zeros(seen.shape, dtype=query.dtype, device=device)
            bias = bias.masked_fill_(~seen, blocks.unseen(query.dtype))
        keys, values = (tensor[:, :, part.columns] for tensor in (key, value))
        return Block(query[:, :, part.rows], keys, values, self.scale, part.causal, bias)

    def owners(self) -> Iterator[int]:
        """Yield the owners of the blocks in the order of arrival, starting with this member."""
        return ((self.group.index - step) % self.group.size for step in range(self.group.size))

    def _positions(self, index: int, length: int, device: torch.device) -> Tensor:
        chunk = torch.arange(length // 2, device=device)
        return torch.cat([number * (length // 2) + chunk for number in zigzag.chunks_of(self.group.size, index)])


class _Pair(NamedTuple):
    """Format of a message with keys and values, or with their gradients."""

    shapes: tuple[torch.Size, torch.Size]

    def packed(self, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([key.reshape(-1), value.reshape(-1)])

    def unpacked(self, message: Tensor) -> tuple[Tensor, Tensor]:
        key, value = message.split([shape.numel() for shape in self.shapes])
        return key.view(self.shapes[0]), value.view(self.shapes[1])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
        kernel = blocks.kernel_for(query, masked=ring.seen is not None)
        pair, length = _Pair((key.shape, value.shape)), query.shape[2]
        message, merged, seeds = pair.packed(key, value), _Merged(), ()
        for step, owner in enumerate(ring.owners()):
            coming = ring.group.shift(message) if step < ring.group.size - 1 else None
            keys, values = pair.unpacked(message)
            for part in ring.parts(owner, length):
                partial = kernel.forward(ring.block(query, keys, values, part, owner))
                merged.add(partial, part.rows, length)
                seeds = seeds or partial.seeds
            if coming is not None:
                message = coming.wait()
        output, sums = merged.settled(query.dtype, masked=ring.seen is not None)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.ring, ctx.kernel, ctx.seeds = ring, kernel, seeds
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        ring, (gradient,) = ctx.ring, gradients
        pair, length = _Pair((key.shape, value.shape)), query.shape[2]
        of_query = torch.zeros(query.shape, dtype=sums.dtype, device=query.device)
        message, onward = pair.packed(key, value), None
        for step, owner in enumerate(ring.owners()):
            coming = ring.group.shift(message) if step < ring.group.size - 1 else None
            keys, values = pair.unpacked(message)
            of_key, of_value = (torch.zeros(shape, dtype=sums.dtype, device=query.device) for shape in pair.shapes)
            for part in ring.parts(owner, length):
                found = ctx.kernel.backward(
                    ring.block(query, keys, values, part, owner),
                    *(tensor[:, :, part.rows] for tensor in (gradient, output, sums)),
                    ctx.seeds,
                )
                of_query[:, :, part.rows] += found[0]
                of_key[:, :, part.columns] += found[1]
                of_value[:, :, part.columns] += found[2]
            mine = pair.packed(of_key, of_value)
            if onward is not None:
                mine += onward.wait()
            onward = ring.group.shift(mine.to(key.dtype))
            if coming is not None:
                message = coming.wait()
        assert onward is not None
        return of_query.to(query.dtype), *pair.unpacked(onward.wait()), None


class _Merged:
    """Attention merged over the blocks so far, in fp32 or better."""

    def __init__(self) -> None:
        self._output: Tensor | None = None
        self._sums: Tensor | None = None

    def add(self, partial: blocks.Partial, rows: slice, length: int) -> None:
        """Merge the result for another block, weighted by the log-sum-exps."""
        output, sums = partial.output.to(partial.sums.dtype), partial.sums
        if self._output is None or self._sums is None:
            if rows == slice(0, length):
                self._output, self._sums = output, sums.clone()
                return
            self._output = output.new_zeros((*output.shape[:2], length, output.shape[-1]))
            self._sums = sums.new_full((*sums.shape[:2], length), -torch.inf)
        before, total = self._sums[..., rows], torch.logaddexp(self._sums[..., rows], sums)
        kept = self._output[:, :, rows]
        kept.mul_((before - total).exp_().unsqueeze(-1))
        kept.addcmul_(output, (sums - total).exp_().unsqueeze(-1))
        before.copy_(total)

    def settled(self, dtype: torch.dtype, *, masked: bool) -> tuple[Tensor, Tensor]:
        """Return the output, and the log-sum-exps for the backward.

        The output and the gradients of a fully masked query are zero.
        """
        output, sums = self._output, self._sums
        assert output is not None and sums is not None, "a query sees its own block"
        if masked:
            nothing = sums < blocks.unseen(dtype) / 2
            output = output.masked_fill(nothing.unsqueeze(-1), 0.0)
            sums = sums.masked_fill(nothing, torch.inf)
        return output.to(dtype), sums


def _covered(visible: list[bool], chunk: int) -> slice | None:
    """Return the slice of a block that covers its visible chunks, or None if no chunk is visible."""
    if not any(visible):
        return None
    return slice(0 if visible[0] else chunk, 2 * chunk if visible[1] else chunk)
