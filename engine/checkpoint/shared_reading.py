"""Shared reading: one replica reads from storage and sends to the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.exchange import gather
from weft.engine.checkpoint.pieces import StoredPiece
from weft.engine.checkpoint.ranks import Ranks
from weft.engine.checkpoint.reader import Checkpoint
from weft.engine.checkpoint.shard_file import TYPES

Key = tuple[str, str]
"""File and key of a piece."""
Tell = Callable[[Tensor, int, Sequence[int]], None]
"""Sends a tensor in host memory from one member of a group to several. The sender and the receivers call it.

Arguments are the tensor, which receivers fill, the sender's index in the group, and the indices of all of them.
"""


class Needed(NamedTuple):
    """A piece that a rank needs, with safetensors' name of its type."""

    piece: StoredPiece
    dtype: str

    @property
    def key(self) -> Key:
        """Location of the piece."""
        return self.piece.file, self.piece.key


def read_once(
    checkpoint: Checkpoint, needed: Mapping[Key, Needed], members: Ranks, everyone: Ranks, tell: Tell
) -> None:
    """Read each piece that several members of a group need on one of them, and send it to the others.

    Collective call over the world.

    Pieces that fewer than two members need and can read are left to `Checkpoint.read`.

    Args:
        needed: pieces that this rank needs.
        everyone: all ranks of the world, which raise the same error.
        tell: sends a piece. `among` returns it with ``members``.

    Raises:
        CheckpointError: on every rank, if a file is damaged.
    """
    reachable = [list(key) for key in sorted(needed) if checkpoint.has(key[0])]
    users: dict[Key, list[int]] = {}
    for member, keys in enumerate(members.gather(reachable)):
        for file, key in keys:
            users.setdefault((file, key), []).append(member)
    shared = sorted(key for key, its in users.items() if len(its) > 1)
    roots = {key: users[key][number % len(users[key])] for number, key in enumerate(shared)}

    def read_mine() -> dict[Key, Tensor]:
        mine = [needed[key] for key in shared if roots[key] == members.rank]
        return {each.key: checkpoint.read_piece(each.piece, each.dtype) for each in mine}

    read = everyone.together(checkpoint.path, read_mine)
    for key in shared:
        if key in needed and members.rank in users[key]:
            piece, dtype = needed[key]
            data = read[key] if key in read else _room(piece, dtype)
            tell(data, roots[key], users[key])
            checkpoint.keep(piece, data)


def among(group: dist.ProcessGroup, device: torch.device) -> tuple[Ranks, Tell]:
    """Return the members of a process group, and a function that sends tensors between them by way of ``device``."""
    size, me = dist.get_world_size(group), dist.get_rank(group)

    def tell(data: Tensor, root: int, users: Sequence[int]) -> None:
        there = data.to(device)
        if len(users) == size:
            dist.broadcast(there, dist.get_global_rank(group, root), group=group)
        elif me == root:
            for user in users:
                if user != root:
                    dist.send(there, dist.get_global_rank(group, user), group=group)
        else:
            dist.recv(there, dist.get_global_rank(group, root), group=group)
        if me != root:
            data.copy_(there)

    return Ranks(me, lambda value: gather(value, group=group)), tell


def _room(piece: StoredPiece, dtype: str) -> Tensor:
    return torch.empty(piece.stop - piece.start, dtype=TYPES[dtype])
