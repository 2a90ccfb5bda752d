"""The outline of a model: which of its modules run before, in and after the decoder layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from weft.engine.stages.refusals import refuse_unfaithful
from weft.engine.stages.shrink import shrunken_model
from weft.engine.stages.skeleton import decoder_layers, num_layers


@dataclass(frozen=True)
class Outline:
    """Where a model can be cut; paths are those of `torch.nn.Module.get_submodule`."""

    layers: str
    """Path of the list of decoder layers."""
    num_layers: int
    """Decoder layers of the whole model."""
    before: tuple[str, ...]
    """Modules with parameters that run before the first layer: embeddings, and what never runs."""
    after: tuple[str, ...]
    """Modules with parameters that run after the last layer: the final norm and the head."""
    answer_length: int | None
    """Length of the tuple that a layer returns; None if it returns the hidden state alone."""


def outline_of(cls: type[PreTrainedModel], config: PreTrainedConfig) -> Outline:
    """Find out by running a small copy of the model once and watching it.

    Raises:
        ValueError: the model cannot be cut: its layers share modules, or exchange more than
            one hidden state [B, S, H], or it is one that is known to go wrong.
    """
    refuse_unfaithful(config)
    model = shrunken_model(cls, config, min_layers=2)
    path = decoder_layers(model)
    layers = model.get_submodule(path)
    assert isinstance(layers, nn.ModuleList)
    watch = _Watch(model, path, layers)
    ids = torch.ones(2, 6, dtype=torch.long)
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    watch.close()
    width = model.config.get_text_config().hidden_size
    _require_one_hidden_state(model, watch.answers, (2, 6, width))
    answer = watch.answers[0]
    return Outline(
        layers=path,
        num_layers=num_layers(config),
        before=tuple(unit for unit, places in watch.places.items() if places <= {"before"}),
        after=tuple(unit for unit, places in watch.places.items() if places == {"after"}),
        answer_length=None if isinstance(answer, Tensor) else len(answer),
    )


class _Watch:
    """Hooks that note when each module outside the layers runs."""

    def __init__(self, model: PreTrainedModel, path: str, layers: nn.ModuleList) -> None:
        self.places: dict[str, set[str]] = {}
        self.answers: list[Any] = []
        self._place = "before"
        self._hooks = [layers[0].register_forward_pre_hook(self._enter)]
        self._hooks += [layer.register_forward_hook(self._note_answer) for layer in layers]
        self._hooks.append(layers[-1].register_forward_hook(self._leave))
        for name, unit in outside_units(model, path):
            self.places[name] = set()
            self._hooks.append(unit.register_forward_pre_hook(self._note(name)))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for name, places in self.places.items():
            if "among" in places or len(places) > 1:
                raise ValueError(
                    f"model: {name} runs {' and '.join(sorted(places))} the decoder layers, so stages would have to "
                    "share it; choose another architecture, or run it whole with pipeline.stages=1"
                )

    def _enter(self, *_: Any) -> None:
        self._place = "among"

    def _leave(self, *_: Any) -> None:
        self._place = "after"

    def _note_answer(self, module: nn.Module, args: Any, answer: Any) -> None:
        self.answers.append(answer)

    def _note(self, name: str) -> Any:
        return lambda *_: self.places[name].add(self._place)


def outside_units(model: nn.Module, layers: str, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The largest modules with parameters that do not contain the list of layers.

    Raises:
        ValueError: a module that contains the layers has parameters of its own.
    """
    own = [name for name, _ in model.named_parameters(recurse=False)]
    if own:
        raise ValueError(
            f"model: {type(model).__name__} keeps the weights {', '.join(own)} beside its layers, and no stage can be "
            "told to hold them; choose another architecture, or run it whole with pipeline.stages=1"
        )
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if layers.startswith(f"{path}."):
            yield from outside_units(child, layers, f"{path}.")
        elif path != layers and any(True for _ in child.parameters()):
            yield path, child


def _require_one_hidden_state(model: PreTrainedModel, answers: list[Any], shape: tuple[int, ...]) -> None:
    for answer in answers:
        hidden = answer if isinstance(answer, Tensor) else answer[0]
        if hidden.shape != shape:
            raise ValueError(
                f"model: the layers of {type(model).__name__} hand on {tuple(hidden.shape)} for hidden states "
                f"{shape}; stages can only hand on one; choose another architecture, or run it "
                "whole with pipeline.stages=1"
            )
