"""Write a checkpoint atomically, by all ranks together."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.engine.checkpoint import durable
from weft.engine.checkpoint.durable import CheckpointError
from weft.engine.checkpoint.folder import check_space, checkpoint_folder, clean, complete, prune, put, temporary_for
from weft.engine.checkpoint.manifest import join, write_manifest
from weft.engine.checkpoint.pieces import Piece
from weft.engine.checkpoint.ranks import Ranks, Store, find_stores, store_of
from weft.engine.checkpoint.shard_file import file_name, write_shard


def save(
    folder: Path,
    step: int,
    pieces: Sequence[Piece],
    meta: Mapping[str, Any],
    *,
    ranks: Ranks | None = None,
    stores: tuple[Store, ...] | None = None,
    keep: int = 0,
    tag: str | None = None,
) -> Path:
    """Write one checkpoint. Collective call.

    All ranks write into a temporary folder. Then the first rank of each store writes the manifest and renames the
    folder. Once all have done so, older checkpoints are removed. At any time the newest finished one is complete.

    Args:
        pieces: the pieces that this rank writes. The pieces of all ranks together cover every tensor.
        meta: JSON values. In each store, the values of its first rank are written.
        ranks: the ranks that write. None means this process alone.
        stores: the groups of ranks that share a file system. None calls `find_stores`.
        keep: number of complete checkpoints to keep, including this one. 0 keeps all.
        tag: name of the checkpoint. It replaces another checkpoint of that name, and ``keep`` does not apply to it.
            None names it by its step.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: on every rank, if the checkpoint cannot be written. Earlier checkpoints are unchanged.
    """
    ranks = ranks or Ranks()
    stores = stores or find_stores(folder, ranks)
    store = store_of(stores, ranks.rank)
    leads = ranks.rank == store.leader
    target = checkpoint_folder(folder, step, tag)
    temporary = temporary_for(target)
    sizes = ranks.gather(sum(piece.num_bytes for piece in pieces))

    def prepare() -> None:
        clean(folder)
        check_space(folder, sum(sizes[rank] for rank in store.members))
        durable.make_new_folder(temporary)

    def commit() -> None:
        here = [entries[rank].file.name for rank in store.members]
        write_manifest(temporary, join(step, serial, name, meta, entries, here))
        durable.sync_folder(temporary)
        put(temporary, target)

    try:
        ranks.together(folder, lambda: prepare() if leads else None)
        entries = ranks.collect(folder, lambda: write_shard(temporary / file_name(ranks.rank), pieces))
        serial = 1 + max(ranks.collect(folder, lambda: _last_serial(folder) if leads else 0))
        name = ranks.gather(secrets.token_hex(8))[0]
        ranks.together(folder, lambda: commit() if leads else None)
    except CheckpointError:
        if leads:
            durable.remove(temporary)
        raise
    ranks.together(folder, lambda: prune(folder, keep) if leads else None)
    return target


def _last_serial(folder: Path) -> int:
    return max((manifest.serial for _, manifest in complete(folder)), default=0)
