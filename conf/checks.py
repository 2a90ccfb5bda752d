"""Consistency checks of a configuration, before anything is loaded or started."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from math import lcm, prod
from operator import attrgetter
from pathlib import Path

from weft.conf.features import missing_features
from weft.conf.hosts import asks_for_nodes, working_hosts
from weft.conf.inference_checks import inference_problems
from weft.conf.schedule_kinds import FOLDS, PlacementKind, ScheduleKind, ScheduleRules
from weft.conf.schema import DataKind, LoraConfig, PipelineConfig, Precision, WeftConfig
from weft.conf.schema.ranges import out_of_range
from weft.conf.sites import site_problems
from weft.conf.sources import source_problems
from weft.conf.training_checks import distill_problems, float8_problems, memory_problems, optimizer_problems

PATHS = (
    "model.path",
    "model.tokenizer",
    "data.path",
    "data.cache_dir",
    "distill.teacher",
    "pipeline.schedule_file",
    "pipeline.costs_file",
    "cluster.hostfile",
    "cluster.deny_list",
    "checkpoint.resume",
    "train.output_dir",
    "train.name",
)
"""Fields that may be paths."""
HUB_NAMES = ("model.path", "model.tokenizer", "distill.teacher")
MOST_BYTES = 255
"""Most bytes of a part of a path on common file systems."""
HUB_ID = re.compile(r"([\w-][\w.-]{0,95}/)?[\w-][\w.-]{0,95}", re.ASCII)


def check(config: WeftConfig, *, complete: bool = True) -> None:
    """Check a configuration, independently of the machine and the number of processes.

    Args:
        complete: also reject a configuration with fields that are still `missing`.

    Raises:
        ValueError: the configuration has problems. The message has a line for each, with field, value and remedy.
    """
    problems = [*out_of_range(config), *_too_long(config)] or [line for find in CHECKS for line in find(config)]
    problems += missing(config) if complete else []
    if problems:
        raise ValueError("\n".join(problems))


def _too_long(config: WeftConfig) -> Iterator[str]:
    for field in PATHS:
        value = attrgetter(field)(config)
        longest = max(len(part.encode(errors="replace")) for part in value.split("/"))
        if longest > MOST_BYTES:
            shown = f"{value[:40]}..."
            yield f"{field}={shown}: a part of {longest} bytes, and file systems take {MOST_BYTES}; shorten it"


def _variables(config: WeftConfig) -> Iterator[str]:
    """Yield a line for each path with a shell's variable, which would become a folder of that name."""
    for field in PATHS:
        if found := re.search(r"\$([A-Za-z_]\w*)", value := attrgetter(field)(config)):
            name = found.group(1)
            yield f"{field}={value}: ${name} is a shell's variable, and no shell reads it; write ${{oc.env:{name}}}"


def _urls(config: WeftConfig) -> Iterator[str]:
    """Yield a line for each path that is a URL, which would become a folder of that name."""
    for field in PATHS:
        value = attrgetter(field)(config)
        if "://" in value and field != "data.path":
            name = " or a hub name, OWNER/NAME" if field in HUB_NAMES else ""
            yield f"{field}={value}: a URL, which only data.path takes; give a path{name}"


def missing(config: WeftConfig) -> Iterator[str]:
    """Yield a line for each required field that is not set."""
    model, data, kind = config.model, config.data, config.data.kind.name
    if not model.path and not model.arch:
        yield "model.arch='': no model is given; set model.path, or model.arch to a model_type"
    if config.distill.enabled and not config.distill.teacher:
        yield "distill.teacher='': no teacher is given; set distill.teacher to a folder or a hub name"
    if data.kind is not DataKind.corpus and not (data.path or data.sources):
        yield f"data.path='': data.kind={kind} needs a source; set data.path to a file, a folder or a hub name"
    if data.kind is not DataKind.corpus and not (model.tokenizer or model.path):
        yield f"model.tokenizer='': data.kind={kind} needs a tokenizer; set model.tokenizer or model.path"


def per_replica(config: WeftConfig) -> tuple[int, list[str]]:
    """Return the product of the fields that are set and divide a replica's batch, and their names and values."""
    given = {
        "train.microbatch_size": config.train.microbatch_size,
        "pipeline.microbatches": config.pipeline.microbatches,
    }
    numbers = {name: number for name, number in given.items() if number}
    return prod(numbers.values()), [f"{name}={number}" for name, number in numbers.items()]


