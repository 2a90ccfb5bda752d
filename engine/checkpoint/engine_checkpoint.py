"""Checkpoints of a whole engine: model, optimiser, counters, random states and the caller's state."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.comm.exchange import gather
from weft.conf.schema import ModelConfig
from weft.engine.checkpoint import engine_state
from weft.engine.checkpoint.background import BackgroundWriter, snapshot
from weft.engine.checkpoint.client_state import decode, encode
from weft.engine.checkpoint.durable import CheckpointError, OtherModelError
from weft.engine.checkpoint.engine_state import (
    EVERYTHING,
    Moment,
    Portion,
    Wanted,
    check_form,
    check_names,
    fragments,
    needed,
    num_bytes_to_come,
    restore_local,
)
from weft.engine.checkpoint.folder import (
    LATEST,
    by_step,
    candidates,
    check_space,
    checkpoint_folder,
    complete,
    move_aside,
    newer,
    tagged,
    to_resume,
)
from weft.engine.checkpoint.origin import Origin
from weft.engine.checkpoint.pieces import Piece
from weft.engine.checkpoint.ranks import Ranks, find_stores, store_of
from weft.engine.checkpoint.reader import Checkpoint, open_checkpoint
from weft.engine.checkpoint.shard_file import ShardEntry
from weft.engine.checkpoint.shared_reading import Needed, among, read_once
from weft.engine.checkpoint.trained import Trained
from weft.engine.checkpoint.writer import save
from weft.engine.stages.files.fingerprint import folder_fingerprint

log = logging.getLogger(__name__)


def save_engine(
    engine: Trained,
    folder: Path,
    *,
    client_state: Mapping[str, Any],
    keep: int = 0,
    tag: str | None = None,
    latest: bool = True,
    background: BackgroundWriter | None = None,
) -> Path:
    """Write a checkpoint between two steps. Collective call.

    Args:
        folder: folder of checkpoints. Ranks need not share a file system. A later run can then restore the
            checkpoint if stages stay on the same hosts.
        client_state: the caller's state, equal on all ranks (see `client_state.encode`).
        keep: number of complete checkpoints without a tag to keep. 0 keeps all.
        tag: name of the checkpoint. None names it by its step.
        latest: whether `load_newest` may choose it.
        background: writes the checkpoint while training continues. None writes it before the return. An error of
            the write is raised at the writer's next use, and the caller may continue without that checkpoint.

    Returns:
        The path of the checkpoint, which may not exist yet.

    Raises:
        CheckpointError: on every rank, if the checkpoint cannot be written. Earlier checkpoints are unchanged.
        NonFiniteError: on every rank, if weights or state have NaN or infinity. Nothing was written.
    """
    engine.check_finite()
    if background is not None:
        background.wait()  # before the copy, so that there is at most one in memory
    held, step = fragments(engine), engine.global_steps
    target = _ranks().together(folder, lambda: checkpoint_folder(folder, step, tag))
    tree, tensors = _ranks().together(folder, lambda: encode(client_state))
    stores = find_stores(folder, _ranks())
    moment = Moment.now(engine)
    pieces = Portion.find(engine, stores, _ranks()).pieces(engine, held, moment)
    if engine.global_rank == store_of(stores, engine.global_rank).leader:
        pieces += [Piece.whole(name, tensor) for name, tensor in tensors.items()]
    own = engine_state.meta(engine, held, moment, tree)
    meta = own | {"groups": engine_state.join_groups(_ranks().gather(own["groups"])), LATEST: latest}
    if background is None:
        return save(folder, step, pieces, meta, ranks=_ranks(), stores=stores, keep=keep, tag=tag)
    copied, ranks = snapshot(pieces), _ranks(background.group)
    background.submit(lambda: save(folder, step, copied, meta, ranks=ranks, stores=stores, keep=keep, tag=tag))
    return target


def load_engine(engine: Trained, path: Path, wanted: Wanted = EVERYTHING) -> dict[str, Any]:
    """Restore an engine from a checkpoint of any layout of ranks. Collective call.

    Weights and the parts that are ``wanted`` are restored exactly, except for random states. In another layout they
    are seeded from step and rank.

    Returns:
        The caller's state.

    Raises:
        CheckpointError: on every rank, if the checkpoint is damaged or of another model. The engine
            may be partly restored.
    """
    ranks = _ranks()
    checkpoint = ranks.together(path, lambda: check_form(open_checkpoint(path)))
    if len(set(ranks.gather(checkpoint.manifest.name))) > 1:
        raise CheckpointError(f"{path}: ranks see different checkpoints of that name; copy one of them to all places")
    check_base(engine, checkpoint, wanted)
    _read_once(engine, checkpoint, ranks, wanted)
    return restore(engine, checkpoint, ranks, wanted)


def check_base(engine: Trained, checkpoint: Checkpoint, wanted: Wanted = EVERYTHING) -> None:
    """Check, before anything is restored, that a run may resume from a checkpoint.

    Raises:
        OtherBaseError: on every rank, if the checkpoint has another base model.
    """
    if wanted.progress:
        engine.origin.require_base(checkpoint.meta.get("origin", {}), checkpoint.path)


def check_base_model(model: ModelConfig, checkpoints: Iterable[Path]) -> None:
    """Check, before a run starts, that it has the same base model as the checkpoint to resume from.

    Args:
        checkpoints: the checkpoint to resume from, then alternatives in case it cannot be read.

    Raises:
        OtherBaseError: the checkpoint has another base model.
        ValueError: the model's folder is not complete.
    """
    for path in checkpoints:
        with suppress(CheckpointError):
            saved = check_form(open_checkpoint(path)).meta.get("origin", {})
            break
    else:
        return
    Origin(folder_fingerprint(model), model.path).require_base(saved, path)


def _read_once(engine: Trained, checkpoint: Checkpoint, ranks: Ranks, wanted: Wanted) -> None:
    """Read each piece that several replicas need on one of them, and send it. Collective call, errors of `restore`."""
    if engine.layout.data_ranks == 1:
        return
    members, tell = among(engine.module.data_group, engine.device)
    pieces = ranks.together(
        checkpoint.path, lambda: [Needed(*each) for each in needed(engine, fragments(engine), checkpoint, wanted)]
    )
    read_once(checkpoint, {each.key: each for each in pieces}, members, ranks, tell)


def restore(engine: Trained, checkpoint: Checkpoint, ranks: Ranks, wanted: Wanted = EVERYTHING) -> dict[str, Any]:
    """Restore an engine as `load_engine` does, from an open checkpoint."""
    held, path = fragments(engine), checkpoint.path
    check_names(checkpoint, held, ranks)
    ranks.together(path, lambda: restore_local(engine, held, checkpoint, wanted))
    engine.optimizer.restored(checkpoint.meta.get("norms", []) if wanted.progress else [])
    engine.sharding.publish()
    changed = engine.origin.report(checkpoint.meta.get("origin", {})) if wanted.progress and ranks.rank == 0 else ""
    if changed:
        log.warning("%s: written with other settings: %s", path, changed)
    return ranks.together(path, lambda: decode(checkpoint.meta["client_state"], checkpoint))


def load_tagged(engine: Trained, folder: Path, tag: str, wanted: Wanted = EVERYTHING) -> tuple[Path, dict[str, Any]]:
    """Restore the checkpoint in ``folder`` that was saved under ``tag``. Collective call.

    Raises:
        CheckpointError: on every rank, if there is no such checkpoint, or it cannot be restored.
    """
    path = _ranks().together(folder, lambda: tagged(folder, tag))
    return path, load_engine(engine, path, wanted)


def load_newest(engine: Trained, folder: Path, wanted: Wanted = EVERYTHING) -> tuple[Path, dict[str, Any]] | None:
    """Restore the newest complete checkpoint in ``folder``. Collective call.

    If its tensors are damaged, this logs a warning and tries the previous checkpoint. ``folder`` may also be a
    checkpoint itself.

    Returns:
        The checkpoint's path and the caller's state, or None if there is no checkpoint.

    Raises:
        CheckpointError: there are checkpoints, but none can be restored.
    """
    ranks = _ranks()
    found = {manifest.name: (path, manifest) for path, manifest in to_resume(folder)}
    aside = {path for path, _ in complete(folder)} - {path for path, _ in found.values()}
    others = ranks.gather((tuple(found), [path.name for path in candidates(folder) if path not in aside]))
    shared = set(found).intersection(*(names for names, _ in others))
    if not shared and any(there for _, there in others):
        raise CheckpointError(
            f"checkpoints in {folder}: none is complete on every rank; repair or copy one (see the warnings above), or "
            "start anew with checkpoint.resume=never and another train.name"
        )
    order = sorted((found[name] for name in shared), key=lambda item: item[1].serial, reverse=True)
    for number, (path, _) in enumerate(order, start=1):
        try:
            return path, load_engine(engine, path, wanted)
        except CheckpointError as error:
            if number == len(order) or isinstance(error, OtherModelError):
                raise
            log.warning("skipped: %s", error)
    return None


def set_aside(folder: Path, least_step: int) -> list[Path]:
    """Move checkpoints of ``least_step`` steps or more to a folder from which no run resumes. Collective call.

    If there is no older checkpoint, nothing is moved.

    Returns:
        Their new paths on this rank's file system.

    Raises:
        CheckpointError: on every rank, if a folder cannot be moved.
    """
    ranks = _ranks()
    store = store_of(find_stores(folder, ranks), ranks.rank)

    def move() -> list[str]:
        return [str(move_aside(path)) for path in newer(folder, least_step)] if ranks.rank == store.leader else []

    return [Path(path) for path in ranks.collect(folder, move)[store.leader]]


def check_folder(engine: Trained, folder: Path, *, keep: int) -> None:
    """Check before training that checkpoints can be written. Collective call.

    Raises:
        CheckpointError: on every rank, if the folder cannot be written, or has no space for the
            checkpoints to keep and the one being written.
    """
    ranks = _ranks()
    stores = find_stores(folder, ranks)
    held = fragments(engine)
    pieces = Portion.find(engine, stores, ranks).pieces(engine, held, Moment.now(engine))
    sizes = ranks.gather(num_bytes_to_come(pieces, held))
    store = store_of(stores, ranks.rank)

    def check() -> None:
        to_come = max(1, keep + 1 - len(by_step(folder)))
        check_space(folder, to_come * sum(sizes[rank] for rank in store.members))

    ranks.together(folder, lambda: check() if ranks.rank == store.leader else None)
    if len(stores) > 1 and ranks.rank == 0:
        log.warning(
            "checkpoints in %s lie on %d file systems, of ranks %s: resume with every stage where it was, or copy "
            "their files together",
            folder,
            len(stores),
            "; ".join(", ".join(map(str, each.members)) for each in stores),
        )


def _ranks(group: dist.ProcessGroup | None = None) -> Ranks:
    return Ranks(dist.get_rank(), partial(gather, group=group, kinds=(ShardEntry,)))
