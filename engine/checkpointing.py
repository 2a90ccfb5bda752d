"""DeepSpeed's methods for checkpoints, as Weft has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from weft.conf.schema import WeftConfig
from weft.engine.checkpoint import BackgroundWriter, Wanted, load_newest, load_tagged, save_engine
from weft.engine.checkpoint.memory import HostMemory, MemoryCheckpoints
from weft.engine.checkpoint.origin import Origin
from weft.engine.planning.run_plan import RunPlan


class CheckpointingEngine(PipelineEngine):
    """A pipeline engine that writes and reads `weft.engine.checkpoint`'s checkpoints.

    What these need of the engine besides is `weft.engine.checkpoint.trained.Trained`.
    """

    weft: WeftConfig
    plan: RunPlan
    groups: Sequence[dist.ProcessGroup] = ()
    """Process groups that were made for this engine, and end with it."""
    origin = Origin()
    """Base model, inputs and settings, as checkpoints record them."""
    memory: MemoryCheckpoints | None = None
    """Checkpoints in host memory, once `open_memory` was called."""
    _writer: BackgroundWriter | None = None

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint that is whole or absent, and fits any layout; a collective call.

        Args:
            save_dir: folder of checkpoints.
            tag: name of the checkpoint's folder; another of that name gives way to it, and
                ``checkpoint.keep`` does not touch it. None names it by its step.
            client_state: what the caller wants back from `load_checkpoint`, equal on all ranks:
                numbers, texts, lists, tuples, dictionaries, tensors and arrays.
            save_latest: whether `load_checkpoint` may take it where no tag is given.
            exclude_frozen_parameters: accepted for compatibility; frozen weights are saved, too.

        Raises:
            CheckpointError: on every rank; checkpoints written before are as they were.
        """
        save_engine(
            self,
            Path(save_dir),
            client_state=client_state or {},
            keep=self.weft.checkpoint.keep,
            tag=None if tag is None else str(tag),
            latest=save_latest,
            background=self._checkpoint_writer(),
        )
        return True

    def _checkpoint_writer(self) -> BackgroundWriter | None:
        if self.weft.checkpoint.background and self._writer is None:
            self._writer = BackgroundWriter.open()
        return self._writer

    def finish_checkpoints(self) -> None:
        """Wait until checkpoints that are being written are whole; a collective call.

        Raises:
            CheckpointError: on every rank: one could not be written.
        """
        if self._writer is not None:
            self._writer.wait()
        if self.memory is not None:
            self.memory.finish()

    def open_memory(self, memory: HostMemory, *, share: float = 1.0) -> MemoryCheckpoints:
        """Let this run take checkpoints in host memory; a collective call.

        Args:
            share: as of `MemoryCheckpoints.open`.

        Raises:
            CheckpointError: on every rank: a host has too little memory.
        """
        layout = self.plan.layout
        sites = [layout.position(rank).site for rank in range(layout.world_size)]
        self.memory = MemoryCheckpoints.open(
            self, memory, sites=sites, timeout_s=self.weft.comm.timeout_s, share=share, whole=self.heartbeat.kept
        )
        self.groups = [*self.groups, self.memory.group]
        return self.memory

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Restore the newest whole checkpoint of a folder, or the one named; a collective call.

        Args:
            load_dir: folder of checkpoints, or a checkpoint itself.
            tag: name of a checkpoint in it; None takes the newest.
            load_optimizer_states, load_lr_scheduler_states: whether to restore these, too; what is
                not restored stays as it is.
            load_module_only: restore weights alone, to start a new run from.
            load_module_strict, custom_load_fn: cannot be changed.

        Returns:
            The checkpoint's path and the caller's state; (None, {}) when no tag is given and there
            is none.

        Raises:
            CheckpointError: on every rank: the checkpoint named is not there, or what is there
                cannot be restored.
            ValueError: an argument that cannot be honoured.
        """
        if not load_module_strict or custom_load_fn is not None:
            raise ValueError(
                "load_checkpoint: load_module_strict=False and custom_load_fn are not to be had: every weight has to "
                "be in the checkpoint; read single ones with weft.engine.checkpoint.open_checkpoint"
            )
        self.finish_checkpoints()
        wanted = Wanted(
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            progress=not load_module_only,
        )
        if tag is not None:
            path, state = load_tagged(self, Path(load_dir), str(tag), wanted)
            return str(path), state
        found = load_newest(self, Path(load_dir), wanted)
        return (None, {}) if found is None else (str(found[0]), found[1])
