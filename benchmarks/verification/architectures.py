"""Every causal architecture of transformers in stages: exact, refused, or the reason why it was not tried."""

from __future__ import annotations

import gc
import json
import multiprocessing
import re
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.engine.stages.small_configs import small_config
from weft.conf.schema import Attention, ModelConfig, SplitKind
from weft.engine.models.skeleton import cuttable_layers, skeleton
from weft.engine.stages.checking.comparison import run_stages
from weft.engine.stages.checking.self_check import (
    LENGTH,
    architecture,
    check_packing,
    check_stages,
    require_causal,
    self_check,
    small_copy,
    tried_batch,
)
from weft.engine.stages.cutting.split import split_layers
from weft.engine.stages.files.exporting import export_stages
from weft.engine.stages.files.loading import load_hf_config, load_stages

LIMIT_S = 180
"""Processor seconds that one architecture may take: other work on the host does not count."""
STUCK_S = 1800.0
"""Seconds after which an architecture that waits instead of computing is aborted."""
LIMIT_BYTES = 8 << 30
"""Memory that one architecture may take."""


class Support(Enum):
    """How an architecture is supported."""

    exact = "exact"
    refused = "refused"
    untried = "untried"
    wrong = "WRONG"


OTHER_LOSS = "with `loss=weft.next_token_loss`; its own loss is a mean of each micro-batch, and refused"
NO_LOSS = "with `loss=weft.next_token_loss`; its own loss does not run on text alone"


@dataclass(frozen=True)
class ArchitectureResult:
    """A row of the table: the result of an architecture.

    Attributes:
        model_type: ``model_type`` of the config.
        reason: why it is not exact, or under which condition it is.
        packing: "apart", "leaks", or empty where it was not tried.
        folder: "loads and exports", what fails, or empty where it was not tried.
        transformers: the version that it was tried with.
        shared: ranks along the axes inside of layers, such as "tensor 2", or empty for stages alone.
    """

    model_type: str
    model_class: str
    support: Support
    reason: str = ""
    packing: str = ""
    folder: str = ""
    transformers: str = transformers.__version__
    seconds: float = 0.0
    shared: str = ""


def causal_types() -> list[str]:
    """Return every ``model_type`` for which transformers has a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def causal_class(model_type: str) -> str:
    """Return the name of the type's causal language model."""
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def result_of(model_type: str, support: Support, reason: str = "", **more: Any) -> ArchitectureResult:
    """Return the result of a type, with the class of its causal language model."""
    return ArchitectureResult(model_type, causal_class(model_type), support, reason, **more)


def examine(model_type: str) -> ArchitectureResult:
    """Try one architecture in this process."""
    made = prepared(model_type, in_stages=True)
    if isinstance(made, ArchitectureResult):
        return made
    _, config, small = made
    reason = ""
    try:
        try:
            self_check(config)
        except ValueError as error:
            reason = OTHER_LOSS if "num_items_in_batch" in str(error) else NO_LOSS
            if not (reason == OTHER_LOSS or _fails_as_a_whole(error)):
                raise
            self_check(config, own_loss=False)
    except ValueError as error:
        support = Support.untried if _fails_as_a_whole(error) else Support.refused
        return result_of(model_type, support, reason_of(error))
    try:
        require_causal(small)
        for batches, num_stages in _wider(small):
            check_stages(small, num_stages, batches, own_loss=not reason)
            small.zero_grad()
    except ValueError as error:
        return result_of(model_type, Support.wrong, reason_of(error))
    return result_of(model_type, Support.exact, reason, packing=_packing(config), folder=_folder(small))


def prepared(
    model_type: str, *, in_stages: bool
) -> tuple[type[PreTrainedModel], PreTrainedConfig, PreTrainedModel] | ArchitectureResult:
    """Return an architecture's class, config and small copy, or the reason why there is none.

    Args:
        in_stages: refuse what cannot be cut into them.
    """
    refused = Support.untried  # what a ValueError of the step at hand means; other errors may come from any library
    try:
        config = small_config(model_type)
        refused = Support.refused
        cls, config = architecture(config)
        if in_stages:
            refused = Support.untried
            whole = skeleton(cls, config)
            refused = Support.refused
            cuttable_layers(whole)
        refused = Support.untried
        return cls, config, small_copy(cls, config, min_layers=2)
    except Exception as error:
        support = refused if isinstance(error, ValueError) else Support.untried
        return result_of(model_type, support, reason_of(error))


def _fails_as_a_whole(error: ValueError) -> bool:
    return "Hugging Face's own run" in str(error) and "differs" not in str(error)


def _wider(small: PreTrainedModel) -> Iterator[tuple[list[dict[str, Tensor]], int]]:
    """Yield cases beyond the self-check: several micro-batches, padding and packed documents, in two stages."""
    plain = tried_batch(small)
    padded = plain | {"attention_mask": torch.ones_like(plain["input_ids"]), "labels": plain["labels"].clone()}
    padded["attention_mask"][0, -3:] = 0
    padded["labels"][0, -3:] = -100
    documents = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])
    packed = plain | {"position_ids": documents.repeat(2, 1)}
    rows = [{name: tensor[row : row + 1] for name, tensor in plain.items()} for row in range(2)]
    for batches in (rows, [padded], [packed]):
        yield batches, 2


