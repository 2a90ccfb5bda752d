"""An error on one rank is every rank's: no rank waits for another that has failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from weft.comm.exchange import gather

T = TypeVar("T")
Gather = Callable[[Any], list[Any]]
"""Every rank's value, in the order of ranks, on every rank; a collective call."""


@dataclass(frozen=True)
class Failure:
    """The first failing rank's error, the same on every rank.

    Attributes:
        rank: in the order of the gathering.
        kind: name of the exception's class.
        text: its message.
        cause: this rank's own exception, if it has failed, too.
    """

    rank: int
    kind: str
    text: str
    cause: Exception | None


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What an action came to.

    Attributes:
        results: this rank's result alone, or every rank's if they were shared; empty after a failure.
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
    """Run ``action`` on every rank, and learn whether all succeeded; a collective call.

    Args:
        gather: over the ranks that take part.
        catch: errors of bad input; others end this rank at once.
        share: whether every rank gets every rank's result.
    """
    results: list[T] = []
    error: Exception | None = None
    try:
        results.append(action())
    except catch as raised:
        error = raised
    said = None if error is None else (type(error).__name__, str(error))
    told = gather((said, results if share else None))
    for rank, (failed, _) in enumerate(told):
        if failed is not None:
            kind, text = failed
            return Outcome([], Failure(rank, kind, text, error))
    return Outcome([result for _, shared in told for result in shared] if share else results, None)
