"""Self-check: compares stages of a small copy with Hugging Face's run of the whole copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from weft.conf.schema import ModelConfig, SplitKind
from weft.engine.models.batch import Batch, attach_rows_of, count_label_tokens
from weft.engine.models.objective import Minimised, Objective, next_token_loss
from weft.engine.models.seeding import seeded
from weft.engine.models.shrink import shrunken_model
from weft.engine.models.skeleton import (
    causal_config,
    copied,
    cuttable_layers,
    hf_model,
    model_class,
    num_layers,
    skeleton,
)
from weft.engine.models.varlen import ON_CPU, VARLEN, wanted_arguments
from weft.engine.stages.checking.comparison import (
    Outcome,
    all_parameters,
    difference,
    distance,
    gradients,
    run_stages,
    staged_outcome,
    whole_outcome,
)
from weft.engine.stages.checking.refusals import refuse_partitioning
from weft.engine.stages.cutting.from_model import stages_from_model
from weft.engine.stages.cutting.port import Port
from weft.engine.stages.cutting.split import StageSplit, split_layers
from weft.engine.stages.cutting.stage import Stage, accepted_arguments
from weft.engine.stages.files.loading import load_hf_config, new_stages

TOLERANCE = 1e-5
"""Largest allowed difference, relative to the largest value. Every architecture that works has 0."""
REMEDY = "choose another architecture, or run it whole with pipeline.stages=1"
LENGTH = 12
"""Sequence length of the check."""
CHUNK_BYTES = 1000
"""Bytes of logits for which the small copy's loss is also computed in chunks: of a few tokens."""


def self_check(
    model: PreTrainedConfig | ModelConfig | nn.Module,
    *,
    num_stages: int = 0,
    packing: bool = False,
    own_loss: bool = True,
    chunks: bool = True,
) -> None:
    """On a small copy, compare logits, loss and gradients of the stages with Hugging Face's own run.

    Stages are made as in training: cut out of a given model, or built one by one from a config.

    Args:
        model: a config, or a model, which is not changed.
        num_stages: stages of the small copy. 0 puts each of its layers on a separate stage.
        packing: also check that packed documents are computed as they are alone.
        own_loss: compare the model's own loss. Otherwise a loss on its logits is used.
        chunks: also compare the model's own loss in chunks of logits.

    Raises:
        ValueError: the results differ. The message has the architecture, the difference and the remedy.
    """
    cls, config = architecture(model)
    refuse_partitioning(model if isinstance(model, nn.Module) else None)
    cuttable_layers(skeleton(cls, config))
    small = small_copy(cls, config, min_layers=max(2, num_stages))
    require_causal(small)
    _require_same_attention(small)
    count = num_stages or num_layers(small.config)
    given = isinstance(model, nn.Module)
    _, want = check_stages(small, count, [tried_batch(small)], given=given, own_loss=own_loss)
    if own_loss and chunks:
        _require_same_in_chunks(small, tried_batch(small), want)
    if packing:
        _require_apart(small)


