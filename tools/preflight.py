"""Checks of this machine and of the run's inputs, before any rank starts."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from weft.comm.native import cache_folder
from weft.conf import load
from weft.conf.batch import check_world
from weft.conf.checks import virtual_stages
from weft.conf.host.float8 import float8_obstacle, lowest_capability
from weft.conf.host.owners import own_folder
from weft.conf.host.private import make_run_folder, make_shared_folder
from weft.conf.host.terminal import print_error
from weft.conf.host.triton import kernel_obstacle
from weft.conf.hosts import is_loopback, read_hostfile, resume_folder, run_folder, world_size
from weft.conf.schema import Attention, ChunkedLoss, ClusterManager, DataKind, Float8, Kernels, Precision, WeftConfig
from weft.conf.sources import for_each_source, sources_of
from weft.engine.planning.schedules import open_placements, read_costs
from weft.tools.launch_arguments import num_gpus, visible_gpus

MIN_FREE_BYTES = 1 << 30


def preflight(
    config: WeftConfig,
    *,
    checks: Mapping[str, Callable[[WeftConfig], None]] | None = None,
    leave_out: Collection[str] = (),
) -> None:
    """Run checks in order, by default all of `CHECKS`, except those in ``leave_out``.

    Raises:
        ValueError: the first problem, with the field, its value and a remedy.
    """
    for name, run in (CHECKS if checks is None else checks).items():
        if name not in leave_out:
            run(config)


def check_inputs(argv: Sequence[str]) -> int:
    """Run the checks of `INPUTS` on the configuration file that ``argv`` names, and return an exit code."""
    (file,) = argv
    try:
        preflight(load([], recipe_file=file), checks=INPUTS)
    except ValueError as error:
        print_error("weft launch", error)
        return 2
    return 0


def check_cluster(config: WeftConfig) -> None:
    """Check that the number of processes fits the pipeline, and that they can reach the rendezvous."""
    cluster = config.cluster
    check_world(config, world_size(cluster))
    one_machine = (ClusterManager.local, ClusterManager.slurm)  # Slurm itself reports its nodes
    if cluster.hostfile and is_loopback(cluster.master_addr) and cluster.manager not in one_machine:
        away = [host for host in read_hostfile(cluster.hostfile) if not is_loopback(host)]
        if away:
            raise ValueError(
                f"cluster.master_addr={cluster.master_addr}: {away[0]} cannot reach it; set the first host's address"
            )


def check_port(config: WeftConfig) -> None:
    """Check that the rendezvous port is free, if it is on this machine."""
    address, port = config.cluster.master_addr, config.cluster.master_port
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(
                    f"cluster.master_port={port}: another process listens there; choose another, or 0 for a free one"
                ) from error
            # The address is of another machine, or a name that only the ranks can resolve.


def check_device(config: WeftConfig) -> None:
    """Check that this machine supports the model's number format, kernels and optimiser."""
    gpus, ranks = num_gpus(), config.cluster.ranks
    if gpus and not config.cluster.hostfile and ranks > gpus and os.environ.get("DS_ACCELERATOR") != "cpu":
        raise ValueError(
            f"cluster.ranks={ranks}: this machine has {gpus} GPUs; lower it, or set DS_ACCELERATOR=cpu to train on CPUs"
        )
    on_gpus = bool(gpus or config.cluster.hostfile) and os.environ.get("DS_ACCELERATOR") != "cpu"
    check_attention(config, on_gpus)
    if config.model.kernels is Kernels.fused and (obstacle := kernel_obstacle(on_gpus)):
        raise ValueError(f"model.kernels=fused: {obstacle}")
    if config.model.float8 is not Float8.none:
        capability = lowest_capability(visible_gpus()) if on_gpus and not config.cluster.hostfile else None
        if obstacle := float8_obstacle(on_gpus, capability):
            raise ValueError(f"model.float8={config.model.float8.value}: {obstacle}")
    if gpus or config.cluster.hostfile:
        return
    if config.train.precision is Precision.fp16:
        raise ValueError("train.precision=fp16: this machine has no GPU; choose bf16 or fp32")


FLASH_PACKAGES = {
    Attention.flash_attention_2: "flash-attn",
    Attention.flash_attention_3: "flash-attn-3",
    Attention.flash_attention_4: "flash-attn-4",
}
"""Distributions with the kernels that transformers calls."""


def check_attention(config: WeftConfig, on_gpus: bool) -> None:
    """Check that this machine has the attention kernel."""
    kind, name = config.model.attn_implementation, f"model.attn_implementation={config.model.attn_implementation.value}"
    package = FLASH_PACKAGES.get(kind)
    if package and not _is_installed(package):
        raise ValueError(f"{name}: {package} is not installed; pip install {package}, or choose varlen or sdpa")
    if (kind.is_flash or kind is Attention.flex_attention) and not on_gpus:
        raise ValueError(f"{name}: its kernels train on GPUs only; choose sdpa")
    if kind is Attention.varlen and on_gpus and config.train.precision is Precision.fp32:
        raise ValueError(f"{name}: on GPUs the kernel takes no fp32; set train.precision=bf16, or choose sdpa")


