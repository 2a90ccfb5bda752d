"""Causal architectures with layers shared out, executed by every kind of schedule that splits backwards or pairs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from types import MappingProxyType

import peft
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.verification.architectures import ArchitectureResult, Support, reason_of, result_of
from benchmarks.verification.shared_architectures import examine_shared, shared_text, small_model
from weft.conf.schema import ZeroConfig
from weft.engine.execution.compute import Compute
from weft.engine.execution.executor import Executor
from weft.engine.execution.step_state import LabelCount, StepState
from weft.engine.models.batch import Batch, attach_rows_of, count_label_tokens
from weft.engine.models.skeleton import cuttable_layers, hf_model
from weft.engine.parallel.axis import AxisGroups, UnshareableError
from weft.engine.stages.checking.axis_check import TOLERANCE
from weft.engine.stages.checking.comparison import Outcome, difference, whole_outcome
from weft.engine.stages.checking.members import members_outcome
from weft.engine.stages.checking.self_check import tried_batch
from weft.engine.stages.cutting.stage import Stage
from weft.engine.strands.strand_pairs import StrandPairs
from weft.engine.zero import Sharding
from weft.pipeline.action import Op, is_pair, parse_slot
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower
from weft.pipeline.order import execution_order
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule
from weft.pipeline.strands.pairs import pair_name
from weft.pipeline.strands.plan import SegmentPlan, Step

KINDS = ("zbv", "dualpipev", "auto")
STAGES, MICROBATCHES = 4, 4
BY_HAND = "0F0 0I0 0F1 0W0 0I1 0F2 0W1 0B2 0F3 0I3 0W3"
"""The schedule of an architecture that stays on one stage."""
PLAN = SegmentPlan(tuple(islice(cycle((Step.forward, Step.backward, Step.weight)), 300)))
"""The plan of each pair: strands alternate, and weight gradients are computed between them."""
CPU = torch.device("cpu")
SEED = 1
"""Seed of the adapters' first weights."""


def scheduled_text(sizes: Mapping[str, int]) -> str:
    """Return `ArchitectureResult.shared` for ranks along each axis under schedules: ``tensor 2, schedules``."""
    return f"{shared_text(sizes)}, schedules"


def examine_scheduled(
    model_type: str, sizes: Mapping[str, int], known: Mapping[str, ArchitectureResult] = MappingProxyType({})
) -> ArchitectureResult:
    """Try one architecture in this process with two members of an axis, under each of `KINDS`.

    What Hugging Face's or peft's own forward makes of the whole model is compared with members that execute the
    schedule, with ZeRO's buckets: of the model with all biases that it can have, and with adapters, saved modules and
    a resized vocabulary.

    Args:
        known: results of architectures without schedules.
    """
    shared = scheduled_text(sizes)
    torch.manual_seed(SEED)
    logging.getLogger("weft.engine.strands.pair").setLevel(logging.ERROR)  # `PLAN` is no pair's own
    plain = known.get(model_type) or examine_shared(model_type, sizes)
    if plain.support is not Support.exact:
        return ArchitectureResult(**vars(plain) | {"shared": shared})

    found = partial(result_of, model_type, shared=shared)
    used = {axis: size for axis, size in sizes.items() if size > 1}
    notes: list[str] = []
    for what, make in (("biases", lambda model: model), ("adapters", adapted)):
        try:
            model = make(small_model(model_type, sizes.get("tensor", 1)))
        except Exception as error:  # any: it is Hugging Face's or peft's own code
            notes.append(f"without {what}: {reason_of(error)}")
            continue
        stages = _num_stages(model, used)
        if stages == 1 and what == "biases":
            notes.append("on one stage")
        for kind in KINDS if stages > 1 else ("split",):
            try:
                wrong = _difference(model, used, stages, kind)
            except UnshareableError as error:
                notes.append(f"without {what}: {reason_of(error)}")
                break
            except Exception as error:  # any: it is Hugging Face's or the model's own code
                wrong = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if wrong:
                try:
                    exact = not _difference(_in_fp64(model), used, stages, kind)
                except Exception:  # any: some models and kernels have no fp64
                    exact = False
                if not exact:
                    return found(Support.wrong, f"{kind}, {what}: {wrong}")
                notes.append(f"{what} under {kind} in fp64, because rounding in fp32 is larger than the tolerance")
    return found(Support.exact, "; ".join(notes))


def adapted(model: PreTrainedModel) -> nn.Module:
    """Return the model with adapters on all matrices, and a resized vocabulary that is fully trained."""
    model.resize_token_embeddings(model.get_input_embeddings().weight.shape[0] + 8, mean_resizing=False)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = [name.rpartition(".")[2] for name, module in model.named_modules() if any(module is end for end in ends)]
    routers = [  # peft's adapters take a linear layer's output for a tensor, which these do not return
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
    ]
    adapters = {"target_modules": "all-linear", "exclude_modules": routers or None, "modules_to_save": names}
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, bias="all", **adapters))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return made.train()


