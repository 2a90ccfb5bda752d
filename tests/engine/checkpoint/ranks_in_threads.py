"""Several ranks of one checkpoint as threads of one process, and crashes at any file operation."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from weft.engine.checkpoint import Piece, Ranks, durable, newest, open_checkpoint, save
from weft.engine.checkpoint.pieces import share
from weft.engine.parallel.in_process import ExchangeBarrier

NUM_RANKS = 3


def verify(checkpoint):
    """Read and check all pieces in the checkpoint's folder."""
    for tensor in checkpoint.manifest.tensors.values():
        for piece in tensor.pieces:
            if checkpoint.has(piece.file):
                checkpoint.read_piece(piece, tensor.dtype)


class Crash(BaseException):
    """The process dies: nothing may catch this."""


class Meeting(ExchangeBarrier):
    """All-gather between threads; a thread that dies leaves the others with an error, as sockets do."""

    def __init__(self, size: int) -> None:
        super().__init__(size, timeout_s=20)

    def ranks(self, rank: int) -> Ranks:
        return Ranks(rank, lambda value: self.exchange(rank, value, "gather"))


def in_threads(count: int, run: Callable[[Ranks], Any]) -> list[Any]:
    """Return what each rank's ``run`` returned or raised; a rank that dies does not meet the others any more."""
    meeting = Meeting(count)

    def outcome(rank: int) -> Any:
        try:
            return run(meeting.ranks(rank))
        except Exception as error:
            return error
        except BaseException as error:
            meeting.abort()
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(outcome, range(count)))


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weight/a": torch.randn(37, 11, generator=generator),
        "weight/b": torch.randn(129, generator=generator).to(torch.bfloat16),
        "weight/c": torch.randn(3, 4, 5, generator=generator).to(torch.float16),
        "optim/step/a": torch.tensor(float(step)),
        "weight/empty": torch.zeros(0, 7),
    }


def save_step(
    folder: Path, step: int, *, keep: int = 2, num_ranks: int = NUM_RANKS, site_of: Sequence[str] = ()
) -> list[BaseException | Path]:
    """Save by threads; what came of it on each rank.

    Args:
        site_of: the folder in ``folder`` that each rank writes to; they write to ``folder`` itself without.
    """
    sites = list(site_of) or [""] * num_ranks

    def run(ranks: Ranks) -> Path:
        rank, num_ranks = ranks.rank, len(sites)
        near = [other for other in range(num_ranks) if sites[other] == sites[rank]]
        held = [Piece.whole(name, tensor) for name, tensor in tensors(step).items()]
        pieces = [*share(held, near.index(rank), len(near)), Piece.whole(f"own/{rank}", torch.tensor([rank]))]
        return save(folder / sites[rank], step, pieces, {"value": step}, ranks=ranks, keep=keep)

    return in_threads(len(sites), run)


def check(folder: Path, steps: set[int]) -> int:
    """The newest checkpoint is complete and one of ``steps``; returns its step."""
    path = newest(folder)
    assert path is not None
    checkpoint = open_checkpoint(path)
    verify(checkpoint)
    assert checkpoint.step in steps
    assert checkpoint.meta == {"value": checkpoint.step}
    for name, expected in tensors(checkpoint.step).items():
        loaded = checkpoint.load([name])[name]
        assert loaded.dtype == expected.dtype
        assert torch.equal(loaded, expected)
    return checkpoint.step


@contextmanager
def failing(at: int, error: BaseException, *, dead_after: bool) -> Iterator[list[str]]:
    """Raise ``error`` instead of the file operation number ``at``; yields the operations' names.

    Args:
        dead_after: every later operation fails as well: the process is gone.
    """
    seen: list[str] = []
    lock = threading.Lock()

    def point(name: str) -> None:
        with lock:
            seen.append(name)
            number = len(seen) - 1
        if number == at or (dead_after and number > at):
            raise error

    def before(name: str, function: Callable) -> Callable:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            point(name)
            return function(*args, **kwargs)

        return wrapped

    def write(path: Path, chunks: Any) -> int:
        def torn() -> Iterator[durable.Buffer]:
            for chunk in chunks:
                half = len(chunk) // 2
                yield chunk[:half]
                point(f"write {path.name}")
                yield chunk[half:]

        return originals[2](path, torn())

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        for file in sorted(Path(path).glob("*")):
            point(f"unlink {file.name}")
            file.unlink()
        point("rmdir")
        if Path(path).exists():
            os.rmdir(path)

    originals = (os.rename, os.fsync, durable.write, shutil.rmtree, os.mkdir)
    os.rename, os.fsync = before("rename", os.rename), before("fsync", os.fsync)
    os.mkdir = before("mkdir", os.mkdir)
    durable.write, shutil.rmtree = write, rmtree
    try:
        yield seen
    finally:
        os.rename, os.fsync, durable.write, shutil.rmtree, os.mkdir = originals
