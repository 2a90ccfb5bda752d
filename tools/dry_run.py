"""The dry run: prints the plan of a run before any process is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from weft.comm.collectives import CollectiveCosts
from weft.conf.batch import fit_batch
from weft.conf.host.terminal import printable
from weft.conf.hosts import world_size
from weft.conf.schema import DataKind, WeftConfig
from weft.conf.sources import sources_of
from weft.engine.data import check_source, encode_first, load_tokenizer, unused_lines, vocabulary_for
from weft.engine.data.documents import IGNORED, Document
from weft.engine.planning.estimates import rank_size
from weft.engine.planning.gathering import facts_before_start
from weft.engine.planning.memory import memory_checkpoint_bytes
from weft.engine.planning.recomputation import choice_text
from weft.engine.planning.run_plan import RunPlan, plan_run
from weft.engine.stages.files.loading import load_hf_config
from weft.pipeline.jitter import has_jitter
from weft.pipeline.text import bound_text, bytes_text, jitter_text
from weft.tools.preflight import INPUTS, check_outputs, check_stages, is_here, preflight

MOST_CHARACTERS = 800
"""Maximum number of characters of a row that are shown."""


def first_row_lines(config: WeftConfig) -> list[str]:
    """Return lines that show the first row of local data; empty for the embedded corpus and for data of a hub.

    If only some tokens count in the loss, they stand in «these».

    Raises:
        ValueError: the row cannot be read or encoded.
    """
    sources = sources_of(config.data)
    if config.data.kind is DataKind.corpus or not all(is_here(source.path) for source in sources):
        return []
    tokenizer = load_tokenizer(config.model, config.data)
    row = encode_first(config.data, tokenizer)
    unused = unused_lines(config.data, tokenizer, check_source(config.data))
    counted = sum(label != IGNORED for label in row.labels)
    which = "all of which count" if counted == len(row.ids) else f"of which {counted:,} count in the loss, «these»"
    text = _marked(row, tokenizer) if counted < len(row.ids) else printable(tokenizer.decode(row.ids))
    head = f"first row of {sources[0].path}: {len(row.ids):,} tokens, {which}"
    return [head, *_shortened(text).splitlines(), *unused]


def _marked(row: Document, tokenizer: PreTrainedTokenizerBase) -> str:
    parts = []
    at = 0
    for counts, labels in groupby(row.labels, lambda label: label != IGNORED):
        here = len(list(labels))
        text = printable(tokenizer.decode(row.ids[at : at + here]))
        parts.append(f"«{text}»" if counts else text)
        at += here
    return "".join(parts)


def _shortened(text: str) -> str:
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} [...] {text[-half:]}"


def expected_plan(config: WeftConfig, *, num_nodes: int = 1, collectives: CollectiveCosts | None = None) -> RunPlan:
    """Return the expected plan of a run before any rank starts, as if it ran on machines like this one.

    For a new model, this may set the vocabulary size in ``config.model.overrides``; see `settled_model`.

    Args:
        num_nodes, collectives: see `facts_before_start`.

    Raises:
        ValueError: the model or the data cannot be read, or no schedule is possible.
    """
    hf_config = settled_model(config)
    return plan_run(config, facts_before_start(config, hf_config, num_nodes=num_nodes, collectives=collectives))


def show(config: WeftConfig) -> None:
    """Print the lines of `report`.

    Raises:
        ValueError: see `report`.
    """
    for line in report(config):
        print(line, flush=True)


def report(config: WeftConfig) -> Iterator[str]:
    """Yield the first row of data, then stages, parameters and memory by rank, ZeRO's collectives and the step.

    The row comes first so that it is shown even if a run with this model would be refused.

    Raises:
        ValueError: see `expected_plan`; also for inputs that a run would refuse.
    """
    config = fit_batch(config, world_size(config.cluster))
    check_outputs(config)
    try:
        row = first_row_lines(config)
    except ValueError:
        preflight(config, checks=INPUTS)  # which says where
        raise
    yield from [*row, ""] if row else row
    preflight(config, checks=INPUTS)
    plan = expected_plan(config)
    _check_as_ranks(config, plan)
    schedule, known = plan.schedule(), plan.facts.sources
    whole = rank_size(plan.facts.model, plan.split, range(plan.split.num_stages))
    trained = "" if whole.trained == whole.parameters else f" ({whole.trained / 1e6:,.3g} M trained)"
    speed = (
        f"costs {known['stage_costs']}"
        if plan.facts.flops_per_s is None
        else f"at {plan.facts.flops_per_s / 1e12:.3g} TFLOP/s a rank ({known['flops_per_s']})"
    )
    yield from [
        f"{settled_model(config).model_type}, {whole.parameters / 1e6:,.1f} M parameters{trained}; {schedule.name}, "
        f"{plan.placement.num_stages} stages on {plan.placement.num_ranks} ranks x {plan.layout.replicas} replicas"
        f"{f' on {plan.layout.routes} routes' if plan.layout.routes > 1 else ''}{_inside(plan)}, "
        f"{schedule.num_microbatches} micro-batches of {config.train.microbatch_size} x "
        f"{config.data.sequence_length} tokens",
        "",
        *_rank_table(plan),
        *_context_lines(plan),
        *(["", *overlap_lines(config, plan)] if plan.layout.replicas > 1 else []),
        *_memory_checkpoint_lines(config, plan),
        "",
        f"predicted step {plan.step_s:.4g} s, bubbles {plan.bubble_share:.1%}, {speed}",
    ]
    if schedule.name == "auto":
        yield bound_text(schedule, plan.step_costs.for_cell(schedule.placement.pipelines), plan.step_s)
    yield from filter(None, (plan.cap_text(), choice_text(plan.recompute), *_jitter_lines(config, plan)))


def _jitter_lines(config: WeftConfig, plan: RunPlan) -> list[str]:
    """Return the step over sampled durations, and that of the schedule by the medians if the plan has another one."""
    schedule, costs = plan.schedule(), plan.step_costs.for_cell(plan.schedule().placement.pipelines)
    if not has_jitter(costs):
        return []
    lines = [f"with jitter: {jitter_text(schedule, costs)}"]
    if config.pipeline.jitter_samples:
        usual = replace(config, pipeline=replace(config.pipeline, jitter_samples=0))
        schedules = plan.schedules_for(usual, schedule.num_microbatches)
        lines.append(f"planned by the medians: {jitter_text(schedules[schedule.placement.pipelines], costs)}")
    return lines


def _check_as_ranks(config: WeftConfig, plan: RunPlan) -> None:
    """Run the checks of a small copy of the model that ranks run at their start."""
    from weft.engine.initialize import require_axes  # imports DeepSpeed

    if config.model.self_check:
        check_stages(config)
    require_axes(config, settled_model(config), plan.facts.exchange)


def _context_lines(plan: RunPlan) -> list[str]:
    """Return the lines about the exchange among ranks that share sequences."""
    if plan.layout.context == 1:
        return []
    return ["", f"parallel.context_exchange: {plan.facts.exchange.value} ({plan.facts.sources['exchange']})"]


def _memory_checkpoint_lines(config: WeftConfig, plan: RunPlan) -> list[str]:
    """Return lines about the host memory that memory checkpoints take."""
    if not config.checkpoint.memory_every:
        return []
    sizes = [rank_size(plan.facts.model, plan.split, held) for held in plan.placement.rank_stages]
    each = max(memory_checkpoint_bytes(size, config, plan.layout.lines) for size in sizes)
    return [
        "",
        f"memory checkpoints every {config.checkpoint.memory_every} steps: {bytes_text(each)} of the fullest rank, "
        f"twice in /dev/shm of its host and, if there are several hosts, twice on another",
    ]


def overlap_lines(config: WeftConfig, plan: RunPlan) -> list[str]:
    """Return lines on how ZeRO's collectives are partitioned and overlapped, with the reasons."""
    lines = [f"ZeRO-{config.zero.stage} over {plan.facts.sources['collectives']}"]
    return lines + ([] if plan.overlap is None else [*plan.overlap.lines()])


