"""Conversion of an engine's state to pieces of tensors and JSON values, and back, for checkpoints of any kind."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from weft.engine.checkpoint import manifest_form as form
from weft.engine.checkpoint import optimizer_state
from weft.engine.checkpoint.client_state import CLIENT
from weft.engine.checkpoint.durable import OtherModelError
from weft.engine.checkpoint.manifest import MANIFEST
from weft.engine.checkpoint.optimizer_state import OPTIM, WEIGHT
from weft.engine.checkpoint.pieces import Piece, StoredPiece, stored_name, whole_name
from weft.engine.checkpoint.ranks import Ranks, Store, store_of
from weft.engine.checkpoint.rates import PER_GROUP, restore_rates
from weft.engine.checkpoint.reader import Checkpoint
from weft.engine.checkpoint.shard_file import damaged
from weft.engine.checkpoint.trained import Trained
from weft.engine.zero import Fragment

BUFFER = "buffer"
"""Kind of tensors that no optimiser updates: ``buffer/NAME``."""
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""DeepSpeed's counters."""
_PACKAGES = ("weft", "torch", "deepspeed", "transformers")


@dataclass(frozen=True)
class Wanted:
    """The parts of a checkpoint to restore besides weights and buffers.

    Attributes:
        optimizer: the optimiser's state. Otherwise the current state stays.
        scheduler: learning rates and their schedule.
        progress: counters, random states, the loss scale, and the norms that define spikes.
    """

    optimizer: bool = True
    scheduler: bool = True
    progress: bool = True


EVERYTHING = Wanted()
"""Resume exactly, with all parts."""

# -- saving ---------------------------------------------------------------------------------------


def fragments(engine: Trained) -> list[Fragment]:
    """Wait for collectives in progress, and return this rank's part of every parameter."""
    engine.sharding.settle()
    return list(engine.sharding.fragments())


def layout(engine: Trained) -> dict[str, Any]:
    """Return the layout of the job as JSON values. Random states can be restored only in the same layout."""
    return {
        "rank_stages": [list(held) for held in engine.module.placement.rank_stages],
        "replicas": engine.num_replicas,
        "device": engine.device.type,
    } | {axis: size for axis in ("context", "tensor", "expert") if (size := getattr(engine.layout, axis)) > 1}


@dataclass(frozen=True)
class Moment:
    """The state that changes before the next optimiser step: counters, random states and the model's buffers.

    Weights and the optimiser's state do not change until that step.
    """

    counters: Mapping[str, int]
    buffers: Mapping[str, torch.Tensor]
    random_states: Mapping[str, torch.Tensor]

    @classmethod
    def now(cls, engine: Trained, *, copy: bool = False) -> Moment:
        """Return the current state. Without ``copy``, the buffers are the model's own, which change later."""
        buffers = {name: tensor.clone() if copy else tensor for name, tensor in _buffers(engine).items()}
        return cls({name: getattr(engine, name) for name in COUNTERS}, buffers, _random_states(engine))


def meta(engine: Trained, held: Iterable[Fragment], moment: Moment, client_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state without tensors as JSON values. Its ``groups`` has only the parameters of ``held``."""
    return {
        "client_state": dict(client_state),
        "counters": dict(moment.counters),
        "groups": optimizer_state.group_scalars(held, engine.basic_optimizer),
        "lr_scheduler": _without_groups(engine.lr_scheduler.state_dict()) if engine.lr_scheduler else {},
        "loss_scale": optimizer_state.loss_scale(engine.optimizer),
        "norms": engine.optimizer.skips.norms,
        "layout": layout(engine),
        "versions": _versions(),
        "origin": engine.origin.to_tree(),
    }


def join_groups(of_ranks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the ``groups`` of all ranks' `meta`."""
    return {name: values for groups in of_ranks for name, values in groups.items()}


@cache
def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES}


