"""Ranks of several stages and replicas learn what one process learns, tied weights, norms and checks included."""

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from tests.engine.small_engine import MICROBATCHES, TIED, SmallEngine, SmallPart, ids
from tests.engine.zero.replicas import small_muon
from tests.thread_ranks import run_in_threads
from weft.conf.schema import ZeroConfig
from weft.engine.zero import Lamb, NonFiniteError

STEPS = 3
MAKE = {
    "adamw": lambda params: AdamW(params, lr=0.02, weight_decay=0.1),
    "lamb": lambda params: Lamb(params, lr=0.02, weight_decay=0.1),
    "muon": small_muon,
}


def alone(stages, kind, tied):
    """Weights by name, and the norm of each step, of one process that computes every stage."""
    parts = [SmallPart(index, tied=tied) for index in range(stages)]
    if tied:
        for part in parts[1:]:
            part.embed.weight = parts[0].embed.weight
    parameters = list(dict.fromkeys(p for part in parts for p in part.parameters()))
    optimizer = MAKE[kind](parameters)
    scheduler, norms = LambdaLR(optimizer, lambda step: 1 / (1 + step)), []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            sum(part(ids(step, microbatch)) for part in parts).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {name: p.detach() for part in parts for name, p in part.named_global_parameters()}, norms


def learn(stages, zero, kind, tied):
    made = SmallEngine(stages, zero, MAKE[kind], tied=tied)
    norms = []
    for _ in range(STEPS):
        made.step()
        norms.append(float(made.optimizer.gradient_norm))
    made.check_finite()
    return made.held()["model"], norms


@pytest.mark.parametrize(
    ("zero", "world", "stages", "kind"),
    [
        *((zero, 4, 2, "adamw") for zero in range(4)),
        *((zero, 4, 2, kind) for zero, kind in ((1, "lamb"), (3, "lamb"), (2, "muon"))),
        (1, 3, 3, "adamw"),
    ],
)
def test_stages_and_replicas_learn_what_one_process_learns(zero, world, stages, kind):
    tied = stages > 1
    expected, norms = alone(stages, kind, tied)
    config = ZeroConfig(stage=zero, reduce_bucket_size=90, allgather_bucket_size=90)
    names = set()
    for held, found in run_in_threads(world, learn, stages, config, kind, tied):
        assert found == pytest.approx(norms, rel=1e-5), "every rank knows the norm of the whole gradient"
        names |= held.keys()
        for name, weight in held.items():
            key = name.removeprefix("weight/")
            torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key} {m}")
    assert names == {f"weight/{name}" for name in expected}
    assert not tied or f"weight/{TIED}" in names


@pytest.mark.parametrize("what", ["weight", "state"])
@pytest.mark.parametrize(("world", "stages", "rank"), [(2, 1, 1), (4, 2, 0), (4, 2, 3)])
def test_one_number_on_one_rank_keeps_everyone_from_saving(world, stages, rank, what):
    def run():
        made = SmallEngine(stages, ZeroConfig(stage=1, reduce_bucket_size=90), MAKE["adamw"])
        made.step()
        made.check_finite()
        if made.global_rank == rank:
            fragment = made.sharding.trained[-1].fragments[-1]
            tensor = fragment.tensor if what == "weight" else made.basic_optimizer.state[fragment.tensor]["exp_avg"]
            tensor.data.view(-1)[-1] = torch.inf
        with pytest.raises(NonFiniteError, match="step 1: weights or the optimiser's state are no longer finite"):
            made.check_finite()
        return True

    assert all(run_in_threads(world, run))


def test_what_is_destroyed_hooks_no_parameter_and_runs_no_thread():
    def run():
        made = SmallEngine(1, ZeroConfig(stage=1), lambda params: SGD(params, lr=0.1))
        made.step()
        made.optimizer.destroy()
        made.part(ids(0, 0)).backward()
        used = [p for name, p in made.part.named_parameters() if name not in ("rare", "never")]
        assert all(p.grad is not None for p in used), "nobody takes gradients any more"
        with pytest.raises(RuntimeError, match="shutdown"):
            made.sharding.collectives.sum(torch.ones(2))
        return True

    assert all(run_in_threads(2, run))
