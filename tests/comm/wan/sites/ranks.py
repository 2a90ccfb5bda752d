"""Operations of ranks at two or three sites on groups that span them, compared with gloo."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm import rendezvous
from weft.comm.backends import in_host_memory
from weft.comm.links import Sites
from weft.comm.wan.channel import WanChannel
from weft.conf.schema import CommConfig
from weft.engine.distributed import init_distributed

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (2, 5), (7, 1, 3), (33, 129))

Run = Callable[[Any], list[Tensor]]


def join(sites: tuple[int, ...], **comm: Any) -> None:
    """Join a job whose ranks are at ``sites``."""
    init_distributed(60.0, sites=Sites(sites, CommConfig(connections=2, timeout_s=60.0, **comm)))


def small(generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Whole numbers, whose sums and products are exact in every dtype; not contiguous."""
    return torch.randint(0, 3, (*shape, 2), generator=generator).to(dtype)[..., 0]


def priorities(sites: tuple[int, ...]) -> dict[str, int]:
    """Return the priorities of this rank's messages to the other site: a message of its own, and a collective's."""
    join(sites)
    seen: dict[str, int] = {}
    send = WanChannel.send

    def noting(channel: WanChannel, tag: str, tensor: Tensor) -> Any:
        seen[tag] = channel.priorities.get(tag, 0)
        return send(channel, tag, tensor)

    numbers, other = torch.arange(5.0) + dist.get_rank(), 1 - dist.get_rank()
    with patch.object(WanChannel, "send", noting):
        sent, heard = dist.isend(numbers, other), torch.zeros(5)
        dist.recv(heard, other)
        assert sent is not None
        sent.wait()
        total = torch.ones(1)
        dist.all_reduce(total)
    assert heard.tolist() == (torch.arange(5.0) + other).tolist() and total.item() == 2
    return seen


def reduction(rng: random.Random, dtype: torch.dtype) -> Any:
    return rng.choice([dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX])


def written(make: Callable[[], list[Tensor]], operation: Callable[..., Any]) -> Run:
    """An operation that writes into new outputs."""

    def run(group: Any) -> list[Tensor]:
        outputs = make()
        for work in operation(outputs, group) or ():
            work.wait()
        return outputs

    return run


def operations(rng: random.Random, generator: torch.Generator, size: int) -> Iterator[tuple[str, Run]]:
    """One of each collective on random tensors; each is called with a group, and returns what it wrote."""
    me = dist.get_rank()
    dtype, shape = rng.choice(DTYPES), rng.choice(SHAPES)
    tensor = small(generator, dtype, shape)
    parts = [small(generator, dtype, shape).contiguous() for _ in range(size)]
    root, op = rng.randrange(size), reduction(rng, dtype)
    length = rng.choice([1, 2, 5])
    flat = small(generator, dtype, (size * length, 3)).contiguous()
    splits = [[rng.choice([0, 1, 3]) for _ in range(size)] for _ in range(size)]

    part, neighbours = parts[0], ((me + 1) % size, (me - 1) % size)
    sent, arriving = splits[me], [row[me] for row in splits]

    def reduce(group: Any) -> list[Tensor]:
        mine = tensor.clone()
        dist.reduce(mine, root, op=op, group=group)
        return [mine] if me == root else []

    def uneven(out: list[Tensor], group: Any) -> None:
        source = small(generator, dtype, (sum(sent), 3)).contiguous() if sum(sent) else flat[:0]
        dist.all_to_all_single(*out, source, arriving, sent, group=group)

    def both_ways(out: list[Tensor], group: Any) -> list[dist.Work]:
        return [dist.isend(part, neighbours[0], group=group), dist.irecv(*out, neighbours[1], group=group)]

    copy, like_part = (lambda: [tensor.clone()]), (lambda: [torch.empty_like(part)])
    for name, make, operation in (
        ("all_reduce", copy, lambda out, group: dist.all_reduce(*out, op=op, group=group)),
        ("broadcast", copy, lambda out, group: dist.broadcast(*out, root, group=group)),
        (
            "all_gather",
            lambda: [torch.empty_like(tensor) for _ in range(size)],
            lambda out, group: dist.all_gather(out, tensor, group=group),
        ),
        (
            "all_gather_single",
            lambda: [flat.new_empty((size * len(flat), 3))],
            lambda out, group: dist.all_gather_into_tensor(*out, flat, group=group),
        ),
        (
            "reduce_scatter_single",
            lambda: [flat.new_empty((length, 3))],
            lambda out, group: dist.reduce_scatter_tensor(*out, flat, op=op, group=group),
        ),
        ("reduce_scatter", like_part, lambda out, group: dist.reduce_scatter(*out, parts, op=op, group=group)),
        (
            "gather",
            lambda: [torch.empty_like(part) for _ in range(size)] if me == root else [],
            lambda out, group: dist.gather(part, out or None, dst=root, group=group),
        ),
        (
            "scatter",
            like_part,
            lambda out, group: dist.scatter(*out, parts if me == root else None, src=root, group=group),
        ),
        (
            "all_to_all_single",
            lambda: [torch.empty_like(flat)],
            lambda out, group: dist.all_to_all_single(*out, flat, group=group),
        ),
        ("all_to_all_uneven", lambda: [flat.new_empty((sum(arriving), 3))], uneven),
        ("send_and_receive", like_part, both_ways),
        ("barrier", list, lambda out, group: dist.barrier(group=group)),
        ("reduce", None, reduce),
    ):
        yield f"{name} {dtype} {shape} {op} root {root}", operation if make is None else written(make, operation)


