"""Weights in the files of a checkpoint, which a worker loads from there, without an export.

The folder of such a model has a configuration, a tokenizer, links to the checkpoint's files, and a list that names the
place of each weight. Weights that no file has in one form lie in safetensors files, as in every model's folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

LIST, LINKS = "stored_weights.json", "stored"


@dataclass(frozen=True)
class Place:
    """Some elements of a flattened weight: those from ``first`` on of an entry of a safetensors file in `LINKS`."""

    file: str
    key: str
    first: int


@dataclass(frozen=True)
class StoredWeight:
    """A weight's shape, and the places of its elements in order."""

    shape: tuple[int, ...]
    places: tuple[Place, ...]


def write_list(folder: Path, weights: Mapping[str, StoredWeight], dtype: torch.dtype) -> None:
    """Write the list of weights, which `stored_weights` converts to ``dtype``."""
    listed = {name: asdict(weight) for name, weight in weights.items()}
    (folder / LIST).write_text(json.dumps({"dtype": str(dtype).removeprefix("torch."), "weights": listed}))


def stored_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model's folder by name: those in its list, then those in its own safetensors files.

    Raises:
        OSError, SafetensorError: a file is missing or damaged.
    """
    value = json.loads((folder / LIST).read_text())
    dtype = getattr(torch, value["dtype"])
    files = {path.name: safe_open(path, framework="pt") for path in (folder / LINKS).iterdir()}
    for name, weight in value["weights"].items():
        parts = [files[each["file"]].get_tensor(each["key"]).view(-1)[each["first"] :] for each in weight["places"]]
        yield name, torch.cat(parts).view(weight["shape"]).to(dtype)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            yield from ((name, file.get_tensor(name)) for name in sorted(file.keys()))
