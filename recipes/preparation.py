"""Preparation of a run before it trains: tokenizer, model check and data, and the settings that follow from them."""

from __future__ import annotations

import hashlib
import json
import secrets
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from math import ceil
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from weft.conf.batch import num_replicas
from weft.conf.checks import check
from weft.conf.host.private import write_private
from weft.conf.hosts import resume_folder
from weft.conf.schema import DataKind, WeftConfig
from weft.conf.sources import for_each_source
from weft.conf.trees import to_tree
from weft.engine.attempt import Attempt, ReusedValues
from weft.engine.checkpoint import to_resume
from weft.engine.data import (
    HostLoader,
    MicrobatchLoader,
    Seen,
    Source,
    Stream,
    build_loader,
    check_source,
    load_tokenizer,
    open_source,
    require_encodable,
    unused_lines,
    vocabulary_for,
    with_template,
)
from weft.engine.data.open import locate
from weft.engine.data.teacher_tokens import require_teacher_tokens
from weft.engine.data.tokenizer import require_rows, tokenizer_sha256
from weft.engine.distributed import attempt_number, from_rank_zero, is_supervised, rank_zero_first, together
from weft.engine.layout import RankLayout
from weft.engine.stages.checking.refusals import refuse_packing
from weft.engine.stages.files.fingerprint import files_fingerprint, folder_fingerprint
from weft.engine.stages.files.loading import load_hf_config
from weft.engine.stages.teacher import teacher_model
from weft.recipes.finish import print_once
from weft.tools.preflight import check_stages


def read_clock(folder: Path) -> datetime:
    """Return the time at which the run in ``folder`` first started, or the current time if it has not started.

    Raises:
        ValueError: the file with the time is damaged.
    """
    file = folder / "clock.json"
    try:
        return datetime.fromisoformat(json.loads(file.read_text())["started"])
    except FileNotFoundError:
        return datetime.now().replace(microsecond=0)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: holds no time ({error}); remove it, and chat templates show today's date") from error


def start_clock(folder: Path, *, anew: bool = False) -> str:
    """Return the time of `read_clock` as text, for other ranks. The first call writes it into a file.

    Args:
        anew: replace the time by the current one, because the run in ``folder`` begins again.
    """
    if anew:
        (folder / "clock.json").unlink(missing_ok=True)
    started = read_clock(folder).isoformat()
    write_private(folder / "clock.json", json.dumps({"started": started}) + "\n")
    return started


SELF_CHECK = "self_check.json"
"""File in a run's folder that records a passed self-check."""
SKIPS = 3
"""``supervise.max_skips`` of a supervised run that leaves it at null."""


def prepare(
    config: WeftConfig, folder: Path, attempt: Attempt
) -> tuple[WeftConfig, PreTrainedTokenizerBase, MicrobatchLoader, MicrobatchLoader | None]:
    """Return a run's final configuration, tokenizer, training data and evaluation data (or None).

    The rank must have joined the job. Collective call.

    Args:
        folder: the run's folder, which records that a model's self-check has passed.
        attempt: stores results of earlier attempts.

    Raises:
        ValueError: the input is invalid. The message is the same on every rank.
    """
    kept = attempt.kept
    host = _start_host_loader(attempt) if config.data.streaming else None
    seen = together(lambda: check_source(config.data) if dist.get_rank() == 0 else None)
    tokenizer = rank_zero_first(lambda: _tokenizer(config, kept))
    together(lambda: _name_unused(config, tokenizer, seen))
    _fit_vocabulary(config, tokenizer)
    if config.distill.enabled:
        together(lambda: require_teacher_tokens(tokenizer, config) if dist.get_rank() == 0 else None)
    attempt.set_up.done("tokenizer")
    if config.data.packing:
        together(lambda: refuse_packing(load_hf_config(config.model).model_type))
    if config.model.self_check:  # only a recipe knows whether sequences are packed
        together(lambda: _check_model(config, folder) if dist.get_rank() == 0 else None)
    attempt.set_up.done("self-check")
    loader, evaluation = _loaders(config, tokenizer, folder, kept, host)
    attempt.set_up.done("data")
    config = _with_steps(config, loader)
    torch.manual_seed(config.train.seed)
    return _with_skips(config), tokenizer, loader, evaluation


