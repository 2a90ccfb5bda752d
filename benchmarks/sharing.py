"""Losses of models with shared layers against one process; a race of two ranks against other engines."""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan, nan

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers import tensor_engines
from benchmarks.results import finish, parse, show
from benchmarks.verification.tiny_models import VOCABULARY, tiny_model
from weft.conf.schema import (
    Attention,
    ContextExchange,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PipelineConfig,
    Precision,
    ScheduleKind,
    TrainConfig,
    WeftConfig,
    ZeroConfig,
)
from weft.engine.deepspeed.construction import learning_rate, parameter_groups
from weft.engine.models.sizes import model_sizes
from weft.engine.parallel.axis import UnshareableError
from weft.engine.parallel.context_exchange import choose_exchange
from weft.engine.precision import DTYPES
from weft.engine.stages.files.loading import build_model, load_hf_config
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

TOLERANCES = {"fp32": 1e-5, "bf16": 1e-3}
"""Largest relative difference of a loss from one process's that counts as equal, by precision."""
ROWS, LENGTH, MICROBATCHES = 2, 16, 3
DOCUMENTS = (5, 8, 3)
"""Lengths of the documents in packed rows."""
TIMEOUT_S = 3600.0
DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip


def _deepseek() -> ModelConfig:
    llama = tiny_model("llama", num_key_value_heads=4)
    return replace(llama, arch="deepseek_v3", overrides=llama.overrides | DEEPSEEK)


ARCHS: Mapping[str, Callable[[], ModelConfig]] = {
    **{
        arch: lambda arch=arch: tiny_model(arch, num_key_value_heads=4)  # type: ignore[misc]
        for arch in ("llama", "qwen3", "mistral", "gemma2", "phi3", "mixtral", "qwen3_moe")
    },
    "deepseek_v3": _deepseek,
}
"""Tiny models whose heads and experts four ranks can divide; windows are shorter than sequences."""
WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3")
SHARINGS: Mapping[str, ParallelConfig] = {
    "tensor 2": ParallelConfig(tensor=2),
    "tensor 4": ParallelConfig(tensor=4),
    **{
        f"context 2, {exchange.value}": ParallelConfig(context=2, context_exchange=exchange)
        for exchange in ContextExchange
        if exchange is not ContextExchange.auto
    },
    "expert 2": ParallelConfig(expert=2),
}


@dataclass(frozen=True)
class Layout:
    """A layout with which a sharing is combined.

    Attributes:
        replicas: data-parallel replicas; an expert axis multiplies them.
    """

    stages: int = 1
    replicas: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    checkpointing: bool = False
    packed: bool = False


LAYOUTS: Mapping[str, Layout] = {
    "alone": Layout(),
    "stages 2": Layout(stages=2),
    "replicas 2": Layout(replicas=2),
    "ZeRO-1": Layout(replicas=2, zero=1),
    "ZeRO-3": Layout(replicas=2, zero=3),
    "recomputed": Layout(checkpointing=True),
    "split backward": Layout(stages=2, schedule="zbv"),
    "packed": Layout(packed=True),
}


@dataclass(frozen=True)
class Found:
    """The difference of a layout's losses from those of one process.

    Attributes:
        off: maximum relative difference over all steps.
    """

    arch: str
    sharing: str
    layout: str
    off: float


