"""Collective calls of a run's ranks, as torch's Flight Recorder has them: from ranks, run folders and torch's dumps."""

from __future__ import annotations

import json
import pickle
import re
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import IO, Any, NamedTuple

from weft.conf.host.documents import parse_json, read_text
from weft.conf.host.terminal import printable
from weft.engine.observability.recorded_calls import calls_socket, own_frame
from weft.tools.watch import FOLDER

LIMIT_S = 10.0
"""Seconds after which a rank is given up that does not answer."""
AT_ONCE = 8
MOST_BYTES = 64 * 2**20
"""Largest answer, and largest file."""
MOST_TEXT = 500
Dumps = dict[int, tuple[float, dict[str, Any]]]
"""The time and the dump of each rank, in torch's format."""
Sizes = tuple[tuple[int, ...], ...]


class Call(NamedTuple):
    """A call of a rank that the other ranks of its group make too.

    Attributes:
        backend, group: the library, and the group's name.
        number: the number of the collective in its group.
        ends: sender and receiver of a transfer, by their places in the group. None for a collective.
        at_s: time of the call, since 1970.
        where: the function and line that made it.
    """

    backend: str
    group: str
    number: int
    operation: str
    inputs: Sizes
    outputs: Sizes
    types: tuple[tuple[str, ...], tuple[str, ...]]
    is_done: bool
    at_s: float
    where: str
    ends: tuple[int, int] | None


class RankCalls(NamedTuple):
    """The newest calls of a rank, oldest first, and the ranks of its groups by name."""

    groups: dict[str, tuple[int, ...]]
    calls: list[Call]


def read_rank(rings: Path, rank: int) -> dict[str, Any]:
    """Return a living rank's dump, with frames unless they take long.

    Raises:
        OSError: it does not answer, or records nothing.
        ValueError: its answer is no dump.
    """
    until, answer = monotonic() + LIMIT_S, b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(LIMIT_S)
        connection.connect(str(calls_socket(rings, rank)))
        try:
            while (left_s := until - monotonic()) > 0 and len(answer) < MOST_BYTES:
                connection.settimeout(left_s)
                if not (part := connection.recv(2**20)):
                    break
                answer += part
        except TimeoutError:
            pass
    lines = answer.split(b"\n")[:-1]  # the last may be incomplete
    if not lines:
        raise TimeoutError
    dump = parse_json(lines[-1])
    if not isinstance(dump, dict) or "error" in dump:
        raise ValueError(printable(str(dump))[:MOST_TEXT])
    return dump


def read_ranks(rings: Path, ranks: Sequence[int]) -> dict[int, dict[str, Any] | str]:
    """Return the dumps of living ranks, or why one has none."""

    def read(rank: int) -> dict[str, Any] | str:
        try:
            return read_rank(rings, rank)
        except TimeoutError:
            return f"no answer within {LIMIT_S:.0f} s; it is stopped, or a thread holds its interpreter lock"
        except (OSError, ValueError) as error:
            return f"its calls cannot be read: {error}"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(ranks, pool.map(read, ranks), strict=True))


def read_run(run_folder: Path) -> Dumps:
    """Return what collectors have stored of the ranks of all hosts in the last stall. See `weft.tools.watch.stalls`."""
    stored = []
    for path in (run_folder / FOLDER).glob("calls-*.json"):
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # it is being replaced, or damaged
            each = parse_json(read_text(path, most_bytes=MOST_BYTES))
            dumps = {int(rank): dump for rank, dump in each["ranks"].items() if isinstance(dump, dict)}
            stored.append((float(each["at"]), float(each["still"]), dumps))
    _, still_s, _ = max(stored, key=lambda each: each[0], default=(0.0, 0.0, {}))
    return {rank: (at_s, dump) for at_s, _, dumps in stored for rank, dump in dumps.items() if at_s >= still_s}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it has an object ({module}.{name}) and not only plain values")


def read_dumps(folder: Path) -> Dumps:
    """Return torch's own dumps in a folder by rank, with their times. Nothing in a pickle is executed.

    NCCL's watchdog writes them at a timeout (``TORCH_FR_DUMP_TEMP_FILE`` with the rank at its end).

    Raises:
        ValueError: there is none, or one is no dump.
    """
    found: Dumps = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        number = re.search(r"\d+$", path.name)
        if number is None or not path.is_file():
            continue
        try:
            if path.stat().st_size > MOST_BYTES:
                raise ValueError(f"more than {MOST_BYTES >> 20} MiB")
            with open(path, "rb") as file:
                found[int(number[0][-9:])] = path.stat().st_mtime, _loaded(file)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: no dump of torch's Flight Recorder ({error}); remove it") from error
    if not found:
        raise ValueError(f"--dumps {folder}: no dumps there; their names end with the rank, such as nccl_trace_rank_0")
    return found


def _loaded(file: IO[bytes]) -> dict[str, Any]:
    try:
        dump = json.load(file) if file.peek(1)[:1] == b"{" else _PlainUnpickler(file).load()  # type: ignore[attr-defined]
    except Exception as error:  # a damaged pickle raises almost any
        raise ValueError(printable(str(error)) or type(error).__name__) from error
    if not isinstance(dump, dict):
        raise ValueError("not a dictionary")
    return dump


def parse(dump: Mapping[str, Any]) -> RankCalls:
    """Return the calls of a dump in torch's format. Entries that are not of this format are left out."""
    groups, calls = {}, []
    configs, entries = dump.get("pg_config"), dump.get("entries")
    for name, config in configs.items() if isinstance(configs, dict) else ():
        with suppress(ValueError, KeyError, TypeError):
            if ranks := _numbers(parse_json(config["ranks"])):
                groups[printable(str(name))] = ranks
    for entry in entries if isinstance(entries, list) else ():
        with suppress(ValueError, KeyError, TypeError, IndexError, AttributeError):
            calls.append(_call(entry))
    return RankCalls(groups, calls)


def _call(entry: Mapping[str, Any]) -> Call:
    backend, _, rest = printable(str(entry["profiling_name"])).partition(":")
    operation, _, ends = rest.partition(" ")
    is_transfer = operation in ("send", "recv")
    if entry["is_p2p"] is True and not is_transfer:
        raise ValueError("a batch of transfers, each of which has an entry")
    number, made_ns = _numbers([entry["p2p_seq_id" if is_transfer else "collective_seq_id"], entry["time_created_ns"]])
    sizes = [tuple(_numbers(size) for size in entry[name]) for name in ("input_sizes", "output_sizes")]
    types = [tuple(printable(str(each)) for each in entry[name]) for name in ("input_dtypes", "output_dtypes")]
    between = None
    if is_transfer:
        first, second = _numbers(list(map(int, re.split("->|<-", ends))))
        between = (first, second) if operation == "send" else (second, first)
    return Call(
        backend,
        printable(str(entry["process_group"][0])),
        number,
        operation,
        sizes[0],
        sizes[1],
        (types[0], types[1]),
        entry["retired"] is True or entry["state"] == "completed",
        made_ns / 1e9,
        _where(entry.get("frames") or ()),
        between,
    )


def _numbers(values: Sequence[Any]) -> tuple[int, ...]:
    """Return numbers of 64 bits. Raise ValueError for anything else."""
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError("not numbers")
    return tuple(values)


def _where(frames: Sequence[Mapping[str, Any]]) -> str:
    frame = own_frame(frames)
    if frame is None:
        return ""
    return printable(f"{frame['name']} ({'/'.join(Path(str(frame['filename'])).parts[-3:])}:{frame['line']})")
