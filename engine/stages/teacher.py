"""A teacher: a frozen model with which each rank with the last stage scores micro-batches for distillation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from weft.conf.schema import LoraConfig, ModelConfig, WeftConfig
from weft.engine.models.batch import Batch
from weft.engine.models.distillation import TopTokens, distillation, of_tokens, top_tokens
from weft.engine.models.objective import Objective
from weft.engine.models.skeleton import num_layers
from weft.engine.precision import DTYPES
from weft.engine.stages.cutting.split import StageSplit
from weft.engine.stages.cutting.stage import Stage
from weft.engine.stages.files.loading import check_model_fits, load_hf_config, load_stages
from weft.engine.stages.streaming import StreamedStages


def teacher_model(config: WeftConfig) -> ModelConfig:
    """Return the settings of the teacher's model: the student's, with other weights, and nothing trained."""
    return replace(
        config.model,
        path=config.distill.teacher,
        tokenizer="",
        overrides={},
        parallel_block=False,
        sliding_window=0,
        lora=LoraConfig(),
    )


def load_teacher_config(config: WeftConfig, tokens: int | None = None) -> PreTrainedConfig:
    """Return the teacher's Hugging Face config.

    Args:
        tokens: length of sequences. If given, the positions and weights of the teacher are checked, too.

    Raises:
        ValueError: the teacher cannot be read, or does not fit.
    """
    model = teacher_model(config)
    try:
        if tokens is not None:
            check_model_fits(model, 1, tokens)
        return load_hf_config(model)
    except ValueError as error:
        reason = str(error).partition(", or set model.overrides")[0]
        raise ValueError(reason.replace("model.path=", "distill.teacher=")) from error


class Teacher:
    """The teacher of a run. Only ranks that compute the loss load its weights.

    If workers score for it, it is needed only where their scores have not arrived. Then its weights stay on the host,
    and are on the device one layer at a time.
    """

    def __init__(self, config: WeftConfig, words: int) -> None:
        """Check that the teacher can be read.

        Args:
            words: number of the student's logits of a token.

        Raises:
            ValueError: see `load_teacher_config`.
        """
        self._config, self._words = config, words
        self._layers = num_layers(load_teacher_config(config))
        self._stages: Iterable[Stage] = ()

    def load(self, device: torch.device) -> None:
        """Load the weights onto ``device``, or to the host. Raise ValueError if a weight is NaN or infinite."""
        if not self._config.inference.scores.enabled:
            self._stages = [self._load(StageSplit((self._layers,)), 0, device)]
            return
        self._stages = streamed = StreamedStages(device, Path(self._config.data.cache_dir).expanduser())
        for index in range(self._layers):
            streamed.add(self._load(StageSplit((1,) * self._layers), index, device))

    def _load(self, split: StageSplit, index: int, device: torch.device) -> Stage:
        dtype = DTYPES[self._config.train.precision]
        (stage,) = load_stages(teacher_model(self._config), split, [index], dtype=dtype, seed=0)
        stage.compute_loss_in_chunks(self._config.model.loss_chunk_mb * 1e6)
        stage.to(device).eval().requires_grad_(False)
        for name, weight in stage.hf_model.named_parameters():
            if weight.is_floating_point() and not weight.isfinite().all():
                raise ValueError(
                    f"distill.teacher={self._config.distill.teacher}: {name} has NaN or infinity in "
                    f"{self._config.train.precision.name}; copy or download it again, or set train.precision=bf16"
                )
        return stage

    @property
    def objective(self) -> Objective:
        """The loss of the student. `load` must have been called before a rank computes it."""
        return distillation(self.scores, self._config.distill, self._config.model.loss_chunk_mb * 1e6)

    def scores(self, batch: Batch) -> TopTokens:
        """Return the most likely tokens after each token of a whole micro-batch."""
        (found,) = self._scores([batch])
        return found

    def scores_of_tokens(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the scores [B, S, k, 2] of the tokens of whole micro-batches, as workers send them."""
        return [of_tokens(found, batch) for found, batch in zip(self._scores(batches), batches, strict=True)]

    @torch.no_grad()
    def _scores(self, batches: Sequence[Batch]) -> list[TopTokens]:
        """Return the tokens of each micro-batch. Each stage's weights are used for all of them."""
        hidden: list[Tensor | None] = [None] * len(batches)
        found = list[TopTokens]()
        for stage in self._stages:
            for index, batch in enumerate(batches):
                if stage.is_last:
                    found.append(self._best(stage, hidden[index], batch))
                else:
                    hidden[index] = stage(hidden[index], batch)
        return found

    def _best(self, stage: Stage, hidden: Tensor | None, batch: Batch) -> TopTokens:
        chunks = stage.logits_in_chunks(hidden, batch)
        found = [top_tokens(logits, self._config.distill.top_k, self._words) for logits in chunks]
        ids = [part.ids for part in found if part.ids is not None]
        return TopTokens(torch.cat([part.log_probabilities for part in found]), torch.cat(ids) if ids else None)