def _packing(config: PreTrainedConfig) -> str:
    try:
        check_packing(config)
    except ValueError as error:
        return "leaks" if "differently from the same documents" in str(error) else reason_of(error)
    return "apart"


def _folder(small: PreTrainedModel) -> str:
    """Save the model, load and export its stages, and load the export; describe a difference in the logits."""
    batch = tried_batch(small.eval())
    try:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            small.save_pretrained(f"{folder}/saved")
            config = ModelConfig(path=f"{folder}/saved", attn_implementation=Attention.eager)
            hf_config = load_hf_config(config)
            split = split_layers(hf_config, 2, SplitKind.even)
            stages = load_stages(config, split, range(2), dtype=torch.float32, seed=1)
            staged = [realigned(stage).eval() for stage in stages]
            export_stages(stages, Path(folder, "exported"))
            again, first = (
                realigned(type(small).from_pretrained(f"{folder}/{name}", attn_implementation="eager")).eval()
                for name in ("exported", "saved")
            )
            takes = staged[-1].accepted(batch)
            want = first(**takes, use_cache=False).logits
            if not torch.equal(staged[-1].logits(run_stages(staged[:-1], batch), batch), want):
                return "stages loaded from a folder differ"
            if not torch.equal(again(**takes, use_cache=False).logits, want):
                return "what stages export differs"
    except Exception as error:  # any: it is Hugging Face's code
        return reason_of(error)
    return "loads and exports"


def realigned(model: nn.Module) -> nn.Module:
    """Return a model with copies of the weights, because their alignment in a file affects rounding."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def reason_of(error: Exception) -> str:
    """Return why an architecture was refused, without the remedy."""
    text = " ".join(str(error).split()).removeprefix("model: ")
    text = re.sub(r"^(parallel\.\w+=?\d*(, )?)+: ", "", text)
    for remedy in ("; choose another architecture", "; check model.overrides", "; set parallel", "; choose a divisor"):
        text = text.partition(remedy)[0]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


# -- all of them -----------------------------------------------------------------------------------


def survey(
    types: Sequence[str],
    *,
    jobs: int,
    stop_after_s: float,
    note: Callable[[ArchitectureResult], None],
    trial: Callable[[str], ArchitectureResult] = examine,
) -> None:
    """Examine each type in a new process, with limits of time and memory.

    Args:
        stop_after_s: seconds after which no process is started; 0 is no limit.
    """
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")  # what was imported is there
    waiting, began = list(types), time.monotonic()
    running: dict[Connection, tuple[str, BaseProcess, float]] = {}
    try:
        while waiting or running:
            late = stop_after_s and time.monotonic() - began > stop_after_s
            while waiting and len(running) < jobs and not late:
                model_type = waiting.pop(0)
                ours, theirs = fork.Pipe(duplex=False)
                work = (trial, model_type, theirs)
                process: BaseProcess = fork.Process(target=_examine_apart, args=work, daemon=True)
                process.start()
                theirs.close()
                running[ours] = model_type, process, time.monotonic()
            if not running:
                return
            ready = wait(list(running), timeout=0.5)
            for pipe, (model_type, process, start) in list(running.items()):
                seconds = time.monotonic() - start
                if pipe in ready or seconds > STUCK_S:
                    del running[pipe]
                    note(_collect(model_type, pipe if pipe in ready else None, process, seconds))
    finally:
        for _, process, _ in running.values():
            process.kill()


def _examine_apart(trial: Callable[[str], ArchitectureResult], model_type: str, pipe: Connection) -> None:
    gc.freeze()  # a process group among what the parent no longer holds would wait for threads that a fork lacks
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 1))
    pipe.send(trial(model_type))


def _collect(model_type: str, pipe: Connection | None, process: BaseProcess, seconds: float) -> ArchitectureResult:
    try:
        result = pipe.recv() if pipe is not None else None
    except EOFError:
        result = None
    if pipe is None:
        process.kill()
    process.join()
    if result is None:
        reason = f"its process ended with {process.exitcode}" if pipe else f"not done after {STUCK_S:g} s"
        if process.exitcode == -signal.SIGXCPU:
            reason = f"not done after {LIMIT_S} s of processor time"
        result = result_of(model_type, Support.untried, reason)
    return ArchitectureResult(**{**vars(result), "seconds": round(seconds, 1)})


def write_result(result: ArchitectureResult, file: Path) -> None:
    """Append a result to a file of JSON lines."""
    with file.open("a") as stream:
        stream.write(json.dumps(asdict(result) | {"support": result.support.value}) + "\n")


def read_results(file: Path, shared: str = "") -> dict[str, ArchitectureResult]:
    """Return the last result of each architecture with this version of transformers.

    Args:
        shared: selects results by `ArchitectureResult.shared`.
    """
    found = {}
    for number, line in enumerate(file.read_text().splitlines() if file.exists() else (), start=1):
        try:
            fields = json.loads(line)
            result = ArchitectureResult(**fields | {"support": Support(fields["support"])})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}: line {number} is not a result ({error}); remove it, or the file") from error
        if (result.transformers, result.shared) == (transformers.__version__, shared):
            found[result.model_type] = result
    return found
