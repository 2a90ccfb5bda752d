"""Imports of a recipe, including Hydra, for the process from which `weft launch` forks ranks."""

import weft.engine.preloaded
import weft.recipes.train  # noqa: F401
from weft.conf import preload

preload()
