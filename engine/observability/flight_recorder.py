"""Torch's Flight Recorder of a rank: its last collective calls, which other processes of this user read by a socket.

Torch records by default (``TORCH_FR_BUFFER_SIZE=0`` turns it off). It records the collectives of gloo, and all calls of
NCCL. A thread answers, so that a rank whose main thread waits for a collective is read too.
"""

from __future__ import annotations

import json
import pickle
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from weft.conf.host.private import private_folder
from weft.conf.host.threads import Thread
from weft.engine.observability.recorded_calls import calls_socket, own_frame

MOST_CALLS = 32
"""The newest calls of each group that are sent."""
MOST_TENSORS = 8
"""Tensors of a call whose sizes are sent."""
ANSWER_S = 5.0
"""Seconds after which a reader is given up."""
_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
"""Torch's recorders: of gloo, and of NCCL, which a build for CPUs does not have."""
_FIELDS = (
    "record_id",
    "process_group",
    "collective_seq_id",
    "p2p_seq_id",
    "is_p2p",
    "profiling_name",
    "time_created_ns",
    "state",
    "retired",
)
_TENSORS = ("input_sizes", "input_dtypes", "output_sizes", "output_dtypes")


class RecorderServer:
    """Answers each connection with the calls since this server was made, as JSON in torch's format.

    The first line has no frames, and the second has them.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        """Listen in a folder of this user alone.

        Raises:
            ValueError: the folder is not private to this user.
            OSError: the socket cannot be made.
        """
        self._rank = rank
        # An earlier attempt in this process had groups of the same names.
        self._earlier = _newest_records()
        path = calls_socket(private_folder(folder), rank)
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(path))
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise
        Thread(self._serve, name="weft-recorder").start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with connection, suppress(OSError):
                connection.settimeout(ANSWER_S)
                for frames in (False, True):  # the first frames take a second or more
                    connection.sendall(self._answer(frames=frames).encode() + b"\n")

    def _answer(self, *, frames: bool) -> str:
        try:
            return json.dumps(self.calls(frames=frames))
        except Exception as error:  # a later torch may record in another format
            return json.dumps({"error": repr(error)})

    def calls(self, *, frames: bool) -> dict[str, Any]:
        """Return the newest calls of each group, with the group's ranks, which gloo's recorder leaves out."""
        world = distributed_c10d._world
        names = {name: sorted(world.pg_group_ranks[group]) for group, name in list(world.pg_names.items())}
        newest: dict[tuple[str, str], deque[dict[str, Any]]] = {}
        for recorder, entries in _recorded(frames=frames):
            for entry in entries:
                if entry["record_id"] > self._earlier.get(recorder, -1):
                    group = recorder, entry["process_group"][0]
                    newest.setdefault(group, deque(maxlen=MOST_CALLS)).append(entry)
        return {
            "rank": self._rank,
            "pg_config": {name: {"name": name, "ranks": str(ranks)} for name, ranks in names.items()},
            "entries": [_short(entry) for calls in newest.values() for entry in calls],
        }

    def close(self) -> None:
        """Answer no longer. The file stays, because a later server of the rank may have replaced it."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _recorded(*, frames: bool = False) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the name and the calls of each recorder of this process, oldest first."""
    for name in _DUMPS:
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            found = pickle.loads(dump(includeStackTraces=frames))  # of this process itself
            yield name, found.get("entries", [])


def _newest_records() -> dict[str, int]:
    """Return the number of each recorder's newest call. Empty if torch records in another format."""
    with suppress(Exception):
        return {name: max((each["record_id"] for each in calls), default=-1) for name, calls in _recorded()}
    return {}


def _short(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a call with limited sizes, and only the frame that called torch."""
    frame = own_frame(entry.get("frames", ()))
    return {
        **{name: entry[name] for name in _FIELDS},
        **{name: entry[name][:MOST_TENSORS] for name in _TENSORS},
        "frames": [] if frame is None else [frame],
    }
