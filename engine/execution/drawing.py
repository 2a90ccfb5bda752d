"""Drawing the micro-batches of a step from the caller's iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor


class DataEnded(ValueError, StopIteration):
    """The data of a step ended before the step had all of it: bad input, and what DeepSpeed lets through."""


def draw(
    batches: Iterator | None, count: int, prepare: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], *, what: str
) -> Sequence[dict[str, Tensor]]:
    """The next ``count`` micro-batches, prepared.

    Args:
        what: the call and the step that they are for, in messages: ``"train_batch, step 5"``.

    Raises:
        DataEnded: there are fewer.
        ValueError: what was passed is no iterator: of a list or a loader every call would read the beginning.
    """
    if batches is None or not hasattr(batches, "__next__"):
        given = "nothing" if batches is None else f"a {type(batches).__name__}"
        raise ValueError(f"{what}: it reads from an iterator, and got {given}; pass the same iter(...) every time")
    drawn: list[dict[str, Tensor]] = []
    for _ in range(count):
        try:
            batch = next(batches)
        except StopIteration:
            raise DataEnded(
                f"{what}: the data ended after {len(drawn)} of {count} micro-batches; give an iterator that goes on "
                "(deepspeed.utils.RepeatingLoader), or stop before that"
            ) from None
        drawn.append(prepare(batch))
    return drawn