def _is_installed(package: str) -> bool:
    with suppress(PackageNotFoundError):
        return bool(version(package))
    return False


def check_model(config: WeftConfig) -> None:
    """Check that the model can be created or read, and supports the stages, the tokens and the packing."""
    path = config.model.path
    if not path or is_here(path) or (_is_hub_name(path) and _runs_here(config)):
        # these import torch, which the other checks do not need
        from weft.engine.models.float8 import require_float8
        from weft.engine.models.kernels import require_kernels
        from weft.engine.models.skeleton import config_skeleton, refuse_skipped_layers
        from weft.engine.stages.checking.refusals import refuse_packing
        from weft.engine.stages.files.loading import check_model_fits, load_hf_config

        tensor, expert = config.parallel.tensor, config.parallel.expert
        stages, tokens = virtual_stages(config), config.data.sequence_length
        check_model_fits(config.model, stages, tokens, tensor=tensor, expert=expert)
        hf_config = load_hf_config(config.model)
        if config.data.packing:
            refuse_packing(hf_config.model_type)
        if config.zero.stage:
            refuse_skipped_layers(hf_config, hf_config.model_type)
        if config.model.kernels is Kernels.fused:
            require_kernels(config_skeleton(hf_config))
        if config.model.float8 is not Float8.none:
            require_float8(config_skeleton(hf_config), config.model.float8)
    elif not _is_hub_name(path):
        raise ValueError(f"model.path={path}: there is no such folder; give a Hugging Face model's folder or hub name")


def _is_hub_name(path: str) -> bool:
    return not path.startswith((".", "/", "~")) and path.count("/") <= 1


def _runs_here(config: WeftConfig) -> bool:
    """Return True if all ranks are on this machine; otherwise their cache and their access to the hub may differ."""
    manager = config.cluster.manager
    return manager is ClusterManager.local or (manager is ClusterManager.ssh and not config.cluster.hostfile)


def is_here(path: str) -> bool:
    """Return True if ``path`` is a file or folder of this machine, rather than a name of the hub."""
    return bool(path) and Path(path).expanduser().exists()


def check_schedule(config: WeftConfig) -> None:
    """Check that the schedule and cost files are readable and have the right number of virtual stages."""
    first, *_ = open_placements(config.pipeline).values()
    if config.pipeline.costs_file:
        read_costs(config.pipeline, first.num_stages)


def check_data(config: WeftConfig) -> None:
    """Check that the data source exists and is well formed.

    Local files are read line by line. If the tokenizer is on this machine, their first row is tokenised.
    """
    # torch, which other checks do not need
    from weft.engine.data import check_source, encode_first, load_tokenizer, require_encodable, require_parts
    from weft.engine.data.tokenizer import require_rows
    from weft.engine.stages.files.loading import load_hf_config

    seen = check_source(config.data)
    words = config.model.tokenizer or config.model.path
    if words and not is_here(words) and not _is_hub_name(words):
        raise ValueError(f"model.tokenizer={words}: there is no such folder; give a tokenizer's folder or hub name")
    # A hub is left to the ranks, which have to be there anyway.
    if all(is_here(source.path) for source in sources_of(config.data)) and (not words or is_here(words)):
        tokenizer = load_tokenizer(config.model, config.data)
        rows = config.model.overrides.get("vocab_size")
        if is_here(config.model.path):
            rows = load_hf_config(config.model).get_text_config().vocab_size
        if rows:
            require_rows(tokenizer, rows, config.model)
        encode_first(config.data, tokenizer)
        require_encodable(config.data, tokenizer, seen)
        evaluated = bool(config.train.eval_every)
        for_each_source(config.data, partial(require_parts, tokenizer=tokenizer, evaluated=evaluated))


def check_teacher(config: WeftConfig) -> None:
    """Check that a teacher on this machine can be read, and has the student's tokens."""
    teacher, words = config.distill.teacher, config.model.tokenizer or config.model.path
    if not config.distill.enabled:
        return
    if not is_here(teacher):
        if not _is_hub_name(teacher):
            raise ValueError(f"distill.teacher={teacher}: there is no such folder; give a model's folder or hub name")
        return  # left to the ranks
    from weft.engine.data import load_tokenizer  # torch, which other checks do not need
    from weft.engine.data.teacher_tokens import require_teacher_tokens
    from weft.engine.stages.teacher import load_teacher_config

    load_teacher_config(config, config.data.sequence_length)
    if not words or is_here(words):
        require_teacher_tokens(load_tokenizer(config.model, config.data), config)