def main(argv: Sequence[str]) -> int:
    """Run ``sharing`` and return 0 if all losses are those of one process, 1 if not.

    Raises:
        ValueError: all requested sharings are refused, or steps are fewer than 1.
    """
    args = parse(_parser(), argv, archs=ARCHS, sharings=SHARINGS, layouts=LAYOUTS, engines=tensor_engines.ENGINES)
    if args.race or args.hops:
        figures, met = tensor_engines.race(args) if args.race else tensor_engines.hops(args)
        return finish(args, "sharing", figures, met=met)
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps}: there is nothing to compare; give at least 1")
    found: list[Found] = []
    for arch in args.archs:
        refused = _refusals(arch, args)
        found += (of_arch := _of_arch(arch, args, refused))
        show(table_of(_rows(of_arch, args), f"{arch}: largest relative difference of {args.steps} losses"))
        show(*(f"{sharing}: refused: {why}" for sharing, why in refused.items()))
    if not found:
        raise ValueError("--archs and --sharings: all of it is refused; name others")
    worst, tolerance = largest([each.off for each in found]), TOLERANCES[args.precision]
    show(f"\n{len(found)} layouts, largest difference {worst:.2g}, tolerance {tolerance:.0e}")
    return finish(args, "sharing", [asdict(each) for each in found], met=worst <= tolerance)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sharing", description=__doc__)
    for option, known in (("archs", ARCHS), ("sharings", SHARINGS), ("layouts", LAYOUTS)):
        parser.add_argument(f"--{option}", nargs="+", default=list(known), help=", ".join(known))
    parser.add_argument("--precision", choices=list(TOLERANCES), default="fp32", help="bf16 has fp32 master weights")
    parser.add_argument("--steps", type=int, default=20, help=f"of training, {MICROBATCHES} micro-batches a replica")
    tensor_engines.add_options(parser)
    return parser


def _refusals(arch: str, args: argparse.Namespace) -> dict[str, str]:
    """Return why an architecture does not support some sharings, by name."""
    found = {}
    for sharing in args.sharings:
        parallel = SHARINGS[sharing]
        if parallel.expert > 1 and arch not in WITH_EXPERTS:
            found[sharing] = "no experts"
            continue
        try:
            config = _config(arch, parallel, Layout(), args)
            hf_config = load_hf_config(config.model)
            dtype = DTYPES[config.train.precision]
            model_sizes(hf_config, tensor=parallel.tensor, expert=parallel.expert, dtype=dtype)
            choose_exchange(hf_config, parallel.context_exchange, context=parallel.context, tensor=parallel.tensor)
        except UnshareableError as error:
            found[sharing] = str(error)
    return found


def _of_arch(arch: str, args: argparse.Namespace, refused: Collection[str]) -> list[Found]:
    """Run every layout of an architecture; layouts of equally many ranks share processes."""
    wanted: dict[int, list[tuple[str, str, WeftConfig, bool]]] = {}
    for sharing, layout in itertools.product(args.sharings, args.layouts):
        if sharing in refused:
            continue
        parallel, how = SHARINGS[sharing], LAYOUTS[layout]
        config = _config(arch, parallel, how, args)
        ranks = how.stages * how.replicas * parallel.tensor * parallel.context * parallel.expert
        wanted.setdefault(ranks, []).append((sharing, layout, config, how.packed))
    alone: dict[tuple[int, bool], list[float]] = {}
    found = []
    for ranks, cases in wanted.items():
        losses = run_ranks(ranks, _trained, [(config, packed) for *_, config, packed in cases], timeout_s=TIMEOUT_S)
        for (sharing, layout, config, packed), of_case in zip(cases, losses[0], strict=True):
            replicas = LAYOUTS[layout].replicas * config.parallel.expert
            if (replicas, packed) not in alone:
                (alone[replicas, packed],) = run_ranks(1, one_process, config, replicas, packed, timeout_s=TIMEOUT_S)
            found.append(Found(arch, sharing, layout, _off(of_case, alone[replicas, packed])))
    return found


def _config(arch: str, parallel: ParallelConfig, how: Layout, args: argparse.Namespace) -> WeftConfig:
    model = ARCHS[arch]()
    model.self_check, model.gradient_checkpointing = False, how.checkpointing
    if arch == "gemma2":
        model.attn_implementation = Attention.eager  # its soft caps are in no other
    config = WeftConfig(
        model=model,
        parallel=replace(parallel),
        pipeline=PipelineConfig(
            stages=how.stages, microbatches=MICROBATCHES, schedule=ScheduleKind[how.schedule], debug=True
        ),
        zero=ZeroConfig(stage=how.zero),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, clip=0.5, warmup_steps=3),
        train=TrainConfig(microbatch_size=ROWS, steps=args.steps, precision=Precision[args.precision]),
    )
    config.data.sequence_length = LENGTH
    config.logging.progress = False
    return config


