"""Check that axis groups can divide a model's layers, on a small copy of the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from weft.conf.schema import ContextExchange, ModelConfig
from weft.engine.models.batch import Batch, attach_rows_of, count_label_tokens
from weft.engine.models.skeleton import decoder_layers, skeleton
from weft.engine.parallel.axis import Alone, UnshareableError
from weft.engine.parallel.context_exchange import choose_exchange
from weft.engine.parallel.experts import expert_cuts, require_experts
from weft.engine.parallel.tensor import require_shareable
from weft.engine.stages.checking.comparison import Outcome, difference, staged_outcome
from weft.engine.stages.checking.members import members_outcome
from weft.engine.stages.checking.mismatch import why_not_shared
from weft.engine.stages.checking.self_check import LENGTH, architecture, small_copy, tried_batch
from weft.engine.stages.cutting.port import Port
from weft.engine.stages.cutting.stage import Stage

MEMBERS = 2
"""Number of members of each axis in the check."""
TOLERANCE = 1e-4
"""Largest allowed difference, relative to the largest value. Members add in another order than one process."""


def check_axes(
    model: PreTrainedConfig | ModelConfig | nn.Module,
    *,
    tensor: int = 1,
    context: int = 1,
    expert: int = 1,
    exchange: ContextExchange = ContextExchange.auto,
    packing: bool = False,
) -> None:
    """On a small copy, compare logits, loss and gradients of two members of each used axis with one process.

    Args:
        model: a config, or a model, which is not changed.
        tensor, context, expert: sizes of the axes in training.
        exchange: the configured exchange between ranks that share sequences.
        packing: whether sequences contain several documents. Otherwise they may be padded.

    Raises:
        ValueError: the results differ. The message has the axis, the architecture, the difference and the remedy.
    """
    used = {"tensor": tensor, "context": context, "expert": expert}
    sizes = {axis: MEMBERS for axis, size in used.items() if size > 1}
    if not sizes:
        return
    apart = 1
    if "expert" in sizes:
        apart = MEMBERS if expert > tensor else 1  # with other tokens, whereas members of a tensor group have the same
        sizes["expert"] = apart * sizes.get("tensor", 1)
    what = ", ".join(f"parallel.{axis}={used[axis]}" for axis in sizes)
    remedy = " and ".join(f"parallel.{axis}=1" for axis in sizes)
    refuse_unshareable(model, tensor=tensor, expert=expert)
    cls, config = architecture(model)
    chosen, _ = choose_exchange(config, exchange, context=context, tensor=tensor)
    if chosen is not ContextExchange.gather:
        remedy = f"parallel.context_exchange=gather or {remedy}"
    small = small_copy(cls, config, min_layers=2)
    for kind, batch in _tried(small, packing).items():
        try:
            off = _difference(small, [batch] * apart, sizes, chosen)
        except UnshareableError:
            raise
        except Exception as error:  # any, because this runs Hugging Face's or the model's own code
            raise ValueError(
                f"{what}: {cls.__name__} cannot share the work of its layers: {why_not_shared(error, sizes)} ({kind}); "
                f"set {remedy}, or choose another architecture"
            ) from error
        for part, much in off.items():
            if not much <= TOLERANCE:
                raise ValueError(
                    f"{what}: {cls.__name__} with its work shared inside of layers differs from one process, {part} by "
                    f"{much:.2g} ({kind}); set {remedy}, or choose another architecture"
                )


def refuse_unshareable(model: PreTrainedConfig | ModelConfig | nn.Module, *, tensor: int = 1, expert: int = 1) -> None:
    """Check from its config alone that members can divide a model.

    Raises:
        UnshareableError: they cannot. The message names the part and the remedy.
    """
    if tensor == expert == 1:
        return
    cls, config = architecture(model)
    whole = skeleton(cls, config)
    require_experts(whole, expert)
    expert_cuts(whole, Alone("expert", expert))
    if tensor > 1:
        require_shareable(whole, tensor, decoder_layers(whole))


def _difference(
    small: PreTrainedModel, batches: list[Batch], sizes: Mapping[str, int], exchange: ContextExchange
) -> dict[str, float]:
    num_items = torch.tensor(sum(map(count_label_tokens, batches)))
    together = members_outcome(small, batches, num_items, sizes, exchange=exchange)
    off = difference(together, _alone(small, batches, num_items))
    return {"logits": off.logits, "loss": off.loss, f"gradient of {off.gradient}": off.gradients}


def _alone(small: PreTrainedModel, batches: list[Batch], num_items: Tensor) -> Outcome:
    """Run the micro-batches in one process, by the model's own forward."""
    small.zero_grad()
    stage = Stage(small, index=0, num_stages=1, port=Port())
    return staged_outcome([stage], batches, num_items)


def _tried(small: PreTrainedModel, packing: bool) -> dict[str, Batch]:
    """Return two micro-batches: one with full sequences, and one with packed or padded sequences."""
    full = tried_batch(small)
    other = dict(full)
    if packing:
        other["position_ids"] = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).repeat(2, 1)
    else:
        other["attention_mask"] = torch.ones_like(full["input_ids"])
        other["attention_mask"][0, -3:] = 0
        other["labels"] = torch.where(other["attention_mask"].bool(), full["labels"], -100)
    for batch in (full, other):
        attach_rows_of(batch["position_ids"], batch["position_ids"])
    return {"full rows": full, "packed rows" if packing else "padded rows": other}
