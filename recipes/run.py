"""A run under way: its steps, and the evaluations, checkpoints and decisions between them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice
from math import nan
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from weft.conf.schema import WeftConfig
from weft.engine.checkpoint import CheckpointError, open_checkpoint, tagged
from weft.engine.data import MicrobatchLoader
from weft.engine.distributed import from_rank_zero, together
from weft.engine.engine import WeftEngine
from weft.recipes.evaluations import Evaluations
from weft.recipes.finish import say
from weft.recipes.progress import Progress

BEST = "best"
"""Tag of the checkpoint with the lowest evaluation loss."""


@dataclass
class Run:
    """What a run's checkpoints hold, and what is decided between its steps."""

    config: WeftConfig
    engine: WeftEngine
    loader: MicrobatchLoader
    evaluation: MicrobatchLoader | None
    folder: Path
    evaluations: Evaluations

    def train(self, start: int, progress: Progress) -> None:
        """The steps from ``start`` on, with evaluations and checkpoints between them; a collective call."""
        train, every = self.config.train, self.config.checkpoint.every
        began = perf_counter()
        for step in range(start, train.steps):
            if self._has_stopped(progress):
                return
            progress.step(step + 1, self.engine.train_batch())
            if self.evaluation is not None and (step + 1) % train.eval_every == 0:
                self._evaluate(step + 1, self.evaluation, progress)
            if every and (step + 1) % every == 0 and step + 1 < train.steps:
                self.save()
            if train.max_seconds and _agreed(perf_counter() - began > train.max_seconds, self.engine.device):
                progress.note(f"train.max_seconds={train.max_seconds:g} reached after step {step + 1}")
                return

    def _evaluate(self, step: int, loader: MicrobatchLoader, progress: Progress) -> None:
        train = self.config.train
        loss = evaluate(self.engine, loader, train.eval_batches)
        progress.evaluation(step, loss)
        best = self.evaluations.add(step, loss, threshold=train.early_stopping_threshold)
        if best and self.config.checkpoint.load_best_model_at_end:
            self.save(tag=BEST)

    def _has_stopped(self, progress: Progress) -> bool:
        """Whether patience has come to its end, in this attempt or in the one that it goes on from."""
        patience, seen = self.config.train.early_stopping_patience, self.evaluations
        if not patience or seen.without_gain < patience:
            return False
        progress.note(
            f"train.early_stopping_patience={patience}: stopped after step {self.engine.global_steps}; the lowest "
            f"evaluation loss was {seen.best_loss or nan:.4f} after step {seen.best_step}"
        )
        return True

    def save(self, tag: str | None = None) -> None:
        """Write a checkpoint that holds the loader's position and the evaluations, too; a collective call."""
        state = {"loader": self.loader.state_dict(), "evaluations": asdict(self.evaluations)}
        self.engine.save_checkpoint(str(self._checkpoints), tag=tag, client_state=state)

    def resume(self) -> int:
        """Go on from a checkpoint where there is one; returns the steps that are done. A collective call."""
        resume, engine = self.config.checkpoint.resume, self.engine
        if resume == "never":
            return 0
        where = self._checkpoints if resume == "auto" else Path(resume)
        path, state = together(lambda: engine.load_checkpoint(str(where)))
        if path is None:
            if resume != "auto":
                raise ValueError(f"checkpoint.resume={where}: no whole checkpoint there; give its folder, or auto")
            return 0
        self.loader.load_state_dict(state["loader"])
        self.evaluations = Evaluations(**state.get("evaluations", {}))
        done = f"resumed after step {engine.global_steps} from {path}"
        steps = self.config.train.steps
        say(f"{done}; train.steps={steps} are done" if engine.global_steps >= steps else done)
        if self.config.checkpoint.load_best_model_at_end and self._step_of_best() != self.evaluations.best_step:
            say(f"{self._checkpoints / BEST} is not of this run: the best is chosen anew from here on")
            self.evaluations = Evaluations()
        return engine.global_steps

    def load_best(self) -> None:
        """Take back the weights of the lowest evaluation loss; a collective call."""
        if self.evaluations.best_loss is None:
            say("checkpoint.load_best_model_at_end: no evaluation yet, so the last weights are exported")
            return
        self.engine.load_checkpoint(str(self._checkpoints), tag=BEST, load_module_only=True)
        seen = self.evaluations
        say(f"best: {self._checkpoints / BEST} (evaluation loss {seen.best_loss:.4f} after step {seen.best_step})")

    def _step_of_best(self) -> int:
        """Step of the checkpoint that has the tag; 0 if none has. A collective call."""

        def step() -> int:
            try:
                return open_checkpoint(tagged(self._checkpoints, BEST)).step
            except CheckpointError:
                return 0

        return from_rank_zero(step)

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def _agreed(stop: bool, device: torch.device) -> bool:
    """Rank 0's word for all: clocks differ, and all ranks have to stop at the same step."""
    word = torch.tensor(int(stop), device=device)
    dist.broadcast(word, src=0)
    return bool(word)


def evaluate(engine: WeftEngine, loader: MicrobatchLoader, batches: int) -> float:
    """Mean loss per token over held-back data: the first ``batches`` steps' worth, or all if there is less."""
    microbatches = list(islice(iter(loader), batches * engine.micro_batches))
    loss = engine.eval_batch(iter(microbatches), num_micro_batches=len(microbatches))
    assert isinstance(loss, torch.Tensor)
    return float(loss)