def settled_placement(pipeline: PipelineConfig) -> PlacementKind | None:
    """Return the placement that is configured or that the schedule needs, or None if schedule=auto chooses it."""
    rules: ScheduleRules = pipeline.schedule.value
    if rules.goes_in_rounds:
        return PlacementKind.interleaved
    if pipeline.placement is not PlacementKind.any:
        return pipeline.placement
    if pipeline.schedule is ScheduleKind["auto"]:
        return None if pipeline.stages > 1 else PlacementKind.straight
    return rules.placements[0]


def virtual_stages(config: WeftConfig) -> int:
    """Return the number of virtual stages over all pipeline ranks.

    If schedule=auto chooses the placement, it is the least.
    """
    pipeline = config.pipeline
    return pipeline.stages * chunks_of(settled_placement(pipeline) or PlacementKind.straight, pipeline)


def chunks_of(placement: PlacementKind, pipeline: PipelineConfig) -> int:
    """Return the number of virtual stages per rank of a placement."""
    if placement is PlacementKind.straight:
        return 1
    return 2 if placement in FOLDS else pipeline.chunks_per_rank


def _model(config: WeftConfig) -> Iterator[str]:
    model = config.model
    if model.attn_implementation.is_flash and config.train.precision is Precision.fp32:
        yield (
            f"model.attn_implementation={model.attn_implementation.value}: the kernel takes no fp32; "
            "set train.precision=bf16, or model.attn_implementation=sdpa"
        )
    if not model.lora.enabled:
        plain = LoraConfig()
        for name, value in vars(model.lora).items():
            given, usual = (getattr(each, "name", each) for each in (value, getattr(plain, name)))
            if given != usual:
                yield (
                    f"model.lora.{name}={given}: adapters are off; set model.lora.enabled=true, "
                    f"or leave {name} at {usual}"
                )


def _schedule(config: WeftConfig) -> Iterator[str]:
    pipeline = config.pipeline
    kind, placement = pipeline.schedule.name, pipeline.placement
    rules: ScheduleRules = pipeline.schedule.value
    if placement not in (*rules.placements, PlacementKind.any):
        names = " or ".join(allowed.name for allowed in rules.placements)
        yield (
            f"pipeline.placement={placement.name}: the {kind} schedule is defined for {names}; "
            f"set pipeline.placement={rules.placements[0].name}, or pipeline.schedule=auto"
        )
    if settled_placement(pipeline) in FOLDS and pipeline.stages < 2:
        yield (
            f"pipeline.placement={placement.name}: a fold needs at least 2 ranks, pipeline.stages={pipeline.stages}; "
            "raise it, or set pipeline.placement=straight"
        )
    if 0 < pipeline.microbatches < rules.microbatches_per_rank * pipeline.stages:
        yield (
            f"pipeline.microbatches={pipeline.microbatches}: the {kind} schedule needs at least "
            f"{rules.microbatches_per_rank} x {pipeline.stages} stages = "
            f"{rules.microbatches_per_rank * pipeline.stages}; raise it, or choose pipeline.schedule=auto"
        )
    if settled_placement(pipeline) in (PlacementKind.interleaved, PlacementKind.site_interleaved):
        yield from _interleaved(config)
    if settled_placement(pipeline) is None:
        yield from _comparable(config)
    if bool(pipeline.schedule_file) != (kind == "file"):
        yield (
            f"pipeline.schedule_file={pipeline.schedule_file!r}: it goes with pipeline.schedule=file, "
            f"which is {kind}; set both or neither"
        )
    elif pipeline.schedule_file and not Path(pipeline.schedule_file).expanduser().is_file():
        yield f"pipeline.schedule_file={pipeline.schedule_file}: there is no such file; write one with `weft schedule`"


def _interleaved(config: WeftConfig) -> Iterator[str]:
    pipeline = config.pipeline
    if pipeline.chunks_per_rank < 2:
        yield (
            f"pipeline.chunks_per_rank={pipeline.chunks_per_rank}: the interleaved schedule needs at least 2; "
            "raise it, or choose pipeline.schedule=1f1b"
        )


def _comparable(config: WeftConfig) -> Iterator[str]:
    """Yield a line for each missing bandwidth that the comparison of placements over sites needs.

    No link has been probed at this time.
    """
    names = [site.name for site in config.cluster.sites]
    known = {frozenset(link.sites) for link in config.cluster.links if link.bandwidth_mbps}
    for pair in pairwise(names):
        if frozenset(pair) not in known:
            yield (
                f"cluster.links.bandwidth_mbps: not given between {pair[0]} and {pair[1]}, and schedule=auto with "
                "placement=any compares placements by it; set it (`weft doctor net` measures it), or "
                "pipeline.placement=straight"
            )