def compare(sites: tuple[int, ...], seeds: int) -> list[str]:
    """Which collectives gave something else than gloo's."""
    join(sites)
    world = dist.group.WORLD
    gloo = dist.new_group(backend="gloo")
    assert type(world).__name__ == "SiteGroup" and dist.get_backend(gloo) == "gloo"
    wrong = []
    for seed in range(seeds):
        for group, results in ((world, ours := []), (gloo, theirs := [])):
            rng, generator = random.Random(seed), torch.Generator().manual_seed(100 * seed + dist.get_rank())
            for name, operation in operations(rng, generator, dist.get_world_size()):
                results.append((name, operation(group)))
        for (name, mine), (_, expected) in zip(ours, theirs, strict=True):
            if len(mine) != len(expected) or not all(map(torch.equal, mine, expected)):
                wrong.append(f"seed {seed}: {name}: {mine}, gloo {expected}")
    dist.destroy_process_group()
    return wrong


def groups(sites: tuple[int, ...]) -> dict[str, Any]:
    """Return the kind of each set's group, and the results of several concurrent operations."""
    join(sites)
    me = dist.get_rank()
    made = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (1, 2), (0, 1, 2), (3,))}
    kinds = {ranks: type(group).__name__ for ranks, group in made.items() if me in ranks}
    everyone = tuple(range(dist.get_world_size()))
    launched = []
    for turn in range(5):
        for ranks, group in (made | {everyone: None}).items():
            if me in ranks:
                number = torch.full((5,), float(me + 10 * turn))
                work = dist.all_reduce(number, group=group, async_op=True)
                launched.append((work, number, float(sum(rank + 10 * turn for rank in ranks))))
    for work, _, _ in reversed(launched):
        work.wait()
    dist.barrier()  # the host's first rank listens for the others, whose links may yet be without contact
    dist.destroy_process_group()
    return {"kinds": kinds, "sums": [(float(number[0]), expected) for _, number, expected in launched]}


def lose_a_link(sites: tuple[int, ...]) -> list[str]:
    """Return each rank's result of an all-reduce after a leader has closed its connection, and of the next one."""
    join(sites, deadline_s=5.0)
    dist.all_reduce(torch.ones(3))
    if dist.get_rank() == sites.index(1):
        dist.distributed_c10d._get_default_group().links.close()
    heard = []
    for _ in range(2):
        try:
            dist.all_reduce(torch.ones(3))
        except RuntimeError as error:
            heard.append(f"{type(error).__name__}: {error}")
    return heard


def lose_a_member(sites: tuple[int, ...]) -> list[str]:
    """Return the others' results when a member that is no leader ends in the middle."""
    join(sites, deadline_s=5.0)
    dist.all_reduce(torch.ones(3))
    group = dist.distributed_c10d._get_default_group()
    if dist.get_rank() == 1:
        group.shutdown()
        del group._exchange
        return []
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        return [str(error)]
    finally:
        if dist.get_rank() == 0:
            group.links.close()
    return ["nothing"]


def tear_down(sites: tuple[int, ...]) -> float:
    """Rank 0 ends its groups while a collective waits for the others, and all begin anew in the same processes."""
    total = 0.0
    for attempt in range(3):
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + (attempt > 0))
        join(sites, deadline_s=5.0)
        group = dist.new_group([0, len(sites) - 1])
        number = torch.full((2,), float(dist.get_rank()))
        dist.all_reduce(number)
        total += float(number[0])
        if dist.get_rank() == 0:
            dist.all_reduce(number, group=group, async_op=True)  # no other process comes to it
        dist.destroy_process_group()
    return total


def hosts_of_one_site() -> dict[str, Any]:
    """Return messages and listeners of ranks that take each other for ranks of another host of the same site."""
    rendezvous.on_one_host = lambda: False
    os.environ["WEFT_KEY"] = "a key of sixteen bytes or more"
    said = _Said()
    logging.getLogger("weft").addHandler(said)
    init_distributed(60.0)
    group, number = dist.new_group([0, 1]), torch.ones(3)
    for over in (None, group, dist.new_group(backend=in_host_memory("nccl"))):
        dist.all_reduce(number, group=over)
    accepting = _accepting()
    dist.all_reduce(number, group=group)
    dist.barrier()
    backends = [dist.get_backend(over) for over in (None, group)]
    dist.destroy_process_group()
    return {"said": said.messages, "accepting": accepting, "sum": number.tolist(), "backends": backends}


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _accepting() -> list[int]:
    """Ports of this process that take connections of other processes; a child tries each."""
    found = psutil.Process().net_connections("tcp4")
    ports = [connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN]
    assert len(ports) > 3, "gloo listens for each group"
    command = [sys.executable, "-c", _TRY, *map(str, ports)]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)


_TRY = """
import contextlib, socket, sys
accepting = []
for port in map(int, sys.argv[1:]):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5):
        accepting.append(port)
print(accepting)
"""
