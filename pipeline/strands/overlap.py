"""The overlap of operators: DHelix's overlap effectiveness factor (section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.pipeline.strands.segments import Kind, LinkScope


def overlap_effectiveness(first_s: float, second_s: float, together_s: float) -> float:
    """Return the OEF of two operators: 1 if the shorter one is hidden entirely, 0 if no time is saved (equation 1).

    Args:
        first_s, second_s: seconds of each operator alone.
        together_s: seconds of both at the same time.
    """
    return (first_s + second_s - together_s) / min(first_s, second_s)


@dataclass(frozen=True)
class OverlapTable:
    """The OEF of pairs of operators; pairs that are not listed have ``default``.

    Attributes:
        compute: OEF of compute and a concurrent collective.
        links: OEF of two collectives, one inside of a host and one between hosts.
    """

    compute: Mapping[tuple[Kind, LinkScope], float] = field(default_factory=dict)
    links: float = 1.0
    default: float = 1.0
    spread: float | None = field(default=None, compare=False)
    """Share by which repeated measurements of pairs differ, or None if nothing was measured."""

    def __post_init__(self) -> None:
        named = {"links": self.links, "default": self.default}
        named |= {f"compute[{kind.value}, {link.value}]": value for (kind, link), value in self.compute.items()}
        for name, value in named.items():
            if not 0 <= value <= 1:
                raise ValueError(f"overlap.{name}={value}: an overlap effectiveness factor lies between 0 and 1")

    def __hash__(self) -> int:
        """Return the hash of its values, whatever the order of the mapping."""
        return hash((frozenset(self.compute.items()), self.links, self.default))

    def moved(self, share: float) -> OverlapTable:
        """Return the table with each factor moved by ``share`` of its distance to 1, or to 0 if it is negative."""

        def factor(value: float) -> float:
            return value + share * (1 - value if share > 0 else value)

        compute = {pair: factor(value) for pair, value in self.compute.items()}
        return OverlapTable(compute, factor(self.links), factor(self.default))

    def slowdown(self, kind: Kind | None, links: tuple[LinkScope, ...]) -> float:
        """Return the factor by which all concurrent operators are slowed down.

        Two operators that take T each alone take (2 - OEF) T together, see equation 1. If one is longer, the same holds
        for the shorter one and an equal part of the longer one.

        Args:
            kind: the kind of compute that runs, if any.
            links: the busy links.
        """
        slow = 1.0
        if kind is not None:
            slow += sum(1 - self.compute.get((kind, link), self.default) for link in links)
        if len(links) > 1:
            slow += 1 - self.links
        return slow
