"""Two ranks that send each other tensors of many sizes and dtypes, both ways at once."""

from __future__ import annotations

import random

import torch

from weft.comm.channel import TensorSpec
from weft.comm.shared_channel import share
from weft.comm.torch_channel import connect
from weft.engine.distributed import init_distributed


def messages(seed: int, count: int) -> list[torch.Tensor]:
    """Random tensors around the size from which shared memory is used; some empty, some views."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.int64])
        shape = rng.choice([(0,), (1,), (3, 5), (7, 11, 13), (130, 257), (400, 300)])
        tensor = torch.randint(-99, 99, shape, generator=generator).to(dtype)
        made.append(tensor.t() if tensor.ndim == 2 and rng.random() < 0.5 else tensor)
    return made


def exchange(shared: bool, count: int) -> list[str]:
    """What arrived other than it was sent; receives are posted ahead, and tensors kept for a while."""
    device = init_distributed(60.0)
    channels = connect({(0, 1), (1, 0)}, device=device, timeout_s=60.0)
    ends = share(channels, device) if shared else channels
    me = torch.distributed.get_rank()
    mine, theirs = messages(me, count), messages(1 - me, count)
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
