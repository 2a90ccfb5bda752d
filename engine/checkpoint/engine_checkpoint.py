"""Checkpoints of a whole engine: model, optimiser, counters, random states and the caller's state."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from weft.comm.exchange import gather
from weft.engine.checkpoint import manifest_form as form
from weft.engine.checkpoint import optimizer_state
from weft.engine.checkpoint.background import BackgroundWriter, snapshot
from weft.engine.checkpoint.client_state import decode, encode
from weft.engine.checkpoint.errors import CheckpointError
from weft.engine.checkpoint.folder import (
    LATEST,
    by_step,
    candidates,
    check_space,
    checkpoint_folder,
    tagged,
    to_resume,
    whole,
)
from weft.engine.checkpoint.manifest import MANIFEST
from weft.engine.checkpoint.optimizer_state import OPTIM, WEIGHT
from weft.engine.checkpoint.pieces import Piece
from weft.engine.checkpoint.ranks import Ranks
from weft.engine.checkpoint.reader import Checkpoint, open_checkpoint
from weft.engine.checkpoint.shard_file import ShardEntry, damaged
from weft.engine.checkpoint.stores import Store, find_stores, store_of
from weft.engine.checkpoint.trained import Trained
from weft.engine.checkpoint.writer import save
from weft.engine.zero import Fragment

BUFFER = "buffer"
"""Kind of tensors that no optimiser updates: ``buffer/NAME``."""
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""DeepSpeed's counts of work done."""
_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")
"""Entries of a torch scheduler's state that hold one value per parameter group of this rank."""
_PACKAGES = ("weft", "torch", "deepspeed", "transformers")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """What to restore from a checkpoint besides weights and buffers.

    Attributes:
        optimizer: the optimiser's state; otherwise the current state is kept.
        scheduler: learning rates and their schedule.
        progress: counters, random states and the loss scale.
    """

    optimizer: bool = True
    scheduler: bool = True
    progress: bool = True


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
    """Write a checkpoint between two steps; a collective call.

    Args:
        folder: folder of checkpoints. Ranks need not share a file system: as long as stages stay
            where they are, each rank finds what it needs on its own.
        client_state: the caller's state, equal on all ranks (see `client_state.encode`).
        keep: number of complete checkpoints without a tag to keep; 0 keeps all.
        tag: name of the checkpoint; None names it by its step.
        latest: whether `load_newest` may choose it.
        background: writes while training continues; an error is then raised at the writer's next use,
            and the caller may continue without that checkpoint, or end.

    Returns:
        The path where the checkpoint is, or will be.

    Raises:
        CheckpointError: on every rank; earlier checkpoints are unchanged.
        NonFiniteError: on every rank, if there are NaNs or infinities; nothing was written.
    """
    engine.check_finite()
    if background is not None:
        background.wait()  # before the copy, so that there is never more than one in memory
    held, step = _fragments(engine), engine.global_steps
    target = _ranks().together(folder, lambda: checkpoint_folder(folder, step, tag))
    tree, tensors = _ranks().together(folder, lambda: encode(client_state))
    stores = find_stores(folder, _ranks())
    pieces = _pieces(engine, held, stores)
    if engine.global_rank == store_of(stores, engine.global_rank).leader:
        pieces += [Piece.whole(name, tensor) for name, tensor in tensors.items()]
    meta = _meta(engine, held, tree) | {LATEST: latest}
    if background is None:
        return save(folder, step, pieces, meta, ranks=_ranks(), stores=stores, keep=keep, tag=tag)
    copied, ranks = snapshot(pieces), _ranks(background.group)
    background.submit(lambda: save(folder, step, copied, meta, ranks=ranks, stores=stores, keep=keep, tag=tag))
    return target


def load_engine(engine: Trained, path: Path, wanted: Wanted = Wanted()) -> dict[str, Any]:
    """Restore an engine from one checkpoint, whatever layout wrote it; a collective call.

    Weights, optimiser state, learning rates, loss scale and counters are restored exactly.
    Random states are restored if the layout is the same, and seeded from step and rank if not.
    Besides weights, only what is ``wanted`` is restored.

    Returns:
        The caller's state.

    Raises:
        CheckpointError: on every rank, if the checkpoint is damaged or of another model. The engine
            may be partly restored.
    """
    ranks = _ranks()
    held = _fragments(engine)
    checkpoint = ranks.together(path, lambda: _open(path))
    if len(set(ranks.gather(checkpoint.manifest.name))) > 1:
        raise CheckpointError(f"{path}: ranks see different checkpoints of that name; copy one of them to all places")
    _check_names(checkpoint, held, ranks)
    ranks.together(path, lambda: _restore_local(engine, held, checkpoint, wanted))
    engine.optimizer.restored()
    engine.sharding.publish()
    return ranks.together(path, lambda: decode(checkpoint.meta["client_state"], checkpoint))


