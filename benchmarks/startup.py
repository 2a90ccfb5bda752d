"""Time from the command to the first step, and from the last step to the exit, also of torchrun, Trainer and peft."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep

from benchmarks.results import finish, parse, show
from weft.tools.tables import table_of

NAMES = {"first step": "first_step_s", "last step to exit": "exit_s", "processor time": "cpu_s"}
MOST = {"first_step_s": 1.0, "exit_s": 1.0, "cpu_s": 1.1}
"""Largest ratios to the peer's figures."""
RANKS, STEPS, LENGTH = 2, 10, 256
WEFT, PEER = "weft launch", "torchrun, Trainer, peft"
LIMIT_S = 300.0
_LOOK_S = 0.01


@dataclass(frozen=True)
class Run:
    """A run of a side.

    Attributes:
        exit_s: seconds from the last step to the exit, including a checkpoint and an export.
    """

    first_step_s: float
    exit_s: float
    cpu_s: float


def compare(rounds: int) -> dict[str, list[Run]]:
    """Run both sides in turns; return the runs of each. Raise RuntimeError if a run failed."""
    with TemporaryDirectory() as folder:
        _make_inputs(Path(folder))
        runs: dict[str, list[Run]] = {WEFT: [], PEER: []}
        for number in range(rounds):
            for side in (WEFT, PEER) if number % 2 else (PEER, WEFT):
                runs[side].append(_run(side, Path(folder), number))
    return runs


def _make_inputs(folder: Path) -> None:
    """Write a model of four small layers, its tokenizer, and 40 conversations."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from weft.engine.data.tokenizer import train_bpe

    rows = [{"prompt": f"how many are {n} and 4?", "completion": f"there are {n + 4}."} for n in range(40)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = train_bpe([text for row in rows for text in row.values()], 300)
    tokenizer.save_pretrained(folder / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "model")


def _run(side: str, folder: Path, number: int) -> Run:
    out = folder / f"run{number}"
    if side == WEFT:
        command, steps = _weft(folder, out), out / "lora" / "metrics.jsonl"
    else:
        command, steps = _peer(folder, out), out / "trainer" / "steps"
        steps.parent.mkdir(parents=True)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        before, begun = _children_s(), perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        first = last = 0.0
        while process.poll() is None:
            now, lines = perf_counter() - begun, _lines(steps)
            first, last = first or (now if lines else 0.0), last or (now if lines >= STEPS else 0.0)
            if now > LIMIT_S:
                process.kill()
            sleep(_LOOK_S)
        ended = perf_counter() - begun
    if process.returncode or not last:
        raise RuntimeError(f"{side} ended with {process.returncode}:\n{(folder / 'log').read_text()[-3000:]}")
    return Run(first, ended - last, _children_s() - before)


def _weft(folder: Path, out: Path) -> list[str]:
    settings: Mapping[str, object] = {
        "recipe": "lora",
        "model.path": folder / "model",
        "data.path": folder / "chats.jsonl",
        "data.cache_dir": out / "cache",
        "data.sequence_length": LENGTH,
        "train.output_dir": out,
        "train.steps": STEPS,
        "train.precision": "fp32",
        "train.microbatch_size": 1,
        "pipeline.stages": RANKS,
        "pipeline.microbatches": 2,
        "cluster.ranks": RANKS,
        "model.self_check": "false",
        "logging.every": 1,
    }
    return [sys.executable, "-m", "weft.tools.cli", "launch", *(f"{name}={value}" for name, value in settings.items())]


def _peer(folder: Path, out: Path) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    given: Sequence[object] = (folder / "model", folder / "chats.jsonl", LENGTH, STEPS, out / "trainer")
    return [*torchrun, str(Path(__file__).parent / "starts" / "trainer.py"), *map(str, given)]


def _lines(file: Path) -> int:
    try:
        return file.read_bytes().count(b"\n")
    except OSError:
        return 0


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def main(argv: Sequence[str]) -> int:
    """Run both sides in turns and return 1 if Weft starts or exits later, or takes more processor time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, in turns (default 3)")
    args = parse(parser, argv)
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: nothing to compare; give at least 1")
    begun = compare(args.rounds)
    ratios = _ratios(begun)
    show(table_of(map(_start_row, begun.items()), f"{RANKS} ranks, a tiny model with LoRA, {args.rounds} rounds"))
    row = {head: f"{ratios[name]:.2f}" for head, name in NAMES.items()}
    show(table_of([row], f"{WEFT} over {PEER}, median of ratios by round"))
    figures = {side: [asdict(run) for run in runs] for side, runs in begun.items()}
    return finish(args, "startup", figures, met=all(ratios[name] <= most for name, most in MOST.items()))


def _start_row(found: tuple[str, Sequence[Run]]) -> dict[str, object]:
    side, runs = found
    return {"run by": side, **{head: _spread([getattr(run, name) for run in runs]) for head, name in NAMES.items()}}


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})"


def _ratios(begun: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """Return the ratios of `weft launch` to its peer, by measured quantity."""
    pairs = list(zip(begun[WEFT], begun[PEER], strict=True))
    return {name: median(getattr(own, name) / getattr(peer, name) for own, peer in pairs) for name in MOST}
