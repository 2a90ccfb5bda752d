"""Tiny runs of the training recipe, on ranks of their own."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

import pytest

from weft.conf import load


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
        f"train.output_dir={folder / 'runs'}",
    ]


def run(
    settings: Sequence[str],
    *,
    losses: Mapping[int, float] | None = None,
    killed_at: int = 0,
    spoilt: range = range(0),
    value: float = nan,
    spoilt_rank: int | None = None,
    spoilt_stage: int | None = None,
    spoilt_part: str = "hidden states",
    left_out: range = range(0),
    filled_at: tuple[int, int] | None = None,
    freed_at: int = 0,
    freed_after_s: float = 0.0,
    read_only: range = range(0),
    signalled_at: int = 0,
) -> dict[str, Any]:
    """Train on this rank.

    Args:
        losses: what evaluations say, by step, instead of what they are.
        killed_at: step in which the process "dies".
        spoilt: sequences of the data whose gradients become ``value`` times as large.
        spoilt_rank: the only rank on which they do; None is all.
        spoilt_stage: stage whose hidden states become ``value`` times as large instead.
        spoilt_part: what does so on that stage: its hidden states, the "logits", or an element of the head's "weight".
        left_out: sequences of the data that the run goes past.
        filled_at: step before which the file system of the run fills up, and the bytes that stay free.
        freed_at: step before which it has space again.
        freed_after_s: seconds after it has filled up until it has space again.
        read_only: steps in which the folder of checkpoints is read-only.
        signalled_at: step before which the last rank gets a SIGTERM.

    Returns:
        The steps done, the sequences left out and warnings, or the error that ended the run.
    """
    import torch

    from weft.engine.engine import WeftEngine
    from weft.engine.stages.cutting.stage import Stage
    from weft.engine.stop_signals import Stopped, StopSignals
    from weft.engine.zero import NonFiniteError
    from weft.recipes import run as recipe
    from weft.recipes.train import train

    step, evaluate, resume = WeftEngine.train_batch, recipe.evaluate, recipe.TrainingRun.resume
    read, seed, forward = WeftEngine._read, WeftEngine._seed_gradient, Stage.forward
    now, done = [False], [0]

    def read_spoilt(engine: WeftEngine, count: int) -> Any:
        batches = read(engine, count)
        loader: Any = engine.training_dataloader
        size = count * engine.num_replicas * engine.weft.train.microbatch_size
        now[0] = not set(range(loader.consumed - size, loader.consumed)).isdisjoint(spoilt)
        return batches

    def seed_spoilt(engine: WeftEngine, loss: torch.Tensor) -> torch.Tensor:
        here = spoilt_stage is None and spoilt_rank in (None, engine.global_rank)
        return seed(engine, loss) * (value if now[0] and here else 1.0)

    def spoil_weight(block: torch.nn.Module, _: Any) -> None:
        block.weight.data.view(-1)[0] = value

    def forward_spoilt(stage: Stage, *args: Any, **named: Any) -> torch.Tensor:
        if not now[0] or stage.index != spoilt_stage:
            return forward(stage, *args, **named)
        head = stage.hf_model.get_output_embeddings()
        block = stage.blocks()[0] if spoilt_part == "hidden states" else head
        if spoilt_part == "weight":
            hook = block.register_forward_pre_hook(spoil_weight)
        else:
            hook = block.register_forward_hook(lambda block, inputs, output: value * output, prepend=True)
        with hook:
            return forward(stage, *args, **named)

    def resume_and_leave_out(each: recipe.TrainingRun) -> int:
        done = resume(each)
        if left_out:
            each.loader.leave_out(left_out.start, left_out.stop)
        return done

    def train_batch(engine: WeftEngine, *args: Any) -> torch.Tensor:
        if killed_at and engine.global_steps + 1 == killed_at:
            raise Killed
        if filled_at is not None and engine.global_steps + 1 == filled_at[0]:
            _fill(Path(engine.weft.train.output_dir), filled_at[1])
            if freed_after_s:
                ballast = Path(engine.weft.train.output_dir) / "ballast"
                threading.Timer(freed_after_s, ballast.unlink).start()
        if engine.global_steps + 1 in read_only and engine.global_steps not in read_only:
            _protect(Path(engine.weft.train.output_dir) / "run" / "checkpoints")
        if engine.global_steps + 1 not in read_only and engine.global_steps in read_only:
            _call("umount", str(Path(engine.weft.train.output_dir) / "run" / "checkpoints"))
        if engine.global_steps + 1 == signalled_at and engine.global_rank == engine.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if freed_at and engine.global_steps + 1 == freed_at:
            (Path(engine.weft.train.output_dir) / "ballast").unlink()
        loss = step(engine, *args)
        done[0] = engine.global_steps
        return loss

    def scripted(engine: WeftEngine, *args: Any) -> float:
        return evaluate(engine, *args) if losses is None else losses[engine.global_steps]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeftEngine, "train_batch", train_batch)
        patch.setattr(WeftEngine, "_read", read_spoilt)
        patch.setattr(WeftEngine, "_seed_gradient", seed_spoilt)
        patch.setattr(Stage, "forward", forward_spoilt)
        patch.setattr(recipe, "evaluate", scripted)
        patch.setattr(recipe.TrainingRun, "resume", resume_and_leave_out)
        warnings = list[str]()
        handler = logging.Handler()
        patch.setattr(handler, "emit", lambda record: warnings.append(record.getMessage()))
        patch.setattr(logging.getLogger("weft"), "handlers", [handler])
        signals = StopSignals(60.0).open() if signalled_at else None
        try:
            if freed_after_s:
                patch.setattr(recipe, "RETRY_S", 0.1)
            engine = train(load(settings), signals=signals)
        except Killed:
            return {}
        except Stopped as stopped:
            return {"stopped": stopped.code, "after": done[0]}
        except NonFiniteError as error:
            return {"error": str(error), "ranks": error.ranks}
        except ValueError as error:
            return {"error": str(error)}
        finally:
            if signals is not None:
                signals.close()
    return {
        "steps": engine.global_steps,
        "warnings": warnings,
        "skipped": engine.skipped_steps,
        "left_out": list(engine.training_dataloader.left_out),  # type: ignore[union-attr]
    }


def _fill(folder: Path, free_bytes: int) -> None:
    """Leave this many bytes on the file system."""
    with (folder / "ballast").open("wb") as file:
        file.write(bytes(shutil.disk_usage(folder).free - free_bytes))


def _protect(folder: Path) -> None:
    """Have the folder read-only for this user, too."""
    _call("mount", "--bind", str(folder), str(folder))
    _call("mount", "-o", "remount,ro,bind", str(folder))


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


def run_all(attempts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`run` with each of these arguments, one after the other."""
    return [run(**attempt) for attempt in attempts]


def records(folder: Path, kind: str) -> dict[int, dict[str, Any]]:
    """The records of ``metrics.jsonl`` by step; a step that was repeated counts as it was last."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == kind}
