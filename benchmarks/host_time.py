"""Host time of a micro-batch in Weft, in plain transformers and in torch's pipeline runtime, with tiny layers."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import process_time, thread_time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from transformers import LlamaForCausalLM

from benchmarks.results import finish, parse, show
from weft.conf.schedule_kinds import ScheduleKind
from weft.conf.schema import ModelConfig, OptimizerConfig, PipelineConfig, PlacementKind, TrainConfig, WeftConfig
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

VOCAB, LENGTH, LAYERS, MICROBATCHES = 64, 12, 8, 8
"""So small that kernels take microseconds, and the host's work is what is measured."""
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.0, clip=1.0)
TIMEOUT_S = 500.0
NUM_STAGES = 2


def _config(stages: int) -> WeftConfig:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    }
    config = WeftConfig(
        model=ModelConfig(arch="llama", overrides=shape, self_check=False),
        pipeline=PipelineConfig(
            stages=stages,
            schedule=ScheduleKind["1f1b"],
            placement=PlacementKind.straight,
            microbatches=MICROBATCHES,
        ),
        optimizer=OPTIMIZER,
        train=TrainConfig(microbatch_size=2, steps=10_000),
    )
    config.logging.progress = False
    return config


def _batches() -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(VOCAB, (2, LENGTH), generator=generator)
        yield {"input_ids": ids, "labels": ids}


def _plain() -> LlamaForCausalLM:
    from weft.engine.stages.files.loading import build_model

    return build_model(_config(1).model, dtype=torch.float32, seed=0).train()


class TorchStage(nn.Module):
    """One half of a Llama for torch's pipeline runtime."""

    def __init__(self, model: LlamaForCausalLM, stage: int) -> None:
        super().__init__()
        count = LAYERS // NUM_STAGES
        self.embedding = model.model.embed_tokens if stage == 0 else None
        self.rotary = model.model.rotary_emb
        self.layers = model.model.layers[stage * count : (stage + 1) * count]
        last = stage == NUM_STAGES - 1
        self.norm = model.model.norm if last else None
        self.head = model.lm_head if last else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states, or logits in the last stage, from hidden states or ids."""
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        positions = torch.arange(hidden.shape[1])[None]
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotary, position_ids=positions)
        return hidden if self.head is None or self.norm is None else self.head(self.norm(hidden))


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def _stepping(parameters: Sequence[nn.Parameter]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(parameters, lr=OPTIMIZER.lr)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _plain_step() -> Callable[[], object]:
    model, data = _plain(), _batches()
    step = _stepping(list(model.parameters()))

    def run() -> None:
        for _ in range(MICROBATCHES):
            (model(**next(data), use_cache=False).loss / MICROBATCHES).backward()
        step()

    return run


def _torch_step(rank: int) -> Callable[[], object]:
    module, data = TorchStage(_plain(), rank), _batches()
    stage = pipelining.PipelineStage(module, rank, NUM_STAGES, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=_loss)
    step = _stepping(list(module.parameters()))

    def run() -> None:
        ids = torch.cat([next(data)["input_ids"] for _ in range(MICROBATCHES)])
        schedule.step(*((ids,) if rank == 0 else ()), target=ids if rank else None)
        step()

    return run


def _weft_step(stages: int) -> tuple[Callable[[], object], Any]:
    from weft.engine.initialize import initialize

    engine, *_ = initialize(config=_config(stages))
    engine.set_dataiterator(_batches())
    return engine.train_batch, engine


def on_ranks(rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Return this rank's processor seconds of a step by engine and round: of the main thread, and of all threads."""
    torch.set_num_threads(1)
    weft, engine = _weft_step(int(os.environ["WORLD_SIZE"]))
    if dist.get_world_size() == 1:
        engines = {"Weft": weft, "transformers": _plain_step()}
    else:
        engines = {"Weft": weft, "torch pipelining": _torch_step(dist.get_rank())}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    gc.collect()
    gc.freeze()
    for turn in range(rounds + 1):
        for name, run in engines.items():
            dist.barrier()
            start = thread_time(), process_time()
            for _ in range(steps):
                run()
            if turn:  # the first warms up
                found[name].append(((thread_time() - start[0]) / steps, (process_time() - start[1]) / steps))
    dist.barrier()
    engine.destroy()
    return found


def rows(rounds: int, steps: int) -> Iterator[dict[str, object]]:
    """Yield a row for each comparison: host time of a micro-batch on a rank."""
    for num_ranks, peer in ((1, "transformers"), (NUM_STAGES, "torch pipelining")):
        by_rank = run_ranks(num_ranks, on_ranks, rounds, steps, timeout_s=TIMEOUT_S)
        main, every = ({name: _by_turn(by_rank, name, which) for name in ("Weft", peer)} for which in range(2))
        ratios = sorted(weft / other for weft, other in zip(main["Weft"], main[peer], strict=True))
        yield {
            "ranks": num_ranks,
            "peer": peer,
            "Weft ms": f"{1e3 * median(main['Weft']):.2f}",
            "peer ms": f"{1e3 * median(main[peer]):.2f}",
            "Weft / peer": f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            "with other threads": f"{median(every['Weft']) / median(every[peer]):.2f}",
        }


def _by_turn(by_rank: Sequence[dict[str, list[tuple[float, float]]]], name: str, which: int) -> list[float]:
    """Return the seconds of a micro-batch in each round, as a mean of the ranks."""
    turns = zip(*(rank[name] for rank in by_rank), strict=True)
    return [sum(rank[which] for rank in turn) / len(by_rank) / MICROBATCHES for turn in turns]


def main(argv: Sequence[str]) -> int:
    """Print the table and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks host_time", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="steps of each engine in a round")
    args = parse(parser, argv)
    title = f"main thread's processor time per micro-batch and rank, {LAYERS} tiny layers, {MICROBATCHES} micro-batches"
    table = table_of(rows(args.rounds, args.steps), title)
    show(table)
    return finish(args, "host_time", table)
