"""Memory checkpoints of a rank: copies made while training continues, replicated on a partner, restored from either."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from math import ceil
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.backends import in_host_memory
from weft.comm.exchange import gather
from weft.conf.host.private import private_folder
from weft.conf.host.threads import executor
from weft.conf.schema import CheckpointConfig
from weft.engine.checkpoint import engine_state
from weft.engine.checkpoint.client_state import encode
from weft.engine.checkpoint.durable import CheckpointError
from weft.engine.checkpoint.engine_state import Moment, Portion, fragments, num_bytes_to_come
from weft.engine.checkpoint.pieces import Piece
from weft.engine.checkpoint.ranks import Ranks, find_stores, store_of
from weft.engine.checkpoint.trained import Trained
from weft.engine.distributed import SharedError, attempt_number, together
from weft.engine.engine import WeftEngine
from weft.engine.supervision.memory.partners import Hosts, receive_copies, send_copy
from weft.engine.supervision.memory.recovery import recover
from weft.engine.supervision.memory.slots import HostMemory, Slot, in_order

COPIES = 2
"""Memory checkpoints per rank and host: a complete one, and one that is being written."""
WAIT_S = 1.0
"""Duration of a memory checkpoint in seconds, from which their interval may grow, so that training does not wait."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Taken:
    """The values of a step that are recorded before training continues."""

    step: int
    moment: Moment
    tree: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class MemoryCheckpoints:
    """Takes memory checkpoints of an engine, by all ranks after the same steps.

    A memory checkpoint takes two phases (MegaScale section 4.4). First a thread copies weights and optimiser state to
    host memory. Meanwhile the next step's forwards and backwards run, which do not change them. Then the thread hashes
    the copy, sends it to the partner, and waits for the results of all ranks. After that the previous memory checkpoint
    may be overwritten. Training waits before an optimiser step until the copy is done, and before a checkpoint until
    the previous one is complete everywhere. If checkpoints take long, the interval between them grows.
    """

    def __init__(
        self,
        engine: Trained,
        memory: HostMemory,
        hosts: Hosts,
        portion: Portion,
        group: dist.ProcessGroup,
        *,
        lineage: int,
        token: str,
        share: float,
        whole: Callable[[int], object],
        watching: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Store the settings. Use `open` instead.

        Args:
            group: process group of all ranks on CPU tensors, which nothing else uses.
            lineage, token: see `Commit`.
            share, whole, watching: see `open`.
        """
        self.memory, self.hosts, self.group = memory, hosts, group
        self.stalled_s = 0.0
        """Seconds that training has waited for memory checkpoints."""
        self.num_whole = 0
        """Number of memory checkpoints of this attempt that were completed on all hosts."""
        self._engine, self._portion = engine, portion
        self._lineage, self._token = lineage, token
        self._share, self._whole, self._watching = share, whole, watching
        self._held = fragments(engine)
        self._slots: dict[tuple[int, int], Slot] = {}
        self._last = 1  # index of the last complete checkpoint, so that the first one uses index 0
        self._copied = threading.Event()
        self._copied.set()
        self._work: Future[tuple[int, bool]] | None = None
        self._step_s = 0.0  # average of the steps before the last due checkpoint
        self._gone_on: tuple[int, float] | None = None  # the step after which training last continued, and the time
        self._not_before = 0
        self._worker = executor("weft-memory")
        self._stream = torch.cuda.Stream(engine.device) if engine.device.type == "cuda" else None

    @classmethod
    def open(
        cls,
        engine: Trained,
        memory: HostMemory,
        *,
        sites: Sequence[int],
        timeout_s: float,
        share: float = 1.0,
        whole: Callable[[int], object] = lambda step: None,
        watching: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> MemoryCheckpoints:
        """Create the memory checkpoints of a job, after a check that they fit into each host's memory. Collective call.

        Args:
            sites: the site of each rank.
            timeout_s: seconds after which a rank that does not answer counts as lost.
            share: maximum share of the time that slow copies may take.
            whole: called, on a thread, with the step of each memory checkpoint that is complete on all hosts.
            watching: the context of waits for other ranks, see `Neighbours.watching`.

        Raises:
            CheckpointError: on every rank: a host has too little memory for two memory checkpoints.
        """
        ranks = Ranks(dist.get_rank(), gather)
        stores = find_stores(memory.root, ranks, leaders=0)  # hosts do not share memory
        hosts, portion = Hosts.of(stores, sites), Portion.find(engine, stores, ranks)
        held = fragments(engine)
        sizes = ranks.gather(num_bytes_to_come(portion.pieces(engine, held, Moment.now(engine)), held))
        store = store_of(stores, ranks.rank)
        needed = COPIES * sum(sizes[rank] for rank in hosts.kept_by(store))
        ranks.together(memory.root, lambda: memory.check_room(needed) if ranks.rank == store.leader else None)
        # Higher than any earlier lineage, including those of hosts that are away.
        last = max([commit.lineage for _, commit in memory.whole()] + [attempt_number()])
        told = ranks.gather((last, secrets.token_hex(8)))
        lineage, token = 1 + max(number for number, _ in told), told[0][1]
        group = dist.new_group(backend=in_host_memory(dist.get_backend()), timeout=timedelta(seconds=timeout_s))
        return cls(
            engine,
            memory,
            hosts,
            portion,
            group,
            lineage=lineage,
            token=token,
            share=share,
            whole=whole,
            watching=watching,
        )

    # -- between steps ---------------------------------------------------------------------------

    def take(self, client_state: Mapping[str, Any]) -> None:
        """Start a memory checkpoint of the step that has just ended, by all ranks after the same step.

        Args:
            client_state: see `save_engine`.

        Raises:
            RuntimeError: another rank was lost while the previous checkpoint was sent.
        """
        begun, step = perf_counter(), self._engine.global_steps
        if step < self._not_before:
            return
        if self._gone_on is not None and step > self._gone_on[0]:
            self._step_s = (begun - self._gone_on[1]) / (step - self._gone_on[0])
        self.finish()
        if step < self._not_before:
            self._go_on(step, begun)
            return
        tree, tensors = encode(client_state)
        taken = _Taken(step, Moment.now(self._engine, copy=True), tree, tensors)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._engine.device))
            with torch.cuda.stream(self._stream):
                self._engine.sharding.order_after_gathers()
        self._copied.clear()
        self._work = self._worker.submit(self._store, taken, 1 - self._last)
        self._go_on(step, begun)

    def _go_on(self, step: int, begun: float) -> None:
        self._gone_on = step, perf_counter()
        self.stalled_s += self._gone_on[1] - begun

    def before_step(self) -> None:
        """Wait until the state that the optimiser is about to change has been copied."""
        if not self._copied.is_set():
            begun = perf_counter()
            self._copied.wait()
            self.stalled_s += perf_counter() - begun
        if self._stream is not None:
            torch.cuda.current_stream(self._engine.device).wait_stream(self._stream)

    def finish(self) -> None:
        """Wait until the last memory checkpoint has completed on all hosts or failed. For errors see `take`."""
        work, self._work = self._work, None
        if work is None:
            return
        with self._watching():
            self._not_before, is_whole = work.result()
        if is_whole:
            self._last = 1 - self._last
            self.num_whole += 1

    def recover(self, *, least_step: int = 0) -> tuple[int, dict[str, Any]] | None:
        """Restore the newest memory checkpoint that is complete over all hosts. Collective call.

        Args:
            least_step: older memory checkpoints are ignored, because storage has a newer checkpoint.

        Returns:
            The checkpoint's step and the caller's state, or None if there is no complete one.
        """
        return recover(self._engine, self.memory, self.hosts, self.group, least_step=least_step)

    def forget(self) -> None:
        """Remove the memory checkpoints of all hosts, because their steps are rolled back. Collective call."""
        self.finish()
        self._give_back()
        gather(None)
        if self._engine.global_rank in self.hosts.leaders:
            self.memory.forget()
        gather(None)  # no rank writes again before everything is removed

    def abandon(self) -> None:
        """Start no more copies. A copy in progress ends with its process group, which the caller must end next."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """End the thread and unmap the memory. Complete checkpoints stay."""
        self._worker.shutdown()
        self._give_back()

    def _give_back(self) -> None:
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()

    # -- on the thread -----------------------------------------------------------------------------

    def _store(self, taken: _Taken, index: int) -> tuple[int, bool]:
        """Copy, commit, and send to the partner. Return the next copy's least step, and True if all ranks succeeded.

        If this takes longer than `WAIT_S`, the interval grows until the slowest rank's copies take ``share`` of the
        time.
        """
        rank, problem, text, begun = self._engine.global_rank, "", b"", perf_counter()
        slot = None
        try:
            slot = self._slot(index, rank)
            text = self._copy(taken, slot)
            slot.commit(text)
        except (OSError, ValueError) as error:
            problem, text = f"rank {rank}: {error}", b""
        finally:
            self._copied.set()
        sent = send_copy(self.group, slot, text, self.hosts.keepers[rank])
        failed = receive_copies(self.group, self.hosts.guests(rank), lambda guest: self._slot(index, guest))
        for work in sent:
            work.wait()
        if failed:
            problem = f"rank {rank}: no copy of rank {failed[0][0]}: {failed[0][1]}"
        told = gather((problem, perf_counter() - begun, self._step_s), group=self.group)
        problems = [problem for problem, *_ in told if problem]
        took_s, step_s = (max(times) for times in list(zip(*told, strict=True))[1:])
        not_before = taken.step + (ceil(took_s / self._share / step_s) if took_s > WAIT_S and step_s else 0)
        if problems:
            log.warning("memory checkpoint after step %d: %s; the one before it stays", taken.step, problems[0])
        else:
            self._whole(taken.step)
        if not problems and rank in self.hosts.leaders:
            self.memory.forget({self.memory.folder(self._lineage, number) for number in range(COPIES)})
        return not_before, not problems

    def _copy(self, taken: _Taken, slot: Slot) -> bytes:
        """Copy the state, release it for the optimiser, and return the text of the commit."""
        pieces = self._portion.pieces(self._engine, self._held, taken.moment)
        if self._engine.global_rank in self.hosts.leaders:
            pieces += [Piece.whole(name, tensor) for name, tensor in taken.tensors.items()]
        pieces = in_order(pieces)
        places = slot.places(pieces)
        with torch.cuda.stream(self._stream):  # without effect on a CPU
            for place, piece in zip(places, pieces, strict=True):
                place.copy_(piece.data, non_blocking=True)
        meta = engine_state.meta(self._engine, self._held, taken.moment, taken.tree)
        self._copied.set()
        if self._stream is not None:
            self._stream.synchronize()
        return slot.sealed(
            lineage=self._lineage,
            token=self._token,
            step=taken.step,
            rank=self._engine.global_rank,
            num_ranks=len(self.hosts.keepers),
            meta=meta,
        ).text()

    def _slot(self, index: int, rank: int) -> Slot:
        slot = self._slots.get((index, rank))
        if slot is not None and slot.bytes.numel() and not slot.path.exists():  # the folder was removed
            self._slots.pop((index, rank)).close()
            slot = None
        if slot is None:
            folder = self.memory.folder(self._lineage, index)
            private_folder(folder.parent)
            folder.mkdir(mode=0o700, exist_ok=True)
            slot = self._slots[index, rank] = Slot(folder, rank, pinned=self._stream is not None)
        return slot


def attach_memory(engine: WeftEngine, memory: HostMemory, *, share: float = 1.0) -> MemoryCheckpoints:
    """Let an engine take checkpoints in host memory. Collective call.

    Args:
        share: see `MemoryCheckpoints.open`.

    Raises:
        CheckpointError: on every rank, if a host has too little memory.
    """
    sites = [engine.layout.position(rank).site for rank in range(engine.layout.world_size)]
    checkpoints = MemoryCheckpoints.open(
        engine,
        memory,
        sites=sites,
        timeout_s=engine.weft.comm.timeout_s,
        share=share,
        whole=engine.watcher.kept,
        watching=engine.neighbours.watching,
    )
    engine.memory = checkpoints
    engine.groups = [*engine.groups, checkpoints.group]
    return checkpoints


def open_memory(settings: CheckpointConfig, engine: WeftEngine) -> str:
    """Attach the host memory that a supervisor keeps when ranks end. Collective call.

    Returns:
        Why there are no memory checkpoints, or empty if there are.
    """
    try:
        memory = together(HostMemory.of_environment)
        if memory is not None:
            attach_memory(engine, memory, share=settings.memory_share)
            engine.set_up.done("memory open")
            return ""
    except (SharedError, CheckpointError) as error:  # on every rank
        every = settings.every
        rest = f"every {every} steps" if every else "at the end alone; set checkpoint.every"
        return f"warning: no memory checkpoints: {error}. Checkpoints go to storage, {rest}"
    return (
        f"checkpoint.memory_every={settings.memory_every}: only a supervisor keeps memory checkpoints; "
        "set supervise.enabled=true with weft launch"
    )