def most_bytes(config: WeftConfig) -> float:
    """Return the memory of the fullest rank, in bytes.

    Raises:
        ValueError: see `expected_plan`.
    """
    return max(memory.total for memory in expected_plan(config).memory)


def settled_model(config: WeftConfig) -> PreTrainedConfig:
    """Return the model's configuration.

    For a new model without a vocabulary size, the tokenizer's is set in ``config.model.overrides``.

    Raises:
        ValueError: the model or the tokenizer cannot be read.
    """
    if not config.model.path:
        words = len(load_tokenizer(config.model, config.data))
        config.model.overrides.setdefault("vocab_size", vocabulary_for(words, config.parallel.tensor))
    return load_hf_config(config.model)


def _inside(plan: RunPlan) -> str:
    """Return a description of the axes inside of layers, or an empty text without any."""
    sizes = {" x context": plan.layout.context, " x tensor": plan.layout.tensor, ", expert": plan.layout.expert}
    return "".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def _rank_table(plan: RunPlan) -> list[str]:
    heads = "rank stages layers parameters weights gradients optimiser buffers activations backward step total"
    rows: list[tuple[str, ...]] = [tuple(heads.split())]
    for rank, (held, memory) in enumerate(zip(plan.placement.rank_stages, plan.memory, strict=True)):
        count = rank_size(plan.facts.model, plan.split, held).held
        layers = "+".join(f"{plan.split.layers[s].start}-{plan.split.layers[s].stop - 1}" for s in held)
        zero = memory.zero
        parts = (
            zero.weights,
            zero.gradients,
            zero.optimizer,
            zero.buffers,
            memory.activations,
            memory.working,
            memory.stepping,
            memory.total,
        )
        rows.append((str(rank), "+".join(map(str, held)), layers, f"{count / 1e6:,.2f} M", *map(bytes_text, parts)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
