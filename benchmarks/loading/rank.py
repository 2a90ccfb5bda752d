"""A rank that only reads its batches."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from weft.conf.host.processes import process_state
from weft.conf.schema import DataConfig, DataKind, ModelConfig
from weft.engine.data import HostLoader, Stream, build_loader, load_tokenizer

MICROBATCHES, LENGTH, BLOCK = 4, 1024, 16
"""Micro-batches of a step, tokens of a sequence, and documents of a block."""
SEED = 1


@dataclass(frozen=True)
class Work:
    """The work of a rank, and of the loader process if it has started one, in all measured steps.

    Attributes:
        cpu_s: processor time in seconds.
        read_bytes: bytes that were read from files.
        digest: hash of the rank's batches.
    """

    steps: int
    cpu_s: float
    read_bytes: int
    digest: str


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the data's settings and its tokenizer, which the first call trains."""
    data = DataConfig(
        kind=DataKind.text,
        path=str(folder / "data.jsonl"),
        streaming=True,
        sequence_length=LENGTH,
        shuffle_buffer=BLOCK,
        cache_dir=str(folder / "cache"),
    )
    return {"data": data, "tokenizer": load_tokenizer(ModelConfig(), data), "seed": SEED}


def _used(host: HostLoader | None) -> tuple[float, int]:
    """Return the processor time and the bytes read so far."""
    processes = ["self"] if host is None or host.process is None else ["self", str(host.process.pid)]
    read = 0
    cpu_s = 0.0
    for process in processes:
        facts = dict(line.split(": ") for line in Path(f"/proc/{process}/io").read_text().splitlines())
        read += int(facts["rchar"])
        state = process_state(int(Path(f"/proc/{process}").resolve().name))
        cpu_s += 0.0 if state is None else state.cpu_s
    return cpu_s, read


def run_rank(folder: Path, rank: int, steps: int, name: str, barrier: Barrier, pipe: Connection) -> None:
    """Read one step, measure the following ones, send the work through ``pipe``, and wait until it is closed.

    Args:
        name: name of the host's loader. Without one, the rank reads the data itself.
        barrier: begins a step on all ranks, as the collectives of training do.
    """
    settings = settings_of(folder)
    host = HostLoader(name, Stream(model=ModelConfig(), data=settings["data"], seed=SEED)) if name else None
    loader = build_loader(**settings, microbatch_size=1, replica=rank, num_replicas=barrier.parties, host=host)
    digest = hashlib.sha256()
    for step in range(1 + steps):
        if step == 1:
            before = _used(host)
        barrier.wait()
        for _ in range(MICROBATCHES):
            digest.update(next(loader)["input_ids"].numpy().tobytes())
    cpu_s, read = (now - then for now, then in zip(_used(host), before, strict=True))
    pipe.send(Work(steps, cpu_s, int(read), digest.hexdigest()))
    with suppress(EOFError):
        pipe.recv()
    loader.close()
    if host is not None:
        host.close()
