"""Members of a bucket: where each parameter lies in it, and which fragment of it this rank's optimiser updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from weft.engine.models.state_blocks import block_of
from weft.engine.parallel.cut import Cut
from weft.pipeline.memory import ALIGNMENT

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter and its offset in the bucket."""

    name: str
    parameter: nn.Parameter
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        """Return the parameter's view, in its own shape, of ``flat``: a buffer of the whole bucket."""
        return flat[self.offset : self.offset + self.parameter.numel()].view(self.parameter.shape)


@dataclass(frozen=True, eq=False)
class Fragment:
    """This rank's part of a parameter, in the form in which the optimiser updates it.

    Attributes:
        name: the parameter's name in the whole Hugging Face model.
        parameter: the model's parameter, with its full shape.
        start: index of the part's first element in the flattened parameter.
        tensor: the part in its highest precision (the master weights, if there are any). It has the
            parameter's shape if it is the whole parameter, and is flat otherwise.
        trained: whether the optimiser updates it.
        shared: whether every replica holds this part.
        cut: the part of the named parameter that ``parameter`` holds. None means that it holds all of it.
    """

    name: str
    parameter: nn.Parameter
    start: int
    tensor: Tensor
    trained: bool
    shared: bool
    cut: Cut | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the named parameter in the whole model."""
        return tuple(self.parameter.shape) if self.cut is None else self.cut.shape

    @property
    def is_whole(self) -> bool:
        """True if the part is the whole parameter."""
        return self.tensor.numel() == self.parameter.numel()


def lay_out(named: Sequence[Named], replicas: int, owners: Sequence[int]) -> tuple[int, tuple[Member, ...]]:
    """Return the length of a shard, and the parameters with their offsets: dense, or in the shards of their owners.

    Parameters with blocks start, and shards end, at multiples of a block.
    """
    ends, offsets = [0] * (replicas if owners else 1), []
    for (_, parameter), owner in zip(named, owners or [0] * len(named), strict=True):
        block = block_of(parameter)
        offsets.append(-(-ends[owner] // block) * block)
        ends[owner] = offsets[-1] + parameter.numel()
    unit = max(ALIGNMENT, *(block_of(parameter) for _, parameter in named)) * replicas // len(ends)
    share = (-(-max(ends) // unit) * unit or unit) * len(ends) // replicas
    starts = [share * owner for owner in owners] or [0] * len(named)
    placed = zip(named, starts, offsets, strict=True)
    return share, tuple(Member(name, parameter, start + offset) for (name, parameter), start, offset in placed)
