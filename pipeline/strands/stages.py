"""Segments of a virtual stage in one forward and one backward: its layers' segments, one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce

from weft.pipeline.strands.segments import StrandPair


@dataclass(frozen=True)
class StageStrands:
    """The parts of a stage in their order, each with how often it follows itself.

    Attributes:
        runs: of a part (a layer, or what comes before or after the layers) its own forward, backward and weight
            gradients. Where a strand of it ends without a collective, it is one segment with what follows.
    """

    runs: tuple[tuple[StrandPair, int], ...]

    def __post_init__(self) -> None:
        """Refuse stages of nothing."""
        if not self.runs or any(count < 1 for _, count in self.runs):
            raise ValueError(
                f"runs: parts that occur {[count for _, count in self.runs]} times; each occurs once or more"
            )

    @classmethod
    def of(cls, parts: Iterable[StrandPair]) -> StageStrands:
        """The stage with these parts, in their order."""
        runs: list[tuple[StrandPair, int]] = []
        for part in parts:
            if runs and runs[-1][0] == part:
                runs[-1] = part, runs[-1][1] + 1
            else:
                runs.append((part, 1))
        return cls(tuple(runs))

    @property
    def layers(self) -> int:
        """Number of parts."""
        return sum(count for _, count in self.runs)

    @cached_property
    def whole(self) -> StrandPair:
        """All parts, one behind the other."""
        return reduce(StrandPair.then, (part.repeated(count) for part, count in self.runs))

    def beside(self, other: StageStrands) -> StrandPair:
        """This stage's forward and another's backward."""
        return StrandPair(self.whole.forward, other.whole.backward, other.whole.weights)

    def then(self, other: StageStrands) -> StageStrands:
        """Return this stage and ``other`` after it, joined to one."""
        return StageStrands.of(part for runs in (self.runs, other.runs) for part, count in runs for _ in range(count))

    def without(self, layer: StrandPair, times: int) -> StageStrands:
        """Return the stage with ``times`` fewer of a layer, removed from its longest run."""
        longest = max((count, number) for number, (part, count) in enumerate(self.runs) if part == layer)[1]
        runs = ((part, count - times * (number == longest)) for number, (part, count) in enumerate(self.runs))
        return StageStrands(tuple(runs))
