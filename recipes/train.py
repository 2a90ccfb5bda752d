"""Train or fine-tune: the entry point that the launcher starts on every rank."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from weft.conf import load
from weft.conf.checks import virtual_stages
from weft.conf.schema import WeftConfig
from weft.engine.checkpoint import check_folder
from weft.engine.data import MicrobatchLoader, build_loader, check_source, load_tokenizer
from weft.engine.distributed import SharedError, first_to_fail, init_distributed, lost_peer, rank_zero_first, together
from weft.engine.engine import WeftEngine
from weft.engine.initialize import initialize
from weft.engine.stages import load_hf_config, refuse_packing, self_check
from weft.recipes.finish import finish, say
from weft.recipes.progress import Progress


def main(argv: Sequence[str]) -> int:
    """Run ``[--config-file FILE] [recipe=NAME] [key=value ...]`` on this rank; returns the exit code."""
    parser = argparse.ArgumentParser(prog="weft train", add_help=False)
    parser.add_argument("--config-file")
    parser.add_argument(
        "--local_rank", "--local-rank"
    )  # DeepSpeed's launcher appends it; the environment says the same
    known, overrides = parser.parse_known_args(argv)
    config = load(overrides, recipe_file=known.config_file)
    if config.dry_run:
        from weft.tools.dry_run import report

        print(report(config))
        return 0
    train(config)
    return 0


def train(config: WeftConfig) -> WeftEngine:
    """Train on this rank as ``config`` says, to the end; a collective call.

    Raises:
        ValueError: bad input, with the same message on every rank.
    """
    init_distributed(config.comm.timeout_s)
    folder = Path(config.train.output_dir).expanduser() / config.train.name
    together(lambda: check_source(config.data) if dist.get_rank() == 0 else None)
    tokenizer = rank_zero_first(lambda: load_tokenizer(config.model, config.data))
    _fit_vocabulary(config, len(tokenizer))
    if (
        config.model.self_check and virtual_stages(config) > 1
    ):  # with what only a recipe knows: whether sequences are packed
        together(lambda: _check_model(config) if dist.get_rank() == 0 else None)
    torch.manual_seed(config.train.seed)
    engine, *_ = initialize(config=replace(config, model=replace(config.model, self_check=False)))
    check_folder(engine, folder / "checkpoints", keep=config.checkpoint.keep)
    loader, evaluation = _loaders(config, tokenizer, engine)
    engine.set_dataloader(loader)
    start = _resume(config, engine, loader, folder)
    with Progress(config, engine, folder, loader.description, start) as progress:
        _loop(config, engine, loader, evaluation, folder, start, progress)
    if config.checkpoint.final:
        save(engine, loader, folder)
    engine.finish_checkpoints()
    finish(config, engine, tokenizer, folder)
    return engine


def _check_model(config: WeftConfig) -> None:
    """The self-check, with what only a recipe knows: whether sequences are packed."""
    hf_config = load_hf_config(config.model)
    if config.data.packing:
        refuse_packing(
            hf_config.model_type,
            attention=config.model.attn_implementation,
            microbatch_size=config.train.microbatch_size,
        )
    self_check(hf_config, packing=config.data.packing)


def _fit_vocabulary(config: WeftConfig, words: int) -> None:
    """Give a new model the tokenizer's vocabulary, and refuse one that is too small for it."""
    if not config.model.path and config.model.overrides.setdefault("vocab_size", words) < words:
        raise ValueError(
            f"model.overrides.vocab_size={config.model.overrides['vocab_size']}: the tokenizer has {words} tokens; "
            "raise it, or leave it out"
        )


def _loaders(
    config: WeftConfig, tokenizer: object, engine: WeftEngine
) -> tuple[MicrobatchLoader, MicrobatchLoader | None]:
    def build(evaluation: bool) -> MicrobatchLoader:
        return build_loader(
            config.data,
            tokenizer,
            microbatch_size=config.train.microbatch_size,
            replica=engine.replica,
            num_replicas=engine.num_replicas,
            seed=config.train.seed,
            evaluation=evaluation,
        )

    training = rank_zero_first(lambda: build(False))
    return training, rank_zero_first(lambda: build(True)) if config.train.eval_every else None


def _loop(
    config: WeftConfig,
    engine: WeftEngine,
    loader: MicrobatchLoader,
    evaluation: MicrobatchLoader | None,
    folder: Path,
    start: int,
    progress: Progress,
) -> None:
    began = perf_counter()
    for step in range(start, config.train.steps):
        loss = engine.train_batch()
        progress.step(step + 1, loss)
        if evaluation is not None and (step + 1) % config.train.eval_every == 0:
            progress.evaluation(step + 1, evaluate(engine, evaluation, config.train.eval_batches))
        if config.checkpoint.every and (step + 1) % config.checkpoint.every == 0 and step + 1 < config.train.steps:
            save(engine, loader, folder)
        if config.train.max_seconds and _agreed(perf_counter() - began > config.train.max_seconds):
            progress.note(f"train.max_seconds={config.train.max_seconds:g} reached after step {step + 1}")
            return


def _agreed(stop: bool) -> bool:
    """Rank 0's word for all: clocks differ, and all ranks have to stop at the same step."""
    word = torch.tensor(int(stop))
    dist.broadcast(word, src=0)
    return bool(word)


def evaluate(engine: WeftEngine, loader: MicrobatchLoader, batches: int) -> float:
    """Mean loss per token over held-back data: the first ``batches`` steps' worth, or all if there is less."""
    microbatches = list(islice(iter(loader), batches * engine.micro_batches))
    loss = engine.eval_batch(iter(microbatches), num_micro_batches=len(microbatches))
    assert isinstance(loss, torch.Tensor)
    return float(loss)


def save(engine: WeftEngine, loader: MicrobatchLoader, folder: Path) -> None:
    """Write a checkpoint that holds the loader's position too."""
    engine.save_checkpoint(str(folder / "checkpoints"), client_state={"loader": loader.state_dict()})


def _resume(config: WeftConfig, engine: WeftEngine, loader: MicrobatchLoader, folder: Path) -> int:
    """Go on from a checkpoint where there is one; returns the steps that are done."""
    if config.checkpoint.resume == "never":
        return 0
    where = folder / "checkpoints" if config.checkpoint.resume == "auto" else Path(config.checkpoint.resume)
    path, state = together(lambda: engine.load_checkpoint(str(where)))
    if path is None:
        if config.checkpoint.resume != "auto":
            raise ValueError(f"checkpoint.resume={where}: no whole checkpoint there; give its folder, or auto")
        return 0
    loader.load_state_dict(state["loader"])
    done = f"resumed after step {engine.global_steps} from {path}"
    say(f"{done}; train.steps={config.train.steps} are done" if engine.global_steps >= config.train.steps else done)
    return engine.global_steps


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except ValueError as error:
        # What all ranks were told is said once.
        if not isinstance(error, SharedError) or dist.get_rank() == 0:
            print(f"weft train: {error}", file=sys.stderr)
        code = 2
    except RuntimeError as error:
        # A rank or link that fails ends every rank; the first to notice speaks for all.
        first, lost = first_to_fail(), lost_peer(error)
        if first and lost is None:
            raise
        if first:
            print(f"\nweft train: {lost}", file=sys.stderr)  # not behind the progress bar
        code = 1
    sys.exit(code)
