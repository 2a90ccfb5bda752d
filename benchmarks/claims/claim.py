"""A figure of a paper, Weft's figure, and whether the claim is reproduced."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A figure of a paper and Weft's figure."""

    figure: str
    what: str
    paper: str
    ours: str
    verdict: str


def judged(ours: float, paper: float, within: float) -> str:
    """``reproduced`` within a share of the paper's figure, ``partly`` within three times that, else ``not``."""
    off = abs(ours / paper - 1)
    return "reproduced" if off <= within else "partly" if off <= 3 * within else "not"
