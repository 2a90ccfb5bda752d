"""The skeleton of a model for cuts: its modules that run before, in and after the decoder layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from weft.engine.models.shrink import shrunken_model
from weft.engine.models.skeleton import cuttable_layers, num_layers, skeleton
from weft.engine.stages.cutting.boundary import boundaries
from weft.engine.stages.cutting.provenance import BEFORE, Entry, Provenance, memory

_LAYER = "a layer"


@dataclass(frozen=True)
class Outline:
    """The structure of a model for cuts. Paths are those that `torch.nn.Module.get_submodule` accepts."""

    layers: str
    """Path of the list of decoder layers."""
    num_layers: int
    """Number of decoder layers of the whole model."""
    before: tuple[str, ...]
    """Modules with parameters that run before the first layer, such as embeddings, or that never run."""
    after: tuple[str, ...]
    """Modules with parameters that run after the last layer: the final norm and the head."""
    answer_length: int | None
    """Length of the tuple that a layer returns, or None if it returns the hidden state alone."""
    own_before: tuple[str, ...] = ()
    """Parameters that the modules around the layers own and use before the layers."""
    own_after: tuple[str, ...] = ()
    """Parameters that the modules around the layers own and use after the layers."""
    more: tuple[str, ...] = ()
    """Arguments of layers that cross cuts besides a hidden state [B, S, H]."""
    plain: bool = True
    """True if only a hidden state [B, S, H] crosses cuts."""


_KNOWN: dict[tuple[type[PreTrainedModel], str], Outline] = {}
"""Cache by class and configuration, for processes that make stages of the same model repeatedly."""


def outline_of(cls: type[PreTrainedModel], config: PreTrainedConfig) -> Outline:
    """Run a small copy of the model once with hooks, and derive the outline.

    Raises:
        ValueError: the model cannot be cut: modules run both outside of its layers and among
            them, or layers run more than once.
    """
    key = cls, config.to_json_string(use_diff=False)
    if key not in _KNOWN:
        _KNOWN[key] = _watched(cls, config)
    return _KNOWN[key]


def _watched(cls: type[PreTrainedModel], config: PreTrainedConfig) -> Outline:
    path = cuttable_layers(skeleton(cls, config))
    model = shrunken_model(cls, config, min_layers=2)
    layers = model.get_submodule(path)
    assert isinstance(layers, nn.ModuleList)
    watch, provenance = _Watch(model, path, layers), Provenance(model, layers)
    ids = torch.ones(2, 6, dtype=torch.long)
    with provenance.watching():
        model(input_ids=ids, use_cache=False)
    places = watch.places()
    crossing = boundaries(provenance.taken, len(layers))[1:]
    own = _own_weights(model, path, provenance)
    width = model.config.get_text_config().hidden_size
    answer = watch.answers[0]
    return Outline(
        layers=path,
        num_layers=num_layers(config),
        before=tuple(unit for unit, found in places.items() if found <= {"before"}),
        after=tuple(unit for unit, found in places.items() if found == {"after"}),
        answer_length=None if isinstance(answer, Tensor) else len(answer),
        own_before=tuple(name for name, is_after in own.items() if not is_after),
        own_after=tuple(name for name, is_after in own.items() if is_after),
        more=tuple(dict.fromkeys(_shown(part.slots[0].entry) for parts in crossing for part in parts[1:])),
        plain=all([part.shape for part in parts] in ([], [(*ids.shape, width)]) for parts in crossing),
    )


class _Watch:
    """Hooks that record the order in which layers and modules outside of them run."""

    def __init__(self, model: PreTrainedModel, path: str, layers: nn.ModuleList) -> None:
        self.answers: list[Any] = []
        self._num_layers = len(layers)
        self._events: list[str] = []
        self._units = dict(outside_units(model, path))
        self._hooks = [unit.register_forward_pre_hook(self._note(name)) for name, unit in self._units.items()]
        self._hooks += [layer.register_forward_pre_hook(self._note(_LAYER)) for layer in layers]
        self._hooks += [layer.register_forward_hook(self._note_answer) for layer in layers]

    def places(self) -> dict[str, set[str]]:
        """Return where each module outside of the layers ran: before them, after them, or never (an empty set)."""
        for hook in self._hooks:
            hook.remove()
        if len(self.answers) > self._num_layers:
            raise ValueError(
                f"model: its {self._num_layers} layers run {len(self.answers)} times, so they are no pipeline; "
                "choose another architecture, or run it whole with pipeline.stages=1"
            )
        if odd := next((answer for answer in self.answers if hasattr(answer, "_fields")), None):
            raise ValueError(
                f"model: its layers answer with {type(odd).__name__} ({', '.join(odd._fields)}), of which several "
                "streams go on; choose another architecture, or run it whole with pipeline.stages=1"
            )
        runs = [number for number, event in enumerate(self._events) if event == _LAYER]
        places: dict[str, set[str]] = {name: set() for name in self._units}
        for number, event in enumerate(self._events):
            if event != _LAYER:
                places[event].add("before" if number < runs[0] else "after" if number > runs[-1] else "among")
        for name, found in places.items():
            if "among" in found or len(found) > 1:
                raise ValueError(
                    f"model: {name} runs {' and '.join(sorted(found))} the decoder layers, so stages would have to "
                    "share it; choose another architecture, or run it whole with pipeline.stages=1"
                )
        return places

    def _note_answer(self, module: nn.Module, args: Any, answer: Any) -> None:
        self.answers.append(answer)

    def _note(self, event: str) -> Any:
        return lambda *_: self._events.append(event)


def outside_units(model: nn.Module, layers: str, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest modules that have parameters and a forward, and do not contain the list of layers, by path."""
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if layers.startswith(f"{path}.") or (path != layers and isinstance(child, nn.ModuleList | nn.ModuleDict)):
            yield from outside_units(child, layers, f"{path}.")
        elif path != layers and any(True for _ in child.parameters()):
            yield path, child


def _own_weights(model: nn.Module, layers: str, provenance: Provenance) -> dict[str, bool]:
    """Return the parameters that modules around the layers own, and whether they are used after the layers."""
    path, found = "", {}
    for step in layers.split("."):
        module = model.get_submodule(path) if path else model
        for name, parameter in module.named_parameters(recurse=False):
            uses = provenance.uses.get(memory(parameter), {BEFORE})
            if len(uses) > 1 or not uses <= {BEFORE, provenance.after}:
                raise ValueError(
                    f"model: {type(module).__name__} uses its weight {name} among its layers, so stages would have to "
                    "share it; choose another architecture, or run it whole with pipeline.stages=1"
                )
            found[f"{path}.{name}".removeprefix(".")] = uses == {provenance.after}
        path = f"{path}.{step}".removeprefix(".")
    return found


def _shown(entry: Entry) -> str:
    return ".".join(map(str, entry))
