"""Tiny runs of the training recipe, on ranks of their own."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weft.conf import load

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Linear
    from torch.utils.hooks import RemovableHandle

    from weft.engine.engine import WeftEngine
    from weft.engine.stages.cutting.stage import Stage
    from weft.recipes.run import TrainingRun


class Killed(Exception):
    """Stands for the end of the process."""


def prepare(folder: Path) -> list[str]:
    """Write a tokenizer and 20 documents; returns the settings of a tiny model on them."""
    from weft.engine.data.tokenizer import train_bpe

    words = [f"question {n}: what is {n} and {n}?\nanswer: it is {2 * n}.\n" for n in range(40)]
    train_bpe(words, 300).save_pretrained(folder / "tokenizer")
    rows = [{"text": " ".join(words[n : n + 3])} for n in range(20)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return [
        "data.kind=text",
        f"data.path={folder / 'data.jsonl'}",
        f"data.cache_dir={folder / 'cache'}",
        "data.sequence_length=16",
        "data.eval_fraction=0.2",
        f"model.tokenizer={folder / 'tokenizer'}",
        "model.self_check=false",
        *(f"model.overrides.{name}={value}" for name, value in shape.items()),
        "model.overrides.num_key_value_heads=2",
        "pipeline.microbatches=2",
        "train.microbatch_size=2",
        "train.eval_batches=1",
        "train.export=false",
        "optimizer.warmup_steps=3",
        "logging.progress=false",
        "logging.events=false",
        f"train.output_dir={folder / 'runs'}",
    ]


@dataclass(frozen=True, kw_only=True)
class Spoilt:
    """Sequences of the data that make numbers ``value`` times as large as they are.

    Attributes:
        rank: the only rank on which their gradients become so; None is all.
        stage: stage whose numbers become so instead of gradients.
        part: these numbers: the "hidden states", the "logits", or an element of the head's "weight", or of a "layer".
    """

    sequences: range = range(0)
    value: float = nan
    rank: int | None = None
    stage: int | None = None
    part: str = "hidden states"

    def are_read(self, engine: WeftEngine, count: int) -> bool:
        """True if the last ``count`` micro-batches that were read have such a sequence."""
        loader: Any = engine.training_dataloader
        size = count * engine.num_replicas * engine.weft.train.microbatch_size
        return not set(range(loader.consumed - size, loader.consumed)).isdisjoint(self.sequences)

    def hook(self, stage: Stage) -> RemovableHandle:
        """Have a forward of the stage compute with the larger numbers."""
        head = stage.hf_model.get_output_embeddings()
        if self.part == "weight":
            return head.register_forward_pre_hook(self._spoil_weight)
        if self.part == "layer":
            return stage.blocks()[0].self_attn.o_proj.register_forward_pre_hook(self._spoil_weight)
        block = stage.blocks()[0] if self.part == "hidden states" else head
        return block.register_forward_hook(lambda block, inputs, output: self.value * output, prepend=True)

    def _spoil_weight(self, block: Linear, _: Any) -> None:
        block.weight.data.view(-1)[0] = self.value


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Faults of the file system of a run.

    Attributes:
        filled_at: step before which it fills up, and the bytes that stay free.
        freed_at: step before which it has space again.
        freed_after_s: seconds after it has filled up until it has space again.
        read_only: steps in which the run's folder is read-only.
    """

    filled_at: tuple[int, int] = (0, 0)
    freed_at: int = 0
    freed_after_s: float = 0.0
    read_only: range = range(0)

    def before(self, step: int, folder: Path) -> None:
        """Let the faults of this step begin and end."""
        ballast, run = folder / "ballast", str(folder / "run")
        if step == self.filled_at[0]:
            _fill(ballast, free=self.filled_at[1])
            if self.freed_after_s:
                threading.Timer(self.freed_after_s, ballast.unlink).start()
        if step in self.read_only and step - 1 not in self.read_only:
            subprocess.run(["mount", "--bind", run, run], check=True)
            subprocess.run(["mount", "-o", "remount,ro,bind", run], check=True)
        if step not in self.read_only and step - 1 in self.read_only:
            subprocess.run(["umount", run], check=True)
        if step == self.freed_at:
            ballast.unlink()


def _fill(ballast: Path, *, free: int) -> None:
    """Fill a file system that the run's collector is writing to."""
    while True:
        try:
            ballast.write_bytes(bytes(shutil.disk_usage(ballast.parent).free - free))
            return
        except OSError:  # the collector has written since the free space was measured
            ballast.unlink(missing_ok=True)