def _layers(config: WeftConfig) -> Iterator[str]:
    if config.pipeline.schedule is ScheduleKind["file"]:
        return  # its own placement defines the number of virtual stages
    chunks, by_hand = virtual_stages(config), config.pipeline.layers
    count = config.model.overrides.get("num_hidden_layers")
    if by_hand and len(by_hand) != chunks and settled_placement(config.pipeline) is not None:
        yield (
            f"pipeline.layers={by_hand}: {len(by_hand)} entries for {chunks} virtual stages; "
            "give one entry for each, or an empty list"
        )
    if by_hand and min(by_hand) < 0:
        yield f"pipeline.layers={by_hand}: a stage cannot hold fewer than 0 layers; correct the entry"
    if by_hand and isinstance(count, int) and sum(by_hand) != count:
        yield f"pipeline.layers={by_hand}: they hold {sum(by_hand)} layers, the model has {count}; correct the list"
    if isinstance(count, int) and count < chunks:
        yield (
            f"pipeline.stages={config.pipeline.stages}: {chunks} virtual stages for "
            f"model.overrides.num_hidden_layers={count}; use fewer stages or more layers"
        )


def _parallel(config: WeftConfig) -> Iterator[str]:
    parallel, length = config.parallel, config.data.sequence_length
    sizes = {"tensor": parallel.tensor, "context": parallel.context, "expert": parallel.expert}
    used = {axis: size for axis, size in sizes.items() if size > 1}
    slices = lcm(2 * parallel.context if parallel.context > 1 else 1, parallel.context * parallel.tensor)
    if length % slices:
        yield (
            f"data.sequence_length={length}: parallel.context={parallel.context} x parallel.tensor={parallel.tensor} "
            f"ranks hold equal slices of a sequence; choose a multiple of {slices}, such as "
            f"{-(-length // slices) * slices}"
        )
    if parallel.expert > 1 and parallel.expert % parallel.tensor:
        yield (
            f"parallel.expert={parallel.expert}: ranks that share matrices (parallel.tensor={parallel.tensor}) share "
            f"experts, too; choose a multiple of {parallel.tensor}, or 1"
        )
    if used and config.comm.cell > 1:
        named = " and ".join(f"parallel.{axis}={size}" for axis, size in used.items())
        yield (
            f"comm.cell={config.comm.cell}: the pipelines of a DP-cell take turns, and ranks of {named} work at the "
            "same time; set comm.cell=1"
        )
    yield from _tensor_across_hosts(config)


def _tensor_across_hosts(config: WeftConfig) -> Iterator[str]:
    tensor, cluster = config.parallel.tensor, config.cluster
    if tensor == 1 or config.parallel.tensor_across_hosts:
        return
    if cluster.hostfile and Path(cluster.hostfile).expanduser().is_file():
        hosts = working_hosts(cluster)
    else:
        hosts = {"each host": cluster.ranks} if asks_for_nodes(cluster) else {}
    for host, ranks in hosts.items():
        if ranks % tensor:
            yield (
                f"parallel.tensor={tensor}: {host} has {ranks} ranks, not a multiple of it, so that hosts would share "
                "matrices over their network; choose a divisor, or set parallel.tensor_across_hosts=true"
            )
            return


def _comm(config: WeftConfig) -> Iterator[str]:
    comm = config.comm
    if comm.deadline_s > comm.timeout_s:
        yield f"comm.deadline_s={comm.deadline_s:g}: longer than comm.timeout_s={comm.timeout_s:g}; lower it"


def _cluster(config: WeftConfig) -> Iterator[str]:
    cluster = config.cluster
    if cluster.hostfile and not Path(cluster.hostfile).expanduser().is_file():
        yield f"cluster.hostfile={cluster.hostfile}: there is no such file; write lines such as `host slots=8`"
    if cluster.hostfile and not cluster.master_port:
        yield "cluster.master_port=0: several machines cannot agree on a free port; set one, such as 29500"
    if not cluster.master_addr:
        yield "cluster.master_addr='': the ranks have nowhere to meet; set the first host's address"


