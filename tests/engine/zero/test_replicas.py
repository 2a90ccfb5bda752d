"""Chunks over several replicas learn what one process learns, and hold no more than their ZeRO stage says."""

import threading

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from torch import nn
from torch.optim import SGD, AdamW

from tests.engine.zero.replicas import MeetingOptimizer, Meetings, SmallStage, in_threads, small_muon, whole_step
from weft.conf.schema import ZeroConfig
from weft.engine.backward import SplitBackward
from weft.engine.zero import Lamb, Sharding, muon
from weft.pipeline.action import Action, Op

STEPS, MICROBATCHES = 3, 6
"""Micro-batches of a step, over all replicas."""
SETTINGS = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1}


def ids(step, microbatch):
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    return torch.randint(11, (2, 5), generator=generator)


class Unused(SmallStage):
    """A model of which each micro-batch uses one of four experts, which its ids choose; another weight is never
    used."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.never = nn.Parameter(torch.ones(6, 6))
        with torch.no_grad():
            for number, expert in enumerate(self.experts):
                expert.weight.copy_(torch.eye(6) * (1 + number / 4))
                expert.bias.fill_(number / 8)

    def hidden(self, ids):
        return self.experts[int(ids.sum()) % 4](super().hidden(ids))


def expected(make, clip, *, tied=False, frozen=(), kind=SmallStage):
    """Weights after each step, and norms, of one process."""
    model = kind(tied=tied)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    weights, norms = [], []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            model(ids(step, microbatch)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or 1e30)))
        optimizer.step()
        optimizer.zero_grad()
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return weights, norms


def resident(sharding):
    """Elements of weights and gradients that are held now."""
    storages = {p.untyped_storage() for _, p in sharding._named.items()}
    return sum(storage.nbytes() for storage in storages) // 4


class Replica:
    """A replica's model, buckets and optimiser."""

    def __init__(
        self, meeting, number, zero, make, *, clip=0.0, scale=1.0, tied=False, frozen=(), split=False, kind=SmallStage
    ):
        self.number, self.count, self.split, self.scale = number, meeting.count, split, scale
        self.model = kind(tied=tied)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        optimizer = make([p for p in self.model.parameters() if p.requires_grad])
        self.collectives = Meetings(meeting, number)
        self.sharding = Sharding([self.model], zero, self.collectives)
        self.backward = SplitBackward(self.model)
        self.optimizer = MeetingOptimizer(
            optimizer, self.sharding, loss_scaler=LossScaler(scale), clip=lambda: clip, check_overflow=False
        )

    def step(self, step):
        mine = range(self.number, MICROBATCHES, self.count)
        ends = (Op.I, Op.W) if self.split else (Op.B,)
        row = [Action(op, 0, m) for m in mine for op in (Op.F, *ends)]
        self.sharding.begin_step(row)
        for m in mine:
            around = self.sharding.around
            self.sharding.unshard(0)
            with around(Action(Op.F, 0, m)):
                loss, saved = self.backward.forward(lambda m=m: self.model(ids(step, m)), None, split=self.split)
            self.sharding.reshard(0)
            self.sharding.unshard(0)
            with around(Action(ends[0], 0, m)):
                run = self.backward.input_backward if self.split else self.backward.full_backward
                run(saved, torch.full_like(loss, self.scale))
            if self.split:
                with around(Action(Op.W, 0, m)):
                    self.backward.weight_backward(saved)
            self.sharding.reshard(0)
        self.sharding.reduce(0)
        whole_step(self.optimizer)
        return float(self.optimizer.gradient_norm)

    def weights(self):
        with self.sharding.full_weights():
            return {name: p.detach().clone() for name, p in self.model.named_parameters()}


