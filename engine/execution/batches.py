"""Micro-batches of a step: read from the data, and converted to the form that stages take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weft.engine.models.batch import attach_packed_rows, attach_rows_of, default_positions
from weft.engine.parallel.axis import Alone, AxisGroup
from weft.engine.stages.cutting.context import WHOLE, part_of

ALONE = Alone("context")


def prepare_batch(
    batch: Mapping[str, Tensor],
    device: torch.device,
    context: AxisGroup = ALONE,
    *,
    keep_whole: bool = False,
    model: PreTrainedModel | None = None,
) -> dict[str, Tensor]:
    """Check a micro-batch, add position ids if it has none, and move it to ``device``. Drop a mask that masks nothing.

    Args:
        batch: ``input_ids`` [B, S]; ``labels`` [B, S] with -100 for ignored tokens; optional
            ``position_ids`` [B, S] and ``attention_mask`` [B, S].
        context: ranks that share its sequences. Only this rank's part is kept.
        keep_whole: also keep the whole micro-batch, which an objective reads.
        model: model or stage of it whose default positions are added.

    Raises:
        ValueError: the micro-batch has another form.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch or "labels" not in batch:
        found = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f"micro-batch: found {found}; yield a dict with input_ids [B, S] and labels [B, S] "
            "(-100 = ignored), as Hugging Face models take"
        )
    given = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    for name in ("input_ids", "labels", "position_ids", "attention_mask"):
        if name not in given and batch.get(name) is not None:
            raise ValueError(f"micro-batch: {name} is a {type(batch[name]).__name__}; give a tensor [B, S]")
    mask, is_given = given.get("attention_mask"), "position_ids" in given
    if mask is not None and mask.shape != given["input_ids"].shape:
        raise ValueError(
            f"micro-batch: attention_mask has the shape {list(mask.shape)}, and input_ids "
            f"{list(given['input_ids'].shape)}; give a mask of padding [B, S], and position_ids that restart at each "
            "document"
        )
    if not is_given:
        given["position_ids"] = default_positions(given, model)
    # Kernels without a mask are faster, but examining a mask on the device would synchronise.
    needless = mask is not None and mask.device.type == "cpu" and bool(mask.all())
    positions, cut = given["position_ids"], context.size > 1
    given = part_of(given, context, keep_whole=keep_whole)
    moved = {name: value.to(device, non_blocking=True) for name, value in given.items()}
    if cut or positions.device.type == "cpu":
        if mask is None and not is_given:
            attach_packed_rows(moved["position_ids"], None)  # nothing separates documents
        else:
            documents = positions if mask is None or is_given else _among_tokens(mask)
            attach_rows_of(moved["position_ids"], documents.cpu())
    if needless:
        whole = {} if cut or not keep_whole else {WHOLE + name: value for name, value in moved.items()}
        del moved["attention_mask"]
        moved |= whole  # an objective receives the batch in the loader's form
    return moved


def _among_tokens(mask: Tensor) -> Tensor:
    """Return the position of each token among the tokens that are not padding, which separates padding from text."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


class DataEnded(ValueError, StopIteration):
    """The data ended within a step. As a `StopIteration` it passes through DeepSpeed unchanged."""


def draw(
    batches: Iterator | None, count: int, prepare: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], *, what: str
) -> Sequence[dict[str, Tensor]]:
    """Read and prepare the next ``count`` micro-batches.

    Args:
        what: call and step for messages, such as ``"train_batch, step 5"``.

    Raises:
        DataEnded: there are fewer than ``count``.
        ValueError: ``batches`` is no iterator. Every call would read a list or a loader from its beginning.
    """
    if batches is None or not hasattr(batches, "__next__"):
        given = "nothing" if batches is None else f"a {type(batches).__name__}"
        raise ValueError(f"{what}: it reads from an iterator, and got {given}; pass the same iter(...) every time")
    drawn: list[dict[str, Tensor]] = []
    for _ in range(count):
        try:
            batch = next(batches)
        except StopIteration:
            raise DataEnded(
                f"{what}: the data ended after {len(drawn)} of {count} micro-batches; give an iterator that goes on "
                "(deepspeed.utils.RepeatingLoader), or stop before that"
            ) from None
        drawn.append(prepare(batch))
    return drawn
