"""Micro-batches of a Trainer's data: each replica's own, and as many as a schedule takes."""

from __future__ import annotations

from collections.abc import Iterator
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
    """``count`` micro-batches for a schedule; if an epoch's last step has fewer, fill up with ones without labels."""
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
