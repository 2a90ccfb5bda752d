"""The batch size of a recipe, given alone."""

import pytest

from weft.conf import load
from weft.conf.batch import check_world, fit_batch, num_replicas

GIVEN = [
    # settings, processes; sequences of a micro-batch, micro-batches
    (["train.batch_size=64"], 4, (2, 32)),
    (["train.batch_size=64"], 8, (2, 16)),
    (["train.batch_size=64", "train.microbatch_size=4"], 4, (4, 16)),
    (["train.batch_size=64", "train.microbatch_size=0", "pipeline.microbatches=8"], 4, (8, 8)),
    (["train.batch_size=64", "train.microbatch_size=0"], 4, (64, 1)),
    (["train.batch_size=16", "pipeline.microbatches=8"], 4, (2, 8)),
    (["train.batch_size=0"], 4, (2, 8)),
    ([], 4, (2, 8)),
]


@pytest.mark.parametrize(("settings", "processes", "sizes"), GIVEN)
def test_what_follows_from_a_batch_size(settings, processes, sizes):
    config = load(["recipe=quickstart", *settings])
    check_world(config, processes)
    fitted = fit_batch(config, processes)
    assert (fitted.train.microbatch_size, fitted.pipeline.microbatches) == sizes
    assert fit_batch(fitted, processes) is fitted


BAD = [
    (["train.batch_size=30", "train.microbatch_size=4"], 4, "not a multiple of train.microbatch_size=4"),
    (["train.batch_size=6"], 8, r"not a multiple of train.microbatch_size=2 x 2 replicas; choose 8"),
    (["train.batch_size=64", "pipeline.microbatches=8"], 4, "or pipeline.microbatches=0 to let it follow"),
    (["pipeline=dualpipev", "pipeline.stages=4", "train.batch_size=8"], 4, "needs at least 2 x 4 stages = 8"),
    (["train.microbatch_size=0"], 4, "train.microbatch_size=0: it follows from train.batch_size, which is 0"),
]


@pytest.mark.parametrize(("settings", "processes", "part"), BAD)
def test_batch_sizes_that_do_not_divide_are_named(settings, processes, part):
    with pytest.raises(ValueError) as error:
        check_world(load(["recipe=quickstart", *settings]), processes)
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("axis", "size", "part"),
    [
        ("tensor", 3, "pipeline.stages=1 x parallel.tensor=3: 4 processes are not a multiple of it"),
        ("context", 8, "pipeline.stages=1 x parallel.context=8: 4 processes are not a multiple of it"),
        ("expert", 3, "parallel.expert=3: 4 processes make 4 replicas x 1 context ranks = 4, not a multiple of it"),
    ],
)
def test_ranks_inside_of_layers_divide_the_processes(axis, size, part):
    config = load(["recipe=quickstart", "pipeline.stages=1"])
    setattr(config.parallel, axis, size)
    with pytest.raises(ValueError) as error:
        check_world(config, 4)
    assert part in str(error.value)


def test_members_inside_of_layers_are_no_replicas():
    config = load(["recipe=quickstart", "pipeline.stages=1", "train.batch_size=8", "train.microbatch_size=2"])
    config.parallel.tensor, config.parallel.context = 2, 2
    assert num_replicas(config, 16) == 4