def load_tagged(engine: Trained, folder: Path, tag: str, wanted: Wanted = Wanted()) -> tuple[Path, dict[str, Any]]:
    """Restore the checkpoint in ``folder`` that was saved under ``tag``; a collective call.

    Raises:
        CheckpointError: on every rank, if there is none, or it cannot be restored.
    """
    path = _ranks().together(folder, lambda: tagged(folder, tag))
    return path, load_engine(engine, path, wanted)


def load_newest(engine: Trained, folder: Path, wanted: Wanted = Wanted()) -> tuple[Path, dict[str, Any]] | None:
    """Restore the newest complete checkpoint in ``folder``; a collective call.

    If its tensors turn out to be damaged, this warns and tries the previous one. ``folder`` may also
    be a checkpoint itself.

    Returns:
        The checkpoint and the caller's state; None if there is none.

    Raises:
        CheckpointError: there are checkpoints, but none can be restored.
    """
    ranks = _ranks()
    found = {manifest.name: (path, manifest) for path, manifest in to_resume(folder)}
    aside = {path for path, _ in whole(folder)} - {path for path, _ in found.values()}
    others = ranks.gather((tuple(found), [path.name for path in candidates(folder) if path not in aside]))
    shared = set(found).intersection(*(names for names, _ in others))
    if not shared and any(there for _, there in others):
        raise CheckpointError(
            f"checkpoints in {folder}: none is whole on every rank; repair or copy one (see the warnings above), or "
            "start anew with checkpoint.resume=never and another train.name"
        )
    order = sorted((found[name] for name in shared), key=lambda item: item[1].serial, reverse=True)
    for number, (path, _) in enumerate(order, start=1):
        try:
            return path, load_engine(engine, path, wanted)
        except CheckpointError as error:
            if number == len(order):
                raise
            log.warning("skipped: %s", error)
    return None


def check_folder(engine: Trained, folder: Path, *, keep: int) -> None:
    """Check before training that checkpoints can be written; a collective call.

    Raises:
        CheckpointError: on every rank, if the folder cannot be written, or has no room for the
            checkpoints to keep and the one being written.
    """
    ranks = _ranks()
    stores = find_stores(folder, ranks)
    held = _fragments(engine)
    pieces = _pieces(engine, held, stores)
    # Before the first step an optimiser has no state; Adam's is twice its fp32 weights.
    stepped = any(piece.name.startswith(f"{OPTIM}/") for piece in pieces)
    grows = set() if stepped else {f"{WEIGHT}/{fragment.name}" for fragment in held if fragment.trained}
    sizes = ranks.gather(sum(piece.num_bytes * (3 if piece.name in grows else 1) for piece in pieces))
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


# -- saving besides the optimiser -----------------------------------------------------------------


def _fragments(engine: Trained) -> list[Fragment]:
    engine.sharding.settle()
    return list(engine.sharding.fragments())


def _ranks(group: dist.ProcessGroup | None = None) -> Ranks:
    return Ranks(dist.get_rank(), partial(gather, group=group, kinds=(ShardEntry,)))


def _layout(engine: Trained) -> dict[str, Any]:
    return {
        "rank_stages": [list(held) for held in engine.module.placement.rank_stages],
        "replicas": engine.num_replicas,
        "device": engine.device.type,
    }


def _meta(engine: Trained, held: list[Fragment], client_state: Mapping[str, Any]) -> dict[str, Any]:
    """Everything except tensors; a collective call."""
    scalars = _ranks().gather(optimizer_state.group_scalars(held, engine.basic_optimizer))
    return {
        "client_state": dict(client_state),
        "counters": {name: getattr(engine, name) for name in COUNTERS},
        "groups": {name: values for of_rank in scalars for name, values in of_rank.items()},
        "lr_scheduler": _without_groups(engine.lr_scheduler.state_dict()) if engine.lr_scheduler else {},
        "loss_scale": optimizer_state.loss_scale(engine.optimizer),
        "layout": _layout(engine),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
    }


def _pieces(engine: Trained, held: list[Fragment], stores: tuple[Store, ...]) -> list[Piece]:
    """The pieces that this rank writes; a collective call.

    The first of several pipeline ranks writes tied weights, if all its replicas write to the same
    store. The replicas of a store share the writing of what they hold in common.
    """
    buffers = _buffers(engine)
    mine = {name for name, _ in engine.module.named_global_parameters()} | buffers.keys()
    members = store_of(stores, engine.global_rank).members
    near: dict[int, list[int]] = {}
    names_of: dict[int, set[str]] = {}
    for rank, (pipe_rank, names) in enumerate(_ranks().gather((engine.pipe_rank, mine))):
        if rank in members:
            near.setdefault(pipe_rank, []).append(rank)
            names_of[pipe_rank] = names
    before = [p for p in near if p < engine.pipe_rank and len(near[p]) == engine.num_replicas]
    taken = set().union(*(names_of[p] for p in before))
    pieces = optimizer_state.collect(
        [fragment for fragment in held if fragment.name not in taken],
        engine.basic_optimizer,
        [Piece.whole(f"{BUFFER}/{name}", tensor) for name, tensor in buffers.items() if name not in taken],
        part=near[engine.pipe_rank].index(engine.global_rank),
        num_parts=len(near[engine.pipe_rank]),
    )
    return pieces + [Piece.whole(name, state) for name, state in _random_states(engine).items()]


