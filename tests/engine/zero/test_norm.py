"""Norms equal float64's, and numbers that are not finite end the run before anything of them is kept."""

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from torch.optim import SGD, AdamW

from tests.engine.zero.replicas import Meetings, SmallStage, in_threads, whole_step
from weft.comm.sums import ReplicaSum
from weft.conf.deepspeed import deepspeed_config
from weft.conf.schema import Precision, WeftConfig, ZeroConfig
from weft.engine.zero import NonFiniteError, ShardedOptimizer, Sharding, Skips, optimizer
from weft.engine.zero.finite import NormWatch, all_finite
from weft.engine.zero.norm import ROW, squared_norm
from weft.engine.zero.optimizer import MOST_SKIPPED
from weft.pipeline.action import Action, Op

CPU = torch.device("cpu")


@pytest.mark.parametrize("numel", [0, 1, ROW - 1, ROW, ROW + 1, 3 * ROW + 5, 30_000_000])
def test_the_norm_equals_float64s(numel):
    generator = torch.Generator().manual_seed(numel)
    flat = torch.rand(numel, generator=generator).mul_(1e-3)
    exact = sum(float(part.double().square().sum()) for part in flat.split(1 << 20))
    found = squared_norm([flat], CPU)
    assert found.dtype is torch.float64
    assert float(found) == pytest.approx(exact, rel=1e-6)


def test_the_norm_of_several_tensors_of_any_shape_and_type():
    tensors = [torch.randn(5, 7), torch.randn(3, 4).t(), torch.randn(()), torch.randn(9).bfloat16(), torch.zeros(0)]
    exact = sum(float(t.double().square().sum()) for t in tensors)
    assert float(squared_norm(iter(tensors), CPU)) == pytest.approx(exact, rel=1e-6)
    assert float(squared_norm([], CPU)) == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_watch_tells_of_what_is_not_finite(value):
    watch = NormWatch(CPU)
    watch.check()  # nothing was asked
    watch.watch(6, ReplicaSum(torch.tensor(9.0), None), 1.0)
    watch.check()
    watch.check()
    watch.watch(7, ReplicaSum(torch.tensor(abs(value)), None), 2.0)
    with pytest.raises(NonFiniteError, match=f"step 7: the norm of the gradient is {abs(value)}.*smaller optimizer.lr"):
        watch.check()
    watch.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_all_finite(dtype):
    good = [torch.tensor([3, 4]), torch.zeros(0, dtype=dtype), torch.tensor([[1.0, -2.0], [0.0, 6e4]], dtype=dtype)]
    assert all_finite(good, CPU) == 1
    assert all_finite([], CPU) == all_finite([torch.tensor([1])], CPU) == 1
    for value in (float("nan"), float("inf"), -float("inf")):
        bad = torch.ones(2, 50, dtype=dtype)
        bad[1, 33] = value
        assert all_finite([*good, bad], CPU) == 0
        assert all_finite([bad, *good], CPU) == 0


class Trained:
    """One replica of a small stage, whose gradients can be spoilt."""

    def __init__(self, *, clip=0.0, check_overflow=False, skips=None, scaler=None, make=None, dtype=torch.float32):
        self.model = SmallStage(dtype=dtype)
        self.done = 0
        (self.sharding,) = in_threads(1, lambda m, n: Sharding([self.model], ZeroConfig(), Meetings(m, n)))
        self.optimizer = ShardedOptimizer(
            (make or AdamW)(self.model.parameters(), lr=0.1),
            self.sharding,
            loss_scaler=scaler or LossScaler(1.0),
            clip=lambda: clip,
            check_overflow=check_overflow,
            skips=skips,
            steps_done=lambda: self.done,
        )

    def step(self, spoilt=0.0, loss=None):
        self.sharding.begin_step([Action(Op.F, 0, 0), Action(Op.B, 0, 0)])
        with self.sharding.around(Action(Op.F, 0, 0)):
            output = self.model(torch.arange(10).view(2, 5))
        with self.sharding.around(Action(Op.B, 0, 0)):
            (output * self.optimizer.cur_scale + spoilt * self.model.head.weight.sum()).backward()
        self.sharding.reduce(0)
        whole_step(self.optimizer, loss)
        self.done += 1

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]


class OneMatrix(torch.nn.Module):
    """A stage with a single weight, whose gradient is what it is multiplied by."""

    index = 0
    tied: frozenset[str] = frozenset()
    cuts = {}

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(numel))

    def named_global_parameters(self):
        yield from self.named_parameters()

    def blocks(self):
        return []


@pytest.mark.parametrize("clip", [1.0, 1e3])
def test_the_step_over_a_large_bucket_is_clipped_by_float64s_norm(clip):
    """Summed in fp32 element by element, the norm of so many came out a tenth of a percent too small."""
    stage = OneMatrix(30_000_000)
    gradient = torch.rand(stage.weight.numel(), generator=torch.Generator().manual_seed(5)).mul_(1e-2)
    exact = sum(float(part.double().square().sum()) for part in gradient.split(1 << 20)) ** 0.5
    sharding = Sharding([stage], ZeroConfig())
    assert len(sharding.trained) == 1
    optimizer = ShardedOptimizer(
        SGD(stage.parameters(), lr=1.0), sharding, loss_scaler=LossScaler(1.0), clip=lambda: clip, check_overflow=False
    )
    sharding.begin_step([Action(Op.F, 0, 0), Action(Op.B, 0, 0)])
    with sharding.around(Action(Op.B, 0, 0)):
        (stage.weight * gradient).sum().backward()
    sharding.reduce(0)
    whole_step(optimizer)
    assert float(optimizer.gradient_norm) == pytest.approx(exact, rel=1e-6)
    torch.testing.assert_close(-stage.weight.detach(), gradient * min(1.0, clip / exact), rtol=2e-6, atol=0.0)


