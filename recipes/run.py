"""The training loop: steps, with evaluations, checkpoints and early stopping between them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import nan
from pathlib import Path
from signal import SIGTERM
from time import perf_counter
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from weft.conf.hosts import resume_folder
from weft.conf.schema import WeftConfig
from weft.engine.checkpoint import CheckpointError, open_checkpoint, set_aside, tagged, to_resume
from weft.engine.checkpoint.durable import StorageError
from weft.engine.data import MicrobatchLoader
from weft.engine.distributed import SharedError, attempt_number, from_rank_zero, together
from weft.engine.engine import WeftEngine
from weft.engine.observability.watcher import Phase
from weft.engine.stop_signals import Stopped
from weft.engine.zero import NonFiniteError, ReplicasDiffer, SkippedTooOften
from weft.engine.zero.finite import explanation, first_appeared
from weft.recipes.finish import has_rank_0, print_once, wait_for_storage
from weft.recipes.history import BadData, Evaluations
from weft.recipes.progress import Progress

BEST = "best"
"""Tag of the checkpoint with the lowest evaluation loss."""


@dataclass
class TrainingRun:
    """State of a run that its checkpoints contain, and its training loop."""

    config: WeftConfig
    engine: WeftEngine
    loader: MicrobatchLoader
    evaluation: MicrobatchLoader | None
    folder: Path
    evaluations: Evaluations
    bad_data: BadData = field(default_factory=BadData)

    def where(self) -> tuple[int, tuple[int, int]]:
        """Return the last step that began, and the range of sequences that it has read so far, over all replicas."""
        step, first = self.bad_data.last
        return step, (first, self.loader.consumed)

    def train(self, start: int, progress: Progress) -> None:
        """Train from step ``start`` on, with evaluations and checkpoints in between. Collective call."""
        train, every, watcher = self.config.train, self.config.checkpoint.every, self.engine.watcher
        began, step = perf_counter(), start
        self.engine.set_up.done("progress")
        if self.engine.agree_to_stop():
            return
        if step and self._evaluates(step) and self.evaluations.last_step < step:
            self._evaluate(step, progress)  # a signal has left it out
        watcher.enter(Phase.first_step)
        while step < train.steps:
            if self._has_stopped(progress):
                return
            progress.begin_step()
            read = self.loader.consumed
            self.bad_data.begin(step + 1, read)
            try:
                loss = self.engine.train_batch()
            except SkippedTooOften as error:
                step = self._go_back(error, progress)
                continue
            except ReplicasDiffer as error:
                self._distrust(error)
                raise
            if not self.engine.optimizer.overflow:
                self.bad_data.trained(read)
            step += 1
            progress.step(step, loss)
            if step == start + 1:
                watcher.enter(Phase.steady)
                self._tell_set_up(step)
            if self.engine.must_stop:
                return
            if self._evaluates(step):
                with watcher.within(Phase.evaluation):
                    self._evaluate(step, progress)
                if self.engine.agree_to_stop():  # evaluations are long, and no norm is summed in them
                    return
            if self.engine.memory is not None and step % self.config.checkpoint.memory_every == 0:
                with watcher.within(Phase.checkpoint):
                    self.engine.memory.take(self._state())
            if every and step % every == 0 and step < train.steps:
                with watcher.within(Phase.checkpoint):
                    self._save_if_there_is_room(step, progress)
            if train.max_seconds and has_rank_0(perf_counter() - began > train.max_seconds, self.engine.device):
                progress.note(f"train.max_seconds={train.max_seconds:g} reached after step {step}")
                return

    def end(self) -> None:
        """Check and save the model. After a stop signal, save it and stop. Collective call.

        Raises:
            NonFiniteError: training has diverged. Raised on every rank.
            Stopped: a rank has received a stop signal. Raised on every rank.
        """
        self.engine.check_finite()
        if self.config.checkpoint.final:
            self.save_last()
        self.engine.finish_checkpoints()
        if self.engine.agree_to_stop():
            self.stop()

    def save_last(self) -> None:
        """Save the last steps. While storage is full or read-only, try again. Collective call.

        Raises:
            StorageError: writing has failed for ``checkpoint.storage_wait_s``. Raised on every rank.
        """

        def save() -> None:
            self.engine.finish_checkpoints()
            self.save()
            self.engine.finish_checkpoints()

        wait_for_storage(save, StorageError, f"step {self.engine.global_steps}", self.config, self.engine)

    def stop(self) -> NoReturn:
        """Save after a stop signal, and print where a resume begins. Collective call.

        Raises:
            Stopped: always, on every rank.
        """
        engine, checkpoint, steps = self.engine, self.config.checkpoint, self.config.train.steps
        engine.watcher.enter(Phase.finishing)
        step, saved = engine.global_steps, from_rank_zero(self._step_in_storage)
        if step > saved:
            self.save_last()
        else:
            engine.finish_checkpoints()
        if step:
            how = "the same command" if checkpoint.resume == "auto" else "checkpoint.resume=auto"
            print_once(f"stopped after step {step} of {steps}: {how} resumes there, from {self._checkpoints}")
        else:
            print_once(f"stopped before step 1 of {steps}: there is nothing to resume")
        dist.barrier()  # a launcher ends all ranks when the first has ended
        number = engine.stop_signals.number if engine.stop_signals is not None else 0
        raise Stopped(128 + (number or SIGTERM))

    def _save_if_there_is_room(self, step: int, progress: Progress) -> None:
        """Save between steps. If storage is full or read-only, training continues with the existing checkpoints."""
        for do in (self.engine.finish_checkpoints, self.save):  # checkpoints that were being written, then due ones
            try:
                do()
            except StorageError as error:
                later = f"training goes on, and saves again in {self.config.checkpoint.every} steps"
                progress.note(f"step {step}: no checkpoint: {error}; {later}")

    def _distrust(self, error: ReplicasDiffer) -> None:
        """Set aside checkpoints that may contain damaged numbers. Collective call.

        Memory checkpoints may be from after the fault. A checkpoint in storage was compared among replicas when it was
        written. ZeRO's shards have one copy, which may have been wrong already. So with shards the run returns to a
        step before the last comparison that passed.
        """
        if self.engine.memory is not None:
            self.engine.memory.forget()
        with suppress(StorageError):
            self.engine.finish_checkpoints()
        sharded = self.config.zero.stage in (1, 2)
        aside = set_aside(self._checkpoints, error.good_step + (not sharded))
        if aside:
            print_once(f"set aside, for they may hold damaged numbers: {', '.join(map(str, aside))}")

    def _tell_set_up(self, step: int) -> None:
        """Write the seconds up to this rank's first step into a supervised run's folder."""
        self.engine.set_up.done("first step")
        if self.engine.watcher.waits is not None:
            where = {"attempt": attempt_number(), "rank": self.engine.global_rank, "step": step}
            self.engine.set_up.write(self.folder / "supervisor" / "set_up.jsonl", **where)

    def _go_back(self, error: SkippedTooOften, progress: Progress) -> int:
        """Restore the newest checkpoint, skip the data of the skipped steps, and return the number of steps done."""
        first, after = self.bad_data.of(error, self.loader.consumed)
        read = f"they read sequences {first} to {after - 1} of the data"
        if self.bad_data.is_hopeless(after):
            raise NonFiniteError(
                f"{error.summary}; {read}, and others were no better: {explanation(error.source)}", error.source
            ) from error
        left_out = self.loader.left_out
        with self.engine.watcher.within(Phase.checkpoint):
            path = self._restore(self._checkpoints)
            if self.engine.memory is not None:
                self.engine.memory.forget()  # its checkpoints are of the undone steps
        if path is None:
            raise NonFiniteError(
                f"{error.summary}; {read}, and there is no checkpoint to go back to: set checkpoint.every; "
                f"{explanation(error.source)}",
                error.source,
            ) from error
        for each in (*left_out, (first, after)):
            self.loader.leave_out(*each)
        done = self.engine.global_steps
        progress.go_back(done)
        whose = f"{first_appeared(error.source)}; " if error.source.ranks else ""
        left = f"{read}, which are left out from step {done} on, where {path} was written"
        progress.note(f"{error.summary}; {whose}{left}")
        return done

    def _evaluates(self, step: int) -> bool:
        return self.evaluation is not None and step % self.config.train.eval_every == 0

    def _evaluate(self, step: int, progress: Progress) -> None:
        train = self.config.train
        assert self.evaluation is not None
        loss = evaluate(self.engine, self.evaluation, train.eval_batches)
        progress.evaluation(step, loss)
        best = self.evaluations.add(step, loss, threshold=train.early_stopping_threshold)
        if best and self.config.checkpoint.load_best_model_at_end:
            self.save(tag=BEST)

    def _has_stopped(self, progress: Progress) -> bool:
        """True if early stopping has ended the run, in this attempt or in the one that it resumes."""
        patience, seen = self.config.train.early_stopping_patience, self.evaluations
        if not patience or seen.without_gain < patience:
            return False
        progress.note(
            f"train.early_stopping_patience={patience}: stopped after step {self.engine.global_steps}; the lowest "
            f"evaluation loss was {seen.best_loss or nan:.4f} after step {seen.best_step}"
        )
        return True

    def save(self, tag: str | None = None) -> None:
        """Write a checkpoint with the loader's position and the evaluations. Collective call."""
        self.engine.save_checkpoint(str(self._checkpoints), tag=tag, client_state=self._state())

    def _state(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict(), "evaluations": asdict(self.evaluations)}

    def _set_state(self, state: dict[str, Any]) -> None:
        together(lambda: self.loader.load_state_dict(state["loader"]))
        if self.engine.scores is not None:
            self.engine.scores.forget()
        self.evaluations = Evaluations(**{"last_step": self.engine.global_steps} | state.get("evaluations", {}))

    def resume(self) -> int:
        """Resume from the newest checkpoint, if there is one, and return the number of steps done. Collective call.

        The memory of this host or its partner is tried first, unless storage has a later step.
        """
        memory = self.engine.memory
        if memory is not None:
            found = memory.recover(least_step=from_rank_zero(self._step_in_storage))
            if found is not None:
                step, state = found
                self._set_state(state)
                return self._went_on(f"resumed after step {step} from memory")
        done = self._resume_from_storage()
        if memory is not None:
            memory.forget()
        return done

    def _resume_from_storage(self) -> int:
        resume, engine = self.config.checkpoint.resume, self.engine
        if resume == "never":
            return 0
        where = resume_folder(self.config)
        path = self._restore(where)
        if path is None:
            if resume != "auto":
                raise SharedError(f"checkpoint.resume={where}: no complete checkpoint there; give its folder, or auto")
            return 0
        return self._went_on(f"resumed after step {engine.global_steps} from {path}")

    def _went_on(self, done: str) -> int:
        """Print where the run continues, and return the number of steps done.

        The best checkpoint of another run is ignored.
        """
        engine = self.engine
        steps = self.config.train.steps
        print_once(f"{done}; train.steps={steps} are done" if engine.global_steps >= steps else done)
        if self.config.checkpoint.load_best_model_at_end and self._step_of_best() != self.evaluations.best_step:
            print_once(f"{self._checkpoints / BEST} is from another run: it is ignored and will be replaced")
            self.evaluations = Evaluations(last_step=engine.global_steps)
        return engine.global_steps

    def _step_in_storage(self) -> int:
        """Return the step of the newest checkpoint in the run's folder, or 0 if there is none."""
        return next((manifest.step for _, manifest in to_resume(self._checkpoints)), 0)

    def _restore(self, where: Path) -> str | None:
        """Restore the newest checkpoint in folder ``where``, and return its path, or None without one.

        Collective call.
        """
        path, state = together(lambda: self.engine.load_checkpoint(str(where)))
        if path is not None:
            self._set_state(state)
        return path

    def load_best(self) -> None:
        """Load the weights with the lowest evaluation loss.

        Without an evaluation, keep the last weights. Collective call.
        """
        if self.evaluations.best_loss is None:
            print_once("checkpoint.load_best_model_at_end: no evaluation yet, so the last weights are exported")
            return
        self.engine.load_checkpoint(str(self._checkpoints), tag=BEST, load_module_only=True)
        seen = self.evaluations
        print_once(
            f"best: {self._checkpoints / BEST} (evaluation loss {seen.best_loss:.4f} after step {seen.best_step})"
        )

    def _step_of_best(self) -> int:
        """Return the step of the checkpoint with the tag `BEST`, or 0 if there is none. Collective call."""

        def step() -> int:
            try:
                return open_checkpoint(tagged(self._checkpoints, BEST)).step
            except CheckpointError:
                return 0

        return from_rank_zero(step)

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def evaluate(engine: WeftEngine, loader: MicrobatchLoader, batches: int) -> float:
    """Return the mean loss per token over the first ``batches`` batches of held-out data, or all if there are fewer."""
    microbatches = list(islice(iter(loader), batches * engine.micro_batches))
    loss = engine.eval_batch(iter(microbatches), num_micro_batches=len(microbatches))
    assert isinstance(loss, torch.Tensor)
    return float(loss)
