"""Attach a frozen model's scores to the micro-batches of a step: computed ahead, or in line where they are missing.

A `Score` describes what a loss needs. `StepScores.attach` puts it into each micro-batch under ``Score.name`` before the
step, on the ranks that compute the loss. There an objective (`weft.engine.models.objective`) reads it:

    score = Score("reference", of_logits=label_log_probs)
    engine.scores = StepScores(engine, score, frozen=InitialWeights(engine.sharding).active)

Without more, all scores are computed in line: a forward pass through the pipeline of the model within ``frozen``. A
model with other layers computes them by ``of_batches``, on the ranks that compute the loss. With
`weft.engine.scores.ahead.Ahead`, scores that arrived in time need neither. At the beginning of a step, the rank of the
last stage decides which micro-batches of the next step lack scores. The decision is sent during the step, so that no
step waits for it or for a scorer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine.execution.step_state import StepState
from weft.engine.models.batch import Batch
from weft.engine.planning.schedules import plan_evaluation
from weft.engine.scores.ahead import Ahead
from weft.engine.stages.cutting.context import WHOLE, whole_batch

if TYPE_CHECKING:
    from weft.engine.engine import WeftEngine

Peek = Callable[[int], Sequence[Batch]]
"""Returns so many of the next micro-batches, on the CPU, without reading past them."""


def of_labels(tokens: Tensor, batch: Batch) -> Tensor:
    """Return the scores [B, S] of tokens that are labels, and 0 for others."""
    return tokens.masked_fill(batch["labels"] == -100, 0.0)


@dataclass(frozen=True)
class Score:
    """Values that a loss needs of a frozen model.

    Attributes:
        name: key in the micro-batch.
        of_logits: returns the scores [B, S, ...] of the tokens by the frozen model's logits [B, S, V] and the
            micro-batch. Element s belongs to token s, and 0 is the score of a token without one.
        of_batches: returns the same of whole micro-batches, by another model. No other rank is needed.
        of_tokens: returns the same from the scores of all tokens that arrive ahead, and the micro-batch.
    """

    name: str
    of_logits: Callable[[Tensor, Batch], Tensor] | None = None
    of_batches: Callable[[Sequence[Batch]], Sequence[Tensor]] | None = None
    of_tokens: Callable[[Tensor, Batch], Tensor] = of_labels


class _Decision(NamedTuple):
    """Which micro-batches of the next step lack scores: on the device, and its transfer. And those that do not."""

    lacking: Tensor
    transfer: dist.Work | None
    arrived: dict[int, Tensor]


class StepScores:
    """Attaches scores to the micro-batches of an engine's steps."""

    def __init__(
        self,
        engine: WeftEngine,
        score: Score,
        *,
        frozen: Callable[[], AbstractContextManager[None]] = nullcontext,
        ahead: Ahead | None = None,
        peek: Peek | None = None,
        steps_ahead: int = 0,
    ) -> None:
        """Attach scores to the micro-batches of ``engine``. All arguments are the same on all ranks.

        Args:
            frozen: context in which the engine's stages are the frozen model.
            ahead: scores that are computed elsewhere, on ranks that compute the loss. Other ranks pass None.
            peek: reads the next micro-batches, without which nothing is computed ahead.
            steps_ahead: number of steps whose scores are requested ahead of the current one. 0 requests none.
        """
        self.score, self.ahead = score, ahead
        self._engine, self._frozen, self._peek, self.steps_ahead = engine, frozen, peek, steps_ahead
        self._decision: _Decision | None = None
        layout = engine.layout
        passes = engine.weft.zero.stage == 3 or layout.expert > 1 or engine.weft.comm.cell > 1
        self._with_all = passes and score.of_logits is not None
        """True if a forward of one replica needs the others, so that all compute the same micro-batches in line."""
        self.num_ahead = self.num_in_line = 0
        """Micro-batches of the last step by the origin of their scores."""

    def attach(self, batches: Sequence[dict[str, Tensor]]) -> None:
        """Attach the scores of a training step's micro-batches, and request those of the next ones. Collective call."""
        decision, self._decision = self._decision, None
        lacking = list(range(len(batches)))
        if decision is not None:
            if decision.transfer is not None:
                decision.transfer.wait()
            lacking = decision.lacking.nonzero().flatten().tolist()
        self.num_in_line, self.num_ahead = len(lacking), len(batches) - len(lacking)
        arrived = {} if decision is None else decision.arrived
        for m in set(range(len(batches))) - set(lacking) if self._engine.holds_loss else ():
            batch = whole_batch(batches[m])
            tokens = arrived[m].to(batch["input_ids"].device, non_blocking=True)
            _put(batches[m], self.score.name, self.score.of_tokens(tokens, batch))
        self.compute([batches[m] for m in lacking])
        if self.steps_ahead and self._peek is not None:
            self._decide(len(batches))

    def compute(self, batches: Sequence[dict[str, Tensor]]) -> None:
        """Compute scores in line, and attach them. Collective call."""
        if not batches:
            return
        if (score := self.score.of_batches) is None:
            found = self._pass(batches)
        else:
            found = score([whole_batch(batch) for batch in batches]) if self._engine.holds_loss else []
        for batch, scores in zip(batches, found, strict=self._engine.holds_loss):
            _put(batch, self.score.name, scores)

    def forget(self) -> None:
        """Forget what was decided for the next step, because it will read other data. All ranks call it."""
        self._decision = None

    @property
    def share_ahead(self) -> float:
        """Share of the last step's micro-batches whose scores were computed ahead."""
        return self.num_ahead / max(1, self.num_ahead + self.num_in_line)

    def close(self) -> None:
        """End the requests ahead."""
        if self.ahead is not None:
            self.ahead.close()

    def _decide(self, count: int) -> None:
        """Request scores of the next steps, and decide which micro-batches of the next one lack them."""
        engine, arrived = self._engine, {}
        assert self._peek is not None
        if self.ahead is not None:
            upcoming = self._peek(count * (1 + self.steps_ahead))
            found = {m: self.ahead.take(batch) for m, batch in enumerate(upcoming[:count])}
            arrived = {m: tokens for m, tokens in found.items() if tokens is not None}
            self.ahead.request(upcoming[count:])  # what arrives for the next step from now on is too late
        lacking = torch.tensor([m not in arrived for m in range(count)], dtype=torch.int32).to(engine.device)
        transfer = None
        if self._with_all:
            if not engine.holds_loss:
                lacking.zero_()
            transfer = dist.all_reduce(lacking, dist.ReduceOp.MAX, async_op=True)
        elif engine.step_loss.pipeline is not None:
            source = engine.step_loss.source
            transfer = dist.broadcast(lacking, src=source, group=engine.step_loss.pipeline, async_op=True)
        self._decision = _Decision(lacking, transfer, arrived)

    def _pass(self, batches: Sequence[dict[str, Tensor]]) -> Sequence[Tensor]:
        """Run the forwards of the frozen model through the engine's own stages, and return what the last one computes.

        All ranks call it with the same micro-batches of their pipelines.
        """
        engine = self._engine
        schedule = plan_evaluation(engine.schedule.placement, len(batches), zero_stage=engine.weft.zero.stage)
        state = StepState(batches=batches, training=False, num_items=None, of_logits=self.score.of_logits)
        was_training = engine.module.training
        engine.module.eval()
        engine.finish_memory_copy()
        with self._frozen():
            engine.executor.run(schedule, state)
        engine.module.train(was_training)
        return [state.of_each[m] for m in sorted(state.of_each)]


def _put(batch: dict[str, Tensor], name: str, scores: Tensor) -> None:
    whole = any(key.startswith(WHOLE) for key in batch)
    batch[WHOLE + name if whole else name] = scores