def batches(replica: int, num_replicas: int, packed: bool) -> Iterator[dict[str, Tensor]]:
    """Yield one-sequence micro-batches; the k-th of a replica has number k R + r. Their numbers of labels differ."""
    for number in itertools.count(replica, num_replicas):
        generator = torch.Generator().manual_seed(1000 + number)
        ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
        labels = ids.clone()
        labels[:, : int(torch.randint(1, LENGTH - 2, (1,), generator=generator))] = -100
        batch = {"input_ids": ids, "labels": labels}
        if packed:
            labels[:, torch.tensor(DOCUMENTS).cumsum(0)[:-1]] = -100
            batch["position_ids"] = torch.cat([torch.arange(length) for length in DOCUMENTS]).repeat(ROWS, 1)
        yield batch


def one_process(config: WeftConfig, replicas: int, packed: bool) -> list[float]:
    """Return the losses of plain transformers and torch's AdamW on the micro-batches of all replicas.

    In bf16 the model is a copy, and its gradients are added up in fp32 on the master weights.
    """
    torch.set_num_threads(1)
    low = config.train.precision is Precision.bf16
    model = build_model(config.model, dtype=torch.bfloat16 if low else torch.float32, seed=config.train.seed).train()
    master = copy.deepcopy(model).float() if low else model
    groups = parameter_groups(master.named_parameters(), config.optimizer.weight_decay)
    adam = {"lr": config.optimizer.lr, "betas": tuple(config.optimizer.betas), "eps": config.optimizer.eps}
    optimizer = torch.optim.AdamW(groups, **adam)
    scheduler = learning_rate(config.optimizer, config.train.steps)(optimizer)
    data, losses = batches(0, 1, packed), []
    for _ in range(config.train.steps):
        step = list(itertools.islice(data, MICROBATCHES * replicas))
        items = torch.tensor(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step))
        total = 0.0
        for batch in step:
            loss = model(**batch, num_items_in_batch=items, use_cache=False).loss
            loss.backward()
            total += loss.item()
            if low:
                _add_gradients(model, master)
        torch.nn.utils.clip_grad_norm_(master.parameters(), config.optimizer.clip)
        optimizer.step()
        if low:
            model.load_state_dict(master.state_dict())  # rounds
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total)
    return losses


def _add_gradients(model: nn.Module, master: nn.Module) -> None:
    """Add a model's gradients to those of its master weights, and clear them."""
    for one, other in zip(model.parameters(), master.parameters(), strict=True):
        if one.grad is not None:
            other.grad = one.grad.float() if other.grad is None else other.grad + one.grad
            one.grad = None


def _trained(cases: Sequence[tuple[WeftConfig, bool]]) -> list[list[float]]:
    """Return the losses of this rank's engines, which run one after the other."""
    from weft.engine.initialize import initialize

    torch.set_num_threads(1)
    found = []
    for config, packed in cases:
        engine, *_ = initialize(config=config)
        engine.set_dataiterator(batches(engine.replica, engine.num_replicas, packed))
        found.append([float(engine.train_batch()) for _ in range(config.train.steps)])
        engine.destroy()
        dist.barrier()
        gc.collect()  # a gloo group's threads end with its last reference
    return found


def _off(found: Sequence[float], alone: Sequence[float]) -> float:
    return largest([abs(mine - theirs) / abs(theirs) for mine, theirs in zip(found, alone, strict=True)])


def largest(differences: Sequence[float]) -> float:
    """Return the maximum, or NaN if any value is NaN."""
    return nan if any(map(isnan, differences)) else max(differences)


def _rows(found: Sequence[Found], args: argparse.Namespace) -> Iterator[dict[str, object]]:
    for sharing in args.sharings:
        cells = {each.layout: f"{each.off:.1e}" for each in found if each.sharing == sharing}
        if cells:
            yield {"shared by": sharing, **{layout: cells.get(layout, "-") for layout in args.layouts}}
