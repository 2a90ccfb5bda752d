"""The memory of weights, gradients and optimiser state: predicted, and what the engine's parts allocate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import peft
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.optimization import Adafactor as TransformersAdafactor

from tests.engine.zero.replicas import whole_step
from tests.shapes import sizes
from weft.comm.channel import Completed
from weft.conf.schema import (
    ClusterConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    OptimizerKind,
    OptimizerState,
    ParallelConfig,
    PipelineConfig,
    PlacementKind,
    Precision,
    Quantization,
    ScheduleKind,
    TrainConfig,
    WeftConfig,
    ZeroConfig,
)
from weft.engine.deepspeed.construction import parameter_groups
from weft.engine.models.hidden_matrices import tag
from weft.engine.parallel.axis import Alone, AxisGroups
from weft.engine.planning.gathering import facts_before_start
from weft.engine.planning.run_plan import plan_run
from weft.engine.precision import DTYPES, compute_in, exact_value
from weft.engine.stages.cutting.from_model import stages_from_model
from weft.engine.stages.files.adapter import exported_frozen
from weft.engine.stages.files.loading import build_model, load_hf_config, load_stages
from weft.engine.zero import Bf16AdamW, Collectives, Lamb, ShardedOptimizer, Sharding, int8_adamw
from weft.engine.zero.muon import Muon

SHAPE = sizes(hidden=64, inner=128, layers=4, heads=4, groups=2, words=512)
ADAPTERS = LoraConfig(enabled=True)
WIDE = LoraConfig(enabled=True, rank=16, target_modules=["all-linear"])
FOUR_BITS = LoraConfig(enabled=True, target_modules=["all-linear"], quantize=Quantization.nf4)
PLAIN_SCALES = LoraConfig(enabled=True, target_modules=["q_proj"], quantize=Quantization.fp4, double_quantize=False)
LATE = LoraConfig(enabled=True, target_modules=["model.layers.3.self_attn.q_proj"])
BF16, INT8 = OptimizerState.bf16, OptimizerState.int8
SGD, LAMB, MUON = OptimizerKind.sgd, OptimizerKind.lamb, OptimizerKind.muon


@dataclass(frozen=True, kw_only=True)
class Case:
    lora: LoraConfig | None = None
    given: str = ""
    stages: int = 2
    fold: bool = False
    tied: bool = False
    zero: int = 0
    replicas: int = 1
    tensor: int = 1
    precision: Precision = Precision.fp32
    kind: OptimizerKind = OptimizerKind.adamw
    state: OptimizerState = OptimizerState.fp32
    momentum: float = 0.9
    passed: Callable[..., torch.optim.Optimizer] | None = None

    def config(self, folder) -> WeftConfig:
        shape = SHAPE | {"tie_word_embeddings": self.tied}
        config = WeftConfig(
            model=ModelConfig(overrides=shape, lora=self.lora or LoraConfig()),
            pipeline=PipelineConfig(
                stages=self.stages,
                microbatches=4,
                placement=PlacementKind.fold if self.fold else PlacementKind.straight,
                schedule=ScheduleKind.zbv if self.fold else ScheduleKind["1f1b"],
            ),
            cluster=ClusterConfig(ranks=self.stages * self.replicas * self.tensor),
            parallel=ParallelConfig(tensor=self.tensor),
            zero=ZeroConfig(stage=self.zero),
            optimizer=OptimizerConfig(kind=self.kind, state=self.state, betas=[self.momentum, 0.95]),
            train=TrainConfig(precision=self.precision),
        )
        if config.model.lora.quantize is not Quantization.none:
            pytest.importorskip("bitsandbytes")
            build_model(ModelConfig(overrides=shape), dtype=torch.float32, seed=0).save_pretrained(folder / "base")
            config.model.path, config.model.overrides = str(folder / "base"), {}
        config.data.sequence_length = 16
        config.data.cache_dir = str(folder)
        return config


class HalfAdam(torch.optim.Optimizer):
    """Keeps two moments of 8 bits, and a scale for every 256 weights, as 8-bit Adam does."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                moments = {name: torch.zeros(weight.numel(), dtype=torch.uint8) for name in ("first", "second")}
                scales = {f"{name} scale": torch.zeros(-(-weight.numel() // 256)) for name in moments}
                self.state[weight] = {**moments, **scales}


class SmallIn32Bit(HalfAdam):
    """Keeps two fp32 moments of weights of fewer than 4096 elements, as bitsandbytes does."""

    def step(self):
        super().step()
        for weight, state in self.state.items():
            if weight.numel() < 4096:
                state.clear()
                state.update(first=torch.zeros(weight.numel()), second=torch.zeros(weight.numel()))


def eight_bit_adam(params) -> torch.optim.Optimizer:
    """Return AdamW of bitsandbytes. Its state is fp32 for weights of fewer than 4096 elements."""
    return pytest.importorskip("bitsandbytes").optim.AdamW8bit(params)


CASES = {
    "all weights": Case(),
    "tied weights of one rank": Case(tied=True, stages=1),
    "tied weights of a fold": Case(tied=True, fold=True),
    "tied weights of two ranks": Case(tied=True),
    "adapters": Case(lora=ADAPTERS),
    "adapters, every matrix, ZeRO": Case(lora=WIDE, zero=1, replicas=2),
    "adapters, bf16": Case(lora=WIDE, precision=Precision.bf16),
    "adapters, bf16, ZeRO": Case(lora=WIDE, precision=Precision.bf16, zero=2, replicas=2),
    "adapters of one stage": Case(lora=LATE, stages=4),
    "adapters, 4 bits": Case(lora=FOUR_BITS),
    "adapters, 4 bits, bf16": Case(lora=PLAIN_SCALES, precision=Precision.bf16, tied=True),
    "adapters, 4 bits, ZeRO": Case(lora=FOUR_BITS, zero=2, replicas=2),
    "adapters, tensor group": Case(lora=WIDE, tensor=2),
    "adapters, tied weights of a fold": Case(lora=ADAPTERS, tied=True, fold=True),
    "frozen layers": Case(given="frozen"),
    "frozen embedding, tied": Case(given="embedding", tied=True, stages=1),
    "frozen layers, bf16": Case(given="frozen", precision=Precision.bf16),
    "modules to save": Case(given="modules_to_save"),
    "modules to save, bf16": Case(given="modules_to_save", precision=Precision.bf16, zero=1, replicas=2),
    "sgd with momentum": Case(kind=SGD),
    "sgd": Case(kind=SGD, momentum=0.0),
    "sgd, bf16, adapters": Case(kind=SGD, momentum=0.0, precision=Precision.bf16, lora=WIDE),
    "lamb": Case(kind=LAMB, lora=WIDE),
    "muon": Case(kind=MUON),
    "muon, ZeRO": Case(kind=MUON, zero=1, replicas=2),
    "muon, bf16, adapters, ZeRO": Case(kind=MUON, zero=2, replicas=2, precision=Precision.bf16, lora=WIDE),
    "bf16 moments": Case(state=BF16),
    "bf16 moments, bf16, adapters, ZeRO": Case(state=BF16, precision=Precision.bf16, lora=WIDE, zero=2, replicas=2),
    "8-bit moments": Case(state=INT8),
    "8-bit moments, bf16, adapters": Case(state=INT8, precision=Precision.bf16, lora=WIDE),
    "a caller's Adafactor": Case(passed=torch.optim.Adafactor),
    "a caller's Adafactor, ZeRO": Case(passed=torch.optim.Adafactor, zero=1, replicas=2),
    "a caller's Adafactor, ZeRO, one replica": Case(passed=torch.optim.Adafactor, zero=1, stages=4),
    "transformers' Adafactor": Case(passed=TransformersAdafactor),
    "a caller's RMSprop": Case(passed=torch.optim.RMSprop, precision=Precision.bf16),
    "a caller's AdamW with 2 bytes a weight": Case(passed=HalfAdam, zero=2, replicas=2),
    "bitsandbytes' AdamW": Case(passed=eight_bit_adam),
    "bitsandbytes' AdamW, ZeRO, adapters": Case(passed=eight_bit_adam, zero=1, replicas=2, lora=WIDE),
    "bitsandbytes' AdamW, adapters": Case(passed=eight_bit_adam, lora=WIDE),
}


def given_model(case: Case, config: WeftConfig) -> nn.Module | None:
    if not case.given:
        return None
    model = AutoModelForCausalLM.from_config(load_hf_config(config.model))
    if case.given == "modules_to_save":
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    parts = [model.model.embed_tokens, *(model.model.layers[:2] if case.given == "frozen" else ())]
    for part in parts:
        part.requires_grad_(False)
    return model


class Unsent(Collectives):
    """Collectives of one replica of several that sends nothing."""

    def _start(self, over: Any, primitive: Any, source: Tensor, target: Tensor) -> Completed:
        return Completed(target)


def optimizer_of(case: Case, config: WeftConfig, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    groups = parameter_groups(named, 0.1)
    if config.optimizer.kind is MUON:
        tag(named)
        return Muon(groups, {})
    if config.optimizer.state is BF16:
        return Bf16AdamW(groups)
    if config.optimizer.state is INT8:
        int8_adamw.tag(named)
        return int8_adamw.Int8AdamW(groups)
    if case.passed is not None:
        return case.passed([{"params": group["params"]} for group in groups])
    if config.optimizer.kind is SGD:
        return torch.optim.SGD(groups, lr=0.1, momentum=config.optimizer.betas[0])
    return (Lamb if config.optimizer.kind is LAMB else torch.optim.AdamW)(groups)


def num_bytes(tensors: Iterable[Tensor | None]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def scales(parameter: nn.Parameter) -> Iterator[Tensor]:
    """Yield the tensors with which bitsandbytes scales a 4-bit weight."""
    state = getattr(parameter, "quant_state", None)
    while state is not None:
        yield from (state.absmax, state.code)
        state = state.state2


def allocated(
    case: Case, config: WeftConfig, model: nn.Module | None, plan, rank: int, replica: int = 0
) -> tuple[int, int, int]:
    """Bytes of weights, of gradients, of masters and optimiser state that a rank has after a step."""
    held, dtype = plan.placement.rank_stages[rank], DTYPES[config.train.precision]
    axes = AxisGroups(tensor=Alone("tensor", case.tensor))
    if model is None:
        stages = load_stages(config.model, plan.split, held, dtype=dtype, seed=0, axes=axes, exact=True)
    else:
        stages = stages_from_model(model, plan.split, held, axes)
    named = {parameter: name for stage in stages for name, parameter in stage.named_global_parameters()}
    if dtype is not torch.float32:
        compute_in(named, dtype, {p for stage in stages for p in exported_frozen(stage)})
    joint = Unsent(num_replicas=case.replicas * case.tensor, replica=replica * case.tensor)
    basic = optimizer_of(case, config, [(name, p) for p, name in named.items()])
    sharding = Sharding(stages, config.zero, Unsent(num_replicas=case.replicas, replica=replica, joint=joint))
    optimizer = ShardedOptimizer(basic, sharding, loss_scaler=LossScaler(1.0), clip=lambda: 0.0, check_overflow=False)
    for bucket in sharding.trained:
        for member in bucket.members:
            member.parameter.grad = torch.ones_like(member.parameter)
        bucket.accumulate()
    gradients = num_bytes(bucket._buffer for bucket in sharding.trained)
    for bucket in sharding.trained:
        bucket.reduce()
    whole_step(optimizer)
    weights = num_bytes([*named, *map(exact_value, named), *(part for p in named for part in scales(p))])
    masters = [bucket._master for bucket in sharding.trained if bucket.has_masters]
    state = [x for per in basic.state.values() for x in per.values() if isinstance(x, Tensor) and x.numel() > 1]
    return weights, gradients, num_bytes(masters) + num_bytes(state)


@pytest.mark.parametrize("lora", [None, WIDE])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_states_of_small_pieces_are_predicted_to_a_hundredth(replicas, zero, lora, tmp_path):
    """On average over the replicas, whose shards cut parameters at different places."""
    case = Case(passed=SmallIn32Bit, zero=zero, replicas=replicas, lora=lora)
    config = case.config(tmp_path)
    plan = plan_run(config, facts_before_start(config, load_hf_config(config.model), optimizer=case.passed))
    for rank, memory in enumerate(plan.memory):
        states = [allocated(case, config, None, plan, rank, replica)[2] for replica in range(replicas)]
        assert memory.zero.optimizer == pytest.approx(sum(states) / replicas, rel=0.01), rank


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
@pytest.mark.parametrize(("zero", "replicas"), [(1, 2), (2, 3), (3, 2)])
def test_8_bit_moments_of_shards_are_predicted(zero, replicas, precision, tmp_path):
    """On average over the replicas, of which some hold more of the small parameters, whose moments are fp32."""
    case = Case(state=INT8, zero=zero, replicas=replicas, precision=precision)
    config = case.config(tmp_path)
    plan = plan_run(config, facts_before_start(config, load_hf_config(config.model)))
    for rank, memory in enumerate(plan.memory):
        measured = [allocated(case, config, None, plan, rank, replica) for replica in range(replicas)]
        weights, gradients, states = (sum(each) / replicas for each in zip(*measured, strict=True))
        assert memory.zero.optimizer == pytest.approx(states, rel=0.02), rank
        assert memory.zero.gradients == pytest.approx(gradients, rel=0.02), rank
        assert zero == 3 or memory.zero.weights == pytest.approx(weights, rel=0.02), rank


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_padding_of_shards_with_whole_matrices_is_predicted(zero, tmp_path):
    """More replicas than a layer has matrices: some own none of it, and pad their shard of a bucket."""
    case = Case(kind=MUON, zero=zero, replicas=10, stages=1, precision=Precision.bf16)
    config = case.config(tmp_path)
    plan = plan_run(config, facts_before_start(config, load_hf_config(config.model)))
    measured = [allocated(case, config, None, plan, 0, replica) for replica in range(case.replicas)]
    weights, gradients, states = (sum(each) / case.replicas for each in zip(*measured, strict=True))
    (memory,) = plan.memory
    assert memory.zero.optimizer == pytest.approx(states, rel=0.01)
    assert memory.zero.gradients == pytest.approx(gradients, rel=0.01)
    assert zero == 3 or memory.zero.weights == pytest.approx(weights, rel=0.01)
    assert plan.facts.padding > 0


@pytest.mark.parametrize("name", CASES)
def test_predicted_states_are_what_the_engine_allocates(name, tmp_path):
    case = CASES[name]
    config = case.config(tmp_path)
    model = given_model(case, config)
    facts = facts_before_start(config, load_hf_config(config.model), model=model, optimizer=case.passed)
    plan = plan_run(config, facts)
    for rank, memory in enumerate(plan.memory):
        whole = given_model(case, config)
        measured = allocated(case, config, whole, plan, rank)
        predicted = memory.zero.weights, memory.zero.gradients, memory.zero.optimizer
        # The final norm is counted with the embedding: a kilobyte at most. The state of a caller's optimiser is the
        # mean of all parameters, but may be another on some ranks, and for parameters that shards cut.
        bound = 1024 if case.passed is None else 0.03 * sum(measured)
        assert predicted == pytest.approx(measured, rel=0.1, abs=bound), (name, rank)
