"""The operations of a rank with each of the others, in order: recorded, and compared with the expected operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any


class EmulationError(ValueError):
    """An emulation cannot continue; the message contains the remedy."""


class Mismatch(EmulationError):
    """No other rank expects this rank's operation. The message names both operations."""


@dataclass(frozen=True)
class Said:
    """An operation of a rank with others. All participants describe it identically.

    Attributes:
        what: the operation, such as ``all_reduce SUM`` or ``send 3RECV_F7``.
        form: number of elements or shape of the tensor, a space, and its number format; or empty.
    """

    what: str
    form: str = ""

    def differs(self, other: Said) -> str:
        """Return how the forms differ if both operations have the same ``what``, otherwise an empty string."""
        if self.what != other.what or not self.form or not other.form:
            return ""
        (mine, my_format), (its, its_format) = self.form.rsplit(" ", 1), other.form.rsplit(" ", 1)
        sized = "shape" if mine.startswith("(") else "number of elements"
        return " and ".join(
            f"another {name} ({here}, not {there})"
            for name, here, there in ((sized, mine, its), ("number format", my_format, its_format))
            if here != there
        )

    def __str__(self) -> str:
        return f"{self.what} of {self.form}" if self.form else self.what


@dataclass
class Conversation:
    """All operations of a rank, by counterpart: the peer of a message, or the members of a process group.

    Attributes:
        said: the operations in order, by counterpart.
        answers: values that one rank sent to all, in order, by counterpart.
    """

    said: dict[str, list[Said]] = field(default_factory=lambda: defaultdict(list))
    answers: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))


class Recorder:
    """Records a rank's operations and compares them with ``expected``, those of a rank with the others' settings."""

    def __init__(
        self, rank: int, expected: Conversation | None = None, told: Mapping[str, Sequence[Any]] | None = None
    ) -> None:
        """Create the recorder of global rank ``rank``.

        Args:
            expected: the conversation to compare with.
            told: answers recorded earlier, in order, by counterpart, by default those of ``expected``.
        """
        self.rank = rank
        self.heard = Conversation()
        self._expected, self._lock = expected, Lock()
        self._told = told if told is not None else (expected.answers if expected is not None else {})

    def say(self, others: Sequence[int], counterpart: str, said: Said) -> None:
        """Record an operation with the global ranks ``others``, the nearest first.

        Raises:
            Mismatch: the other ranks expect a different operation at this point.
        """
        with self._lock:
            mine = self.heard.said[counterpart]
            mine.append(said)
            if self._expected is None:
                return
            theirs = self._expected.said.get(counterpart, [])
        place, differing = len(mine) - 1, ""
        if place >= len(theirs):
            expected = f"nothing more of it ({counterpart})" if theirs else f"nothing of it ({counterpart})"
        elif theirs[place] != said:
            expected, differing = str(theirs[place]), said.differs(theirs[place])
        else:
            return
        peer = next((rank for rank in others if rank != self.rank), self.rank)
        in_what = f": {differing}" if differing else ""
        raise Mismatch(f"rank {self.rank} comes to {said}, where rank {peer} expects {expected}{in_what}")

    def is_answered(self, counterpart: str) -> bool:
        """True if the other ranks' next answer is recorded."""
        return len(self.heard.answers[counterpart]) < len(self._told.get(counterpart, ()))

    def answer(self, counterpart: str, computed: Any) -> Any:
        """Return the other ranks' next recorded answer, or ``computed`` if there is none, and record it."""
        answers = self.heard.answers[counterpart]
        answers.append(self._told[counterpart][len(answers)] if self.is_answered(counterpart) else computed)
        return answers[-1]
