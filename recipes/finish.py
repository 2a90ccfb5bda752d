"""Outputs of a finished run: an exported Hugging Face folder, a text sample, a plot of the timeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from weft.conf.host.files import write_atomic
from weft.conf.schema import WeftConfig
from weft.engine.checkpoint import check_export, export
from weft.engine.data import with_template
from weft.engine.engine import WeftEngine
from weft.engine.precision import EXPORTED
from weft.engine.stages.files.exporting import ExportStorageError
from weft.pipeline.perfetto import write_perfetto
from weft.pipeline.plot import plot_timelines
from weft.pipeline.profile import costs_to_yaml, fit_costs
from weft.pipeline.timeline import Timeline

RETRY_S = 10.0
"""Seconds between attempts to write the last steps or the export while storage is full or read-only."""


def finish(config: WeftConfig, engine: WeftEngine, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the outputs that ``config.train`` enables. Collective call."""
    if config.train.export:
        target = folder / "export"
        options = _export_options(config, tokenizer)
        wait_for_storage(lambda: export(engine, target, **options), ExportStorageError, "the export", config, engine)
        print_once(f"export: {target} (a Hugging Face folder)")
        if config.train.sample and engine.global_rank == 0:
            train = config.train
            _print_result("sample", lambda: repr(sample(target, train.sample, train.sample_tokens, train.seed)))
    timelines = engine.correct_measurements()
    if config.train.timeline and engine.global_rank == 0:
        if timelines:
            _print_result("timeline", lambda: draw_timeline(engine, timelines, folder))
        else:
            print_once("timeline: none, because this resume ran no step")
    dist.barrier()
    if config.train.hub_model_id and engine.global_rank == 0:  # the others need not wait for it
        address = push(folder / "export", config.train.hub_model_id, private=config.train.hub_private_repo)
        print_once(f"pushed: {address}")


def wait_for_storage(
    write: Callable[[], None], full: type[ValueError], what: str, config: WeftConfig, engine: WeftEngine
) -> None:
    """Write. While storage is full or read-only, try again. Collective call.

    Args:
        full: the error of such storage, which ``write`` raises on every rank.
        what: name of what is written, for messages.

    Raises:
        ValueError: writing has failed for ``checkpoint.storage_wait_s``. Raised on every rank.
    """
    begun, limit_s = perf_counter(), config.checkpoint.storage_wait_s
    while True:
        try:
            return write()
        except full as error:
            waited_s = perf_counter() - begun
            if has_rank_0(waited_s >= limit_s, engine.device):
                raise
            if waited_s < RETRY_S:
                again = f"{what} is tried again every {RETRY_S:g} s"
                print_once(f"{error}; {again} until checkpoint.storage_wait_s={limit_s:g} is over")
        sleep(RETRY_S)


def has_rank_0(is_over: bool, device: torch.device) -> bool:
    """Return rank 0's value on every rank, because clocks differ, but all ranks must stop together. Collective call."""
    word = torch.tensor(int(is_over), device=device)
    dist.broadcast(word, src=0)
    return bool(word)


def check_finish(config: WeftConfig, engine: WeftEngine, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Check before training that `finish` can write the export. Collective call.

    Raises:
        ValueError: the export cannot be written.
    """
    if config.train.export:
        check_export(engine, folder / "export", **_export_options(config, tokenizer))


def _export_options(config: WeftConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "tokenizer": with_template(tokenizer, config.data.chat_template),
        "dtype": EXPORTED.get(config.train.export_dtype),
    }


def print_once(text: str) -> None:
    """Print a text on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def _print_result(name: str, action: Callable[[], str]) -> None:
    """Print the result of an action on a finished run. The run succeeds if the action fails."""
    try:
        print_once(f"{name}: {action()}")
    except Exception as error:  # any: a prompt may be longer than a model reads, and a disk full
        reason = " ".join(str(error).split())
        print_once(f"{name}: none ({type(error).__name__}: {reason})")


def sample(folder: Path, prompt: str, tokens: int, seed: int) -> str:
    """Sample a continuation of ``prompt`` with plain transformers, from the model in an exported folder."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=True, top_k=40, temperature=0.8)
    return tokenizer.decode(output[0], skip_special_tokens=True)


def draw_timeline(engine: WeftEngine, timelines: list[Timeline], folder: Path) -> str:
    """Plot the median one of the last steps, and the simulator's prediction from the costs of all of them.

    Also write the measured costs, for `weft simulate --costs` and ``pipeline.costs_file``. Return what was drawn.
    """
    costs = fit_costs(timelines, engine.plan.costs)
    write_atomic(folder / "costs.yaml", costs_to_yaml(costs))
    predicted = engine.plan.predicted(costs=costs)
    measured = sorted(timelines, key=lambda timeline: timeline.step_s)[len(timelines) // 2]
    write_perfetto([measured, predicted], folder / "timeline.json")
    try:
        plot_timelines([measured, predicted], folder / "timeline.png")
        drawn = str(folder / "timeline.png")
    except ValueError as error:  # a large job's is too large for a picture
        drawn = f"no picture ({error})"
    return (
        f"{drawn} (measured {measured.step_s:.3f} s, predicted {predicted.step_s:.3f} s), "
        f"{folder / 'timeline.json'} for Perfetto"
    )


def push(folder: Path, model_id: str, *, private: bool) -> str:
    """Upload an exported folder to a hub repository, and create the repository if it is missing.

    Returns:
        The URL of the commit.

    Raises:
        ValueError: the hub cannot be reached or rejects the upload. The folder is unchanged.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repository = api.create_repo(model_id, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message="Upload model")
        return commit.commit_url
    except Exception as error:  # from the hub, HTTP or the file system: the remedy is the same
        raise ValueError(
            f"train.hub_model_id={model_id}: {' '.join(str(error).split())}; the export is complete, try again with "
            f"`hf upload {model_id} {folder}`"
        ) from error