def _buffers(engine: Trained) -> dict[str, torch.Tensor]:
    """The persistent buffers of the model, by their names in the whole model."""
    found: dict[str, torch.Tensor] = {}
    for stage in engine.module.stages.values():
        parameters = {name for name, _ in stage.model.named_parameters(remove_duplicate=False)}
        for name, tensor in stage.model.state_dict().items():
            if name not in parameters:
                found[stage.prefix + name] = tensor
    return found


def _random_states(engine: Trained) -> dict[str, torch.Tensor]:
    states = {f"rng/cpu/{engine.global_rank}": torch.get_rng_state()}
    if engine.device.type != "cpu":
        states[f"rng/{engine.device.type}/{engine.global_rank}"] = get_accelerator().get_rng_state()
    return states


# -- restoring ------------------------------------------------------------------------------------


def _open(path: Path) -> Checkpoint:
    """Open an engine's checkpoint, and check the form of its state."""
    checkpoint = open_checkpoint(path)
    try:
        meta = checkpoint.meta
        for part in ("client_state", "groups", "lr_scheduler", "loss_scale", "layout"):
            form.mapping(meta, part)
        counters = form.mapping(meta, "counters")
        if set(counters) != set(COUNTERS):
            raise form.FormError(f"counters: {', '.join(counters)[:200]}")
        for name in COUNTERS:
            form.number(counters, name)
        for name in meta["groups"]:
            form.mapping(meta["groups"], name)
    except form.FormError as error:
        raise damaged(path / MANIFEST, f"meta is not an engine's: {error}") from error
    return checkpoint


def _check_names(checkpoint: Checkpoint, held: list[Fragment], ranks: Ranks) -> None:
    """Check that the model has every weight of the checkpoint, so that none is silently lost."""
    known = {f"{WEIGHT}/{name}" for of_rank in ranks.gather([f.name for f in held]) for name in of_rank}
    lost = sorted(name for name in checkpoint.names if name.startswith(f"{WEIGHT}/") and name not in known)
    if lost:
        raise CheckpointError(
            f"{checkpoint.path}: it holds {len(lost)} tensors that this model lacks, such as {lost[0]}; give the "
            "model and lora settings with which the checkpoint was written"
        )


def _restore_local(engine: Trained, held: list[Fragment], checkpoint: Checkpoint, wanted: Wanted) -> None:
    """Everything but the collective last step."""
    meta = checkpoint.meta
    optimizer_state.restore(held, engine.basic_optimizer, checkpoint, with_state=wanted.optimizer)
    for name, tensor in _buffers(engine).items():
        tensor.copy_(checkpoint.load([f"{BUFFER}/{name}"])[f"{BUFFER}/{name}"])
    scalars = optimizer_state.OF_STATE * wanted.optimizer + optimizer_state.OF_SCHEDULE * wanted.scheduler
    optimizer_state.restore_group_scalars(held, engine.basic_optimizer, meta["groups"], scalars)
    if engine.lr_scheduler and meta["lr_scheduler"] and wanted.scheduler:
        _restore_scheduler(engine, meta["lr_scheduler"])
    if wanted.progress:
        _restore_progress(engine, checkpoint)


def _restore_progress(engine: Trained, checkpoint: Checkpoint) -> None:
    meta = checkpoint.meta
    optimizer_state.restore_loss_scale(engine.optimizer, meta["loss_scale"])
    for name, value in meta["counters"].items():
        setattr(engine, name, value)
    if meta["layout"] == _layout(engine):
        states = {name: checkpoint.read(name) for name in _random_states(engine)}
        torch.set_rng_state(states.pop(f"rng/cpu/{engine.global_rank}"))
        for state in states.values():
            get_accelerator().set_rng_state(state)
    else:
        torch.manual_seed((checkpoint.step << 20) + engine.global_rank)


def _without_groups(state: Mapping[str, Any]) -> dict[str, Any]:
    """A scheduler's state without the entries per parameter group, which differ between layouts."""
    return {key: value for key, value in state.items() if key not in _PER_GROUP}


def _restore_scheduler(engine: Trained, saved: Mapping[str, Any]) -> None:
    scheduler = engine.lr_scheduler
    own = {key: value for key, value in scheduler.state_dict().items() if key in _PER_GROUP}
    if "_last_lr" in own:
        own["_last_lr"] = [group["lr"] for group in engine.optimizer.param_groups]
    scheduler.load_state_dict({**saved, **own})
