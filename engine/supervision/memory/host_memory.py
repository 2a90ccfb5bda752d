"""Host memory: a private folder in /dev/shm that outlives ranks, with the slots of their memory checkpoints."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from weft.conf.host.private import private_folder
from weft.engine.checkpoint.durable import CheckpointError
from weft.engine.checkpoint.shard_file import FILES
from weft.engine.supervision.memory.slot import COMMIT, Commit, read_commit

VARIABLE = "WEFT_MEMORY"
"""Environment variable of a rank: the folder, which the ranks' parent creates, and removes at the end of the job."""
_NAME = re.compile(r"memory-\d{6,}-[ab]")


class HostMemory:
    """The folder that the ranks of one host share."""

    def __init__(self, root: Path) -> None:
        """Open the folder, or create it.

        Raises:
            ValueError: other users could read or replace the folder.
        """
        self.root = private_folder(root)

    @classmethod
    def of_environment(cls) -> HostMemory | None:
        """Return the folder that ``WEFT_MEMORY`` names, or None if it is unset."""
        named = os.environ.get(VARIABLE)
        return cls(Path(named)) if named else None

    def folder(self, lineage: int, index: int) -> Path:
        """Return the folder of one memory checkpoint's slots. Each lineage alternates between the indices 0 and 1."""
        return self.root / f"memory-{lineage:06d}-{'ab'[index]}"

    def whole(self) -> Iterator[tuple[Path, Commit]]:
        """Yield file and commit of every complete slot. Checksums of pieces are not verified."""
        for folder in self._folders():
            for path in sorted(folder.glob(FILES)):
                commit = read_commit(path.with_suffix(COMMIT))
                if commit is not None and path == folder / f"rank-{commit.rank:03d}.safetensors":
                    yield path, commit

    def forget(self, kept: Collection[Path] = ()) -> None:
        """Remove all folders except those in ``kept``."""
        for folder in self._folders():
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def check_room(self, num_bytes: int) -> None:
        """Check that there is memory for ``num_bytes``, including existing slots.

        Raises:
            CheckpointError: there is too little memory.
        """
        free = shutil.disk_usage(self.root).free
        if num_bytes > free:
            raise CheckpointError(
                f"checkpoint.memory_every: two memory checkpoints of this host's ranks take {num_bytes / 2**30:.2f} "
                f"GiB, and {self.root} has {free / 2**30:.2f} GiB free; enlarge /dev/shm, or set "
                "checkpoint.memory_every=0"
            )

    def _folders(self) -> list[Path]:
        return sorted(path for path in self.root.iterdir() if path.is_dir() and _NAME.fullmatch(path.name))
