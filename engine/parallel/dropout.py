"""Random numbers of a tensor group: equal for activations that members share, different for parts.

Between layers the device's generator has the same state on all members. For a member's own numbers, the generator is
seeded with a number from this state and the member's index, and the state is restored afterwards. So all numbers
depend only on the state at the beginning of a layer, which gradient checkpointing restores.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from weft.engine.parallel.axis import AxisGroup
from weft.engine.parallel.tensor_styles import Style, TensorPlan

STEP = 4
"""Increase of a CUDA generator's offset for one number. Offsets must be multiples of it."""


def drops(model: PreTrainedModel) -> bool:
    """True if the model's modules or config have a dropout probability above 0."""
    modules = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    fields = model.config.get_text_config().to_dict().items()
    return modules or any(
        isinstance(value, float) and value > 0 for name, value in fields if "dropout" in name or "pdrop" in name
    )


class DropoutStreams:
    """Hooks that switch between random numbers that all members share and numbers of this member alone."""

    def __init__(self, group: AxisGroup) -> None:
        self._index = group.index
        self._thread = _Saved()  # two strands may run the model at once, each in its thread

    def hook_layer(self, layer: nn.Module) -> None:
        """Switch to own numbers for the layer, because a member has only a slice of the sequence between blocks."""
        layer.register_forward_pre_hook(self._enter_layer)
        layer.register_forward_hook(self._to_shared)

    def hook_block(self, block: nn.Module) -> None:
        """Switch to shared numbers for a block, whose gathered input is the same on all members."""
        block.register_forward_pre_hook(self._to_shared)
        block.register_forward_hook(self._to_own)

    def hook_matrix(self, module: nn.Module, style: Style) -> None:
        """Switch to own numbers between column-wise and row-wise products, where members have different features."""
        before, after = self._to_shared, self._to_own
        if style.sums:
            before, after = (before if style is Style.sliced_rows else self._to_own), self._to_shared
        elif style is Style.gathered_columns:
            after = self._to_shared
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _enter_layer(self, layer: nn.Module, *_: Any) -> None:
        self._thread.state = None  # a recomputation may have stopped within a layer
        self._to_own(layer)

    def _to_own(self, module: nn.Module, *_: Any) -> None:
        generator = _generator(module)
        if generator is not None and self._thread.state is None:
            seed = _draw(generator)
            self._thread.state = generator.get_state()
            generator.manual_seed((seed + self._index) % 2**63)

    def _to_shared(self, module: nn.Module, *_: Any) -> None:
        generator, state = _generator(module), self._thread.state
        if generator is not None and state is not None:
            generator.set_state(state)
            self._thread.state = None


class _Saved(threading.local):
    state: Tensor | None = None


def hook_dropout(
    model: PreTrainedModel, plan: TensorPlan, group: AxisGroup, layers: str, blocks: list[nn.Module]
) -> None:
    """Make dropout equal on all members for shared activations, and different for their own parts.

    Args:
        layers: path of the list of decoder layers.
        blocks: parts of layers whose input is the whole sequence.
    """
    if not drops(model):
        return
    streams = DropoutStreams(group)
    for layer in model.get_submodule(layers).children():
        streams.hook_layer(layer)
    for block in blocks:
        streams.hook_block(block)
    for _, module, style in plan.modules(model, layers):
        streams.hook_matrix(module, style)


def _generator(module: nn.Module) -> torch.Generator | None:
    """Return the random number generator of the device on which a module trains.

    Return None if the module is not in training, has no parameters, or is on the meta device.
    """
    weight = next(module.parameters(), None)
    if not module.training or weight is None or weight.is_meta:
        return None
    if weight.device.type == "cuda":
        return torch.cuda.default_generators[weight.device.index]
    return torch.default_generator


def _draw(generator: torch.Generator) -> int:
    """Draw a number from a generator without synchronising its device."""
    if generator.device.type == "cpu":
        return int(torch.randint(2**62, (), generator=generator))
    offset = generator.get_offset()
    generator.set_offset(offset + STEP)
    number = generator.initial_seed() * 0x9E3779B97F4A7C15 + offset * 0xD1342543DE82EF95  # odd factors
    return number % 2**63
