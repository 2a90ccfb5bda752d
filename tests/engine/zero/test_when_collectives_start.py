"""Gradients are reduced by the end of the last backward, once per step; weights are gathered one block ahead."""

import pytest
from torch import nn
from torch.optim import SGD

from tests.engine.zero.replicas import SmallStage, in_threads
from tests.engine.zero.test_replicas import Replica, ids
from weft.conf.schema import ZeroConfig
from weft.pipeline.action import Action, Op

BUCKETS = {"reduce_bucket_size": 50, "allgather_bucket_size": 50}
ROWS = {
    "full": [(Op.B,)] * 3,
    "split": [(Op.I, Op.W)] * 3,
    "split, then full": [(Op.I, Op.W), (Op.I, Op.W), (Op.B,)],
    "full, then split": [(Op.B,), (Op.B,), (Op.I, Op.W)],
    "full between": [(Op.I, Op.W), (Op.B,), (Op.I, Op.W)],
}


def make(parameters):
    return SGD(parameters, lr=0.02)


def whole(model, tokens):
    return model(tokens)


def without_head(model, tokens):
    """The head gets no gradient."""
    return model.hidden(tokens).square().sum()


def run_row(replica, backwards, compute=whole):
    """A step with the given backward of each micro-batch; how many reductions were started by the end of each."""
    sharding, started = replica.sharding, replica.collectives.started
    pairs = list(enumerate(backwards))
    sharding.begin_step([Action(op, 0, m) for m, ends in pairs for op in (Op.F, *ends)])
    before, counts = len(started), []

    def reductions():
        return sum(name != "all_gather" for name, _ in started[before:])

    for m, ends in pairs:
        with sharding.around(Action(Op.F, 0, m)):
            loss, saved = replica.backward.forward(
                lambda m=m: compute(replica.model, ids(0, m)), None, split=Op.W in ends
            )
        for op in ends:
            run = {
                Op.B: lambda: replica.backward.full_backward(saved, loss.new_ones(())),  # noqa: B023
                Op.I: lambda: replica.backward.input_backward(saved, loss.new_ones(())),  # noqa: B023
                Op.W: lambda: replica.backward.weight_backward(saved),  # noqa: B023
            }[op]
            with sharding.around(Action(op, 0, m)):
                run()
        counts.append(reductions())
    sharding.reduce(0)
    counts.append(reductions())
    replica.optimizer.step()
    return counts


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("row", ROWS)
def test_each_bucket_is_reduced_once_by_the_end_of_the_last_backward(stage, row, tied):
    def run(meeting, number):
        replica = Replica(meeting, number, ZeroConfig(stage=stage, **BUCKETS), make, tied=tied)
        buckets = len(replica.sharding.trained)
        assert buckets > 3
        # Rows of other lengths before and after: no step depends on the row of another.
        for backwards in ([(Op.B,)], ROWS[row], [(Op.I, Op.W)] * 2, ROWS[row], [(Op.B,)] * 4):
            assert run_row(replica, backwards) == [0] * (len(backwards) - 1) + [buckets] * 2

    in_threads(2, run)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("row", ROWS)
def test_with_reduce_every_1_each_bucket_is_reduced_for_each_microbatch(stage, row):
    def run(meeting, number):
        replica = Replica(meeting, number, ZeroConfig(stage=stage, reduce_every=1, **BUCKETS), make)
        buckets = len(replica.sharding.trained)
        for backwards in (ROWS[row][:1], ROWS[row], ROWS[row][1:], [(Op.B,)] * 4):
            expected = [buckets * (m + 1) for m in range(len(backwards))]
            assert run_row(replica, backwards) == [*expected, expected[-1]]

    in_threads(2, run)


def test_a_bucket_without_a_gradient_delays_no_other_microbatchs_reductions():
    def run(meeting, number):
        replica = Replica(meeting, number, ZeroConfig(stage=2, reduce_every=1, **BUCKETS), make)
        buckets = len(replica.sharding.trained)
        for count in (1, 3, 2, 4):
            found = run_row(replica, [(Op.B,)] * count, without_head)
            # The last micro-batch's rest is left to REDUCE_GRAD.
            assert found[:-2] == [buckets * (m + 1) for m in range(count - 1)]
            assert found[-1] == buckets * count

    in_threads(2, run)


def test_zero_3_gathers_one_block_ahead_and_no_further():
    """While block k computes, the weights of the next block in its direction are being gathered."""

    def run(meeting, number):
        replica = Replica(meeting, number, ZeroConfig(stage=3, reduce_bucket_size=10**6), make)
        weights = replica.sharding._weights[0]
        blocks, seen = len(weights._blocks), {"forward": [], "backward": []}

        def requested():
            """Blocks whose weights are complete or being gathered."""
            return [all(b._whole or not b.is_settled for b in bucket) for bucket in weights._blocks]

        for number_of_block, block in enumerate(replica.model.layers):
            linear = next(module for module in block if isinstance(module, nn.Linear))
            linear.register_forward_hook(lambda *_, k=number_of_block: seen["forward"].append((k, requested())))
            linear.weight.register_hook(lambda _, k=number_of_block: seen["backward"].append((k, requested())))
        run_row(replica, [(Op.B,)])
        for k, held in seen["forward"]:
            assert held == [index in (k, k + 1) for index in range(blocks)], (k, held)
        for k, held in seen["backward"]:
            assert held == [index in (k, k - 1) for index in range(blocks)], (k, held)
        assert [k for k, _ in seen["forward"]] == list(range(blocks))
        assert [k for k, _ in seen["backward"]] == list(reversed(range(blocks)))

    assert len(SmallStage().blocks()) >= 3
    in_threads(2, run)


def test_an_unsharded_stage_begins_with_what_its_next_computation_uses_first():
    """A forward begins with the first block, a backward with the last; nothing else is asked for."""

    def run(meeting, number):
        replica = Replica(meeting, number, ZeroConfig(stage=3, reduce_bucket_size=10**6), make)
        sharding, weights = replica.sharding, replica.sharding._weights[0]
        blocks = len(weights._blocks)

        def unsharded():
            sharding.reshard(0)
            sharding.unshard(0)
            return [all(b._whole or not b.is_settled for b in bucket) for bucket in weights._blocks]

        first, last = ([index == edge for index in range(blocks)] for edge in (0, blocks - 1))
        sharding.begin_step([Action(op, 0, m) for m in range(2) for op in (Op.F, Op.I, Op.W)])
        for m in range(2):
            assert unsharded() == first
            with sharding.around(Action(Op.F, 0, m)):
                loss, saved = replica.backward.forward(lambda m=m: replica.model(ids(0, m)), None, split=True)
            assert unsharded() == last
            with sharding.around(Action(Op.I, 0, m)):
                replica.backward.input_backward(saved, loss.new_ones(()))
            with sharding.around(Action(Op.W, 0, m)):
                replica.backward.weight_backward(saved)
        assert unsharded() == first, "nothing is to come in this step, and the next begins with a forward"
        sharding.reduce(0)
        replica.optimizer.step()

    in_threads(2, run)