CASES = {
    "adamw": (lambda params: AdamW(params, **SETTINGS), {}),
    "clipped": (lambda params: AdamW(params, **SETTINGS), {"clip": 0.5}),
    "scaled": (lambda params: SGD(params, lr=0.02, momentum=0.9), {"scale": 8.0}),
    "scaled and clipped": (lambda params: SGD(params, lr=0.02), {"scale": 8.0, "clip": 3.0}),
    "lamb": (lambda params: Lamb(params, **SETTINGS), {"clip": 0.5}),
    "tied": (lambda params: AdamW(params, **SETTINGS), {"tied": True, "clip": 0.5}),
    "frozen": (lambda params: AdamW(params, **SETTINGS), {"frozen": ("layers.1.0.weight", "embed.weight")}),
    "split": (lambda params: AdamW(params, **SETTINGS), {"split": True}),
    "unused weights": (lambda params: AdamW(params, **SETTINGS), {"kind": Unused}),
    "unused weights, split": (lambda params: AdamW(params, **SETTINGS), {"kind": Unused, "split": True, "clip": 0.5}),
    "unused weights, muon": (small_muon, {"kind": Unused, "scale": 8.0, "clip": 0.5}),
    "unused weights, lamb": (lambda params: Lamb(params, **SETTINGS), {"kind": Unused}),
}


