"""Recovery of the newest memory checkpoint that is complete over all hosts. Each piece comes from the nearest copy."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.comm.exchange import gather
from weft.engine.checkpoint import engine_state
from weft.engine.checkpoint.durable import CheckpointError, OtherBaseError
from weft.engine.checkpoint.engine_checkpoint import check_base, restore
from weft.engine.checkpoint.engine_state import check_form, fragments, sources
from weft.engine.checkpoint.manifest import join
from weft.engine.checkpoint.ranks import Ranks
from weft.engine.checkpoint.reader import Checkpoint
from weft.engine.checkpoint.shard_file import ShardEntry, ShardReader, file_name
from weft.engine.checkpoint.trained import Trained
from weft.engine.supervision.memory.partners import Hosts, receive_copies, send_copy
from weft.engine.supervision.memory.slots import COMMIT, Commit, HostMemory, Slot, entry, read_commit
from weft.engine.zero import NonFiniteError

log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class Part:
    """A rank's part of a memory checkpoint on some host. Parts sort by age, with the newest last.

    Attributes:
        lineage, step, token: see `Commit`.
        folder: name of the folder, the same on all hosts.
        rank, num_ranks: see `Commit`.
    """

    lineage: int
    step: int
    token: str
    folder: str
    rank: int
    num_ranks: int

    @classmethod
    def of(cls, path: Path, commit: Commit) -> Part:
        """Return the part in a slot's file."""
        return cls(commit.lineage, commit.step, commit.token, path.parent.name, commit.rank, commit.num_ranks)

    @property
    def whole(self) -> tuple[int, int, str, str, int]:
        """Fields that all parts of one memory checkpoint share."""
        return self.lineage, self.step, self.token, self.folder, self.num_ranks


def newest_whole(held: Sequence[Iterable[Part]], least_step: int = 0) -> dict[Part, list[int]]:
    """Return the parts of the newest complete memory checkpoint, each with the hosts that have it.

    Args:
        held: the parts on each host.
        least_step: older memory checkpoints are ignored.

    Returns:
        The hosts by part, or an empty dictionary if no memory checkpoint is complete.
    """
    where: dict[tuple, dict[Part, list[int]]] = {}
    for host, parts in enumerate(held):
        for part in parts:
            if part.step >= least_step:
                where.setdefault(part.whole, {}).setdefault(part, []).append(host)
    for whole in sorted(where, reverse=True):
        if {part.rank for part in where[whole]} == set(range(whole[-1])):
            return where[whole]
    return {}


def recover(
    engine: Trained, memory: HostMemory, hosts: Hosts, group: dist.ProcessGroup, *, least_step: int
) -> tuple[int, dict[str, Any]] | None:
    """Restore the newest memory checkpoint that is complete over all hosts. Collective call.

    Damaged parts are replaced by other copies. Without such copies, the memory checkpoint is not restored.

    Args:
        group: process group of all ranks, in host memory.

    Returns:
        The checkpoint's step and the caller's state, or None if there is no complete one.
    """
    ranks = Ranks(dist.get_rank(), partial(gather, kinds=(ShardEntry, Part)))
    leads = ranks.rank in hosts.leaders
    while True:
        told = ranks.gather([Part.of(path, commit) for path, commit in memory.whole()] if leads else [])
        where = newest_whole([told[leader] for leader in hosts.leaders], least_step)
        if not where:
            return None
        recovery = _Recovery(engine, memory, hosts, group, ranks, where)
        try:
            return recovery.step, recovery.run()
        except OtherBaseError:
            raise
        except (CheckpointError, NonFiniteError) as error:
            log.warning("memory checkpoint after step %d: %s", recovery.step, error)
            recovery.drop_damaged()


