"""The segments of a virtual stage in one forward and one backward: those of its layers, one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce

from weft.pipeline.strands.segments import StrandPair


@dataclass(frozen=True)
class StageStrands:
    """The parts of a stage in order, each with its number of repetitions.

    Attributes:
        runs: (part, repetitions). A part is a layer, or what precedes or follows the layers, with its forward, backward
            and weight gradients. A strand of a part that ends without a collective is joined to the next part.
    """

    runs: tuple[tuple[StrandPair, int], ...]

    def __post_init__(self) -> None:
        """Refuse empty stages."""
        if not self.runs or any(count < 1 for _, count in self.runs):
            raise ValueError(
                f"runs: parts that occur {[count for _, count in self.runs]} times; each occurs once or more"
            )

    @classmethod
    def of(cls, parts: Iterable[StrandPair]) -> StageStrands:
        """Return the stage with these parts in order."""
        runs: list[tuple[StrandPair, int]] = []
        for part in parts:
            if runs and runs[-1][0] == part:
                runs[-1] = part, runs[-1][1] + 1
            else:
                runs.append((part, 1))
        return cls(tuple(runs))

    @property
    def layers(self) -> int:
        """The number of parts."""
        return sum(count for _, count in self.runs)

    @cached_property
    def whole(self) -> StrandPair:
        """All parts, one after the other."""
        return reduce(StrandPair.then, (part.repeated(count) for part, count in self.runs))

    def beside(self, other: StageStrands) -> StrandPair:
        """Return the pair of this stage's forward and the other stage's backward."""
        return StrandPair(self.whole.forward, other.whole.backward, other.whole.weights)

    def then(self, other: StageStrands) -> StageStrands:
        """Return this stage followed by ``other`` as one stage."""
        return StageStrands.of(part for runs in (self.runs, other.runs) for part, count in runs for _ in range(count))

    def without(self, layer: StrandPair, times: int) -> StageStrands:
        """Return the stage with ``times`` fewer repetitions of a layer, removed from its longest run."""
        longest = max((count, number) for number, (part, count) in enumerate(self.runs) if part == layer)[1]
        runs = ((part, count - times * (number == longest)) for number, (part, count) in enumerate(self.runs))
        return StageStrands(tuple(runs))