def newton_schulz(update, steps):
    """DeepSpeed's iterations, which round to bf16 and so turn the last bit of a gradient into 1 %, in fp64."""
    x = update.double() / (update.double().norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.float()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("stage", range(4))
def test_replicas_learn_what_one_process_learns(stage, replicas, name, monkeypatch):
    monkeypatch.setattr(muon, "NEWTON_SCHULZ", dict.fromkeys(muon.NEWTON_SCHULZ, newton_schulz))
    make, more = CASES[name]
    clip = more.get("clip", 0.0)
    alike = {key: more[key] for key in ("tied", "frozen", "kind") if key in more}
    weights, norms = expected(make, clip, **alike)
    buckets = {"reduce_bucket_size": 90, "allgather_bucket_size": 90}
    every = {"reduce_every": 1} if stage >= 2 and name in ("clipped", "split", "unused weights") else {}
    persistent = {"param_persistence_threshold": 6, "model_persistence_threshold": 30} if name == "tied" else {}
    zero = ZeroConfig(stage=stage, **buckets, **every, **persistent)

    def run(meeting, number):
        replica = Replica(meeting, number, zero, make, **more)
        found = []
        for step in range(STEPS):
            norm = replica.step(step)
            assert all(p.grad is None for p in replica.model.parameters())
            assert all(fragment.tensor.grad is None for fragment in replica.sharding.fragments())
            found.append((norm, replica.weights()))
        return found

    for found in in_threads(replicas, run):
        for (norm, after), (expected_norm, expected_after) in zip(found, zip(norms, weights, strict=True), strict=True):
            assert norm == pytest.approx(expected_norm, rel=1e-5)
            for key, weight in after.items():
                torch.testing.assert_close(weight, expected_after[key], rtol=1e-5, atol=1e-6)


def test_weights_in_16_bits_have_a_master_copy():
    """Steps too small for bf16 add up in it."""

    def run(meeting, number):
        model = SmallStage(dtype=torch.bfloat16)
        optimizer = SGD(model.parameters(), lr=1e-6)
        sharding = Sharding([model], ZeroConfig(stage=2), Meetings(meeting, number))
        sharded = MeetingOptimizer(
            optimizer, sharding, loss_scaler=LossScaler(1.0), clip=lambda: 0.0, check_overflow=False
        )
        masters = [fragment.tensor.clone() for fragment in sharding.fragments()]
        for _ in range(3):
            sharding.begin_step([Action(Op.F, 0, 0), Action(Op.B, 0, 0)])
            with sharding.around(Action(Op.F, 0, 0)):
                loss = model(ids(0, 0))
            with sharding.around(Action(Op.B, 0, 0)):
                loss.backward()
            sharding.reduce(0)
            whole_step(sharded)
        sharding.settle()
        for fragment, before in zip(sharding.fragments(), masters, strict=True):
            assert fragment.tensor.dtype is torch.float32
            model_part = fragment.parameter.detach().flatten()[fragment.start :][: fragment.tensor.numel()]
            assert torch.equal(model_part, fragment.tensor.flatten().bfloat16())
            if fragment.name == "head.weight":
                assert (fragment.tensor != before).any()
        return True

    assert all(in_threads(2, run))


def test_what_stays_in_memory_between_steps():
    """At stage 3 a replica keeps its share of the weights, and gives the rest back behind each block."""
    whole = sum(p.numel() for p in SmallStage().parameters())
    kept = {}
    for stage in (2, 3):

        def run(meeting, number, stage=stage):
            replica = Replica(meeting, number, ZeroConfig(stage=stage, reduce_bucket_size=60), CASES["adamw"][0])
            highest = []
            for layer in replica.model.layers:
                layer.register_forward_hook(lambda *_: highest.append(resident(replica.sharding)))
            replica.step(0)
            for bucket in replica.sharding.buckets:
                bucket.release()
            assert all(bucket._gradient is None and bucket._buffer is None for bucket in replica.sharding.trained)
            return resident(replica.sharding), max(highest)

        kept[stage] = in_threads(2, run)
    for after, highest in kept[2]:
        assert min(after, highest) >= whole
    for after, highest in kept[3]:
        assert after == 0
        assert highest < whole  # one block ahead, and none behind


def test_stage_3_gathers_each_block_for_each_computation_and_reduces_once():
    def run(meeting, number):
        replica = Replica(meeting, number, ZeroConfig(stage=3, reduce_bucket_size=60), CASES["adamw"][0])
        replica.collectives.started.clear()
        replica.step(0)
        return [name for name, _ in replica.collectives.started]

    for names in in_threads(2, run):
        assert names.count("reduce_scatter") == names.count("all_gather") // 6 > 1  # three micro-batches, twice each


def test_a_layout_by_position_is_refused():
    (replica,) = in_threads(1, lambda meeting, number: Replica(meeting, number, ZeroConfig(), CASES["adamw"][0]))
    with pytest.raises(RuntimeError, match="save_checkpoint"):
        replica.optimizer.state_dict()
    with pytest.raises(RuntimeError, match="save_checkpoint"):
        replica.optimizer.load_state_dict()


def test_a_thread_that_fails_ends_the_others():
    """The helper itself raises the error of a thread, and no thread waits for one that has ended."""

    def run(meeting, number):
        if number:
            raise ValueError("no luck")
        meeting.exchange(number, torch.zeros(1))

    before = threading.active_count()
    with pytest.raises(ValueError, match="no luck"):
        in_threads(2, run)
    assert threading.active_count() <= before


def test_stepped_weights_are_gathered_anew_although_the_old_ones_were_there():
    """Test stage 3 with weights still gathered, as after an evaluation."""

    def run(meeting, number):
        replica = Replica(meeting, number, ZeroConfig(stage=3, reduce_bucket_size=60), CASES["adamw"][0])
        for bucket in replica.sharding.buckets:
            bucket.wait()
        for fragment in replica.sharding.fragments():
            fragment.tensor.data.fill_(3.0)
        replica.sharding.publish()
        return all(bool((weight == 3.0).all()) for weight in replica.weights().values())

    assert all(in_threads(2, run))


@pytest.mark.parametrize("stage", range(4))
def test_frozen_weights_are_everyones_until_stage_3_shares_them_out(stage):
    """As a checkpoint has to know, which stores once what all replicas hold."""

    def run(meeting, number):
        frozen = ("layers.1.0.weight", "embed.weight")
        replica = Replica(meeting, number, ZeroConfig(stage=stage), CASES["adamw"][0], frozen=frozen)
        names = [fragment.name for fragment in replica.sharding.fragments() if not fragment.trained]
        held = {fragment.name: fragment for fragment in replica.sharding.fragments()}
        assert stage == 3 or sorted(names) == sorted(frozen)
        for name, fragment in held.items():
            assert fragment.trained == (name not in frozen)
            assert fragment.shared == (stage == 0 or (name in frozen and stage < 3))
            if fragment.shared:
                assert fragment.is_whole and fragment.start == 0

    in_threads(2, run)