class _Recovery:
    """One attempt to restore one memory checkpoint. Its methods are collective calls."""

    def __init__(
        self,
        engine: Trained,
        memory: HostMemory,
        hosts: Hosts,
        group: dist.ProcessGroup,
        ranks: Ranks,
        where: Mapping[Part, Sequence[int]],
    ) -> None:
        self._engine, self._hosts, self._group, self._ranks, self._where = engine, hosts, group, ranks, where
        first = next(iter(where))
        self.step, self._token = first.step, first.token
        self._memory = memory
        self._folder = memory.root / first.folder
        self._leads = ranks.rank in hosts.leaders
        self._host = next(number for number, store in enumerate(hosts.stores) if ranks.rank in store.members)

    def run(self) -> dict[str, Any]:
        """Restore the memory checkpoint, and return the caller's state.

        Raises:
            CheckpointError: on every rank, if a part is damaged or belongs to another model.
            NonFiniteError: on every rank, if there are NaNs or infinities.
        """
        self._ranks.together(self._folder, self._clear)
        told = self._ranks.collect(self._folder, self._entries)
        metas = [meta for of_rank in told for meta, _ in of_rank]
        entries = [item for of_rank in told for _, item in of_rank]
        meta = {**metas[0], "groups": engine_state.join_groups(each["groups"] for each in metas)}
        manifest = join(self.step, 0, self._token, meta, entries, ())
        checkpoint = self._ranks.together(self._folder, lambda: check_form(Checkpoint(self._folder, manifest)))
        check_base(self._engine, checkpoint)
        self._fetch(sources(self._engine, fragments(self._engine), checkpoint))
        state = restore(self._engine, checkpoint, self._ranks)
        self._engine.check_finite()
        if self._leads:
            self._memory.forget({self._folder})  # newer checkpoints are of steps that are rolled back
        return state

    def drop_damaged(self) -> None:
        """Remove damaged parts or, if none is damaged, all parts, because the memory checkpoint cannot be restored."""
        damaged = [path for path in self._own() if not _is_intact(path)] if self._leads else []
        none = not any(self._ranks.gather(len(damaged)))
        for path in self._own() if none and self._leads else damaged:
            path.with_suffix(COMMIT).unlink(missing_ok=True)
        self._ranks.gather(None)  # no rank searches again before all ranks have removed their parts

    def _own(self) -> list[Path]:
        return [self._folder / file_name(part.rank) for part, held in self._where.items() if self._host in held]

    def _clear(self) -> None:
        """Create the folder if it is missing, and remove incomplete slots and slots of other steps from it."""
        if not self._leads:
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        kept = {path.with_suffix(suffix) for path in self._own() for suffix in (path.suffix, COMMIT)}
        for path in set(self._folder.iterdir()) - kept:
            path.unlink()

    def _entries(self) -> list[tuple[Any, ShardEntry]]:
        """Return commit and table of the parts whose first copy is on this host, as its leader reported."""
        found = []
        for part, held in self._where.items() if self._leads else ():
            if held[0] == self._host:
                path = self._folder / file_name(part.rank)
                commit = read_commit(path.with_suffix(COMMIT))
                if commit is None:
                    raise CheckpointError(f"{path}: it is gone")
                found.append((commit.meta, entry(commit, path)))
        return found

    def _fetch(self, needed: set[str]) -> None:
        """Copy missing parts that this host's ranks need from hosts that have them."""
        lacks = self._ranks.gather(sorted(name for name in needed if not (self._folder / name).exists()))
        for part, held in sorted(self._where.items()):
            for store in self._hosts.stores:
                if any(file_name(part.rank) in lacks[rank] for rank in store.members):
                    self._copy(part, self._hosts.leaders[held[0]], store.leader)
        self._ranks.gather(None)  # the leaders have fetched the parts

    def _copy(self, part: Part, source: int, target: int) -> None:
        path = self._folder / file_name(part.rank)
        if self._ranks.rank == source:
            slot = Slot(self._folder, part.rank)
            slot.map()
            for work in send_copy(self._group, slot, path.with_suffix(COMMIT).read_bytes(), target):
                work.wait()
        elif self._ranks.rank == target:
            receive_copies(self._group, [source], lambda _: Slot(self._folder, part.rank))


def _is_intact(path: Path) -> bool:
    commit = read_commit(path.with_suffix(COMMIT))
    if commit is None:
        return False
    with suppress(OSError, ValueError):
        item = entry(commit, path)
        reader = ShardReader(path, item.file)
        for tensor in item.tensors.values():
            reader.read(tensor.pieces[0], tensor.dtype)
        return True
    return False