@dataclass(kw_only=True)
class Faults:
    """The faults of a run.

    Attributes:
        losses: the results of evaluations, by step, instead of the real ones.
        killed_at: step in which the process "dies".
        left_out: sequences of the data that the run goes past.
        signalled_at: step before which the last rank gets a SIGTERM.
    """

    losses: Mapping[int, float] | None = None
    killed_at: int = 0
    spoilt: Spoilt = Spoilt()
    disk: Disk = Disk()
    left_out: range = range(0)
    signalled_at: int = 0
    steps_done: int = field(default=0, init=False)
    is_bad: bool = field(default=False, init=False)

    def read(self, original: Callable, engine: WeftEngine, count: int) -> Any:
        """Read batches, and note whether they have a spoilt sequence."""
        batches = original(engine, count)
        self.is_bad = self.spoilt.are_read(engine, count)
        return batches

    def seed_gradient(self, original: Callable, engine: WeftEngine, loss: Tensor) -> Tensor:
        here = self.spoilt.stage is None and self.spoilt.rank in (None, engine.global_rank)
        return original(engine, loss) * (self.spoilt.value if self.is_bad and here else 1.0)

    def forward(self, original: Callable, stage: Stage, *args: Any, **named: Any) -> Tensor:
        """Run a stage, with spoilt numbers in it."""
        with self.spoilt.hook(stage) if self.is_bad and stage.index == self.spoilt.stage else nullcontext():
            return original(stage, *args, **named)

    def resume(self, original: Callable, run: TrainingRun) -> int:
        """Resume, and leave out sequences."""
        step = original(run)
        if self.left_out:
            run.loader.leave_out(self.left_out.start, self.left_out.stop)
        return step

    def train_batch(self, original: Callable, engine: WeftEngine, *args: Any) -> Tensor:
        """Train, after the faults that come before the step."""
        step = engine.global_steps + 1
        if step == self.killed_at:
            raise Killed
        self.disk.before(step, Path(engine.weft.train.output_dir))
        if step == self.signalled_at and engine.global_rank == engine.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        loss = original(engine, *args)
        self.steps_done = engine.global_steps
        return loss

    def evaluate(self, original: Callable, engine: WeftEngine, *args: Any) -> float:
        """Return the loss of an evaluation, or the scripted one."""
        return original(engine, *args) if self.losses is None else self.losses[engine.global_steps]


def run(settings: Sequence[str], **faults: Any) -> dict[str, Any]:
    """Train on this rank, with `Faults`.

    Returns:
        The steps done, the sequences left out and warnings, or the error that ended the run.
    """
    from weft.engine.engine import WeftEngine
    from weft.engine.stages.cutting.stage import Stage
    from weft.engine.stop_signals import Stopped, StopSignals
    from weft.engine.zero import NonFiniteError
    from weft.recipes import run as recipe
    from weft.recipes.train import train

    given = Faults(**faults)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, with_faults in (
            (WeftEngine, "train_batch", given.train_batch),
            (WeftEngine, "_read", given.read),
            (WeftEngine, "_seed_gradient", given.seed_gradient),
            (Stage, "forward", given.forward),
            (recipe, "evaluate", given.evaluate),
            (recipe.TrainingRun, "resume", given.resume),
        ):
            patch.setattr(owner, name, _with_original(with_faults, getattr(owner, name)))
        warnings = list[str]()
        handler = logging.Handler()
        patch.setattr(handler, "emit", lambda record: warnings.append(record.getMessage()))
        patch.setattr(logging.getLogger("weft"), "handlers", [handler])
        if given.disk.freed_after_s:
            patch.setattr("weft.recipes.finish.RETRY_S", 0.1)
        try:
            with closing(StopSignals(60.0).open()) if given.signalled_at else nullcontext() as signals:
                engine = train(load(settings), signals=signals)
        except Killed:
            return {}
        except Stopped as stopped:
            return {"stopped": stopped.code, "after": given.steps_done}
        except NonFiniteError as error:
            return {"error": str(error), "ranks": error.ranks}
        except ValueError as error:
            return {"error": str(error), "kind": type(error).__name__, "warnings": warnings}
    engine.destroy()
    return {
        "steps": engine.global_steps,
        "warnings": warnings,
        "skipped": engine.skipped_steps,
        "left_out": list(engine.training_dataloader.left_out),  # type: ignore[union-attr]
    }


def _with_original(function: Callable, original: Callable) -> Callable:
    return lambda *args, **named: function(original, *args, **named)


def run_all(attempts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`run` with each of these arguments, one after the other, each without the process groups of those before."""
    import torch.distributed as dist

    from weft.engine.distributed import close_groups, process_groups

    ends = []
    for attempt in attempts:
        ends.append(run(**attempt))
        if dist.is_initialized():
            dist.barrier()  # a peer may not have read all
            close_groups(process_groups()[1:])
        gc.collect()  # gloo's threads poll until the last reference to their group is gone
    return ends


def records(folder: Path, kind: str) -> dict[int, dict[str, Any]]:
    """The records of ``metrics.jsonl`` by step; a step that was repeated counts as it was last."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == kind}
