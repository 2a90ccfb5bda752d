"""Two ranks that send each other tensors of many sizes and dtypes, both ways at once."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from weft.comm.channel import ChannelError, TensorSpec
from weft.comm.shared_channel import share
from weft.comm.torch_channel import between_hosts, connect
from weft.engine.distributed import init_distributed


def messages(seed: int, count: int) -> list[torch.Tensor]:
    """Random tensors, some empty, some views, some large enough for a thread of their own."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.int64])
        shape = rng.choices([(0,), (1,), (3, 5), (7, 11, 13), (130, 257), (1000, 900)], [2, 2, 2, 2, 1, 0.1])[0]
        tensor = torch.randint(-99, 99, shape, generator=generator).to(dtype)
        made.append(tensor.t() if tensor.ndim == 2 and rng.random() < 0.5 else tensor)
    return made


def exchange(way: str, count: int) -> list[str]:
    """Return the values that arrived changed; receives are posted ahead, and tensors stored for a while."""
    device = init_distributed(60.0)
    hops = {(0, 1), (1, 0)}
    if way == "shared memory":
        ends, apart = share(hops, timeout_s=60.0)
        assert not apart
    else:
        ends = connect(hops, device=device, timeout_s=60.0, rts_group=between_hosts())
    me = torch.distributed.get_rank()
    mine, theirs = ([tensor.to(device) for tensor in messages(seed, count)] for seed in (me, 1 - me))
    handles = [ends[1 - me, me].recv(str(n), TensorSpec(tuple(t.shape), t.dtype)) for n, t in enumerate(theirs)]
    sends = [ends[me, 1 - me].send(str(n), t) for n, t in enumerate(mine)]
    kept: list[torch.Tensor] = []
    wrong = []
    for n, (handle, expected) in enumerate(zip(handles, theirs, strict=True)):
        kept = [*kept[-5:], handle.wait()]
        if not all(torch.equal(a, b) for a, b in zip(kept, theirs[max(0, n - 5) : n + 1], strict=True)):
            wrong.append(f"{n}: {tuple(expected.shape)} {expected.dtype}")
    for send in sends:
        send.wait()
    return wrong


def desert() -> str | list[str]:
    """Rank 0 sends once and closes its ends; what rank 1 hears after that."""
    init_distributed(60.0)
    ends, _ = share({(0, 1), (1, 0)}, timeout_s=60.0)
    if torch.distributed.get_rank() == 0:
        ends[0, 1].send("first", torch.ones(3)).wait()
        for end in ends.values():
            end.close()
        torch.distributed.barrier()
        return "left"
    torch.distributed.barrier()
    three = TensorSpec((3,), torch.float32)
    assert ends[0, 1].recv("first", three).wait().tolist() == [1.0, 1.0, 1.0]
    return [
        _error(lambda: ends[0, 1].recv("second", three).wait()),
        _error(lambda: ends[1, 0].send("third", torch.ones(3)).wait()),
    ]


def keep_silent(way: str) -> str:
    """Return rank 1's error if rank 0 sends nothing."""
    device = init_distributed(60.0)
    if way == "shared memory":
        ends: dict = share({(0, 1)}, timeout_s=0.5)[0]
    else:
        ends = connect({(0, 1)}, device=device, timeout_s=0.5, rts_group=between_hosts())
    said = ""
    if torch.distributed.get_rank() == 1:
        said = _error(lambda: ends[0, 1].recv("word", TensorSpec((3,), torch.float32)).wait())
    torch.distributed.barrier()
    return said


def _error(action: Callable[[], object]) -> str:
    try:
        action()
    except ChannelError as error:
        return str(error)
    return "nothing"
