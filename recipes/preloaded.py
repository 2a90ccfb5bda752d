"""Imports of a recipe, including Hydra, for the process from which `weft launch` forks ranks."""

import weft.engine.preloaded
import weft.recipes.train  # noqa: F401
from weft.conf import load

load(["train.name=a b", "train.steps=1", "optimizer.lr=1e-3"])  # finds Hydra's plug-ins, and fills its parser's tables
