"""A small engine whose ranks hold parts of matrices; gradients need no exchange, for each follows from its element."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.engine.small_engine import SmallEngine
from weft.engine.parallel.cut import Cut

MATRICES = {"up": ((8, 6), 0, 1), "packed": ((16, 3), 0, 2), "down": ((5, 8), 1, 1), "norm": ((7,), None, 1)}
"""Shape of each parameter of a layer, the dimension that members divide, and its blocks."""


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers of a parameter that all ranks know."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator)


class CutLayer(nn.Module):
    """Parameters of which a member holds its parts, and a sum over them that is a loss."""

    def __init__(self, name: str, index: int, count: int) -> None:
        super().__init__()
        self.cuts: dict[str, Cut] = {}
        self.share, self.slopes = 1 / count, {}
        for kind, (shape, dim, blocks) in MATRICES.items():
            whole, slope = (drawn(f"{name}.{kind}.{part}", shape) for part in ("weight", "slope"))
            if dim is not None and count > 1:
                cut = self.cuts[kind] = Cut(shape, dim, index, count, blocks)
                whole, slope = cut.take(whole), cut.take(slope)
            self.register_parameter(kind, nn.Parameter(whole.clone()))
            self.slopes[kind] = slope

    def forward(self, scale: Tensor) -> Tensor:
        """This member's part of the loss: of what all hold in full, its share."""
        parts = []
        for kind, parameter in self.named_parameters():
            part = (parameter * self.slopes[kind] * scale).sum() + parameter.square().sum() / 2
            parts.append(part * (1.0 if kind in self.cuts else self.share))
        return torch.stack(parts).sum()


class CutPart(nn.Module):
    """A virtual stage of two such layers, with a buffer."""

    tied: frozenset[str] = frozenset()

    def __init__(self, index: int, member: int, count: int) -> None:
        super().__init__()
        self.index, self.prefix = index, f"part{index}."
        self.layers = nn.ModuleList(CutLayer(f"{index}.{number}", member, count) for number in range(2))
        self.register_buffer("seen", torch.zeros(3))
        self.cuts = {
            f"{self.prefix}layers.{number}.{kind}": cut
            for number, layer in enumerate(self.layers)
            for kind, cut in layer.cuts.items()
        }

    @property
    def model(self) -> nn.Module:
        return self

    def named_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.named_parameters():
            yield self.prefix + name, parameter

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen[0] += 1
        scale = tokens.float().mean() / 10
        return torch.stack([layer(scale) for layer in self.layers]).sum()


class CutEngine(SmallEngine):
    """See `SmallEngine`; ``tensor`` ranks share each part."""

    def make_part(self, tied: bool) -> nn.Module:
        position = self.layout.position(self.global_rank)
        return CutPart(self.pipe_rank, position.tensor, self.layout.tensor)