def _train(config: WeftConfig) -> Iterator[str]:
    train = config.train
    size, names = per_replica(config)
    if train.name in ("", ".", "..") or "/" in train.name:
        yield f"train.name={train.name!r}: not a folder name; choose one word without /"
    if not train.batch_size and len(names) < 2:
        name = "pipeline.microbatches" if train.microbatch_size else "train.microbatch_size"
        yield f"{name}=0: it follows from train.batch_size, which is 0; give one of them"
    elif train.batch_size % size:
        yield (
            f"train.batch_size={train.batch_size}: not a multiple of {' x '.join(names)} = {size}; "
            f"choose {-(-train.batch_size // size) * size}, or 0 to let it follow from them, or set "
            "pipeline.microbatches=0 to let these follow"
        )
    folder = Path(train.output_dir).expanduser()
    if not train.output_dir or any(part.is_file() for part in (folder, folder / train.name)):
        yield f"train.output_dir={train.output_dir!r}: not a folder; choose one that exists or can be made"
    for name, wanted in (
        ("train.early_stopping_patience", train.early_stopping_patience),
        ("checkpoint.load_best_model_at_end", config.checkpoint.load_best_model_at_end),
    ):
        if wanted and not train.eval_every:
            yield f"{name}={str(wanted).lower()}: it needs evaluations; set train.eval_every=50 or so"
    if train.hub_model_id and not train.export:
        yield f"train.hub_model_id={train.hub_model_id}: only an export can be pushed; set train.export=true"
    if train.hub_model_id and not HUB_ID.fullmatch(train.hub_model_id):
        yield f"train.hub_model_id={train.hub_model_id!r}: not a repository's name; write NAME or ORGANISATION/NAME"
    if train.sample and not train.export:
        yield f"train.sample={train.sample!r}: the text is sampled from the export; set train.export=true"


def _checkpoint(config: WeftConfig) -> Iterator[str]:
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not Path(resume).expanduser().is_dir():
        yield f"checkpoint.resume={resume!r}: there is no such folder; give a checkpoint's folder, auto or never"


def _supervision(config: WeftConfig) -> Iterator[str]:
    supervise = config.supervise
    if supervise.spike and not supervise.spike > 1:
        yield f"supervise.spike={supervise.spike:g}: every norm would be one; choose a value above 1, or 0"
    if supervise.spike and supervise.max_skips == 0:
        yield f"supervise.spike={supervise.spike:g}: supervise.max_skips=0 skips no step; set it to 3 or so"


def _adapt(config: WeftConfig) -> Iterator[str]:
    """Yield a line for each setting with which the schedule cannot be planned again while training."""
    if not config.pipeline.adapt:
        return
    pipeline, parallel = config.pipeline, config.parallel
    if pipeline.schedule is not ScheduleKind["auto"]:
        yield (
            f"pipeline.adapt=true: pipeline.schedule={pipeline.schedule.name} depends on no costs, so another plan "
            "would be the same; set pipeline.schedule=auto"
        )
    shared = {"tensor": parallel.tensor, "context": parallel.context, "expert": parallel.expert}
    reasons = [
        (f"comm.cell={config.comm.cell}", "the links of a DP-cell are not measured; set it to 1", config.comm.cell > 1),
        ("zero.stage=3", "a slot's duration includes waits for weights; choose 0 to 2", config.zero.stage == 3),
        ("cluster.routes", "replicas on several routes have costs of their own; use one", bool(config.cluster.routes)),
        *(
            (f"parallel.{axis}={size}", "a slot's duration includes waits for other ranks; set it to 1", size > 1)
            for axis, size in shared.items()
        ),
    ]
    yield from (
        f"pipeline.adapt=true: does not work with {name}, because {why}, or set pipeline.adapt=false"
        for name, why, found in reasons
        if found
    )


def _jitter(config: WeftConfig) -> Iterator[str]:
    pipeline = config.pipeline
    if not pipeline.jitter_samples:
        return
    name = f"pipeline.jitter_samples={pipeline.jitter_samples}"
    if pipeline.schedule is not ScheduleKind["auto"]:
        yield f"{name}: schedule={pipeline.schedule.name} depends on no costs; set pipeline.schedule=auto, or 0"
    if not pipeline.costs_file:
        yield f"{name}: without pipeline.costs_file no jitter is known; give a file with `jitter`, or set 0"
    if pipeline.offload:
        yield f"{name}: schedules with pipeline.offload=true are planned with medians; set one of them to 0 or false"


CHECKS = (
    missing_features,
    _urls,
    _variables,
    _model,
    source_problems,
    _schedule,
    _adapt,
    _jitter,
    _layers,
    _parallel,
    memory_problems,
    site_problems,
    _comm,
    _cluster,
    optimizer_problems,
    distill_problems,
    float8_problems,
    _train,
    _checkpoint,
    _supervision,
    inference_problems,
)
