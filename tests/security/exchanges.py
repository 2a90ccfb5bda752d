"""Ranks whose exchanges are watched, or whose neighbour is not a rank."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.engine.tiny import begun, tiny_config


def work_without_pickles(folder: str) -> None:
    """Plan, train, measure, save, resume and export, in several layouts; any pickle between ranks is an error."""
    forbid_pickles()
    from weft.engine.checkpoint import export

    layouts = {
        "tied, ZeRO-1": tiny_config(stages=2, zero=1, tied=True),
        "sites, auto": tiny_config("auto", "site_fold", stages=4, sites=(2, 2)),
        "LoRA": tiny_config(stages=4, lora=True),
    }
    for name, config in layouts.items():
        engine = begun(config)
        engine.train_batch()
        engine.train_batch()
        engine.measured_timelines()
        engine.save_checkpoint(f"{folder}/{name}", client_state={"mark": 1})
        assert engine.load_checkpoint(f"{folder}/{name}")[1] == {"mark": 1}
        export(engine, Path(folder, f"{name} exported"))
        engine.destroy()
        dist.barrier()


def recipe_without_pickles(folder: str) -> int:
    """A run with all that a recipe does, and its resume, with pickles forbidden; returns the steps done."""
    forbid_pickles()
    from tests.quickstart import TINY_QUICKSTART
    from weft.conf import load
    from weft.recipes.train import train

    settings = [
        *TINY_QUICKSTART,
        f"train.output_dir={folder}",
        f"data.cache_dir={folder}/cache",
        "pipeline.stages=2",
        "zero.stage=1",
        "supervise.compare_every=1",
        "data.eval_fraction=0.1",
        "train.eval_every=1",
        "train.eval_batches=1",
        "train.export=true",
        "train.sample=The",
        "train.sample_tokens=2",
        "train.timeline=true",
        "checkpoint.every=1",
        "checkpoint.load_best_model_at_end=true",
    ]
    for steps in (1, 3):
        done = train(load([*settings, f"train.steps={steps}"])).global_steps
    return done


def trainers_without_pickles(folder: str, use_cpu: bool) -> list[int]:
    """`WeftTrainer` on lists, on streams and resumed, with pickles forbidden; returns the last step of each."""
    forbid_pickles()
    from tests.engine.huggingface.runs import Streamed, arguments, on_device, section, tiny_model, weft
    from weft import WeftTrainer

    replicas = section(1, zero_optimization={"stage": 1})
    more = {"use_cpu": use_cpu, "num_train_epochs": 1, "eval_strategy": "epoch", "save_strategy": "epoch"}
    first = weft(f"{folder}/lists", 16, more, replicas, save=f"{folder}/saved", evaluate_first=[7])
    resumed = weft(f"{folder}/lists", 16, more | {"num_train_epochs": 2}, replicas, resume=True)
    steps = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    on_device(use_cpu)
    streaming = WeftTrainer(
        tiny_model(),
        arguments(f"{folder}/streams", deepspeed=section(2), use_cpu=use_cpu, **steps),
        train_dataset=Streamed(64),
        eval_dataset=Streamed(7),
    )
    streaming.train()
    return [first[-1]["step"], resumed[-1]["step"], streaming.state.global_step]


def forbid_pickles() -> None:
    """Make torch's exchange of objects fail, whoever asks for it."""

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
