"""What ranks do whose exchanges are watched, or whose neighbour is no rank of ours."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.engine.tiny import batches, tiny_config


def work_without_pickles(folder: str) -> None:
    """Plan, train, measure, save, resume and export, in several layouts; any pickle between ranks is an error."""
    forbid_pickles()
    from weft.engine.checkpoint import export
    from weft.engine.initialize import initialize

    layouts = {
        "tied, ZeRO-1": tiny_config(stages=2, zero=1, tied=True),
        "sites, auto": tiny_config("auto", "site_fold", stages=4, sites=(2, 2)),
        "LoRA": tiny_config(stages=4, lora=True),
    }
    for name, config in layouts.items():
        engine, *_ = initialize(config=config)
        engine.set_dataiterator(batches(engine.replica, engine.num_replicas))
        engine.train_batch()
        engine.train_batch()
        engine.measured_timelines()
        engine.save_checkpoint(f"{folder}/{name}", client_state={"mark": 1})
        assert engine.load_checkpoint(f"{folder}/{name}")[1] == {"mark": 1}
        export(engine, Path(folder, f"{name} exported"))
        engine.destroy()
        dist.barrier()


def forbid_pickles() -> None:
    """Make torch's exchange of objects fail."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a pickle between ranks")

    dist.distributed_c10d._object_to_tensor = refuse
    dist.distributed_c10d._tensor_to_object = refuse


class Trap:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def beside_an_impostor(folder: str) -> str:
    """Rank 1 answers an exchange with a pickle; what rank 0 makes of it."""
    from weft.engine.distributed import init_distributed, together

    init_distributed(30.0)
    if dist.get_rank() == 0:
        try:
            together(lambda: None)
        except ValueError as error:
            return str(error)
        return "nothing was noticed"
    from weft.comm.exchange import _all_gathered, _first

    _all_gathered(_first(pickle.dumps(Trap(folder))), torch.device("cpu"), None)
    return "the impostor went on"


def beside_a_boaster(length: int) -> str:
    """Rank 1 announces a value of ``length`` bytes; what rank 0 makes of it."""
    from weft.comm.exchange import _LENGTH, _all_gathered, _first, gather
    from weft.engine.distributed import init_distributed

    init_distributed(30.0)
    if dist.get_rank() == 0:
        try:
            gather("fine")
        except ValueError as error:
            return str(error)
        return "nothing was noticed"
    boast = _first(b"fine")
    boast[: _LENGTH.size] = torch.frombuffer(bytearray(_LENGTH.pack(length)), dtype=torch.uint8)
    _all_gathered(boast, torch.device("cpu"), None)
    return ""