def check_hub(config: WeftConfig) -> None:
    """Check that the export can be pushed to the hub: the client is online and has a token."""
    if not config.train.hub_model_id:
        return
    from huggingface_hub import constants, get_token  # an import that the other checks do not need

    name = f"train.hub_model_id={config.train.hub_model_id}"
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"{name}: HF_HUB_OFFLINE forbids to push; unset it, or push the export yourself")
    if not get_token():
        raise ValueError(f"{name}: there is no token to push with; run `hf auth login`, or set HF_TOKEN")


def check_stages(config: WeftConfig) -> None:
    """Compare a small copy of the model with Hugging Face's forward: cut into stages, packed, and as a teacher."""
    from weft.engine.initialize import check_streamed_teacher
    from weft.engine.stages.checking.self_check import check_flash_packing, check_packing, self_check
    from weft.engine.stages.files.loading import load_hf_config

    hf_config, packing = load_hf_config(config.model), config.data.packing
    if packing and config.model.attn_implementation.is_flash and config.train.microbatch_size > 1:
        check_flash_packing(hf_config)
    if virtual_stages(config) > 1:
        chunks = config.model.chunked_loss is not ChunkedLoss.never
        own_loss = not config.distill.enabled and config.data.kind is not DataKind.preference
        self_check(hf_config, packing=packing, chunks=chunks, own_loss=own_loss)
    elif packing:
        check_packing(hf_config)
    if config.distill.enabled:
        check_streamed_teacher(config)


def check_resume(config: WeftConfig) -> None:
    """Check that the checkpoint to resume from exists, and was trained from the same base model."""
    where = config.checkpoint.resume
    folder = resume_folder(config)
    if where == "never" or (where == "auto" and not folder.is_dir()):
        return
    from weft.engine.checkpoint import check_base_model, to_resume  # imports torch, as other checks need not

    checkpoints = list(to_resume(folder))
    if not checkpoints and where != "auto":
        raise ValueError(f"checkpoint.resume={where}: no complete checkpoint there; give its folder, or auto")
    if checkpoints and _weights_are_here(config.model.path):
        check_base_model(config.model, (path for path, _ in checkpoints))


def _weights_are_here(path: str) -> bool:
    """Return True for a new model, a folder, and a model of the hub that is in this machine's cache.

    Other weights are visible only to ranks.
    """
    from weft.engine.stages.files.folder import weight_files, weights_folder

    if not path or is_here(path):
        return True
    with suppress(ValueError, OSError):
        return bool(weight_files(weights_folder(path)))
    return False


def check_outputs(config: WeftConfig) -> None:
    """Check that nothing is in the way of the run's folders. Nothing is created."""
    folder = run_folder(config)
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    for path in (existing, *(folder / name for name in ("export", ".export.partial", "checkpoints"))):
        if os.path.lexists(path) and not (path.is_dir() and os.access(path, os.W_OK | os.X_OK)):
            what = "cannot be written" if path.is_dir() else "is not a folder"
            raise ValueError(f"train.output_dir={config.train.output_dir}: {path} {what}; remove it, or choose another")


def check_run_folder(config: WeftConfig) -> None:
    """Check that the run's folder is writable, with space for more than its logs."""
    check_outputs(config)
    folder = run_folder(config)
    try:
        make_shared_folder(folder) if config.train.shared else make_run_folder(folder)
        _try_to_write(folder)
    except OSError as error:
        raise ValueError(f"train.output_dir={config.train.output_dir}: {error.strerror}; choose another") from error
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise ValueError(
            f"train.output_dir={config.train.output_dir}: {free / 1e9:.1f} GB are free there, less than "
            f"{MIN_FREE_BYTES / 1e9:.1f}; free some, or choose another"
        )


def check_caches(config: WeftConfig) -> None:
    """Check that the caches that ranks keep between runs are writable: tokenised data, measurements, compiled code."""
    folders = {
        f"data.cache_dir={config.data.cache_dir}": Path(config.data.cache_dir).expanduser(),
        f"XDG_CACHE_HOME={os.environ.get('XDG_CACHE_HOME', '')}": cache_folder(),
    }
    for setting, folder in folders.items():
        try:
            _try_to_write(own_folder(folder, setting))
        except OSError as error:
            raise ValueError(f"{setting}: {folder} cannot be written ({error.strerror}); set another folder") from error


def _try_to_write(folder: Path) -> None:
    probe = folder / f".writable{os.getpid()}"
    probe.touch()
    probe.unlink()


# A new check is a function that raises ValueError, and a line in one of these tables.
MACHINE: dict[str, Callable[[WeftConfig], None]] = {
    "cluster": check_cluster,
    "port": check_port,
    "device": check_device,
    "schedule": check_schedule,
    "run folder": check_run_folder,
    "caches": check_caches,
}
"""Checks that need neither torch nor transformers."""
INPUTS: dict[str, Callable[[WeftConfig], None]] = {
    "model": check_model,
    "data": check_data,
    "teacher": check_teacher,
    "hub": check_hub,
    "resume": check_resume,
}
"""Checks for which seconds of imports are needed."""
CHECKS = MACHINE | INPUTS
