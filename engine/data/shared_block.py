"""A packed block of the global order in anonymous shared memory, which other processes map."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from dataclasses import asdict

import numpy as np

from weft.engine.data.documents import Document
from weft.engine.data.order import Cursor, Placed
from weft.engine.data.packing import WholeLayout
from weft.engine.data.source import Block

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class _Pieces:
    """Documents in one array of tokens. See `weft.engine.data.documents.Documents`."""

    def __init__(self, ids: np.ndarray, labels: np.ndarray, lengths: np.ndarray) -> None:
        self._ids, self._labels = ids, labels
        self.lengths = lengths
        self._ends = np.cumsum(lengths)

    def __getitem__(self, index: int) -> Document:
        end = int(self._ends[index])
        inside = slice(end - int(self.lengths[index]), end)
        return Document(self._ids[inside], self._labels[inside])


def write_block(placed: Placed) -> int:
    """Write the sequences of a block, in training order, into memory without a name, and return its file descriptor.

    No other process can open it without the descriptor. It is sealed, so no process can change it.
    """
    sequences = [placed.documents(number) for number in range(len(placed.layout))]
    pieces = [piece for sequence in sequences for piece in sequence]
    ids = _joined([piece.ids for piece in pieces])
    labels = _joined([piece.labels for piece in pieces])
    arrays = [
        np.array([len(piece.ids) for piece in pieces], dtype=np.int64),
        np.cumsum([len(sequence) for sequence in sequences], dtype=np.int64),
        ids,
        *([] if np.array_equal(ids, labels) else [labels]),
    ]
    head = json.dumps({"cursor": asdict(placed.cursor), "sizes": [len(array) for array in arrays]}).encode()
    head += b" " * (-len(head) % 8)  # the arrays are aligned
    file = os.memfd_create("weft-data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(file, "wb", closefd=False) as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for array in arrays:
            out.write(array.data)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    return file


def read_block(file: int) -> Placed:
    """Map a block of `write_block`. The descriptor can be closed afterwards."""
    memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
    at = 8 + int.from_bytes(memory[:8], "little")
    head = json.loads(memory[8:at])
    arrays = []
    for number, size in enumerate(head["sizes"]):
        kind = np.dtype(np.int64 if number < 2 else np.int32)
        arrays.append(np.frombuffer(memory, kind, size, at))
        at += size * kind.itemsize
    lengths, ends, ids, *labels = arrays
    cursor = Cursor(**head["cursor"])
    documents = _Pieces(ids, labels[0] if labels else ids, lengths)
    return Placed(Block(documents, cursor.start), WholeLayout(np.arange(len(lengths)), ends, lengths), cursor)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.int32, copy=False) if parts else np.empty(0, dtype=np.int32)
