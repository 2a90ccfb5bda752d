"""Training by peers of Weft's supervisor in `benchmarks survive --peers`: a tiny Llama, data-parallel.

A peer's launcher starts it on each rank with a folder. It resumes from the newest checkpoint in the folder, writes a
checkpoint every few steps, and appends a line per step to the file `steps`. Signals make a rank fail.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import sleep, time
from typing import Any

CHECKPOINT_EVERY = 5
PAD_S = 0.2
"""Seconds added to each step."""
SAVE_S = 0.5
"""Seconds added to each checkpoint, so that a rank can be killed during one."""
TIMEOUT_S = 15
"""Timeout of collectives: torch's default of half an hour is too long here."""
HOLD_LOCK, TAKE_MEMORY = signal.SIGUSR1, signal.SIGUSR2
VOCAB, LENGTH, BATCH = 4096, 64, 4


def main(folder: Path) -> None:
    """Train until this process is killed."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    signal.signal(HOLD_LOCK, lambda *_: ctypes.PyDLL(None).sleep(60))
    signal.signal(TAKE_MEMORY, lambda *_: _held.append(bytearray(os.urandom(1 << 20) * 1024)))
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    (folder / f"rank{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=4, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = _resume(folder, model, optimizer)
    parallel = DistributedDataParallel(model)
    give_sign = _heartbeat()
    while True:
        give_sign()
        step += 1
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
        loss = parallel(input_ids=ids, labels=ids).loss
        loss.backward()
        sleep(PAD_S)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            with open(folder / "steps", "a") as file:
                file.write(f"{time()} {os.getpid()} {step} {loss.item()}\n")
        if step % CHECKPOINT_EVERY == 0:
            _save(folder, rank, {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
            dist.barrier()


def _heartbeat() -> Callable[[], object]:
    """Return the function that reports this rank's life to NVRx's monitor under its launcher; otherwise None."""
    if "FT_RANK_MONITOR_IPC_SOCKET" not in os.environ:
        return lambda: None
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client.send_heartbeat


def _save(folder: Path, rank: int, state: dict[str, Any]) -> None:
    import torch

    if rank:
        return
    (folder / "saving").touch()
    torch.save(state, folder / "draft.pt")
    sleep(SAVE_S)
    os.replace(folder / "draft.pt", folder / f"step-{state['step']:08d}.pt")
    (folder / "saving").unlink()


def _resume(folder: Path, model: Any, optimizer: Any) -> int:
    """Load the newest checkpoint, and return its step."""
    import torch

    found = sorted(folder.glob("step-*.pt"))
    if not found:
        return 0
    state = torch.load(found[-1])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


_held: list[bytearray] = []


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
