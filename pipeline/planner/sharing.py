"""Division of a step's work among ranks that a micro-batch reaches at different times."""

from __future__ import annotations

from collections.abc import Iterator


def spans_of(
    ranks: list[tuple[int, int]], ways_s: list[tuple[int, float]], given: int
) -> Iterator[tuple[int, int, float]]:
    """Sites, ranks and the way to them: the first ``given`` sites as they are, of others the fastest are nearest."""
    for (site, held), (_, way_s) in zip(ranks[:given], ways_s, strict=False):
        yield site, held, way_s
    ways, room, way_s = iter(ways_s[given:]), 0, 0.0
    for site, held in ranks[given:]:
        while held:
            if not room:
                room, way_s = next(ways)
            together = min(held, room)
            yield site, together, way_s
            held, room = held - together, room - together


def shared_s(spans: list[tuple[float, float]], count: int) -> float:
    """A step in which ranks share all work, each from when a micro-batch can have reached it.

    Args:
        spans: models per second of some ranks, and seconds that these cannot work.
    """
    rate, lost, step_s = 0.0, 0.0, float("inf")
    for speed, off_s in spans:  # the nearest first
        if off_s >= step_s:
            break
        rate += speed
        lost += speed * off_s
        step_s = (count + lost) / rate
    return step_s
