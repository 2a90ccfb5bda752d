"""Micro-batches of a Trainer's data: each replica's share, and as many as a schedule needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

IGNORED = -100
"""Label of tokens that are ignored in the loss."""


class EveryNthBatch(IterableDataset):
    """One replica's share of a stream: one of every ``num_replicas`` batches, with no item repeated."""

    def __init__(self, dataset: IterableDataset, batch_size: int, replica: int, num_replicas: int) -> None:
        self.dataset = dataset
        self._batch_size, self._replica, self._num_replicas = batch_size, replica, num_replicas

    def __iter__(self) -> Iterator[Any]:
        for index, item in enumerate(self.dataset):
            if index // self._batch_size % self._num_replicas == self._replica:
                yield item


def filled(batches: list[dict[str, Tensor]], spare: dict[str, Tensor], count: int) -> Iterator[dict[str, Tensor]]:
    """Yield ``count`` micro-batches for a schedule.

    If there are fewer ``batches``, as in an epoch's last step, copies of ``spare`` without labels follow.
    """
    yield from batches
    for _ in range(count - len(batches)):
        yield {**spare, "labels": torch.full_like(spare["labels"], IGNORED)}


def any_batch(dataloader: DataLoader) -> dict[str, Tensor]:
    """Return a batch with the first row of the data, to fill the schedule of a replica without rows."""
    dataset: Any = dataloader.dataset
    if isinstance(dataset, EveryNthBatch):
        dataset = dataset.dataset
    collate = dataloader.collate_fn
    assert collate is not None
    return collate([next(iter(dataset)) if isinstance(dataset, IterableDataset) else dataset[0]])


def check_inputs(batch: Mapping[str, Any], rows: int) -> None:
    """Check a micro-batch of the Trainer. Only tensors in host memory are examined.

    Args:
        rows: size of the model's vocabulary.

    Raises:
        ValueError: it has no labels, or a token outside of the vocabulary.
    """
    if "labels" not in batch:
        raise ValueError(
            f"train_dataset, eval_dataset: batches have {', '.join(sorted(batch))} and no labels for the loss; "
            "add a column labels (ids, with -100 where a token does not count), or give "
            "data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )
    for name, least in (("input_ids", 0), ("labels", -100)):
        ids = batch.get(name)
        if not isinstance(ids, Tensor) or ids.device.type != "cpu" or not ids.numel():
            continue
        low, high = (int(value) for value in ids.aminmax())
        if high >= rows or low < least:
            raise ValueError(
                f"{name}: token {high if high >= rows else low} is none of the model's {rows}; tokenise with the "
                "model's own tokenizer, or call model.resize_token_embeddings(len(tokenizer)) before"
            )
