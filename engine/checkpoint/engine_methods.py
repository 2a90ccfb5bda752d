"""DeepSpeed's methods for checkpoints, which are those of `weft.engine.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from weft.conf.schema import WeftConfig
from weft.engine.checkpoint import BackgroundWriter, Wanted, load_newest, load_tagged, save_engine
from weft.engine.checkpoint.background import MemoryWriter
from weft.engine.checkpoint.trained import Trained


class Checkpointed(Trained, Protocol):
    """The interface that these methods need of an engine.

    Attributes:
        checkpoint_writer: writes checkpoints in the background, or None before the first such checkpoint.
        memory: takes checkpoints in host memory, or None.
    """

    weft: WeftConfig
    checkpoint_writer: BackgroundWriter | None
    memory: MemoryWriter | None


def finish_checkpoints(engine: Checkpointed) -> None:
    """Wait until checkpoints that are being written are complete. Collective call.

    Raises:
        CheckpointError: on every rank, if a checkpoint could not be written.
    """
    if engine.checkpoint_writer is not None:
        engine.checkpoint_writer.wait()
    if engine.memory is not None:
        engine.memory.finish()


def save_checkpoint(
    engine: Checkpointed,
    save_dir: str,
    tag: str | int | None = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write a checkpoint, atomically, that any layout of ranks can restore. Collective call.

    Args:
        save_dir: folder of checkpoints.
        tag: name of the checkpoint's folder. It replaces another one of that name, and ``checkpoint.keep`` does not
            apply to it. None names it by its step.
        client_state: the caller's state for `load_checkpoint`, equal on all ranks: numbers, texts, lists, tuples,
            dictionaries, tensors and arrays.
        save_latest: whether `load_checkpoint` may choose it without a tag.
        exclude_frozen_parameters: accepted for compatibility. Frozen weights are saved, too.

    Raises:
        CheckpointError: on every rank, if the checkpoint cannot be written. Earlier checkpoints are unchanged.
    """
    if engine.weft.checkpoint.background and engine.checkpoint_writer is None:
        engine.checkpoint_writer = BackgroundWriter.open()
    save_engine(
        engine,
        Path(save_dir),
        client_state=client_state or {},
        keep=engine.weft.checkpoint.keep,
        tag=None if tag is None else str(tag),
        latest=save_latest,
        background=engine.checkpoint_writer,
    )
    return True


def load_checkpoint(
    engine: Checkpointed,
    load_dir: str,
    tag: str | int | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable | None = None,
) -> tuple[str | None, dict[str, Any]]:
    """Restore the newest complete checkpoint of a folder, or the checkpoint named ``tag``. Collective call.

    Args:
        load_dir: folder of checkpoints, or a checkpoint itself.
        tag: name of a checkpoint in it. None takes the newest.
        load_optimizer_states, load_lr_scheduler_states: whether to restore the optimiser's state and the learning
            rates. State that is not restored does not change.
        load_module_only: restore only weights, to start a new run.
        load_module_strict, custom_load_fn: only the default is supported.

    Returns:
        The checkpoint's path and the caller's state. Without a tag and without a checkpoint: (None, {}).

    Raises:
        CheckpointError: on every rank, if the named checkpoint does not exist, or none can be restored.
        ValueError: an argument is not supported.
    """
    if not load_module_strict or custom_load_fn is not None:
        raise ValueError(
            "load_checkpoint: load_module_strict=False and custom_load_fn are not supported: the checkpoint must "
            "contain every weight; read single ones with weft.engine.checkpoint.open_checkpoint"
        )
    finish_checkpoints(engine)
    wanted = Wanted(
        optimizer=load_optimizer_states and not load_module_only,
        scheduler=load_lr_scheduler_states and not load_module_only,
        progress=not load_module_only,
    )
    if tag is not None:
        path, state = load_tagged(engine, Path(load_dir), str(tag), wanted)
        return str(path), state
    found = load_newest(engine, Path(load_dir), wanted)
    return (None, {}) if found is None else (str(found[0]), found[1])
