"""Traced segments equal what members that are threads really start, and in which order; and what is made of them."""

import copy
import threading
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from pytest import approx
from transformers import LlamaConfig, MistralConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig

from tests.engine.losses import own, smoothed
from tests.engine.parallel.members import micro_batches
from tests.shapes import sizes
from weft.conf.schema import ContextExchange, LoraConfig, SplitKind
from weft.engine.backward import SplitBackward
from weft.engine.models.batch import attach_rows_of
from weft.engine.models.lora import add_adapters
from weft.engine.models.objective import Minimised, Objective
from weft.engine.models.seeding import new_model
from weft.engine.models.skeleton import model_class
from weft.engine.models.tracing import trace_model
from weft.engine.parallel.axis import AxisGroups
from weft.engine.parallel.in_process import run_in_threads
from weft.engine.stages.cutting.context import part_of
from weft.engine.stages.cutting.from_model import stages_from_model
from weft.engine.stages.cutting.split import split_layers
from weft.engine.strands.tracing import trace_strands
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.search import search_stages
from weft.pipeline.strands.segments import LinkScope
from weft.pipeline.strands.work import Speed, Traffic

ROWS, LENGTH = 2, 16
SHAPE = sizes(hidden=32, inner=64, layers=4, heads=4, groups=2, words=96)
MODELS = {
    "llama": LlamaConfig(**SHAPE),
    "tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "mistral": MistralConfig(**SHAPE, sliding_window=5),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
}
CASES = [
    ("llama", {"tensor": 2}, False, 1),
    ("llama", {"tensor": 2}, True, 2),
    ("tied", {"tensor": 2}, False, 2),
    ("qwen3", {"tensor": 2}, False, 2),
    ("llama", {"context": 2}, False, 2),
    ("qwen3", {"context": 2}, True, 1),
    ("mixtral", {"expert": 2}, False, 2),
    ("mixtral", {"expert": 2}, True, 1),
    ("mixtral", {"tensor": 2}, False, 1),
    ("mixtral", {"context": 2}, False, 2),
]
CASES = [(*case, ContextExchange.gather) for case in CASES] + [
    ("llama", {"context": 4}, False, 2, ContextExchange.ring),
    ("qwen3", {"context": 2}, True, 1, ContextExchange.ring),
    ("mistral", {"context": 2}, False, 1, ContextExchange.ring),
]
CASES = [(*case, None) for case in CASES] + [
    (name, sizes, False, 2, ContextExchange.gather, objective)
    for name, sizes in (("llama", {"context": 2}), ("llama", {"tensor": 2}), ("mixtral", {"context": 2}))
    for objective in (smoothed, own)
]


@dataclass
class Logged:
    """An axis group that notes what it is asked for."""

    group: object
    log: list

    def __getattr__(self, name):
        return getattr(self.group, name)

    def _note(self, primitive, num_bytes):
        self.log.append(Traffic(self.group.axis, primitive, float(num_bytes)))

    def all_gather(self, shard):
        self._note("all_gather", shard.nbytes * self.group.size)
        return self.group.all_gather(shard)

    def reduce_scatter(self, tensor):
        self._note("reduce_scatter", tensor.nbytes)
        return self.group.reduce_scatter(tensor)

    def all_reduce(self, tensor):
        self._note("all_reduce", tensor.nbytes)
        return self.group.all_reduce(tensor)

    def maximum(self, tensor):
        self._note("all_reduce", tensor.nbytes)
        return self.group.maximum(tensor)

    def all_to_all(self, tensor, send, receive):
        self._note("all_to_all", tensor.nbytes)
        return self.group.all_to_all(tensor, send, receive)

    def shift(self, tensor):
        self._note("shift", tensor.nbytes)
        return self.group.shift(tensor)


