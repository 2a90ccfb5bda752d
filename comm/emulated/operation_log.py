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
class Operation:
    """An operation of a rank with others. All participants describe it identically.

    Attributes:
        what: the operation, such as ``all_reduce SUM`` or ``send 3RECV_F7``.
        form: number of elements or shape of the tensor, a space, and its number format; or empty.
    """

    what: str
    form: str = ""

    def differs(self, other: Operation) -> str:
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
class OperationLog:
    """All operations of a rank, by counterpart: the peer of a message, or the members of a process group.

    Attributes:
        operations: the operations in order, by counterpart.
        answers: values that one rank sent to all, in order, by counterpart.
    """

    operations: dict[str, list[Operation]] = field(default_factory=lambda: defaultdict(list))
    answers: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))


class Recorder:
    """Records a rank's operations and compares them with ``expected``, those of a rank with the others' settings."""

    def __init__(
        self,
        rank: int,
        expected: OperationLog | None = None,
        recorded_answers: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Create the recorder of global rank ``rank``.

        Args:
            expected: the conversation to compare with.
            recorded_answers: answers of an earlier run, in order, by counterpart; by default those of ``expected``.
        """
        self.rank = rank
        self.log = OperationLog()
        self._expected, self._lock = expected, Lock()
        self._recorded_answers = (
            recorded_answers if recorded_answers is not None else (expected.answers if expected is not None else {})
        )

    def record(self, others: Sequence[int], counterpart: str, operation: Operation) -> None:
        """Record an operation with the global ranks ``others``, the nearest first.

        Raises:
            Mismatch: the other ranks expect a different operation at this point.
        """
        with self._lock:
            mine = self.log.operations[counterpart]
            mine.append(operation)
            if self._expected is None:
                return
            theirs = self._expected.operations.get(counterpart, [])
        index, differing = len(mine) - 1, ""
        if index >= len(theirs):
            expected = f"nothing more of it ({counterpart})" if theirs else f"nothing of it ({counterpart})"
        elif theirs[index] != operation:
            expected, differing = str(theirs[index]), operation.differs(theirs[index])
        else:
            return
        peer = next((rank for rank in others if rank != self.rank), self.rank)
        in_what = f": {differing}" if differing else ""
        raise Mismatch(f"rank {self.rank} executes {operation}, where rank {peer} expects {expected}{in_what}")

    def is_answered(self, counterpart: str) -> bool:
        """True if the other ranks' next answer is recorded."""
        return len(self.log.answers[counterpart]) < len(self._recorded_answers.get(counterpart, ()))

    def answer(self, counterpart: str, computed: Any) -> Any:
        """Return the other ranks' next recorded answer, or ``computed`` if there is none, and record it."""
        answers = self.log.answers[counterpart]
        answers.append(self._recorded_answers[counterpart][len(answers)] if self.is_answered(counterpart) else computed)
        return answers[-1]