def architecture(model: PreTrainedConfig | ModelConfig | nn.Module) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Return the Hugging Face class that is trained, and its config.

    Raises:
        ValueError: the model is not Hugging Face's, or transformers has no causal model of the type.
    """
    if isinstance(model, nn.Module):
        return type(hf_model(model)), hf_model(model).config
    config = load_hf_config(model) if isinstance(model, ModelConfig) else causal_config(model)
    return model_class(config), config


def small_copy(cls: type[PreTrainedModel], config: PreTrainedConfig, *, min_layers: int) -> PreTrainedModel:
    """Return a small model of an architecture in training mode, with perturbed weights.

    Raises:
        ValueError: see `shrunken_model`.
    """
    small = shrunken_model(cls, config, min_layers=min_layers).train()
    roughen([small])
    return small


def check_stages(
    small: PreTrainedModel, num_stages: int, batches: Sequence[Batch], *, given: bool = True, own_loss: bool = True
) -> tuple[Outcome, Outcome]:
    """Run a small model whole and in stages, and require equal outcomes.

    Args:
        small: a model from `small_copy`. Its gradients are set.
        given: whether to cut stages out of a copy of the model. Otherwise each stage is built separately.
        own_loss: compare the model's own loss. Otherwise a loss on its logits is used.

    Returns:
        The outcome of the stages and the outcome of the whole model.

    Raises:
        ValueError: the outcomes differ, or one of the runs fails.
    """
    name, num_items = type(small).__name__, torch.tensor(sum(map(count_label_tokens, batches)))
    split = split_layers(small.config, num_stages, SplitKind.even)
    stages = _stages(small, split, given)
    _require_same_weights(small, stages)
    loss = None if own_loss else next_token_loss
    if loss is not None:
        stages[-1].objective = Minimised(Objective.of(loss))
    with _refusing(f"Hugging Face's own run of {name} fails"):
        want = whole_outcome(small, batches, num_items, loss)
    with _refusing(f"{name} does not run in stages"):
        got = staged_outcome(stages, batches, num_items)
        with torch.no_grad():
            half = torch.stack([run_stages(stages, batch, 2 * num_items) for batch in batches]).sum()
    off = difference(got, want)
    for what, much in (("logits", off.logits), ("loss", off.loss), (f"gradient of {off.gradient}", off.gradients)):
        if not much <= TOLERANCE:
            raise _refusal(f"{name} in stages differs from Hugging Face's own run, {what} by {much:.2g}")
    if not torch.allclose(2 * half, got.loss):
        raise _refusal(
            f"{name} does not divide its loss by num_items_in_batch, so micro-batches cannot be weighed by tokens; "
            "give a loss of your own, weft.initialize(loss=weft.next_token_loss)"
        )
    _require_same_evaluation(small, stages, batches[0])
    return got, want


def _require_same_in_chunks(small: PreTrainedModel, batch: Batch, want: Outcome) -> None:
    """Compare the loss in chunks of logits, and its gradients, with the outcome of the whole model."""
    name, remedy = type(small).__name__, "set model.chunked_loss=never"
    stage = Stage(small, index=0, num_stages=1, port=Port())
    stage.compute_loss_in_chunks(CHUNK_BYTES)
    small.zero_grad()
    try:
        loss = stage(None, batch, torch.tensor(count_label_tokens(batch)))
        loss.backward()
    except Exception as error:  # any, because this runs Hugging Face's or the model's own code
        raise ValueError(f"model: the loss of {name} in chunks fails ({error}); {remedy}") from error
    off = difference(Outcome(want.logits, loss.detach(), gradients([stage])), want)
    if not off.worst <= TOLERANCE:
        raise ValueError(
            f"model: the loss of {name} in chunks of logits differs from Hugging Face's by {off.loss:.2g}, its "
            f"gradient of {off.gradient} by {off.gradients:.2g}; {remedy}"
        )


def _require_same_evaluation(small: PreTrainedModel, stages: Sequence[Stage], batch: Batch) -> None:
    """Compare stages and whole model in evaluation mode, in which some models compute differently."""
    name = type(small).__name__
    for model in (*stages, small):
        model.eval()
    with _refusing(f"{name} does not run in stages in evaluation"), torch.no_grad():
        got = stages[-1].logits(run_stages(stages[:-1], batch), batch)
        want = small(**stages[0].accepted(batch), use_cache=False).logits
    for model in (*stages, small):
        model.train()
    if not (much := distance(got, want)) <= TOLERANCE:
        raise _refusal(f"{name} in stages differs from Hugging Face's own run in evaluation, logits by {much:.2g}")


def _stages(small: PreTrainedModel, split: StageSplit, given: bool) -> list[Stage]:
    if given:
        return stages_from_model(copied(small), split, range(split.num_stages))
    with _refusing(f"{type(small).__name__} cannot be made in stages", passed=ValueError):
        stages = new_stages(type(small), small.config, split, range(split.num_stages), dtype=torch.float32, seed=0)
    roughen(stages)
    return stages


def check_packing(model: PreTrainedConfig | ModelConfig | nn.Module) -> None:
    """Check on a small copy that packed documents are computed as they are alone, in one row and in several.

    Raises:
        ValueError: they are not.
    """
    cls, config = architecture(model)
    small = small_copy(cls, config, min_layers=2)
    _require_same_attention(small)
    _require_apart(small)


def check_flash_packing(model: PreTrainedConfig | ModelConfig | nn.Module) -> None:
    """Check on a small copy that packed documents are computed as they are alone in flash attention.

    The kernel itself needs a GPU. So the check is that the architecture passes the documents' bounds to its attention,
    and uses nothing else.

    Raises:
        ValueError: the architecture does not pass them, or uses other information.
    """
    cls, config = architecture(model)
    small = small_copy(cls, config, min_layers=2)
    try:
        small.set_attn_implementation(ON_CPU)
        _require_apart(small)
    except ValueError as error:
        raise ValueError(
            f"data.packing=true with flash attention and more than one sequence in a micro-batch: {cls.__name__} does "
            "not tell its attention where documents begin; set train.microbatch_size=1 and raise "
            "pipeline.microbatches or data.sequence_length, or choose model.attn_implementation=sdpa"
        ) from error


def roughen(models: Sequence[nn.Module]) -> None:
    """Perturb weights with fixed noise, because initial norms and biases are the same in every layer."""
    with torch.no_grad():
        for name, parameter in all_parameters(models):
            with seeded(0, name):
                parameter.add_(torch.randn(parameter.shape), alpha=0.05)


def tried_batch(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a batch of two sequences of `LENGTH` tokens, without labels for the first two tokens."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(1, vocabulary, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :2] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(LENGTH).repeat(2, 1)}


def require_causal(model: PreTrainedModel) -> None:
    """Check that the model returns logits over the vocabulary for every token, independent of later tokens.

    Raises:
        ValueError: the model has no such logits, or they depend on later tokens.
    """
    name, batch = type(model).__name__, tried_batch(model)
    ids, half = batch["input_ids"], LENGTH // 2
    logits = _logits(model, ids, batch["position_ids"])
    if logits is None or logits.shape[:-1] != ids.shape or logits.shape[-1] < int(ids.max()) + 1:
        found = "none" if logits is None else tuple(logits.shape)
        raise ValueError(
            f"model: {name} is no causal language model: its logits are {found}, not one vocabulary for each of "
            f"{tuple(ids.shape)} tokens; give one such as AutoModelForCausalLM makes"
        )
    later = torch.cat([ids[:, :half], ids[:, half:].flip(1)], dim=1)
    other = _logits(model, later, batch["position_ids"])
    assert other is not None
    if not distance(other[:, :half], logits[:, :half]) <= 1e-4:  # a mixture of experts rounds a little differently
        hint = "choose a causal architecture"
        if getattr(model.config, "is_decoder", True) is False:
            hint = "set is_decoder=true in its config (model.overrides.is_decoder=true), or " + hint
        raise ValueError(f"model: {name} lets tokens see those after them, so that labels would leak; {hint}")


def _logits(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> Tensor | None:
    takes = accepted_arguments(model)
    given = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    given |= wanted_arguments(model.config, positions)
    training = model.training
    model.eval()
    try:
        with _refusing(f"Hugging Face's own run of {type(model).__name__} fails"), torch.no_grad():
            return getattr(model(**{k: v for k, v in given.items() if takes is None or k in takes}), "logits", None)
    finally:
        model.train(training)


def _require_same_weights(small: PreTrainedModel, stages: Sequence[Stage]) -> None:
    whole, staged = ({name for name, _ in all_parameters(models)} for models in ([small], stages))
    if whole != staged:
        odd = ", ".join(sorted(whole ^ staged)[:4])
        raise _refusal(f"{type(small).__name__} in stages has other weights than the whole: {odd}")


def _require_same_attention(model: PreTrainedModel) -> None:
    """Check that a model computes with `VARLEN` attention, if configured, what it computes with eager attention."""
    if model.config.get_text_config()._attn_implementation != VARLEN:
        return
    batch, name = tried_batch(model), type(model).__name__
    got = _logits(model, batch["input_ids"], batch["position_ids"])
    model.set_attn_implementation("eager")
    want = _logits(model, batch["input_ids"], batch["position_ids"])
    model.set_attn_implementation(VARLEN)
    if not (off := distance(got, want)) <= 1e-4:  # sums in another order
        raise ValueError(
            f"model.attn_implementation={VARLEN}: {name} has attention that is not plain causal (logits differ by "
            f"{off:.2g}); set it to sdpa"
        )


DOCUMENTS = ((5, 7), (2, 4, 6))
"""Lengths of the packed documents in the two rows of the check, different so that no row's bounds fit the other."""


