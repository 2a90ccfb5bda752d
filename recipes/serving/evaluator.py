"""The evaluator: prefill workers score held-out data, with the weights of each of the run's checkpoints."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from math import exp, isfinite
from pathlib import Path

import torch
from transformers.core_model_loading import revert_weight_conversion

from weft.conf.host.private import private_folder
from weft.conf.host.run_lock import RunLock
from weft.conf.hosts import run_folder
from weft.conf.schema import ModelConfig, WeftConfig
from weft.engine.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from weft.engine.checkpoint.folder import candidates, complete
from weft.engine.data import load_tokenizer, open_source, with_template
from weft.engine.data.documents import Document
from weft.engine.models.skeleton import model_class
from weft.engine.stages.files.loading import load_hf_config
from weft.inference.worker.command import addresses, server_key, weights_folder
from weft.inference.worker.stored_weights import LINKS, Place, StoredWeight, write_list
from weft.recipes.evaluated import KIND, Results, add_result, known_serials
from weft.recipes.logs import JsonLines
from weft.recipes.preparation import read_clock
from weft.recipes.serving.scoring import Scorer, ScoringError, score_all, with_weights

POLL_S = 1.0
"""Seconds between looks for workers that have started."""
MOST_LOSS = 700.0
"""Loss above which the perplexity is no double."""
TRIES = 3
"""Number of attempts to evaluate a checkpoint."""
WEIGHT = "weight/"
"""Prefix of weights among the tensors of a checkpoint."""
VOCABULARY = "model.overrides.vocab_size"
KEPT = 2
"""Number of folders to keep: the newest, and one from which a worker may still be loading."""


class Evaluator:
    """Evaluates the checkpoints of a run in the order in which they were written."""

    def __init__(self, config: WeftConfig) -> None:
        self._config = config
        self._run = run_folder(config)
        self._folder = weights_folder(config)
        key = server_key(config, os.environ)
        self._workers = [Scorer(each.url, key, config.train.name) for each in addresses(config)]
        self._tries: dict[int, int] = {}
        self._seen: set[str] = set()
        self._documents: list[Document] | None = None

    def check(self) -> None:
        """Evaluate the checkpoints that have no result."""
        names = {path.name for path in candidates(self._run / "checkpoints")}
        if names == self._seen:
            return
        done = known_serials(self._run) | {serial for serial, tries in self._tries.items() if tries >= TRIES}
        found = [(manifest.serial, manifest.step, path) for path, manifest in complete(self._run / "checkpoints")]
        waiting = sorted(each for each in found if each[0] not in done)
        if not waiting:
            self._seen = names
            return
        serial, step, path = waiting[0]
        self._tries[serial] = self._tries.get(serial, 0) + 1
        try:
            self._evaluate(serial, step, path)
        except (CheckpointError, ScoringError, OSError) as error:
            gone = "" if path.exists() else "; it was removed meanwhile: raise checkpoint.keep"
            print(f"step {step}: not evaluated: {error}{gone}", flush=True)
            if gone:
                self._tries[serial] = TRIES

    def _evaluate(self, serial: int, step: int, path: Path) -> None:
        documents = self._held_out()
        weights = f"{serial:08d}-step-{step}"
        if not (self._folder / weights).exists():
            write_weights(open_checkpoint(path), self._config.model, self._tokenizer_folder(), self._folder / weights)
        begun_s = time.monotonic()
        while not (ready := with_weights(self._workers, weights)):
            time.sleep(POLL_S)  # `weft serve` starts them once there are weights
        loss, count = score_all(ready, documents)
        of_tasks = self._score_tasks(ready)
        if changed := [worker.url for worker in ready if worker.weights() != weights]:
            raise ScoringError(f"{', '.join(changed)}: restarted meanwhile, with other weights")
        mean = loss / max(count, 1)
        if not isfinite(mean):
            raise ScoringError("the loss is not finite")
        size = {"tokens": count, "documents": len(documents)}
        metrics: dict[str, float] = {"loss": mean, "perplexity": exp(min(mean, MOST_LOSS)), **size, **of_tasks}
        add_result(self._run, step=step, serial=serial, metrics=metrics)
        seconds = time.monotonic() - begun_s
        print(f"step {step}: loss {mean:.4f}, perplexity {metrics['perplexity']:.4f}, {seconds:.1f} s", flush=True)
        remove_older(self._folder)
        self._log_after_the_end()

    def _score_tasks(self, ready: Sequence[Scorer]) -> dict[str, float]:
        evaluate = self._config.inference.evaluate
        if not evaluate.tasks:
            return {}
        from weft.recipes.serving.harness import score_tasks  # takes seconds to import

        tokenizer = load_tokenizer(self._config.model, self._config.data)
        return score_tasks(evaluate, ready, tokenizer, self._config.inference.prefill.max_tokens - 1)

    def _log_after_the_end(self) -> None:
        """Write results into the run's metrics if no process trains that would."""
        try:
            RunLock.check(self._run)
        except ValueError:
            return
        if self._config.logging.jsonl:
            log = JsonLines(self._run / "metrics.jsonl")
            for step, metrics in Results(self._run).take():
                log.write(KIND, step, metrics)

    def _held_out(self) -> list[Document]:
        if self._documents is None:
            config = self._config
            tokenizer = load_tokenizer(config.model, config.data)
            source = open_source(config.data, tokenizer, evaluation=True, now=read_clock(self._run))
            most = min(config.data.sequence_length, config.inference.prefill.max_tokens - 1)
            blocks = (block.documents for block in source.blocks({}, 0))
            found = (documents[index] for documents in blocks for index in range(len(documents.lengths)))
            chosen = islice(found, config.inference.evaluate.documents)
            self._documents = [Document(each.ids[:most], each.labels[:most]) for each in chosen]
            with_template(tokenizer, config.data.chat_template).save_pretrained(self._tokenizer_folder())
        return self._documents

    def _tokenizer_folder(self) -> Path:
        return private_folder(self._folder / ".tokenizer")


