"""Micro-batches of a Trainer's data: those of each replica, in the number of the schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

IGNORED = -100
"""Label of tokens that do not count in the loss."""


class EveryNthBatch(IterableDataset):
    """One replica's items of a stream: one of every ``num_replicas`` batches, without repetition."""

    def __init__(self, dataset: IterableDataset, batch_size: int, replica: int, num_replicas: int) -> None:
        self.dataset = dataset
        self._batch_size, self._replica, self._num_replicas = batch_size, replica, num_replicas

    def __iter__(self) -> Iterator[Any]:
        for index, item in enumerate(self.dataset):
            if index // self._batch_size % self._num_replicas == self._replica:
                yield item


def filled(batches: list[dict[str, Tensor]], spare: dict[str, Tensor], count: int) -> Iterator[dict[str, Tensor]]:
    """Return ``count`` micro-batches for a schedule. An epoch's last step is filled with ones without labels."""
    yield from batches
    for _ in range(count - len(batches)):
        yield {**spare, "labels": torch.full_like(spare["labels"], IGNORED)}


def any_batch(dataloader: DataLoader) -> dict[str, Tensor]:
    """A row of the data, to fill a schedule on a replica that has no rows."""
    dataset: Any = dataloader.dataset
    if isinstance(dataset, EveryNthBatch):
        dataset = dataset.dataset
    collate = dataloader.collate_fn
    assert collate is not None
    return collate([next(iter(dataset)) if isinstance(dataset, IterableDataset) else dataset[0]])


def check_inputs(batch: Mapping[str, Any], rows: int) -> None:
    """Check a micro-batch of the Trainer, as far as it is in host memory.

    Args:
        rows: of the model's embedding.

    Raises:
        ValueError: it has no labels, or a token without a row.
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
