"""Scores of micro-batches that are moved between replicas: each step has those of the tokens that it reads."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.engine.data.test_loader import Blocks, share
from weft.engine.deal import StepDeal
from weft.engine.scores import Ahead
from weft.engine.scores.step_scores import Score, StepScores

pytest.importorskip("weft.inference", reason="needs the feature prefill")
from tests.inference.worker.test_scores_ahead import after

ROUNDS, REPLICAS = 2, 2


def values(ids):
    """Scores that depend on every token of a document, so that those of other tokens differ."""
    return -torch.arange(0.0, len(ids)) / (1 + sum(ids))


def in_line(batches):
    return [torch.stack([values(row.tolist()) for row in batch["input_ids"]]) for batch in batches]


def ahead_of(dies_after):
    calls = []

    def scorer(ids):
        calls.append(ids)
        if len(calls) > dies_after:
            raise ConnectionResetError
        return values(ids).numpy().astype(np.float32)

    return Ahead([scorer])


class Replica:
    """A replica that reads data and attaches scores as `WeftEngine` does at the beginning of a step."""

    def __init__(self, number, steps_ahead, dies_after=10**6):
        self.loader = share(Blocks([8] * 400), size=1, replica=number, replicas=REPLICAS)
        self.deal = StepDeal(number, REPLICAS)
        engine = SimpleNamespace(
            layout=SimpleNamespace(expert=1),
            weft=SimpleNamespace(zero=SimpleNamespace(stage=1), comm=SimpleNamespace(cell=1)),
            holds_loss=True,
            device=torch.device("cpu"),
            step_loss=SimpleNamespace(pipeline=None),
        )
        score = Score("reference", of_batches=in_line, of_tokens=lambda tokens, batch: tokens)
        ahead = ahead_of(dies_after) if steps_ahead else None
        self.scores = StepScores(engine, score, ahead=ahead, peek=self.loader.peek, steps_ahead=steps_ahead)

    def change(self, counts):
        if self.deal.counts != counts:  # as in `WeftEngine.run_schedules`
            self.scores.forget()
        self.deal.counts = counts

    def read(self):
        count = self.deal.begin(self.loader, ROUNDS)
        batches = [next(self.loader) for _ in range(count)]
        self.scores.attach(batches)
        return batches

    def step(self):
        batches = self.read()
        count = len(batches)
        if self.scores.ahead is not None:
            wanted = self.loader.peek(2 * count)[count:] if self.scores.steps_ahead else []
            assert after(lambda: all(self.scores.ahead.take(batch) is not None for batch in wanted) or None)
        return batches


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_moved_micro_batches_have_the_scores_of_their_own_tokens(steps_ahead):
    replicas = [Replica(number, steps_ahead) for number in range(REPLICAS)]
    read, shares = [], []
    for counts in [(), (), (), (1, 3), (1, 3), (1, 3), (3, 1), (3, 1), (3, 1), (), (), ()]:
        for replica in replicas:
            replica.change(counts)
        steps = [replica.step() for replica in replicas]
        assert [len(batches) for batches in steps] == list(counts or (ROUNDS,) * REPLICAS)
        for batches in steps:
            expected = in_line(batches)
            assert all(torch.equal(batch["reference"], own) for batch, own in zip(batches, expected, strict=True))
        read.append(sorted(batch["input_ids"].flatten().tolist() for batches in steps for batch in batches))
        shares.append([replica.scores.share_ahead for replica in replicas])
    alone = share(Blocks([8] * 400), size=1)
    for step in read:
        assert step == sorted(next(alone)["input_ids"].flatten().tolist() for _ in range(ROUNDS * REPLICAS))
    last = [shares[at] for at in (2, 5, 8, 11)]  # the third steps after each change
    assert last == [[float(steps_ahead > 0)] * REPLICAS] * 4
    for replica in replicas:
        replica.scores.close()
        replica.loader.close()


def test_one_stage_computes_in_line_what_a_killed_worker_does_not_send(monkeypatch):
    monkeypatch.setattr("weft.engine.scores.ahead.PAUSE_S", 0.01)
    replica, shares = Replica(0, 1, dies_after=3 * ROUNDS), []
    known = replica.scores.ahead
    for _ in range(8):
        batches = replica.read()
        assert all(torch.equal(batch["reference"], own) for batch, own in zip(batches, in_line(batches), strict=True))
        shares.append(replica.scores.share_ahead)
        after(lambda: all(known.take(each) is not None for each in replica.loader.peek(2)) or None, 0.2)
    assert max(shares) == 1.0 and shares[-3:] == [0.0] * 3 and not known.num_refused
    replica.scores.close()
    replica.loader.close()
