"""The configuration of a run: schema, YAML groups, recipes, checks and the DeepSpeed JSON."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.conf.schema import WeftConfig


def preload() -> None:
    """Find Hydra's plug-ins and fill its parser's tables, for processes that are forked from this one."""
    load(["train.name=a b", "train.steps=1", "optimizer.lr=1e-3"])


def load(overrides: Sequence[str] = (), *, recipe_file: str | None = None) -> WeftConfig:
    """Compose, convert and check the configuration of a run.

    Args:
        overrides: Hydra overrides such as ``recipe=quickstart`` or ``train.steps=10``.
        recipe_file: a YAML file instead of ``recipe=NAME``. ``recipe=FILE.yaml`` means the same.

    Raises:
        ValueError: an unknown key, a wrong type, or a value that fails a check. The message names
            the field, the value and the remedy.
    """
    # Composing needs Hydra, which the engine never imports: it only reads the schema.
    from weft.conf.checks import check
    from weft.conf.compose import compose
    from weft.conf.sources import take_credentials

    config = compose(overrides, recipe_file=recipe_file)
    take_credentials(config.data, os.environ)
    check(config)
    return config