def write_weights(checkpoint: Checkpoint, model: ModelConfig, tokenizer_folder: Path, target: Path) -> None:
    """Write a folder from which a worker loads a checkpoint's model. It is there as a whole or not at all.

    It links to the checkpoint's files. Weights that are not stored whole there, because ranks share layers, or that
    transformers stores in another form, are written once more, and so are all where links are not possible.

    Args:
        tokenizer_folder: folder whose files are copied, so that a worker can start with ``target``.

    Raises:
        CheckpointError: the checkpoint is damaged, or has been removed.
        OSError: the folder cannot be written.
    """
    settings = checkpoint.meta.get("origin", {}).get("settings", {})
    if not model.path and VOCABULARY in settings:  # a new model's follows from its tokenizer
        model = replace(model, overrides={**model.overrides, "vocab_size": settings[VOCABULARY]})
    hf_config = load_hf_config(model)
    with torch.device("meta"):
        built = model_class(hf_config)._from_config(hf_config)
    weights = built.state_dict()
    names = [name for name in weights if f"{WEIGHT}{name}" in checkpoint.names]  # a tied head has none
    dtype = hf_config.dtype or torch.float32
    draft = target.with_name(f".{target.name}")
    shutil.rmtree(draft, ignore_errors=True)
    for folder in (draft, draft / LINKS):
        folder.mkdir(mode=0o700)
    is_original = revert_weight_conversion(built, dict(weights)).keys() == weights.keys()
    linked = link(checkpoint, names, draft / LINKS) if is_original else {}
    write_list(draft, linked, dtype)
    rest = [name for name in names if name not in linked]
    state = {name: checkpoint.load([f"{WEIGHT}{name}"])[f"{WEIGHT}{name}"].to(dtype) for name in rest}
    built.save_pretrained(draft, state_dict=state)
    for file in tokenizer_folder.iterdir():
        shutil.copy(file, draft)
    draft.rename(target)


def link(checkpoint: Checkpoint, names: Iterable[str], folder: Path) -> dict[str, StoredWeight]:
    """Link the files with those of a checkpoint's weights that are stored whole, and return their places.

    Raises:
        CheckpointError: a weight is damaged.
    """
    found: dict[str, StoredWeight] = {}
    for name in names:
        if not checkpoint.is_whole(f"{WEIGHT}{name}"):
            continue
        at, places = 0, []
        for piece, dtype in checkpoint.pieces(f"{WEIGHT}{name}"):
            checkpoint.read_piece(piece, dtype)  # workers do not verify it
            places.append(Place(piece.file, piece.key, at - piece.start))
            at = piece.stop
        try:
            for file in {place.file for place in places} - {path.name for path in folder.iterdir()}:
                os.link(checkpoint.path / file, folder / file)
        except OSError:  # another file system, or one without links
            continue
        found[name] = StoredWeight(checkpoint.shape(f"{WEIGHT}{name}"), tuple(places))
    return found


def remove_older(folder: Path) -> None:
    """Remove all weights in ``folder`` except for the newest `KEPT`."""
    for old in sorted(path for path in folder.iterdir() if not path.name.startswith("."))[:-KEPT]:
        with suppress(OSError):
            shutil.rmtree(old)
