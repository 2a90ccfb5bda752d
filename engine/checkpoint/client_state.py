"""The caller's state, without pickle: JSON in the manifest, and tensors and arrays stored like the model's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.engine.checkpoint.durable import CheckpointError
from weft.engine.checkpoint.reader import Checkpoint
from weft.engine.checkpoint.shard_file import DTYPES

CLIENT = "client"
"""Kind of the caller's tensors: ``client/0``, in the order of the state."""
_MARK = "__weft__"
"""Key of the dictionaries that represent values without a JSON form."""


def encode(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Encode the state. Return it as JSON values, and its tensors by the names under which they are stored.

    Tensors, numpy arrays and tuples are restored as such, whereas numpy numbers become Python numbers.

    Raises:
        CheckpointError: a value cannot be stored. The message names it.
    """
    tensors: dict[str, Tensor] = {}
    try:
        return _encode(dict(state), "client_state", tensors), tensors
    except RecursionError:
        raise CheckpointError("client_state: it is nested too deeply, or holds itself; flatten it") from None


def decode(tree: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Decode the output of `encode`. Raise CheckpointError if a tensor is damaged."""
    return {key: _decode(value, checkpoint) for key, value in tree.items()}


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        name = f"{CLIENT}/{len(tensors)}"
        tensors[name] = _storable(value, path)
        return {_MARK: "tensor" if isinstance(value, Tensor) else "array", "name": name}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{path}[{number}]", tensors) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {_MARK: "tuple", "items": items}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _MARK:
                raise CheckpointError(f"{path}: key {key!r}: keys have to be text other than {_MARK!r}; rename it")
        return {key: _encode(item, f"{path}.{key}", tensors) for key, item in value.items()}
    raise CheckpointError(
        f"{path}: a {type(value).__name__} cannot be stored without pickle, which checkpoints do not hold; give "
        "numbers, texts, tensors, arrays, lists, tuples and dictionaries (of an object, its state_dict() or vars())"
    )


def _storable(value: Tensor | np.ndarray, path: str) -> Tensor:
    try:
        tensor = value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
    except (TypeError, ValueError) as error:  # an array of objects, or in another byte order
        raise CheckpointError(f"{path}: an array of {value.dtype}; convert it to numbers") from error
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
        raise CheckpointError(
            f"{path}: a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device} cannot be stored; convert it to "
            f"one of {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)} in memory"
        )
    # Copy, because the caller may modify it while a checkpoint is written in the background.
    return tensor.to("cpu", copy=True).reshape(value.shape)


def _decode(value: Any, checkpoint: Checkpoint) -> Any:
    if isinstance(value, list):
        return [_decode(item, checkpoint) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind == "tuple":
        return tuple(_decode(value["items"], checkpoint))
    if kind in ("tensor", "array"):
        tensor = checkpoint.load([value["name"]])[value["name"]].clone()
        return tensor if kind == "tensor" else tensor.numpy()
    return decode(value, checkpoint)
