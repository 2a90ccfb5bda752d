"""Diagnosis of a failed forward of a divided model: the operation that does not support the division."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from torch import Tensor, nn
from transformers import PreTrainedModel

from weft.engine.models.skeleton import decoder_layers
from weft.engine.parallel.attention import ContextAttention, HeadAttention, RingAttention

_OF_SIZES = re.compile(r"\b(sizes?|shapes?|dimensions?)\b|out of bounds", re.IGNORECASE)


@dataclass(frozen=True)
class _Step:
    """A call in the traceback of a failed forward.

    Attributes:
        path: the module's path in the model, or empty for the model itself.
    """

    path: str
    module: nn.Module
    frame: FrameType

    def __str__(self) -> str:
        return f"{self.path} ({type(self.module).__name__})" if self.path else type(self.module).__name__


def why_not_shared(error: Exception, axes: Collection[str]) -> str:
    """Return the operation that members cannot share. For errors that are not about sizes, return the error's message.

    Args:
        error: the forward's error, with its traceback.
        axes: axes that divided the work.
    """
    steps = list(_steps(error))
    if not steps or not isinstance(error, RuntimeError | IndexError | ValueError) or not _OF_SIZES.search(str(error)):
        return f"its forward does not run ({type(error).__name__}: {' '.join(str(error).split())})"
    last = steps[-1]
    if "context" in axes and (more := _beside_positions(last, error)):
        return more
    if "tensor" in axes and (more := _beside_hidden_states(steps)):
        return more
    parts = {"tensor": "heads, features or the sequence", "context": "the sequence", "expert": "the experts"}
    of_what = " or of ".join(parts[axis] for axis in parts if axis in axes)
    outside = ", outside of the attention that is looked up by name" if "context" in axes else ""
    return f"{last} combines a rank's part of {of_what} with all of it{outside}"


def _steps(error: Exception) -> Iterator[_Step]:
    """Yield the calls of a Hugging Face model and its modules from a traceback, the outermost first."""
    paths: dict[nn.Module, str] = {}
    for frame, _ in walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if not paths and isinstance(module, PreTrainedModel):
            paths = {part: path for path, part in module.named_modules()}
        if isinstance(module, nn.Module) and module in paths:
            yield _Step(paths[module], module, frame)


def _beside_positions(last: _Step, error: Exception) -> str:
    """Describe an operation that uses other positions than the rank's own, or return an empty string."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if any(Path(frame.f_code.co_filename).name == "masking_utils.py" for frame in frames):
        return f"{last} makes masks of other tensors than the positions and the padding that it is given"
    ours = ContextAttention | HeadAttention | RingAttention
    if any(isinstance(frame.f_locals.get("self"), ours) for frame in frames):
        return f"{last} gives attention keys or masks of its own making, alongside those of the rank's positions"
    return ""


def _beside_hidden_states(steps: list[_Step]) -> str:
    """Describe an operation of a layer that needs whole hidden states [batch, sequence, features], not a rank's slice.

    Return an empty string if there is none.
    """
    model, last = steps[0].module, steps[-1]
    assert isinstance(model, PreTrainedModel)
    layers = decoder_layers(model)
    depth = layers.count(".") + 1
    outside = [step for step in steps if step.path.count(".") <= depth]  # of layers' parts
    hidden = [step.frame.f_locals.get("hidden_states") for step in outside]
    if dims := max((tensor.dim() for tensor in hidden if isinstance(tensor, Tensor)), default=3) - 3:
        return f"its layers hand on hidden states of {3 + dims} dimensions, not of batch, sequence and features alone"
    if last.path.startswith(f"{layers}.") and last.path.count(".") == depth:
        return f"{last} computes with hidden states alongside its parts, where a rank has a slice of the sequence"
    own = [name for name, _ in last.module.named_parameters(recurse=False)]
    if own and any(True for _ in last.module.children()):
        return (
            f"{last} combines a rank's part with weights next to its matrices ({', '.join(own)}), which are not divided"
        )
    return ""