@dataclass(frozen=True)
class Portion:
    """The part of the state that a rank stores.

    A store is a set of ranks that share a file system. Ranks of a store divide the state that they have in common. Of
    several pipeline ranks with tied weights the first stores them, if all of its replicas use the same store.

    Attributes:
        taken: names of weights and buffers that another pipeline rank stores.
        alike: by the axis that cuts a parameter ("" for none), the ranks of this rank's store that hold the same
            part of it as this rank.
    """

    taken: frozenset[str]
    alike: Mapping[str, Sequence[int]]
    rank: int

    @classmethod
    def find(cls, engine: Trained, stores: tuple[Store, ...], ranks: Ranks) -> Portion:
        """Return this rank's portion. Collective call."""
        mine = {name for name, _ in engine.module.named_global_parameters()} | _buffers(engine).keys()
        members = store_of(stores, engine.global_rank).members
        near: dict[int, list[int]] = {}
        names_of: dict[int, set[str]] = {}
        for rank, (pipe_rank, names) in enumerate(ranks.gather((engine.pipe_rank, mine))):
            if rank in members:
                near.setdefault(pipe_rank, []).append(rank)
                names_of[pipe_rank] = names
        before = [p for p in near if p < engine.pipe_rank and len(near[p]) == engine.layout.lines]
        taken = frozenset().union(*(names_of[p] for p in before))
        holders = engine.layout.holders(engine.global_rank)
        alike = {axis: [rank for rank in near[engine.pipe_rank] if rank in held] for axis, held in holders.items()}
        return cls(taken, alike, engine.global_rank)

    def share(self, axis: str) -> tuple[int, int]:
        """Return this rank's index among the ranks of its store with the same part of a parameter, and their number."""
        return self.alike[axis].index(self.rank), len(self.alike[axis])

    def pieces(self, engine: Trained, held: Iterable[Fragment], moment: Moment) -> list[Piece]:
        """Return the pieces of the engine's state that this rank stores."""
        buffers = {name: tensor for name, tensor in moment.buffers.items() if name not in self.taken}
        stored = optimizer_state.collect(
            [fragment for fragment in held if fragment.name not in self.taken],
            engine.basic_optimizer,
            [Piece.whole(f"{BUFFER}/{name}", tensor) for name, tensor in buffers.items()],
            self.share,
        )
        return stored + [Piece.whole(name, state) for name, state in moment.random_states.items()]


def num_bytes_to_come(pieces: Iterable[Piece], held: Iterable[Fragment]) -> int:
    """Return the bytes of pieces including the optimiser's state, which does not exist before its first step.

    The optimiser's state is estimated to be as large as Adam's: twice the fp32 weights.
    """
    pieces = list(pieces)
    stepped = any(whole_name(piece.name).startswith(f"{OPTIM}/") for piece in pieces)
    grows = (
        set()
        if stepped
        else {stored_name(f"{WEIGHT}/{fragment.name}", fragment.cut) for fragment in held if fragment.trained}
    )
    return sum(piece.num_bytes * (3 if piece.name in grows else 1) for piece in pieces)


def _buffers(engine: Trained) -> dict[str, torch.Tensor]:
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


def check_form(checkpoint: Checkpoint) -> Checkpoint:
    """Check the form of the metadata of an engine's checkpoint.

    Raises:
        CheckpointError: the checkpoint is not an engine's.
    """
    try:
        meta = checkpoint.meta
        for part in ("client_state", "groups", "lr_scheduler", "loss_scale", "layout"):
            form.mapping(meta, part)
        counters = form.mapping(meta, "counters")
        if set(counters) != set(COUNTERS):
            raise form.FormError(f"counters: {', '.join(counters)[:200]}")
        for name in COUNTERS:
            form.number(counters, name)
        if "norms" in meta:  # missing in older checkpoints
            form.numbers(meta, "norms")
        if "origin" in meta:  # also missing there
            origin = form.mapping(meta, "origin")
            for part in ("settings", "inputs"):
                form.mapping(origin, part)
            for part in ("base", "path"):
                form.text(origin, part)
        for name in meta["groups"]:
            form.mapping(meta["groups"], name)
    except form.FormError as error:
        raise damaged(checkpoint.path / MANIFEST, f"meta is not an engine's: {error}") from error
    return checkpoint


