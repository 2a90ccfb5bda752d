"""Causal architectures with the work of their layers shared out: exact, refused, or silently wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from benchmarks.verification.architectures import ArchitectureResult, Support, prepared, reason_of, result_of
from tests.engine.stages.small_configs import small_config
from weft.conf.schema import ContextExchange
from weft.engine.models.batch import Batch, attach_rows_of, count_label_tokens
from weft.engine.models.skeleton import cuttable_layers
from weft.engine.parallel.axis import UnshareableError
from weft.engine.stages.checking.axis_check import TOLERANCE, check_axes, refuse_unshareable
from weft.engine.stages.checking.comparison import difference, whole_outcome
from weft.engine.stages.checking.members import members_outcome
from weft.engine.stages.checking.self_check import LENGTH, architecture, check_packing, small_copy, tried_batch

BIASES = ("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "use_qkv_bias", "add_bias_linear")
"""Fields of configs that give matrices biases."""


def shared_text(sizes: Mapping[str, int], exchange: ContextExchange = ContextExchange.auto) -> str:
    """Return `ArchitectureResult.shared` of some axes: ``tensor 2, context 2, ring``, or an empty string."""
    parts = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    return ", ".join(parts + [exchange.value] * (exchange is not ContextExchange.auto))


def examine_shared(
    model_type: str, sizes: Mapping[str, int], exchange: ContextExchange = ContextExchange.auto
) -> ArchitectureResult:
    """Try one architecture in this process with two members of each axis of more than one rank.

    What the check before a run accepts is held against Hugging Face's own forward in more ways than
    the check tries: several micro-batches, in two stages, in evaluation and with checkpointed layers.

    Args:
        exchange: between ranks that share sequences.
    """
    shared = shared_text(sizes, exchange)
    if reason := _refused_by_name(model_type, sizes):
        return result_of(model_type, Support.refused, reason, shared=shared)
    made = prepared(model_type, in_stages=False)
    if isinstance(made, ArchitectureResult):
        return ArchitectureResult(**vars(made) | {"shared": shared})
    _, config, small = made

    found = partial(result_of, model_type, shared=shared)
    raise_vocabulary(config, sizes.get("tensor", 1))
    notes = []
    try:
        _check(config, sizes, exchange, packing=False)
    except ValueError as error:
        return found(Support.refused, reason_of(error))
    packs = _packs(config)
    if packs:
        try:
            _check(config, sizes, exchange, packing=True)
        except ValueError as error:
            notes, packs = [f"not with packed rows: {reason_of(error)}"], False
    used = {axis: size for axis, size in sizes.items() if size > 1}
    try:
        stages = _most_stages(small, used)
    except ValueError as error:
        notes, stages = [*notes, f"on one stage: {reason_of(error)}"], 1
    for what, batches in _wider(small, packs):
        if wrong := _difference(small, batches, used, stages, exchange):
            return found(Support.wrong, f"{what}: {wrong}")
    return found(Support.exact, "; ".join(notes))


def _refused_by_name(model_type: str, sizes: Mapping[str, int]) -> str:
    """Return why members cannot divide an architecture, if the config alone shows it; otherwise an empty string."""
    try:
        config = small_config(model_type)
        raise_vocabulary(config, sizes.get("tensor", 1))
        refuse_unshareable(config, tensor=sizes.get("tensor", 1), expert=sizes.get("expert", 1))
    except UnshareableError as error:
        return reason_of(error)
    except Exception:  # any: `prepared` reports that there is no small copy
        return ""
    return ""


def _check(config: PreTrainedConfig, sizes: Mapping[str, int], exchange: ContextExchange, *, packing: bool) -> None:
    tensor, context, expert = (sizes.get(axis, 1) for axis in ("tensor", "context", "expert"))
    check_axes(config, tensor=tensor, context=context, expert=expert, exchange=exchange, packing=packing)


def small_model(model_type: str, tensor: int) -> PreTrainedModel:
    """Return a small copy with at least four layers, and with all biases that its config supports."""
    config = small_config(model_type)
    text = config.get_text_config()
    for name in BIASES:
        if getattr(text, name, None) is False:
            setattr(text, name, True)
    cls, config = architecture(config)
    raise_vocabulary(config, tensor)
    return small_copy(cls, config, min_layers=4)


def raise_vocabulary(config: PreTrainedConfig, members: int) -> None:
    """Raise the vocabulary to a multiple of the members, as for a new model."""
    text = config.get_text_config()
    if isinstance(getattr(text, "vocab_size", None), int):
        text.vocab_size += -text.vocab_size % members


def _packs(config: PreTrainedConfig) -> bool:
    try:
        check_packing(config)
    except ValueError:
        return False
    return True


def _most_stages(small: PreTrainedModel, sizes: Mapping[str, int]) -> int:
    """Return 2 if the architecture can be cut, and members can share the tensors that cross the cut."""
    cuttable_layers(small)
    batch = _told(tried_batch(small))
    try:
        members_outcome(small, [batch] * sizes.get("expert", 1), torch.tensor(count_label_tokens(batch)), sizes, 2)
    except UnshareableError:
        raise
    except Exception:  # any: errors in stages are reported below
        return 2
    return 2


def _wider(small: PreTrainedModel, packs: bool) -> Iterator[tuple[str, Sequence[Batch]]]:
    """Yield further micro-batches than the check's, with a description; the model is prepared for them."""
    plain = tried_batch(small)
    rows = [{name: tensor[row : row + 1] for name, tensor in plain.items()} for row in range(2)]
    yield "two micro-batches", rows
    cut = {"labels": rows[0]["labels"].clone(), "attention_mask": torch.ones_like(rows[0]["input_ids"])}
    cut["labels"][:, -3:], cut["attention_mask"][:, -3:] = -100, 0
    yield "padded rows", [rows[0] | cut, rows[1] | {"attention_mask": torch.ones_like(rows[1]["input_ids"])}]
    if packs:
        documents = torch.cat([torch.arange(7), torch.arange(LENGTH - 7)]).repeat(2, 1)
        yield "packed rows", [plain | {"position_ids": documents}, plain]
    if small.supports_gradient_checkpointing:
        small.gradient_checkpointing_enable({"use_reentrant": False})
        yield "checkpointed layers", rows
        small.gradient_checkpointing_disable()
    small.eval()
    yield "evaluation", rows


def _told(batch: Batch) -> Batch:
    attach_rows_of(batch["position_ids"], batch["position_ids"])
    return batch


def _difference(
    small: PreTrainedModel, batches: Sequence[Batch], sizes: Mapping[str, int], stages: int, exchange: ContextExchange
) -> str:
    """Return the difference between the members' outcome and the whole model's, or empty if none."""
    for batch in batches:
        _told(batch)
    items = torch.tensor(sum(map(count_label_tokens, batches)))
    small.zero_grad()
    try:
        want = whole_outcome(small, batches, items)
        between = ContextExchange.gather if exchange is ContextExchange.auto else exchange
        off = difference(members_outcome(small, batches, items, sizes, stages, between), want)
    except Exception as error:  # any: it is Hugging Face's or the model's own code
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    parts = {"logits": off.logits, "loss": off.loss, f"gradient of {off.gradient}": off.gradients}
    return ", ".join(f"{part} by {much:.2g}" for part, much in parts.items() if not much <= TOLERANCE)
