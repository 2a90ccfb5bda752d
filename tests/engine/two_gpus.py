"""Two ranks with a GPU each over NCCL; started by torchrun, prints a line of JSON on rank 0.

torchrun --nproc-per-node=2 -m tests.engine.two_gpus
"""

from __future__ import annotations

import gc
import json
import sys
from itertools import chain
from time import perf_counter

import torch
import torch.distributed as dist

from tests.engine.tiny import many_losses, reference_losses, tiny_config

STEPS = 6
CASES = {
    "1f1b": {"stages": 2},
    "gpipe": {"stages": 2, "schedule": "gpipe"},
    "w, fold, tied": {"stages": 2, "schedule": "w", "placement": "fold", "tied": True},
    "auto, fold": {"stages": 2, "schedule": "auto", "placement": "fold"},
    "1f1b, bf16": {"stages": 2, "precision": "bf16"},
    "two replicas, ZeRO-1": {"stages": 1, "zero": 1},
    "two replicas, ZeRO-3": {"stages": 1, "zero": 3},
}
MESSAGES = 100


def main() -> int:
    """Print what `report` found."""
    found = report()
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def report() -> dict:
    """Train every case, exchange tensors, and tell what came of it."""
    from weft.engine.distributed import init_distributed

    device = init_distributed(120.0)
    gc.freeze()  # as `run_ranks` does for its ranks
    configs = [tiny_config(**keywords) for keywords in CASES.values()]
    found = {"device": device.type, "wrong": _exchange(device), "cases": {}}
    start = perf_counter()
    for (name, keywords), config, losses in zip(CASES.items(), configs, many_losses(configs, STEPS), strict=True):
        expected = reference_losses(config, 2 // keywords["stages"], STEPS, device.type)
        found["cases"][name] = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    found["seconds"] = perf_counter() - start
    return found


def _exchange(device: torch.device) -> int:
    """Messages both ways at once, of kernels that are still queued when the send is called; how many came wrong."""
    from weft.comm.channel import TensorSpec
    from weft.comm.torch_channel import between_hosts, connect

    me = dist.get_rank()
    ends = connect({(0, 1), (1, 0)}, device=device, timeout_s=60.0, rts_group=between_hosts())
    to, back = ends[me, 1 - me], ends[1 - me, me]
    shapes = [(1 + 997 * n % 5000, 3) for n in range(MESSAGES)]
    receives = [back.recv(str(n), TensorSpec(shape, torch.float32)) for n, shape in enumerate(shapes)]
    sends = []
    for n, shape in enumerate(shapes):
        tensor = torch.zeros(shape, device=device)
        for _ in range(20):
            tensor = tensor + 0.05 * (n + me)
        sends.append(to.send(str(n), tensor))
    came = [receive.wait() for receive in receives]
    wrong = [not torch.allclose(t, torch.full_like(t, n + 1 - me), rtol=1e-4) for n, t in enumerate(came)]
    for send in sends:
        send.wait()
    for end in chain([to, back]):
        end.close()
    return sum(wrong)


if __name__ == "__main__":
    sys.exit(main())
