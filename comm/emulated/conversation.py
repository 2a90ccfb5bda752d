"""The messages of a rank to each of the others, in order: recorded, and compared with the others' expectations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any


class EmulationError(ValueError):
    """An emulation cannot continue; the message contains the remedy."""


class Mismatch(EmulationError):
    """This rank does something that no other rank expects of it; names both, and what each does."""


@dataclass(frozen=True)
class Said:
    """An operation of a rank with others, described equally by all of them.

    Attributes:
        what: the operation, such as ``all_reduce SUM`` or ``send 3RECV_F7``.
        form: number of elements or shape of the tensor, and after the last blank its number format.
    """

    what: str
    form: str = ""

    def differs(self, other: Said) -> str:
        """Return how the form of ``other`` differs if ``what`` agrees; otherwise an empty string."""
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
    """All operations of a rank, by counterpart: a message's peer, or the members of a process group.

    Attributes:
        said: the operations in order, by counterpart.
        answers: values that one rank sent to all, in order, by counterpart.
    """

    said: dict[str, list[Said]] = field(default_factory=lambda: defaultdict(list))
    answers: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))


class Recorder:
    """Records a conversation, and compares it with ``expected``, that of a rank with the settings of all others."""

    def __init__(
        self, rank: int, expected: Conversation | None = None, told: Mapping[str, Sequence[Any]] | None = None
    ) -> None:
        """Create the recorder of global rank ``rank``.

        Args:
            expected: the conversation to compare with.
            told: answers recorded earlier, in order, by counterpart.
        """
        self.rank = rank
        self.heard = Conversation()
        self._expected, self._lock = expected, Lock()
        self._told = told if told is not None else (expected.answers if expected is not None else {})

    def say(self, others: Sequence[int], counterpart: str, said: Said) -> None:
        """Record an operation with ``others``, global ranks, the nearest first.

        Raises:
            Mismatch: they have another operation at this point.
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
        """Return the other ranks' recorded answer, or what this rank has ``computed``."""
        answers = self.heard.answers[counterpart]
        answers.append(self._told[counterpart][len(answers)] if self.is_answered(counterpart) else computed)
        return answers[-1]
