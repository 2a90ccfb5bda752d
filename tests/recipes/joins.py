"""How often a run joins its job and fits its batch."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

from weft.conf import batch, load
from weft.engine import distributed


def joins_and_fits(settings: Sequence[str]) -> tuple[int, int]:
    """The calls of a whole run on this rank."""
    from weft.recipes.train import train

    join, fit = mock.Mock(wraps=distributed.init_distributed), mock.Mock(wraps=batch.fit_batch)
    with mock.patch.object(distributed, "init_distributed", join), mock.patch.object(batch, "fit_batch", fit):
        train(load(settings))
    return join.call_count, fit.call_count
