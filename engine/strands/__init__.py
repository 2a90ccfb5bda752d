"""Strand pairs (DHelix): a forward and a backward whose collectives inside of layers hide behind each other's compute.

Other packages import from here. Names load on first use, so that cost files can be read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "KINDS": "weft.engine.strands.facts",
    "StrandPairs": "weft.engine.strands.strand_pairs",
    "correct_overlap": "weft.engine.strands.overlap_cache",
    "measure_host": "weft.engine.strands.overlap_cache",
    "strands_from_tables": "weft.pipeline.strands.profile",
    "strands_to_tables": "weft.pipeline.strands.profile",
    "with_strands": "weft.engine.strands.facts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
