"""Replicas read what several of them need once between them, and have every byte that each would have read."""

import shutil
import threading
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.checkpoint.ranks_in_threads import Meeting, save_step, tensors
from weft.engine.checkpoint import CheckpointError, open_checkpoint
from weft.engine.checkpoint.shard_file import ShardReader
from weft.engine.checkpoint.shared_reading import Needed, read_once


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """One written by three ranks."""
    return save_step(tmp_path_factory.mktemp("checkpoints"), 4)[0]


def in_threads(size, run):
    """Run on so many threads; their errors."""
    errors = []

    def one(rank):
        try:
            run(rank)
        except CheckpointError as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
    return errors


class Group:
    """Members of a group, their storage, and which threads have read each piece."""

    def __init__(self, size, path, monkeypatch):
        self.meeting, self.size, self.path = Meeting(size), size, path
        self.readers: dict[tuple[str, str], set[int]] = {}
        self._boxes, self._there = {}, threading.Condition()
        read = ShardReader.read

        def counted(reader, piece, dtype):
            self.readers.setdefault((piece.file, piece.key), set()).add(threading.get_ident())
            return read(reader, piece, dtype)

        monkeypatch.setattr(ShardReader, "read", counted)

    def tell(self, number):
        """Each member's end of what they tell each other."""
        told = Counter()

        def tell(data, root, users):
            key = root, tuple(users), told[root, tuple(users)]
            told[root, tuple(users)] += 1
            with self._there:
                if number == root:
                    self._boxes[key] = data
                    self._there.notify_all()
                else:
                    assert self._there.wait_for(lambda: key in self._boxes, 20.0)
                    data.copy_(self._boxes[key])

        return tell

    def restore(self, spans):
        """Return the pieces that each member reads: (tensor, first element, one after the last)."""
        found, whole = [None] * self.size, self.meeting.ranks

        def run(rank):
            mine = open_checkpoint(self.path)
            pieces = [Needed(*each) for span in spans[rank] for each in mine.pieces(*span)]
            ranks = whole(rank)
            read_once(mine, {each.key: each for each in pieces}, ranks, ranks, self.tell(rank))
            found[rank] = [mine.read(*span) for span in spans[rank]]

        return in_threads(self.size, run), found


@st.composite
def wishes(draw):
    """Return for each member the parts of tensors that it needs."""
    sizes = {name: each.numel() for name, each in tensors(4).items()}

    def part():
        name = draw(st.sampled_from(sorted(sizes)))
        first, last = sorted((draw(st.integers(0, sizes[name])), draw(st.integers(0, sizes[name]))))
        return name, first, last

    return [[part() for _ in range(draw(st.integers(0, 4)))] for _ in range(draw(st.integers(1, 4)))]


@settings(max_examples=40, deadline=None)
@given(spans=wishes())
def test_every_byte_is_read_once_and_is_the_right_one(checkpoint, spans):
    with pytest.MonkeyPatch.context() as patch:
        group = Group(len(spans), checkpoint, patch)
        errors, found = group.restore(spans)
        assert not errors
        assert all(len(readers) == 1 for readers in group.readers.values()), "no piece is read by two"
    right = tensors(4)
    for wanted, got in zip(spans, found, strict=True):
        for (name, first, last), part in zip(wanted, got, strict=True):
            assert torch.equal(part, right[name].flatten()[first:last])


def test_replicas_that_all_need_everything_share_the_reading(checkpoint, monkeypatch):
    group = Group(4, checkpoint, monkeypatch)
    everything = [(name, 0, None) for name in tensors(4)]
    errors, found = group.restore([everything] * 4)
    assert not errors and all(len(readers) == 1 for readers in group.readers.values())
    assert len(set().union(*group.readers.values())) > 1, "they share the work"
    stored = sum(each.numel() * each.element_size() for each in tensors(4).values())
    assert all(sum(part.nbytes for part in got) == stored for got in found)


def test_a_damaged_piece_is_an_error_on_every_member(checkpoint, monkeypatch, tmp_path):
    damaged = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    shard = sorted(damaged.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    errors, _ = Group(3, damaged, monkeypatch).restore([[(name, 0, None) for name in tensors(4)]] * 3)
    assert len(errors) == 3 and len({str(error) for error in errors}) == 1
