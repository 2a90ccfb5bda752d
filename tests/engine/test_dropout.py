"""Dropout draws what the step, the micro-batch and the stage say, whatever the schedule and the number of replicas."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from tests.engine.parallel.axis_training import go_on_all
from tests.engine.tiny import many_losses, tiny_config
from weft.conf.schema import Recompute, WeftConfig
from weft.engine.deal import StepDeal, dealt
from weft.engine.deepspeed.construction import seed_forward
from weft.engine.models.seeding import restored_generators
from weft.pipeline.action import Action, Op
from weft.tools.ranks import run_ranks

STEPS = 3
ONE = {"microbatches": 4}
REPLICAS = {"microbatches": 2, "zero": 2}
CHECKPOINTED = {"microbatches": 2, "schedule": "gpipe", "checkpointing": True}


def dropping(*, dropout=0.3, checkpointing=False, **keywords):
    config = tiny_config(layers=4, **keywords)
    config.model.overrides["attention_dropout"] = dropout
    config.pipeline.recompute = Recompute.layers if checkpointing else Recompute.none
    return config


def drawn(step=0, microbatch=0, stage=0, replica=0, replicas=2, context=0, deal=None):
    """Return the first numbers that a rank's forward draws; the caller's generator is left alone."""
    rank = SimpleNamespace(
        weft=WeftConfig(),
        global_steps=step,
        deal=deal or StepDeal(replica, replicas),
        axes=SimpleNamespace(context=SimpleNamespace(index=context)),
        device=torch.device("cpu"),
    )
    before = torch.get_rng_state()
    with restored_generators(rank.device):
        seed_forward(rank, Action(Op.F, stage, microbatch))
        number = float(torch.rand(()))
    assert torch.equal(torch.get_rng_state(), before)
    return number


def test_steps_microbatches_stages_replicas_and_parts_draw_their_own_numbers():
    keys = list(itertools.product(range(3), repeat=5))
    found = [drawn(step, m, stage, replica, 3, context) for step, m, stage, replica, context in keys]
    assert len(set(found)) == len(keys)
    assert found == [drawn(step, m, stage, replica, 3, context) for step, m, stage, replica, context in keys]


def test_a_microbatch_draws_the_same_on_any_number_of_replicas():
    for number in range(12):
        spread = {drawn(4, number // r, 1, number % r, r) for r in (1, 2, 3, 4)}
        assert len(spread) == 1


def test_a_microbatch_draws_the_same_on_the_replica_that_it_was_moved_to():
    usual = {number: drawn(microbatch=number // 2, replica=number % 2) for number in range(8)}
    for replica, numbers in enumerate(dealt((1, 7))):
        deal = StepDeal(replica, 2)
        deal.numbers = numbers
        assert [drawn(microbatch=m, deal=deal) for m in range(len(numbers))] == [usual[n] for n in numbers]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_losses_with_dropout_do_not_depend_on_replicas_schedules_or_recomputation(tmp_path):
    """As long as the virtual stages are the same; a resumed run goes on, also with other replicas."""
    one, without = run_ranks(2, many_losses, [dropping(**ONE), dropping(**ONE, dropout=0.0)], STEPS)[0]
    configs = [dropping(**REPLICAS), dropping(**REPLICAS), dropping(**CHECKPOINTED)]
    first, again, other = run_ranks(4, many_losses, configs, STEPS, timeout_s=200)[0]
    assert first == again
    for losses in (first, other):
        assert losses == pytest.approx(one, rel=1e-5)
        assert losses != pytest.approx(without, rel=1e-4)
    folder = str(tmp_path)
    written, same = run_ranks(4, go_on_all, [(configs[0], folder, write) for write in (True, False)], timeout_s=200)[0]
    (alone,) = run_ranks(2, go_on_all, [(dropping(**ONE), folder, False)])[0]
    assert same == written and alone == pytest.approx(written, rel=1e-5)