def _in_fp64(model: nn.Module) -> nn.Module:
    """Return a copy in fp64, so that rounding is negligible and only errors differ from the whole model."""
    precise = copy.deepcopy(model).double()
    whole = hf_model(precise)
    if whole._can_set_experts_implementation():
        whole.set_experts_implementation("eager")  # torch has no grouped product in fp64
    return precise


def schedule_of(kind: str, num_stages: int) -> Schedule:
    """Return a schedule of two pipeline ranks as one row that a single rank can execute."""
    if num_stages == 1:
        slots = tuple(map(parse_slot, BY_HAND.split()))
    else:
        schedule = generate(kind, Placement.fold(2), MICROBATCHES, search_seconds=0.2)
        slots = tuple(visit.slot for visit in execution_order(schedule))
    return lower(Schedule(kind, Placement.interleaved(1, num_stages), MICROBATCHES, (slots,)))


def _num_stages(model: nn.Module, sizes: Mapping[str, int]) -> int:
    """Return the number of stages of the schedules, or 1 if the architecture does not support it."""
    whole = hf_model(model)
    try:
        cuttable_layers(whole)
        members_outcome(whole, _batches(whole), torch.tensor(1), sizes, STAGES, train=_make_only)
    except Exception:  # any: `examine_shared` reports errors in stages
        return 1
    return STAGES


def _make_only(
    make: Callable[[AxisGroups], list[Stage]], axes: AxisGroups, batches: Sequence[Batch], num_items: Tensor
) -> tuple[list[Stage], Outcome]:
    return make(axes), Outcome(torch.zeros(1, 1, 1, 1), torch.zeros(()), {})


def _batches(whole: PreTrainedModel) -> Sequence[Batch]:
    """Return four micro-batches, one of which has padding."""
    plain = tried_batch(whole)
    rows: list[dict[str, Tensor]] = [
        {name: tensor[row % 2 :][:1].clone() for name, tensor in plain.items()} for row in range(MICROBATCHES)
    ]
    rows[-1]["attention_mask"] = torch.ones_like(rows[-1]["input_ids"])
    rows[-1]["attention_mask"][:, -3:], rows[-1]["labels"][:, -3:] = 0, -100
    for row in rows:
        attach_rows_of(row["position_ids"], row["position_ids"])
    return rows


def _difference(model: nn.Module, sizes: Mapping[str, int], num_stages: int, kind: str) -> str:
    """Return the difference between members under a schedule and the whole model, or empty if none."""
    batches = _batches(hf_model(model))
    items = torch.tensor(sum(map(count_label_tokens, batches)))
    schedule = schedule_of(kind, num_stages)
    model.zero_grad()
    want = whole_outcome(model, batches, items)
    want = Outcome(torch.zeros(()), want.loss, {name: grad.clone() for name, grad in want.gradients.items()})
    model.zero_grad()

    got = members_outcome(copy.deepcopy(model), batches, items, sizes, num_stages, train=partial(execute, schedule))
    off = difference(Outcome(torch.zeros(()), got.loss, got.gradients), want)
    parts = {"loss": off.loss, f"gradient of {off.gradient}": off.gradients}
    return ", ".join(f"{part} by {much:.2g}" for part, much in parts.items() if not much <= TOLERANCE)


def execute(
    schedule: Schedule,
    make: Callable[[AxisGroups], list[Stage]],
    axes: AxisGroups,
    batches: Sequence[Batch],
    num_items: Tensor,
) -> tuple[list[Stage], Outcome]:
    """Execute a step on one member that holds all stages, its strand pairs interleaved."""
    pairs = StrandPairs.open(axes, CPU)
    made = make(pairs.axes)
    stages = {stage.index: stage for stage in made}
    sharding = Sharding(made, ZeroConfig(stage=0, reduce_bucket_size=5000))
    sharding.overlaps = True  # as with replicas, where a bucket must not be reduced too soon
    pairs.plans |= {pair_name(slot): PLAN for slot in schedule.rows[0] if is_pair(slot)}
    ignored = {op: (lambda action: None) for op in (Op.UNSHARD, Op.RESHARD)}
    executor = Executor(
        rank=0,
        stages=stages,
        compute=Compute(
            stages=stages, placement=schedule.placement, seed_gradient=torch.ones_like, around=sharding.around
        ),
        send_to={},
        receive_from={},
        receive_ahead=1,
        stage_wide={**ignored, Op.REDUCE_GRAD: lambda action: sharding.reduce(action.stage)},
        debug=True,
        pairs=pairs,
    )
    state = StepState(batches=list(batches), training=True, num_items=LabelCount(num_items, None))
    sharding.begin_step(list(schedule.actions(0)))
    try:
        executor.run(schedule, state)
        sharding.finish_gradients()
    finally:
        pairs.close()
        sharding.close()
    loss = torch.stack([state.losses[number] for number in sorted(state.losses)]).sum()
    return made, Outcome(torch.zeros(len(batches), 1, 1, 1), loss, dict(_gradients(sharding)))


def _gradients(sharding: Sharding) -> Iterator[tuple[str, Tensor]]:
    for bucket in sharding.trained:
        for member in bucket.members:
            yield member.name, member.of(bucket.gradient).clone()
