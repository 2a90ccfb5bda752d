"""Reads the micro-batches of a step from the caller's iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor


class DataEnded(ValueError, StopIteration):
    """The data ended within a step. It is a bad input, and an error class that DeepSpeed passes on."""


def draw(
    batches: Iterator | None, count: int, prepare: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], *, what: str
) -> Sequence[dict[str, Tensor]]:
    """Read and prepare the next ``count`` micro-batches.

    Args:
        what: call and step for messages, such as ``"train_batch, step 5"``.

    Raises:
        DataEnded: there are fewer.
        ValueError: the argument is no iterator. With a list or a loader every call would read the beginning.
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
