"""Inputs and outputs of a stage: tensors that it receives from the previous stage and sends to the next one."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.engine.stages.cutting.boundary import Boundary, BoundaryTracer, Slot
from weft.engine.stages.cutting.provenance import MAPPINGS, Entry, entries, leaves

_FED = "_weft_fed"


class StageEnded(Exception):
    """Raised to end a forward after the stage's last layer."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.tensors = tensors
        """The boundary tensors, the hidden state first."""


class Port:
    """The inputs and outputs of one stage, for one micro-batch at a time."""

    def __init__(self, window: range = range(0), num_layers: int = 0, tracer: BoundaryTracer | None = None) -> None:
        """Start without tensors.

        Args:
            window: the stage's decoder layers.
            num_layers: number of layers of the whole model.
            tracer: computes boundary tensors. None if only hidden states cross cuts.
        """
        self.window, self.num_layers, self.tracer = window, num_layers, tracer
        self.hidden: Tensor | None = None
        """The input of the stage's first layer, while a forward runs."""
        self.dtype = torch.float32
        """The type in which the model computes."""
        self._entered = False
        self._thread: int | None = None
        self._given: dict[Slot, Tensor] = {}
        self._leaving: Boundary = ()
        self._out: dict[int, Tensor] = {}

    def crossing(self, cut: int, shape: Sequence[int], dtype: torch.dtype) -> Boundary | None:
        """Return the boundary tensors before a layer for token ids [B, S].

        Return None if only a hidden state [B, S, H] crosses every cut.

        Raises:
            ValueError: see `BoundaryTracer.boundary`.
        """
        return None if self.tracer is None else self.tracer.boundary(cut, shape, dtype)

    def open(self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> None:
        """Set the tensors from the previous stage, the hidden state first, for token ids of ``shape``.

        The first stage has none. ``dtype`` is the type in which the model computes.
        """
        self.dtype, self._thread = dtype, threading.get_ident()
        self.hidden, self._entered = tensors[0] if tensors else None, False
        self._given, self._out, self._leaving = {}, {}, ()
        if self.tracer is None:
            return
        if tensors:
            boundary = self.tracer.boundary(self.window.start, shape, dtype)
            self._given = {slot: t for part, t in zip(boundary, tensors, strict=True) for slot in part.slots}
        if self.window.stop < self.num_layers:
            self._leaving = self.tracer.boundary(self.window.stop, shape, dtype)

    def close(self) -> None:
        """Release all tensors."""
        self.hidden, self._given, self._out, self._leaving, self._entered = None, {}, {}, (), False

    def put_in(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict]:
        """Return a layer's arguments with the tensors of earlier stages inserted.

        The stage's first layer also receives the hidden state. The tensors are also attached to the hidden state. So a
        layer that is recomputed in its backward receives the same tensors, although no forward runs then, or another
        thread runs the forward of another micro-batch.
        """
        if self._entered and not self._given and self._thread == threading.get_ident():
            return args, kwargs  # saves host time where only hidden states cross cuts
        entry, hidden = next((e, tree) for e, tree in entries(args, kwargs) if isinstance(tree, Tensor))
        fed: dict[int, dict[tuple[Entry, tuple[int, ...]], Tensor]] = getattr(hidden, _FED, {})
        if self.hidden is not None and self._thread == threading.get_ident():
            given = {(slot.entry, slot.place): tensor for slot, tensor in self._given.items() if slot.layer == layer}
            if not self._entered:
                given[entry, ()] = self.hidden
                self._entered = True
            fed = fed | {layer: {where: tensor for where, tensor in given.items() if tensor is not hidden}}
            setattr(hidden, _FED, fed)
        given = fed.get(layer, {})
        for entry in dict.fromkeys(entry for entry, _ in given):
            args, kwargs = _replaced(args, kwargs, entry, {p: t for (e, p), t in given.items() if e == entry})
        return args, kwargs

    def take_out(self, layer: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the boundary tensors that a layer after the stage's own takes.

        Raises:
            StageEnded: all boundary tensors are recorded.
        """
        parts = self._leaving[1:]
        if 0 not in self._out:  # some layers never run
            self._out[0] = hidden if self._entered or self.hidden is None else self.hidden
        found = {(entry, place): tensor for entry, tree in entries(args, kwargs) for place, tensor in leaves(tree)}
        for number, part in enumerate(parts, start=1):
            if part.slots[0] in self._given:
                self._out[number] = self._given[part.slots[0]]
            elif part.slots[0].layer == layer:
                self._out[number] = found[part.slots[0].entry, part.slots[0].place]
        if len(self._out) == 1 + len(parts):
            raise StageEnded([self._out[number] for number in range(1 + len(parts))])


class Feed:
    """Hook on a stage's own layer that inserts tensors of earlier stages. It is a class, because stages are copied."""

    def __init__(self, port: Port, layer: int) -> None:
        self._port, self._layer = port, layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the layer's arguments with the tensors inserted."""
        return self._port.put_in(self._layer, args, kwargs)


def require_as_predicted(tensors: Sequence[Tensor], boundary: Boundary, name: str) -> None:
    """Require that a stage's outputs have the shapes and types that the next stage expects.

    Raises:
        ValueError: the shapes or types differ.
    """
    found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    wanted = [(part.shape, part.dtype) for part in boundary]
    if found != wanted:
        raise ValueError(
            f"model: the layers of {name} hand on {_shown(found)}, not {_shown(wanted)} as was predicted; "
            "choose another architecture, or run it whole with pipeline.stages=1"
        )


def _shown(parts: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {shape}" for shape, dtype in parts)


def _replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], entry: Entry, given: Mapping[tuple[int, ...], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with the tensors of one entry replaced. An entry in a mapping is replaced in place."""
    name, keys = entry[0], entry[1:]
    old = args[name] if isinstance(name, int) else kwargs.get(name)
    if keys:
        table: Any = old
        for key in keys[:-1]:
            table = table[key]
        assert isinstance(table, MAPPINGS)
        table[keys[-1]] = _tree(table.get(keys[-1]), given)
        return args, kwargs
    new = _tree(old, given)
    if isinstance(name, int):
        return (*args[:name], new, *args[name + 1 :]), kwargs
    return args, kwargs | {name: new}


def _tree(old: Any, given: Mapping[tuple[int, ...], Tensor]) -> Any:
    """Return the nested tuple ``old`` with the given tensors inserted at their indices."""
    if () in given:
        return given[()]
    size = max(1 + max(place[0] for place in given), len(old) if isinstance(old, tuple | list) else 0)
    return tuple(
        _tree(was, inner) if inner else was
        for index in range(size)
        for was in [old[index] if isinstance(old, tuple | list) and index < len(old) else None]
        for inner in [{place[1:]: tensor for place, tensor in given.items() if place[0] == index}]
    )
