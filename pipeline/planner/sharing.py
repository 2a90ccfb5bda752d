"""Division of a step's work among ranks that a micro-batch reaches at different times."""

from __future__ import annotations

from collections.abc import Iterator

ROUNDED_UP = 1 + 1e-9


def spans_of(
    ranks: list[tuple[int, int]], ways_s: list[tuple[int, float]], given: int
) -> Iterator[tuple[int, int, float]]:
    """Yield (site, number of ranks, seconds until a micro-batch reaches them) in pipeline order.

    The first ``given`` sites stay as they are. The other sites come in the order of ``ranks``, at the delays of
    ``ways_s``.
    """
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
    """Return the least seconds of a step whose work is divided among ranks, if each starts after a delay.

    Args:
        spans: (micro-batches per second, delay in seconds) of groups of ranks, the smallest delay first.
    """
    rate, lost, step_s = 0.0, 0.0, float("inf")
    for speed, off_s in spans:  # the nearest first
        if off_s >= step_s:
            break
        rate += speed
        lost += speed * off_s
        step_s = (count + lost) / rate
    return step_s


def whole_layers_s(ranks: list[tuple[int, float]], layers: int, least_s: float) -> float:
    """Return the least seconds of a step whose ranks hold whole layers, or ``least_s`` if that is longer.

    Args:
        ranks: (number of ranks, seconds of a step for each layer on one of them).
    """
    held = [int(least_s * ROUNDED_UP / layer_s) for _, layer_s in ranks]
    left = layers - sum(many * each for (many, _), each in zip(ranks, held, strict=True))
    while left > 0:
        least_s, place = min(((each + 1) * ranks[at][1], at) for at, each in enumerate(held))
        held[place] += 1
        left -= ranks[place][0]
    return least_s