def really_started(config, sizes, checkpointing, num_stages, exchange, loss):
    """By stage, what member 0 starts in a forward and in a backward, and of how many parameters the gradients wait."""
    config = copy.deepcopy(config)
    config._attn_implementation = "sdpa"
    model = new_model(model_class(config), config, dtype=torch.float32, seed=0).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    split, making = split_layers(config, num_stages, SplitKind.even), threading.Lock()
    batch, items = micro_batches(1, rows=ROWS, length=LENGTH)[0], torch.tensor(ROWS * LENGTH)

    def member(axes):
        log = []
        used = [axis for axis in ("tensor", "context", "expert") if getattr(axes, axis).size > 1]
        logged = AxisGroups(**{axis: Logged(getattr(axes, axis), log) for axis in used}, exchange=exchange)
        with making:
            stages = stages_from_model(copy.deepcopy(model), split, range(num_stages), logged)
        part = part_of(batch, axes.context, keep_whole=True)
        objective = Objective.of(loss) if loss is smoothed else Objective(loss)
        stages[-1].objective = None if loss is None else Minimised(objective)
        attach_rows_of(part["position_ids"], batch["position_ids"])
        hidden, forwards, found = None, [], []
        for stage in stages:
            before = None if hidden is None else hidden.detach().requires_grad_()
            split_backward = SplitBackward(stage)
            hidden, saved = split_backward.forward(lambda s=stage, b=before: s(b, part, items), before)
            forwards.append((split_backward, saved, list(log)))
            log.clear()
        gradient = torch.ones_like(hidden)
        for split_backward, saved, forward in reversed(forwards):
            gradient = split_backward.input_backward(saved, gradient)
            found.append((forward, list(log), len(saved.tape._deferred)))
            log.clear()
        return found[::-1]

    return run_in_threads(sizes, member)[0]


def comparable(traffic, *, sized):
    return [(t.axis, t.primitive, t.num_bytes) if sized else (t.axis, t.primitive) for t in traffic]


@pytest.mark.parametrize(("name", "sizes", "checkpointing", "num_stages", "exchange", "loss"), CASES)
def test_traced_collectives_are_those_that_run_in_their_order(name, sizes, checkpointing, num_stages, exchange, loss):
    config = MODELS[name]
    strands = trace_strands(
        config,
        sizes,
        exchange=exchange,
        microbatch_size=ROWS,
        sequence_length=LENGTH,
        checkpointing=checkpointing,
        dtype=torch.float32,
        own_loss=loss is None,
    )
    stage_of = strands.timed(Speed(1e9, 1e9), lambda traffic: traffic.num_bytes, lambda axis: LinkScope.inside_host)
    split = split_layers(config, num_stages, SplitKind.even)
    parts = [strands.before, *(strands.layers[kind] for kind in strands.order), strands.after]
    sized = "expert" not in sizes  # how many tokens go where depends on them
    started = really_started(config, sizes, checkpointing, num_stages, exchange, loss)
    for index, (forward, backward, kept) in enumerate(started):
        first, last = index == 0, index == num_stages - 1
        layers = split.layers[index]
        held = parts[layers[0] + (not first) : layers[-1] + 2 + last]
        traced = [s.traffic for part in held for s in part.forward if s.traffic]
        assert comparable(traced, sized=sized) == comparable(forward, sized=sized)
        traced = [s.traffic for part in reversed(held) for s in part.backward if s.traffic]
        assert comparable(traced, sized=sized) == comparable(backward, sized=sized)
        # A stage's strands have one segment more than collectives, and each weight gradient that waits.
        whole = stage_of(layers, first, last).whole
        assert len(whole.forward.segments) == len(forward) + 1
        assert len(whole.backward.segments) == len(backward) + 1
        assert len(whole.weights) == kept


@pytest.mark.parametrize("name", ["llama", "qwen3", "tied"])
def test_operations_are_those_that_the_planner_counts(name):
    """A forward's products occur once more for input gradients, and once more for weight gradients."""
    config = MODELS[name]
    strands = trace_strands(config, {}, microbatch_size=1, sequence_length=LENGTH)
    (layer,) = strands.layers
    assert strands.order == (0,) * config.num_hidden_layers
    flops = trace_model(config, LENGTH).layers[0]
    forward, backward = sum_of(layer.forward), sum_of(layer.backward)
    assert forward.product_flops == backward.product_flops == flops.matmul_flops
    assert forward.attention_flops == approx(flops.attention_flops)
    assert backward.attention_flops == approx(2.5 * flops.attention_flops)
    assert sum(work.product_flops for _, work in layer.weights) == flops.matmul_flops


