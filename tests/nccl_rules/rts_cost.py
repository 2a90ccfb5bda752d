"""The cost of an RTS: latency of a message with receives posted ahead, and with receives launched on an RTS.

python -m tests.nccl_rules.rts_cost [MESSAGES]
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic_ns, sleep

import torch
import torch.distributed as dist

from weft.comm.channel import Handle, TensorSpec
from weft.tools.ranks import run_ranks

GAP_S = 0.005
"""Between two sends, in place of a forward or a backward."""
SIZES = {"4 B": 1, "8 MB": 2 << 20}
"""Elements of fp32."""
SWITCH_S = (5e-3, 5e-4)
"""Python's switch interval: its default, and that of ranks that receive RTS messages."""


def seconds(count: int) -> dict[tuple[str, str, str], list[float]]:
    """By way, size and what the receiver's interpreter does meanwhile: seconds of each message."""
    from tests.nccl_rules.group import join
    from weft.comm.torch_channel import between_hosts, connect

    join(60.0)
    me, device = dist.get_rank(), torch.device("cpu")
    ends = connect({(0, 1), (1, 0)}, device=device, timeout_s=60.0, rts_group=between_hosts())
    end = ends[0, 1]
    plain = dist.new_group([0, 1])
    ways: dict[str, Callable[[int], Handle | dist.Work | None]] = {
        "posted ahead": partial(_plain, plain, me),
        "on an RTS": lambda elements: (
            end.send("t", torch.zeros(elements, device=device))
            if me == 0
            else end.recv("t", TensorSpec((elements,), torch.float32))
        ),
    }
    loads = {"waits": _idle, **{f"computes in Python, {1e3 * s:g} ms": partial(_busy, s) for s in SWITCH_S}}
    found = {}
    for load_name, load in loads.items():
        for size_name, elements in SIZES.items():
            for way_name, way in ways.items():
                with load(me == 1):
                    found[way_name, size_name, load_name] = _stamps(me, lambda n=elements, w=way: w(n), count)
    return found


def _plain(group: dist.ProcessGroup, me: int, elements: int) -> dist.Work | None:
    tensor = torch.zeros(elements, device=torch.device("cpu"))
    return dist.isend(tensor, 1, group=group) if me == 0 else dist.irecv(tensor, 0, group=group)


def _stamps(me: int, start: Callable[[], Handle | dist.Work | None], count: int) -> list[float]:
    """When each message was sent (rank 0) or had come (rank 1)."""
    stamps = []
    for _ in range(count):
        dist.barrier()
        if me == 1:
            handle = start()
        sleep(GAP_S)
        if me == 0:
            stamps.append(monotonic_ns() / 1e9)
            handle = start()
        assert handle is not None
        handle.wait()
        if me == 1:
            stamps.append(monotonic_ns() / 1e9)
    return stamps


@contextmanager
def _idle(_: bool):
    yield


@contextmanager
def _busy(switch_s: float, here: bool):
    """A thread that never lets the interpreter go by itself, as one that launches kernels."""
    before, over = sys.getswitchinterval(), threading.Event()
    sys.setswitchinterval(switch_s)

    def compute() -> None:
        while not over.is_set():
            sum(range(200))

    if here:
        threading.Thread(target=compute, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        sys.setswitchinterval(before)


def table(sent: dict, came: dict) -> list[str]:
    """A line of the median and the 99th percentile for each case."""
    lines = [f"{'receiver':38s} {'message':8s} {'posted ahead':>18s} {'on a note':>18s}   median, p99 in us"]
    for _, size, load in (key for key in sent if key[0] == "posted ahead"):
        cells = []
        for way in ("posted ahead", "on an RTS"):
            took = sorted(b - a for a, b in zip(sent[way, size, load], came[way, size, load], strict=True))
            cells.append(f"{1e6 * took[len(took) // 2]:8.0f} {1e6 * took[int(0.99 * len(took))]:9.0f}")
        lines.append(f"{load:38s} {size:8s} {cells[0]:>18s} {cells[1]:>18s}")
    return lines


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    sent, came = run_ranks(2, seconds, int(argv[0]) if argv else 200, timeout_s=300)
    print("\n".join(table(sent, came)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