def inputs_of(config: WeftConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return fingerprints of a run's inputs except the model, to store in its checkpoints."""
    template = json.dumps(with_template(tokenizer, config.data.chat_template).chat_template)
    found = {
        "the tokenizer": tokenizer_sha256(tokenizer),
        "the chat template": hashlib.sha256(template.encode()).hexdigest(),
    }
    if config.distill.enabled:
        found["the teacher"] = folder_fingerprint(teacher_model(config))
    sources = [] if config.data.kind is DataKind.corpus else for_each_source(config.data, locate)
    for number, path in enumerate(source.path for source in sources):
        if path is not None:
            files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
            name = f"data.sources[{number}].path" if config.data.sources else "data.path"
            found[name] = files_fingerprint(files)
    return found


def checked(config: WeftConfig) -> str:
    """Return the settings that the model's self-check depends on, as the run's folder records a passed check."""
    done = {"model": to_tree(config)["model"], "packing": config.data.packing, "rows": config.train.microbatch_size}
    done["teacher"] = config.distill.enabled and config.inference.scores.enabled and config.distill.teacher
    return json.dumps(done) + "\n"


def _check_model(config: WeftConfig, folder: Path) -> None:
    """Run the model's self-check, unless an earlier attempt has passed it with the same settings."""
    with suppress(OSError, ValueError):
        if attempt_number() > 1 and (folder / SELF_CHECK).read_text() == checked(config):
            return
    check_stages(config)


def _fit_vocabulary(config: WeftConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a model's vocabulary covers the tokenizer's tokens.

    A new model without ``model.overrides.vocab_size`` gets the size of the tokenizer, rounded up for the tensor group.
    The configuration is changed in place.

    Raises:
        ValueError: the vocabulary is too small.
    """
    if config.model.path:
        rows = load_hf_config(config.model).get_text_config().vocab_size
    else:
        fitting = vocabulary_for(len(tokenizer), config.parallel.tensor)
        rows = config.model.overrides.setdefault("vocab_size", fitting)
    require_rows(tokenizer, rows, config.model)


def _tokenizer(config: WeftConfig, kept: ReusedValues) -> PreTrainedTokenizerBase:
    return kept.get("tokenizer", (config.model, config.data), lambda: load_tokenizer(config.model, config.data))


def _name_unused(config: WeftConfig, tokenizer: PreTrainedTokenizerBase, seen: Seen | None) -> None:
    if seen is not None and attempt_number() <= 1:
        require_encodable(config.data, tokenizer, seen)
        for line in unused_lines(config.data, tokenizer, seen):
            print_once(line)


def _source(
    config: WeftConfig, tokenizer: PreTrainedTokenizerBase, now: datetime, kept: ReusedValues, *, evaluation: bool
) -> Source:
    def open_it() -> Source:
        return open_source(config.data, tokenizer, evaluation=evaluation, now=now)

    return kept.get("evaluation data" if evaluation else "data", (config.model, config.data), open_it)


def _loaders(
    config: WeftConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    kept: ReusedValues,
    host: HostLoader | None,
) -> tuple[MicrobatchLoader, MicrobatchLoader | None]:
    layout = RankLayout.of(config, dist.get_world_size())
    anew = config.checkpoint.resume == "never" and attempt_number() <= 1
    now = datetime.fromisoformat(from_rank_zero(lambda: start_clock(folder, anew=anew)))
    if host is not None:
        host.configure(Stream(model=config.model, data=config.data, seed=config.train.seed, now=now.isoformat()))

    def build(evaluation: bool) -> MicrobatchLoader:
        return build_loader(
            config.data,
            tokenizer,
            source=_source(config, tokenizer, now, kept, evaluation=evaluation),
            microbatch_size=config.train.microbatch_size,
            replica=layout.position(dist.get_rank()).replica,
            num_replicas=layout.replicas,
            seed=config.train.seed,
            ahead=config.pipeline.microbatches,
            evaluation=evaluation,
            host=host,
        )

    training = rank_zero_first(lambda: build(False))
    return training, rank_zero_first(lambda: build(True)) if config.train.eval_every else None


def _start_host_loader(attempt: Attempt) -> HostLoader:
    """Return this rank's access to the loader process of its host, which starts to import now. Collective call."""
    host = HostLoader(from_rank_zero(lambda: secrets.token_hex(16)))
    attempt.callback(host.close)
    host.start()
    return host


def _with_steps(config: WeftConfig, loader: MicrobatchLoader) -> WeftConfig:
    """Return the configuration with ``train.epochs`` converted to ``train.steps``, if epochs are set.

    Steps that a checkpoint has done may have had more or fewer sequences. Without epochs, print how many of them the
    steps are, if they are more than one. Collective call.
    """
    per_step = config.train.microbatch_size * config.pipeline.microbatches * num_replicas(config, dist.get_world_size())
    if not (config.train.epochs or loader.is_countable):
        return config
    sequences = together(lambda: loader.sequences(config.train.epochs or 1)) * config.data.kind.sequences
    if not config.train.epochs:
        if (read := config.train.steps * per_step) > sequences:
            print_once(f"train.steps={config.train.steps}: {read / sequences:.3g} epochs of {sequences} sequences")
        return config
    done, read = from_rank_zero(lambda: _done(config))
    steps = done + ceil(max(0, sequences - read * config.data.kind.sequences) / per_step)
    print_once(f"{config.train.epochs:g} epochs of {loader.description}: {sequences} sequences, {steps} steps")
    config = replace(config, train=replace(config.train, steps=steps))
    check(config)
    return config


def _done(config: WeftConfig) -> tuple[int, int]:
    """Return the steps of the checkpoint in storage to resume from, and the rows of the global order in them."""
    if config.checkpoint.resume == "never":
        return 0, 0
    for _, manifest in to_resume(resume_folder(config)):
        state = manifest.meta["client_state"].get("loader", {"consumed": 0})
        read = state["consumed"]
        skipped = sum(min(after, read) - first for first, after in state.get("left_out", ()) if first < read)
        return manifest.step, read - skipped
    return 0, 0


def _with_skips(config: WeftConfig) -> WeftConfig:
    """Return the configuration with ``supervise.max_skips`` set, because null depends on the run.

    It is `SKIPS` if the run is supervised or looks for spikes, and otherwise 0.
    """
    if config.supervise.max_skips is not None:
        return config
    most = SKIPS if is_supervised(config) or config.supervise.spike else 0
    return replace(config, supervise=replace(config.supervise, max_skips=most))