def _require_apart(model: PreTrainedModel) -> None:
    """Check that every packed document has the logits that it has alone in a row.

    They differ if a document depends on the one before it, or on its place in the row. A micro-batch has one row or
    two.
    """
    ids = tried_batch(model)["input_ids"]
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in DOCUMENTS])
    alone = torch.stack([_alone(model, row, lengths) for row, lengths in zip(ids, DOCUMENTS, strict=True)])
    for rows in (1, 2):
        packed = positions[:rows].clone()
        attach_rows_of(packed, packed)
        got = _logits(model, ids[:rows], packed)
        assert got is not None
        off = float((got - alone[:rows]).abs().max())
        if not off <= 1e-4 * float(alone.abs().max()):  # a mixture of experts rounds a little differently
            raise ValueError(
                f"data.packing=true: {type(model).__name__} computes packed documents differently from the same "
                f"documents alone (logits differ by {off:.2g}); set data.packing=false"
            )


def _alone(model: PreTrainedModel, row: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the logits of the documents of a row [S], each computed alone, as [S, V]."""
    parts = [_logits(model, document[None], torch.arange(len(document))[None]) for document in row.split(lengths)]
    return torch.cat([part[0] for part in parts if part is not None])


@contextmanager
def _refusing(what: str, *, passed: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Convert any error of Hugging Face's or the model's own code into a `ValueError` with the remedy.

    Args:
        passed: types of errors that already name the reason, and pass unchanged.
    """
    try:
        yield
    except passed:
        raise
    except Exception as error:
        raise _refusal(f"{what} ({type(error).__name__}: {' '.join(str(error).split())})") from error


def _refusal(reason: str) -> ValueError:
    return ValueError(f"model: {reason}; {REMEDY}")