NAN = float("nan")


def test_clipped_on_a_cpu_the_weights_stay_as_they_were():
    trained = Trained(clip=1.0)
    trained.step()
    before = trained.weights()
    with pytest.raises(NonFiniteError, match=r"step 2: the norm of the gradient is nan"):
        trained.step(spoilt=NAN)
    assert all(torch.equal(a, b) for a, b in zip(before, trained.weights(), strict=True))
    with pytest.raises(NonFiniteError, match=r"step 2: the norm"):
        trained.optimizer.check_finite()
    assert all(bucket._gradient is None for bucket in trained.sharding.trained)
    trained.step()  # the spoilt gradient is forgotten
    trained.optimizer.check_finite()


def test_what_is_restored_may_be_kept():
    trained = Trained(clip=1.0)
    with pytest.raises(NonFiniteError):
        trained.step(spoilt=NAN)
    trained.optimizer.restored([])
    trained.optimizer.check_finite()
    unclipped = Trained()
    unclipped.step(spoilt=NAN)
    before = Trained()
    for mine, other in zip(unclipped.model.parameters(), before.model.parameters(), strict=True):
        mine.data.copy_(other)
    unclipped.optimizer.state.clear()
    unclipped.optimizer.restored([])
    unclipped.optimizer.check_finite()
    unclipped.step()


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_without_clipping_a_bad_norm_is_raised_in_the_next_step_or_before_a_save(value):
    trained = Trained()
    trained.step()
    trained.optimizer.check_finite()
    trained.step(spoilt=value)
    with pytest.raises(NonFiniteError, match=r"step 2: the norm of the gradient is (nan|inf)"):
        trained.step()
    again = Trained()
    again.step(spoilt=value)
    with pytest.raises(NonFiniteError, match="step 1: the norm"):
        again.optimizer.check_finite()
    with pytest.raises(NonFiniteError, match="step 1: weights or the optimiser's state are no longer finite"):
        again.optimizer.check_finite()


def test_weights_that_a_finite_gradient_carries_away():
    trained = Trained(make=SGD, clip=1e3)
    trained.optimizer.param_groups[0]["lr"] = 3e38
    trained.step()
    with pytest.raises(NonFiniteError, match="step 1: weights"):
        trained.optimizer.check_finite()


def test_an_optimisers_state_that_is_not_finite():
    trained = Trained(clip=1.0)
    trained.step()
    next(iter(trained.optimizer.state.values()))["exp_avg_sq"][0] = float("inf")
    with pytest.raises(NonFiniteError, match="step 1: weights or the optimiser's state"):
        trained.optimizer.check_finite()


def test_a_16_bit_weight_that_its_master_outgrows():
    trained = Trained(make=SGD, clip=1.0, dtype=torch.float16)
    trained.optimizer.param_groups[0]["lr"] = 1e6
    trained.step()
    assert all(torch.isfinite(fragment.tensor).all() for fragment in trained.sharding.fragments())
    with pytest.raises(NonFiniteError, match="weights"):
        trained.optimizer.check_finite()


def test_fp16_skips_and_lowers_its_scale():
    class Halving(LossScaler):  # DeepSpeed's dynamic one needs ranks
        def update_scale(self, overflow):
            self.cur_scale /= 2 if overflow else 1

    trained = Trained(check_overflow=True, scaler=Halving(4.0))
    before = trained.weights()
    trained.step(spoilt=NAN)
    assert trained.optimizer.overflow and trained.optimizer.cur_scale == 2.0
    assert all(torch.equal(a, b) for a, b in zip(before, trained.weights(), strict=True))
    trained.step()
    assert not trained.optimizer.overflow
    assert not all(torch.equal(a, b) for a, b in zip(before, trained.weights(), strict=True))
    trained.optimizer.check_finite()


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("check_overflow", [False, True])
@pytest.mark.parametrize("most", [0, 2])
def test_only_a_norm_that_the_step_needs_is_summed_before_it(monkeypatch, clip, check_overflow, most):
    """The way across sites that is short for those who wait; any other sum goes on during the next step."""
    at_once = []
    monkeypatch.setattr(optimizer, "sum_now", lambda number, **groups: at_once.append(groups) or number)
    trained = Trained(clip=clip, check_overflow=check_overflow, skips=Skips(most))
    trained.step()
    needed = clip > 0 or check_overflow or most > 0
    assert at_once == [{"replicas": None, "pipeline": None}] * needed
    assert float(trained.optimizer.gradient_norm) > 0


def test_steps_are_not_skipped_for_ever():
    assert MOST_SKIPPED == 50, "docs/zero.md"
    trained = Trained(check_overflow=True)
    assert not trained.optimizer.overflow, "nothing is known before the first step"
    for _ in range(MOST_SKIPPED):
        trained.step(spoilt=NAN)
    trained.step()
    for _ in range(MOST_SKIPPED):
        trained.step(spoilt=NAN)
    with pytest.raises(NonFiniteError, match=f"step {2 * MOST_SKIPPED + 2}: the norm"):
        trained.step(spoilt=NAN)


def test_bf16_neither_waits_for_the_norm_nor_skips():
    config = WeftConfig()
    config.train.precision = Precision.bf16
    assert deepspeed_config(config, config.pipeline.stages)["bf16"] == {"enabled": True, "check_grad_overflow": False}
