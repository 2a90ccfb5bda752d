"""Processor time and bytes read per step with one loader per host and with one per rank, and the wait for data."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.results import finish, parse, show
from weft.conf.host.processes import process_state
from weft.conf.schema import DataConfig, DataKind, ModelConfig
from weft.engine.data import HostLoader, Stream, build_loader, load_tokenizer
from weft.engine.data.corpus import load_corpus
from weft.tools.tables import table_of

HOST, RANK = "one per host", "one per rank"
PARTS = ("loaders", "wait")
MOST_WAIT = 0.01
"""Largest share of a step of the quickstart that may pass in waits for data."""
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


def measure(ranks: int, steps: int) -> dict[str, list[Work]]:
    """Read the same stream with both kinds of loaders, and return the work of each rank.

    Raises:
        RuntimeError: a rank has failed, or the loaders have read different batches.
    """
    with TemporaryDirectory() as folder:
        texts = load_corpus().texts
        (Path(folder) / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        settings_of(Path(folder))  # trains the tokenizer
        found = {name: _run(Path(folder), ranks, steps, token_hex(16) if name == HOST else "") for name in (RANK, HOST)}
    if [work.digest for work in found[HOST]] != [work.digest for work in found[RANK]]:
        raise RuntimeError("the two kinds of loaders have read different batches")
    return found


def _run(folder: Path, ranks: int, steps: int, name: str) -> list[Work]:
    """Run ranks with the host's loader of this ``name``, or each with its own if it is empty."""
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # a process with threads cannot be forked
    context = get_context("forkserver")  # the modules are imported once
    context.set_forkserver_preload(["benchmarks.data"])
    barrier = context.Barrier(ranks)
    pipes = [context.Pipe() for _ in range(ranks)]
    processes = [
        context.Process(target=run_rank, args=(folder, rank, steps, name, barrier, pipe[1]), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        works = [ours.recv() for ours, _ in pipes]
    except EOFError:
        raise RuntimeError("a rank has failed; its output tells why") from None
    finally:
        for ours, _ in pipes:
            ours.close()  # ends a rank, after all have measured
    for process in processes:
        process.join()
    return works


def wait_for_data() -> float:
    """Run the quickstart, and return the share of a step that its slowest rank waits for data.

    Raises:
        RuntimeError: the run failed.
    """
    from weft.tools.watch.explain import Measured
    from weft.tools.watch.record import RunRecord

    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "weft.tools.cli", "launch", "recipe=quickstart", f"train.output_dir={folder}"]
        command += ["train.export=false", "train.sample=''", "checkpoint.every=0", "checkpoint.final=false"]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"the quickstart ended with {run.returncode}:\n{run.stdout}{run.stderr}"[-3000:])
        measured = Measured(RunRecord(Path(folder) / "quickstart"))
    return measured.data_s / measured.step_s


def main(argv: Sequence[str]) -> int:
    """Run ``python -m benchmarks data``. Return 1 if the goals are not met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks data", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="ranks on this host")
    parser.add_argument("--steps", type=int, default=24, help="steps that are measured")
    parser.add_argument("--parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all of them")
    args = parse(parser, argv, parts=PARTS)
    parts, met = args.parts or PARTS, True
    figures: dict[str, object] = {}
    if "loaders" in parts:
        found = measure(args.ranks, args.steps)
        title = f"{args.ranks} ranks that stream and tokenise the same text, per step and host"
        show(table_of([*map(_row, found.items()), _ratio_row(found)], title))
        figures |= found
        met = _ratio(found, "cpu_s") < 1
    if "wait" in parts:
        figures["wait"] = wait = wait_for_data()
        row = {"run": "quickstart", "wait in a step": f"{wait:.2%}", "goal": f"below {MOST_WAIT:.0%}"}
        show(table_of([row], "Wait of the slowest rank for data"))
        met = met and wait < MOST_WAIT
    return finish(args, "data", figures, met=met)


def _row(item: tuple[str, Sequence[Work]]) -> dict[str, object]:
    name, works = item
    cpu_s, read = _sum(works, "cpu_s"), _sum(works, "read_bytes")
    return {"loaders": name, "processor time": f"{cpu_s:.2f} s", "read": f"{read / 1e6:.2f} MB"}


def _ratio_row(found: Mapping[str, Sequence[Work]]) -> dict[str, object]:
    ratios = [f"{_ratio(found, name):.2f}" for name in ("cpu_s", "read_bytes")]
    return {"loaders": "ratio", "processor time": ratios[0], "read": ratios[1]}


def _sum(works: Sequence[Work], name: str) -> float:
    return sum(getattr(work, name) / work.steps for work in works)


def _ratio(found: Mapping[str, Sequence[Work]], name: str) -> float:
    return _sum(found[HOST], name) / _sum(found[RANK], name)
