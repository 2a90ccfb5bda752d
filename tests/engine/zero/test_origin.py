"""The first rank with non-finite gradients is distinguished from ranks that received them, and from bad data."""

from dataclasses import replace
from itertools import chain

import pytest
import torch

from tests.engine.zero.replicas import Meetings, SmallStage, in_threads
from tests.engine.zero.test_norm import Trained
from weft.conf.schema import ZeroConfig
from weft.engine.stages.cutting.stage import HEAD, HEAD_WEIGHT
from weft.engine.zero import NonFiniteError, Sharding
from weft.engine.zero.finite import explanation
from weft.engine.zero.origin import OwnNumbers, Sighting, Source, origins
from weft.pipeline.action import Action, Op

FINE = -1


def seen(*pipelines, losses=()):
    """Sightings of pipelines with one stage per rank, which take neighbouring ranks; ``losses`` that are bad."""
    begins = [sum(map(len, pipelines[:number])) for number in range(len(pipelines))]
    return [
        Sighting(begin, stage, number in losses and stage == max(stages))
        for number, (begin, stages) in enumerate(zip(begins, pipelines, strict=True))
        for stage in stages
    ]


@pytest.mark.parametrize(
    ("sightings", "ranks"),
    [
        (seen([FINE], [0]), (1,)),
        (seen([0], [0]), ()),
        (seen([0]), ()),
        (seen([FINE], [0], losses=[1]), ()),
        (seen([0, 1]), (1,)),
        (seen([0, FINE]), (0,)),
        (seen([0, 1, FINE]), (1,)),
        (seen([0, 1], [FINE, FINE]), (1,)),
        (seen([0, 1], [0, FINE]), ()),
        (seen([0], [FINE], [0], losses=[2]), (0,)),
        (seen([FINE, FINE], [FINE, FINE]), ()),
    ],
)
def test_the_last_stage_of_the_only_bad_pipelines_is_the_origin(sightings, ranks):
    assert origins(sightings) == Source(ranks)


def forwards(*pipelines, losses=()):
    """Sightings as of `seen`, of pipelines whose gradients are all bad, with each rank's first bad hidden states."""
    found = seen(*([0] * len(stages) for stages in pipelines), losses=losses)
    return [replace(each, forward=forward) for each, forward in zip(found, chain(*pipelines), strict=True)]


@pytest.mark.parametrize(
    ("sightings", "source"),
    [
        (forwards([0, 1], losses=[0]), Source((0,), 0)),
        (forwards([FINE, 1, 2], losses=[0]), Source((1,), 1)),
        (forwards([FINE, 1], [FINE, FINE], losses=[0, 1]), Source((1,), 1)),
        (forwards([FINE, 1], [FINE, 1], losses=[0, 1]), Source()),
        (forwards([FINE, FINE], losses=[0]), Source()),
        (forwards([FINE, HEAD], losses=[0]), Source((1,), HEAD)),
        (forwards([FINE, HEAD], [FINE, HEAD], losses=[0, 1]), Source()),
        (forwards([FINE, HEAD_WEIGHT], [FINE, HEAD_WEIGHT], losses=[0, 1]), Source((1, 3), HEAD_WEIGHT)),
        (forwards([HEAD_WEIGHT], losses=[0]), Source((0,), HEAD_WEIGHT)),
        (forwards([1, HEAD_WEIGHT], losses=[0]), Source((0,), 1)),
    ],
)
def test_the_first_stage_with_bad_hidden_states_is_the_origin(sightings, source):
    assert origins(sightings) == source


def with_weights(sightings, *ranks, updated=False):
    """The sightings, of which these ranks had weights that were not finite before the step."""
    return [
        replace(each, weights=(f"w{rank % 2}",), updated=updated) if rank in ranks else each
        for rank, each in enumerate(sightings)
    ]


@pytest.mark.parametrize(
    ("sightings", "source"),
    [
        # on all replicas, whose forwards are bad from the same stage on
        (with_weights(forwards([FINE, 1], [FINE, 1], losses=[0, 1]), 1, 3), Source((1, 3), 1, ("w1",))),
        # a shard on one replica, from which both gather
        (with_weights(forwards([0, 1], [0, 1], losses=[0, 1]), 2), Source((0, 2), 0, ("w0",))),
        (with_weights(forwards([FINE, 1], losses=[0]), 0, 1, updated=True), Source((0, 1), 1, ("w0", "w1"), True)),
        (with_weights(forwards([0], losses=[0]), 0), Source((0,), 0, ("w0",))),
        # tokens may not use all rows of an embedding
        (with_weights(seen([0, FINE]), 0), Source((0,), -1, ("w0",))),
    ],
)
def test_weights_that_were_bad_before_the_step_are_the_origin(sightings, source):
    assert origins(sightings) == source
    assert f"weights ({', '.join(source.weights)}) of rank" in explanation(source)


def test_the_first_step_names_weights_that_were_loaded_bad_and_a_later_one_those_of_an_update():
    trained = Trained(clip=1.0)
    trained.step()
    named = {fragment.name: fragment.tensor for fragment in trained.optimizer.sharding.fragments()}
    name = next(name for name in named if "layers.1" in name)
    named[name].view(-1)[0] = float("nan")
    for is_restored, cause in ((False, "the update of the step before made them so"), (True, "as they were loaded")):
        if is_restored:
            trained.optimizer.restored([])
        with pytest.raises(NonFiniteError, match=f"weights .{name}. of rank 0, before this step.*{cause}") as caught:
            trained.step(spoilt=float("nan"))
        assert caught.value.ranks == (0,)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_only_the_replica_that_spoils_its_gradient_sees_that_before_the_reduction(stage, value):
    def run(meeting, number):
        model = SmallStage()
        sharding = Sharding([model], ZeroConfig(stage=stage), Meetings(meeting, number))
        sharding.begin_step([Action(Op.F, 0, 0), Action(Op.B, 0, 0)])
        with sharding.around(Action(Op.F, 0, 0)):
            loss = model(torch.arange(10).view(2, 5))
        with sharding.around(Action(Op.B, 0, 0)):
            (loss + (value if number == 1 else 0.0) * model.head.weight.sum()).backward()
        sharding.reduce(0)
        sharding.finish_gradients()
        own = OwnNumbers.of_step(sharding.trained, loss.detach(), None)
        reduced = torch.stack([bucket.gradient.abs().max() for bucket in sharding.trained])
        return own._sighting(number), bool(reduced.isfinite().all())

    (first, first_reduced), (second, second_reduced) = in_threads(2, run)
    assert not (first_reduced and second_reduced), "the sum has it"
    assert (first, second) == (Sighting(0, FINE, False), Sighting(1, 0, False))
