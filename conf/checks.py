"""Checks of a whole configuration, before anything is loaded or started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from weft.conf.ranges import SHARE, out_of_range
from weft.conf.schema import Attention, DataKind, PlacementKind, Precision, WeftConfig
from weft.conf.sites import site_problems

ANY_PLACEMENT = tuple(PlacementKind)
STRAIGHT = (PlacementKind.straight,)
FOLD = (PlacementKind.fold,)
FOLDS = (PlacementKind.fold, PlacementKind.site_fold)

# The placements that each schedule is defined for.
PLACEMENTS = {
    "gpipe": ANY_PLACEMENT,
    "1f1b": STRAIGHT,
    "interleaved": STRAIGHT,
    "w": FOLDS,
    "dualpipev": FOLD,
    "zbv": FOLD,
    "auto": ANY_PLACEMENT,
    "file": ANY_PLACEMENT,
}


def check(config: WeftConfig) -> None:
    """Refuse a configuration that cannot run, whatever the machine and the number of processes.

    Raises:
        ValueError: one line per problem, each with the field, its value and a remedy.
    """
    problems = list(out_of_range(config)) or [line for find in CHECKS for line in find(config)]
    if problems:
        raise ValueError("\n".join(problems))


def check_world(config: WeftConfig, world_size: int) -> None:
    """Refuse a number of processes that the pipeline cannot be laid over.

    Raises:
        ValueError: `world_size` is no multiple of the stages, or the batch does not come out.
    """
    stages = config.pipeline.stages
    if world_size < 1 or world_size % stages:
        raise ValueError(
            f"pipeline.stages={stages}: {world_size} processes are no multiple of it; "
            f"change it, or start {-(-max(world_size, 1) // stages) * stages} processes (cluster.ranks or the hostfile)"
        )
    replicas = world_size // stages
    if config.comm.cell > replicas:
        raise ValueError(
            f"comm.cell={config.comm.cell}: {world_size} processes make {replicas} replicas of the pipeline; "
            "lower it, or start more processes"
        )
    product = config.train.microbatch_size * config.pipeline.microbatches * replicas
    if config.train.batch_size not in (0, product):
        raise ValueError(
            f"train.batch_size={config.train.batch_size}: train.microbatch_size={config.train.microbatch_size} x "
            f"pipeline.microbatches={config.pipeline.microbatches} x {replicas} replicas make {product}; "
            "change one of them, or set train.batch_size=0"
        )


def virtual_stages(config: WeftConfig) -> int:
    """Chunks that the model is cut into, over all pipeline ranks."""
    pipeline = config.pipeline
    if pipeline.schedule.value == "interleaved":
        return pipeline.stages * pipeline.chunks_per_rank
    return pipeline.stages * (1 if pipeline.placement is PlacementKind.straight else 2)


def _model(config: WeftConfig) -> Iterator[str]:
    model = config.model
    if not model.path and not model.arch:
        yield "model.arch='': nothing says which model to train; set model.path, or model.arch to a model_type"
    if model.attn_implementation is Attention.flash_attention_2 and config.train.precision is Precision.fp32:
        yield (
            "model.attn_implementation=flash_attention_2: the kernel takes no fp32; "
            "set train.precision=bf16, or model.attn_implementation=sdpa"
        )
    if model.lora.target_modules and not model.lora.enabled:
        yield (
            f"model.lora.target_modules={model.lora.target_modules}: adapters are off; "
            "set model.lora.enabled=true, or leave the list empty"
        )


def _data(config: WeftConfig) -> Iterator[str]:
    data, kind = config.data, config.data.kind.name
    if data.kind is DataKind.corpus and data.path:
        yield f"data.path={data.path}: unused by data.kind=corpus; set data.kind to text or chat"
    if data.kind is not DataKind.corpus and not data.path:
        yield f"data.path='': data.kind={kind} needs a source; set data.path to a file, a folder or a hub name"
    if data.kind is not DataKind.corpus and not (config.model.tokenizer or config.model.path):
        yield f"model.tokenizer='': data.kind={kind} needs a tokenizer; set model.tokenizer or model.path"
    if data.chat_template and data.kind is not DataKind.chat:
        yield f"data.chat_template={data.chat_template!r}: unused by data.kind={kind}; set data.kind=chat"
    if config.train.eval_every and not (data.eval_split or data.eval_fraction):
        yield (
            f"train.eval_every={config.train.eval_every}: there is nothing to evaluate on; "
            "set data.eval_fraction=0.01 or data.eval_split, or train.eval_every=0"
        )


def _schedule(config: WeftConfig) -> Iterator[str]:
    pipeline = config.pipeline
    kind, placement = pipeline.schedule.value, pipeline.placement
    if placement not in PLACEMENTS[kind]:
        names = " or ".join(allowed.name for allowed in PLACEMENTS[kind])
        yield (
            f"pipeline.placement={placement.name}: the {kind} schedule is defined for {names}; "
            f"set pipeline.placement={PLACEMENTS[kind][0].name}, or pipeline.schedule=auto"
        )
    if placement is not PlacementKind.straight and pipeline.stages < 2:
        yield (
            f"pipeline.placement={placement.name}: a fold needs at least 2 ranks, pipeline.stages={pipeline.stages}; "
            "raise it, or set pipeline.placement=straight"
        )
    if kind == "dualpipev" and pipeline.microbatches < 2 * pipeline.stages:
        yield (
            f"pipeline.microbatches={pipeline.microbatches}: the dualpipev schedule needs at least "
            f"2 x {pipeline.stages} stages = {2 * pipeline.stages}; raise it, or choose pipeline.schedule=w"
        )
    if kind == "interleaved":
        yield from _interleaved(config)
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


def _layers(config: WeftConfig) -> Iterator[str]:
    if config.pipeline.schedule.value == "file":
        return  # its own placement says how many virtual stages there are
    chunks, by_hand = virtual_stages(config), config.pipeline.layers
    count = config.model.overrides.get("num_hidden_layers")
    if by_hand and len(by_hand) != chunks:
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


def _optimizer(config: WeftConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if len(optimizer.betas) != 2 or any(beta not in SHARE for beta in optimizer.betas):
        yield f"optimizer.betas={optimizer.betas}: not two numbers {SHARE}; give two, such as [0.9, 0.95]"


def _train(config: WeftConfig) -> Iterator[str]:
    train, per_replica = config.train, config.train.microbatch_size * config.pipeline.microbatches
    if train.name in ("", ".", "..") or "/" in train.name:
        yield f"train.name={train.name!r}: it names the run's folder; choose one word without /"
    if train.batch_size % per_replica:
        yield (
            f"train.batch_size={train.batch_size}: not a multiple of train.microbatch_size={train.microbatch_size} x "
            f"pipeline.microbatches={config.pipeline.microbatches} = {per_replica}; "
            f"choose {-(-train.batch_size // per_replica) * per_replica}, or 0 to let it follow from them"
        )
    folder = Path(train.output_dir).expanduser()
    if not train.output_dir or any(part.is_file() for part in (folder, folder / train.name)):
        yield f"train.output_dir={train.output_dir!r}: not a folder; choose one that exists or can be made"
    if train.sample and not train.export:
        yield f"train.sample={train.sample!r}: the text is sampled from the export; set train.export=true"


def _checkpoint(config: WeftConfig) -> Iterator[str]:
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not Path(resume).expanduser().is_dir():
        yield f"checkpoint.resume={resume!r}: there is no such folder; give a checkpoint's folder, auto or never"


def _prefill(config: WeftConfig) -> Iterator[str]:
    prefill, count = config.inference.prefill, config.cluster.ranks
    ranks = prefill.ranks or list(range(count))
    if len(set(ranks)) < len(ranks) or min(ranks) < 0:
        yield f"inference.prefill.ranks={ranks}: not ranks, each once; name those of this host"
    elif not config.cluster.hostfile and max(ranks) >= count:
        yield f"inference.prefill.ranks={ranks}: there are {count} ranks, from 0; correct it, or cluster.ranks"
    if prefill.model and len(ranks) % prefill.ranks_per_worker:
        yield (
            f"inference.prefill.ranks_per_worker={prefill.ranks_per_worker}: {len(ranks)} ranks are no multiple of it; "
            "change it, or name the ranks in inference.prefill.ranks"
        )


def _controller(config: WeftConfig) -> Iterator[str]:
    for worker in config.inference.controller.workers:
        if not worker.url.startswith(("http://", "https://")):
            yield (
                f"inference.controller.workers.url={worker.url!r}: not an HTTP address; "
                "give it as in http://127.0.0.1:8001"
            )
        if not worker.boards:
            yield (
                "inference.controller.workers.boards=[]: nothing tells when this worker may run; "
                "give the bubble board of each rank whose device it uses"
            )


CHECKS = (
    _model,
    _data,
    _schedule,
    _layers,
    site_problems,
    _comm,
    _cluster,
    _optimizer,
    _train,
    _checkpoint,
    _prefill,
    _controller,
)