def sources(engine: Trained, held: Iterable[Fragment], checkpoint: Checkpoint) -> set[str]:
    """Return the names of the files that this rank reads to restore everything."""
    return {piece.file for piece, _ in needed(engine, held, checkpoint, EVERYTHING)}


def needed(
    engine: Trained, held: Iterable[Fragment], checkpoint: Checkpoint, wanted: Wanted
) -> Iterator[tuple[StoredPiece, str]]:
    """Yield the pieces that this rank reads to restore ``wanted``, with the name of their type, some repeatedly."""
    parts: dict[str, list[Fragment]] = {}
    for fragment in held:
        parts.setdefault(fragment.name, []).append(fragment)
    buffers, states = _buffers(engine), _random_states(engine)
    for name in checkpoint.names:
        kind, _, rest = name.partition("/")
        parameter = rest.partition("/")[2] if kind == OPTIM else rest
        if kind == WEIGHT or (kind == OPTIM and wanted.optimizer):
            for fragment in parts.get(parameter, ()):
                if checkpoint.shape(name) != fragment.shape:
                    yield from checkpoint.pieces(name)
                    continue
                stop = fragment.start + fragment.tensor.numel()
                yield from checkpoint.pieces(name, fragment.start, stop, fragment.cut)
        elif name in states or (kind == BUFFER and rest in buffers) or kind == CLIENT:
            yield from checkpoint.pieces(name)


def check_names(checkpoint: Checkpoint, held: Iterable[Fragment], ranks: Ranks) -> None:
    """Check that the model has every weight of the checkpoint, so that none is silently ignored. Collective call.

    Raises:
        OtherModelError: on every rank, if the model lacks a weight.
    """
    known = {f"{WEIGHT}/{name}" for of_rank in ranks.gather([f.name for f in held]) for name in of_rank}
    lost = sorted(name for name in checkpoint.names if name.startswith(f"{WEIGHT}/") and name not in known)
    if lost:
        raise OtherModelError(
            f"{checkpoint.path}: it holds {len(lost)} tensors that this model lacks, such as {lost[0]}; give the "
            "model and lora settings with which the checkpoint was written"
        )


def restore_local(engine: Trained, held: Sequence[Fragment], checkpoint: Checkpoint, wanted: Wanted) -> None:
    """Restore this rank's state, without communication between replicas.

    Raises:
        CheckpointError: the checkpoint is damaged, or belongs to another model.
    """
    meta = checkpoint.meta
    optimizer_state.restore(held, engine.basic_optimizer, checkpoint, with_state=wanted.optimizer)
    for name, tensor in _buffers(engine).items():
        tensor.copy_(checkpoint.load([f"{BUFFER}/{name}"])[f"{BUFFER}/{name}"])
    if wanted.optimizer:
        optimizer_state.restore_step_counts(held, engine.basic_optimizer, meta["groups"])
    if wanted.scheduler:
        steps = meta["counters"]["global_steps"] - meta["counters"]["skipped_steps"]
        saved = meta["groups"], meta["lr_scheduler"]
        restore_rates(held, engine.basic_optimizer, engine.lr_scheduler, *saved, steps)
    if wanted.progress:
        _restore_progress(engine, checkpoint)


def _restore_progress(engine: Trained, checkpoint: Checkpoint) -> None:
    meta = checkpoint.meta
    optimizer_state.restore_loss_scale(engine.optimizer, meta["loss_scale"])
    for name, value in meta["counters"].items():
        setattr(engine, name, value)
    if meta["layout"] == layout(engine):
        states = {name: checkpoint.read(name) for name in _random_states(engine)}
        torch.set_rng_state(states.pop(f"rng/cpu/{engine.global_rank}"))
        for state in states.values():
            get_accelerator().set_rng_state(state)
    else:
        alike = (
            engine.global_rank - engine.layout.position(engine.global_rank).tensor
        )  # members of a tensor group have the same dropout
        torch.manual_seed((checkpoint.step << 20) + alike)


def _without_groups(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scheduler's state without the entries per parameter group, which differ between layouts."""
    return {key: value for key, value in state.items() if key not in PER_GROUP}
