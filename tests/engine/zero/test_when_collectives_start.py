"""Gradients are reduced by the end of the last backward, once per step; weights are gathered one block ahead."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD

from tests.engine.zero.replicas import Meetings, SmallStage, in_threads, whole_step
from tests.engine.zero.test_replicas import Replica, ids
from weft.conf.schema import ZeroConfig
from weft.engine.backward import SplitBackward
from weft.engine.zero import Sharding
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
            with sharding.around(Action(op, 0, m), saved.coming):
                run()
        counts.append(reductions())
    sharding.reduce(0)
    counts.append(reductions())
    whole_step(replica.optimizer)
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
            with sharding.around(Action(Op.I, 0, m), saved.coming):
                replica.backward.input_backward(saved, loss.new_ones(()))
            with sharding.around(Action(Op.W, 0, m), saved.coming):
                replica.backward.weight_backward(saved)
        assert unsharded() == first, "nothing is to come in this step, and the next begins with a forward"
        sharding.reduce(0)
        whole_step(replica.optimizer)

    in_threads(2, run)


def of_matrix(self, x):
    """A matrix multiplies rows, which can wait for W, and is looked at, which cannot."""
    return (self.once(self.twice(x).tanh()).square() * self.twice.weight.mean()).sum()


def of_bias(self, x):
    """As members of a tensor group take off their shares of a bias behind the product that adds it."""
    return (self.once(self.twice(x).tanh()).square() + self.twice(x) - self.twice.bias * 0.5).sum()


def of_bias_before(self, x):
    """The bias is used before its product, so its gradient arrives last in I."""
    return self.once(self.twice(x - self.twice.bias).tanh()).square().sum()


def of_shared_bias(self, x):
    """Two products add one bias, which has a gradient from each of them."""
    return (nn.functional.linear(self.twice(x).tanh(), self.once.weight, self.twice.bias) - self.twice.bias).sum()


def of_one_way(self, x):
    """The other matrix has no gradient at all."""
    return (self.twice(x).tanh() - self.twice.bias).square().sum()


class TwiceUsed(nn.Module):
    """It uses a parameter in products, and once more outside of them; another one waits less long."""

    index = 0
    tied: frozenset[str] = frozenset()
    cuts = {}

    def __init__(self, compute):
        super().__init__()
        self.twice, self.once = nn.Linear(6, 6), nn.Linear(6, 6)
        self.compute = compute

    def named_global_parameters(self):
        return self.named_parameters()

    def blocks(self):
        return []

    def forward(self, x):
        return self.compute(self, x)


def in_two_parts(backward, saved):
    """W on its own: parts of a full backward, played whenever a strand pair has space for them."""
    return (
        (Op.I, lambda seed: backward.input_backward(saved, seed)),
        (Op.W, lambda _: backward.weight_backward(saved)),
    )


def played_within(backward, saved):
    """A full backward of a forward with a tape, as in a strand pair; parts of the tape are played before its end."""

    def play(_):
        saved.tape.play()

    def run(seed):
        hooks = [parameter.register_hook(play) for parameter in saved.tape.parameters]
        backward.full_backward(saved, seed)
        for hook in hooks:
            hook.remove()

    return ((Op.B, run),)


@pytest.mark.parametrize("compute", [of_matrix, of_bias, of_bias_before, of_shared_bias, of_one_way])
@pytest.mark.parametrize("backwards", [in_two_parts, played_within])
@pytest.mark.parametrize("stage", range(4))
def test_a_bucket_is_reduced_after_the_last_gradient_of_parameters_used_twice(stage, backwards, compute):
    """Though each of them may have had one before, in I or in the same backward."""

    def run(meeting, number):
        model = TwiceUsed(compute)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        alone = copy.deepcopy(model)
        collectives = Meetings(meeting, number)
        sharding = Sharding([model], ZeroConfig(stage=stage), collectives)
        backward = SplitBackward(model)
        assert len(sharding.buckets) == 1
        for step in range(3):
            rows = [torch.randn(3, 6, generator=generator) for _ in range(2 * meeting.count)]
            mine = list(enumerate(rows[number :: meeting.count]))
            ops = [op for op, _ in backwards(backward, None)]
            sharding.begin_step([Action(op, 0, m) for m, _ in mine for op in (Op.F, *ops)])
            collectives.started.clear()
            for m, row in mine:
                with sharding.around(Action(Op.F, 0, m)):
                    loss, saved = backward.forward(lambda row=row: model(row), None)
                for op, part in backwards(backward, saved):
                    with sharding.around(Action(op, 0, m), saved.coming):
                        part(torch.ones_like(loss))
            assert len([name for name, _ in collectives.started if name != "all_gather"]) == 1, step
            sharding.reduce(0)
            sharding.finish_gradients()
            sum(alone(row) for row in rows).backward()
            (bucket,) = sharding.buckets
            bucket.assign_gradients()
            for fragment in bucket.fragments:
                gradient = dict(alone.named_parameters())[fragment.name].grad
                part = torch.zeros(36) if gradient is None else gradient.flatten()[fragment.start :]
                torch.testing.assert_close(fragment.tensor.grad.flatten(), part[: fragment.tensor.numel()])
            bucket.drop_gradient()
            alone.zero_grad()

    in_threads(2, run)


class Part(nn.Module):
    """A virtual stage that ends with a matrix, which another one may hold, too."""

    tied = frozenset({"shared"})
    cuts = {}

    def __init__(self, index, shared, *, own=True):
        super().__init__()
        self.index, self.shared = index, shared
        self.own = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6)) if own else None

    def named_global_parameters(self):
        yield "shared", self.shared
        if self.own is not None:
            yield f"own of {self.index}", self.own

    def blocks(self):
        return []

    def forward(self, x):
        x = x if self.own is None else (x @ self.own).tanh()
        return x @ self.shared


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
@pytest.mark.parametrize("stage", range(4))
def test_what_two_stages_of_a_rank_share_is_reduced_when_both_have_ended(stage, order):
    """Once a step, by whichever of them ends last; and so again in the next step."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(6, 6, generator=generator) / 3

    def run(meeting, number):
        shared = nn.Parameter(weight.clone())
        stages = [Part(index, shared, own=index == 0) for index in range(2)]
        collectives = Meetings(meeting, number)
        sharding = Sharding(stages, ZeroConfig(stage=stage), collectives)
        (joint,) = [bucket for bucket in sharding.trained if bucket.stages == {0, 1}]
        alone = Part(0, nn.Parameter(weight.clone()))

        def reductions():
            return sum(name != "all_gather" for name, _ in collectives.started)

        for step in range(2):
            rows = [torch.randn(3, 6, generator=torch.Generator().manual_seed(9 * step + k)) for k in range(2)]
            row = [Action(op, index, 0) for op in (Op.F, Op.B) for index in order]
            sharding.begin_step(row)
            collectives.started.clear()
            outputs = {}
            for action in row:
                with sharding.around(action):
                    if action.op is Op.F:
                        outputs[action.stage] = stages[action.stage](rows[number]).square().sum()
                    else:
                        outputs[action.stage].backward()
            first, last = order
            begun = reductions()
            assert begun == 1, "the first stage's own weights"
            sharding.reduce(first)
            assert reductions() == begun
            sharding.reduce(last)
            assert reductions() == begun + 1
            sharding.reduce(first)
            assert reductions() == begun + 1
            sharding.finish_gradients()
            for each in rows:
                for of in (alone(each), each @ alone.shared):
                    of.square().sum().backward()
            joint.assign_gradients()
            (fragment,) = joint.fragments
            expected = alone.shared.grad.flatten()[fragment.start :][: fragment.tensor.numel()]
            torch.testing.assert_close(fragment.tensor.grad.flatten(), expected)
            alone.zero_grad()
            for bucket in sharding.trained:
                bucket.drop_gradient()

    in_threads(2, run)


def test_stepped_weights_of_the_first_stage_begin_to_come_before_the_next_step():
    """At stage 3 those that its forward uses first, and no others; at 1 and 2 everything comes."""

    def run(meeting, number):
        for stage in range(1, 4):
            parts = [SmallStage(), SmallStage()]
            for index, part in enumerate(parts):
                part.index = 2 * index + 1
            sharding = Sharding(parts, ZeroConfig(stage=stage, reduce_bucket_size=10**6), Meetings(meeting, number))
            sharding.publish()
            coming = [
                [
                    all(not b.is_settled for b in [*weights._rest, *first]),
                    any(not b.is_settled for block in blocks for b in block),
                ]
                for weights in sharding._weights.values()
                for first, *blocks in [weights._blocks or [[]]]
            ]
            assert coming == ([[True, False], [False, False]] if stage == 3 else [[True, False]] * 2), stage
            sharding.settle()
            assert all(bucket.is_settled for bucket in sharding.buckets)

    in_threads(2, run)
