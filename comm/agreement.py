"""Agreement on errors: if one rank fails, all ranks receive its error, so that none waits for it forever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from weft.comm.exchange import gather

T = TypeVar("T")
Gather = Callable[[Any], list[Any]]
"""A function that returns every rank's value, in rank order, on every rank. A collective call."""


@dataclass(frozen=True)
class Failure:
    """The first failing rank's error, the same on every rank.

    Attributes:
        rank: the failing rank's index in the gathered list.
        cause: this rank's own exception, if this rank failed as well.
    """

    rank: int
    kind: str
    text: str
    cause: Exception | None


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The result of `attempt`.

    Attributes:
        results: this rank's result, or every rank's with ``share``, or empty after a failure.
        failure: None if every rank succeeded.
    """

    results: list[T]
    failure: Failure | None


def attempt(
    action: Callable[[], T],
    gather: Gather = gather,
    *,
    catch: tuple[type[Exception], ...] = (Exception,),
    share: bool = False,
) -> Outcome[T]:
    """Run ``action`` on every rank and agree on whether all of them succeeded. A collective call.

    Args:
        gather: all-gathers a value over the participating ranks.
        catch: exceptions to agree on; others propagate on this rank immediately.
        share: return every rank's result on every rank.
    """
    results: list[T] = []
    error: Exception | None = None
    try:
        results.append(action())
    except catch as raised:
        error = raised
    failure = None if error is None else (type(error).__name__, str(error))
    reports = gather((failure, results if share else None))
    for rank, (failed, _) in enumerate(reports):
        if failed is not None:
            kind, text = failed
            return Outcome([], Failure(rank, kind, text, error))
    return Outcome([result for _, shared in reports for result in shared] if share else results, None)
