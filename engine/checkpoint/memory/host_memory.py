"""Host memory: a private folder in /dev/shm that outlives ranks, with the slots of their memory checkpoints."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from weft.conf.private import private_folder
from weft.engine.checkpoint.errors import CheckpointError
from weft.engine.checkpoint.memory.slot import COMMIT, Commit, read_commit
from weft.engine.checkpoint.shard_file import FILES

VARIABLE = "WEFT_MEMORY"
"""Names the folder to a rank; whoever starts ranks makes the folder, and removes it when the job ends."""
_NAME = re.compile(r"memory-\d{6,}-[ab]")


class HostMemory:
    """The folder as the ranks of one host share it."""

    def __init__(self, root: Path) -> None:
        """Take the folder, or make it.

        Raises:
            ValueError: others could read or replace it.
        """
        self.root = private_folder(root)

    @classmethod
    def of_environment(cls) -> HostMemory | None:
        """The one that ``WEFT_MEMORY`` names; None if nobody keeps any."""
        named = os.environ.get(VARIABLE)
        return cls(Path(named)) if named else None

    def folder(self, lineage: int, index: int) -> Path:
        """Where slots of one memory checkpoint lie: each lineage has two, 0 and 1, that take turns."""
        return self.root / f"memory-{lineage:06d}-{'ab'[index]}"

    def whole(self) -> Iterator[tuple[Path, Commit]]:
        """The file and the commit of every slot that is whole; checksums of pieces are not looked at."""
        for folder in self._folders():
            for path in sorted(folder.glob(FILES)):
                commit = read_commit(path.with_suffix(COMMIT))
                if commit is not None and path == folder / f"rank-{commit.rank:03d}.safetensors":
                    yield path, commit

    def forget(self, kept: Collection[Path] = ()) -> None:
        """Remove all folders but those ``kept``."""
        for folder in self._folders():
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def check_room(self, num_bytes: int) -> None:
        """Check that there is memory for ``num_bytes`` alongside what is held already.

        Raises:
            CheckpointError: there is not.
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