@pytest.mark.parametrize("axis", ["tensor", "context", "expert"])
def test_members_share_the_work(axis):
    config = MODELS["mixtral"]
    alone, shared = (
        trace_strands(config, sizes, microbatch_size=1, sequence_length=LENGTH).layers[0] for sizes in ({}, {axis: 2})
    )
    share = sum_of(shared.forward).product_flops / sum_of(alone.forward).product_flops
    # Routers see all tokens of a tensor group; members of an expert group have micro-batches of their own.
    assert share == approx(1.0 if axis == "expert" else 0.5, rel=0.02)
    assert len(shared.weights) == len(alone.weights)


def test_checkpointing_adds_a_forward_to_the_backward():
    how = {"microbatch_size": 1, "sequence_length": LENGTH}
    traced = [trace_strands(MODELS["llama"], {"tensor": 2}, **how, checkpointing=on) for on in (False, True)]
    plain, again = (strands.layers[0] for strands in traced)
    assert plain.forward == again.forward
    forward = Counter(s.traffic for s in plain.forward if s.traffic)
    backward = Counter(s.traffic for s in plain.backward if s.traffic)
    more = Counter(s.traffic for s in again.backward if s.traffic) - backward
    # Nothing needs the last sum again, so torch stops before it.
    assert sum((forward - more).values()) == 1
    assert sum_of(again.backward).product_flops > sum_of(plain.backward).product_flops


def test_a_model_that_is_given_is_traced_as_it_trains():
    """With what is frozen and checkpointed in it, and left alone."""
    config, how = copy.deepcopy(MODELS["llama"]), {"microbatch_size": 1, "sequence_length": LENGTH}
    model = new_model(model_class(config), config, dtype=torch.bfloat16, seed=0)
    plain, again = (trace_strands(config, {"tensor": 2}, **how, checkpointing=on) for on in (False, True))
    assert trace_strands(model, {"tensor": 2}, **how) == plain
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert trace_strands(model, {"tensor": 2}, **how) == again
    model.model.layers[1].mlp.requires_grad_(False)
    partly = trace_strands(model, {"tensor": 2}, **how)
    assert partly.order == (0, 1, 0, 0) and len(partly.layers[1].weights) == len(partly.layers[0].weights) - 3
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.parametrize("given", [False, True])
def test_strands_of_a_frozen_embedding_are_not_planned(given):
    config, lora = copy.deepcopy(MODELS["llama"]), LoraConfig(enabled=True, target_modules=["q_proj"])
    model = add_adapters(new_model(model_class(config), config, dtype=torch.bfloat16, seed=0), lora, seed=0)
    with pytest.raises(ValueError, match="the embedding of LlamaForCausalLM is frozen"):
        trace_strands(model if given else config, {"tensor": 2}, microbatch_size=1, sequence_length=LENGTH, lora=lora)


def test_layers_that_differ_stay_apart():
    """Every second layer of this one has experts, every other one has none."""
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2}
    config = Qwen3MoeConfig(**SHAPE, **experts)
    strands = trace_strands(config, {"expert": 2}, microbatch_size=1, sequence_length=LENGTH)
    assert strands.order == (0, 1, 0, 1)
    dense, sparse = strands.layers
    assert not any(segment.traffic for segment in (*dense.forward, *dense.backward))
    assert sum(segment.traffic is not None for segment in sparse.forward) == 3


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_a_traced_stage_gets_a_plan_that_hides_most(share):
    strands = trace_strands(MODELS["llama"], {"tensor": 2}, microbatch_size=1, sequence_length=LENGTH)

    def stage(each_s):
        timed = strands.timed(Speed(1e9, 1e9), lambda t: each_s * t.num_bytes, lambda _: LinkScope.inside_host)
        return timed(range(4), False, False)

    one = stage(1.0).whole
    stage = stage(one.compute_s * share / (1 - share) / one.comm_s)
    pair = stage.beside(stage)
    assert pair.comm_s / pair.sequential_s == approx(share)
    plan = search_stages(stage, stage, OverlapTable())
    plan.check(pair)
    assert plan.hidden(pair, OverlapTable()) > 0.8


def test_a_model_that_cannot_be_divided_is_refused():
    with pytest.raises(ValueError, match="cannot"):
        trace_strands(MODELS["llama"], {"tensor": 3}, microbatch_size=1, sequence_length=15)


def sum_of(segments):
    works = [segment.work for segment in segments]
    return sum(works[1:], works[0])
