"""The key names that DeepSpeed's configuration accepts, taken from DeepSpeed itself."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, KeysView, Mapping
from functools import cache
from typing import Any, get_args

from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import BaseModel, ValidationError

# A minimal configuration that passes DeepSpeed's batch size checks for any world size.
BATCH = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
BATCH_NAMES = frozenset(BATCH) | {"train_batch_size"}
REMOVED = frozenset(_REMOVED_TOP_LEVEL_CONFIG_KEYS)
"""Sections of older DeepSpeed versions."""
# Sections that are passed to a constructor, which refuses unknown names itself.
OPEN = frozenset({"optimizer.params", "scheduler.params"})


def check_names(tree: Mapping[str, Any], source: str) -> None:
    """Raise an error for keys and values that DeepSpeed refuses, and for misspelt keys, which DeepSpeed ignores.

    Raises:
        ValueError: a key or value is wrong. The message has the key, and the nearest known key.
    """
    for name in tree:
        if name not in _top_level():
            raise ValueError(f"{source}: {_unknown(name, _top_level())}")
    rest = {name: value for name, value in tree.items() if name not in BATCH_NAMES}
    looked_up: dict[str, set[str]] = {}
    try:
        DeepSpeedConfig(_Watched(BATCH | rest, looked_up))
    except ValidationError as error:
        raise ValueError(f"{source}: {_explain(error, rest)}") from error
    except (DeepSpeedConfigError, ValueError, AssertionError) as error:
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from error
    for section, known in looked_up.items():
        given = _at(rest, section)
        for name in given if isinstance(given, Mapping) and section and section not in OPEN else ():
            if known and name not in known:
                raise ValueError(f"{source}: {_unknown(f'{section}.{name}', {f'{section}.{k}' for k in known})}")


@cache
def _top_level() -> frozenset[str]:
    """Return every top-level key that DeepSpeed reads, found by recording its look-ups."""
    looked_up: dict[str, set[str]] = {}
    DeepSpeedConfig(_Watched(BATCH, looked_up))
    return frozenset(looked_up[""])


class _Watched(dict):
    """A dictionary that records which keys are looked up, by section."""

    def __init__(self, tree: Mapping[str, Any], looked_up: dict[str, set[str]], section: str = "") -> None:
        prefix = f"{section}." if section else ""
        super().__init__(
            {k: _Watched(v, looked_up, prefix + k) if isinstance(v, Mapping) else v for k, v in tree.items()}
        )
        self._noted = looked_up.setdefault(section, set())

    def _note(self, name: Any) -> Any:
        self._noted.add(name)
        return name

    def get(self, name: Any, default: Any = None) -> Any:
        return super().get(self._note(name), default)

    def __getitem__(self, name: Any) -> Any:
        return super().__getitem__(self._note(name))

    def __contains__(self, name: Any) -> bool:
        return super().__contains__(self._note(name))

    def __iter__(self) -> Iterator:
        # With this method, `model(**section)` looks up each key. So the keys that DeepSpeed passes
        # to a pydantic model, which refuses unknown ones itself, count as known.
        return super().__iter__()

    def keys(self) -> KeysView:  # type: ignore[override]  # dict_keys cannot be subclassed
        return _WatchedKeys(self)


class _WatchedKeys(KeysView):
    """Keys view of a `_Watched` dictionary, because DeepSpeed uses `name in tree.keys()`."""

    def __init__(self, tree: _Watched) -> None:
        super().__init__(tree)
        self._tree = tree

    def __contains__(self, name: Any) -> bool:
        return name in self._tree

    def __iter__(self) -> Iterator:
        return dict.__iter__(self._tree)


def _explain(error: ValidationError, tree: Mapping[str, Any]) -> str:
    """Return one line about the first error of a DeepSpeed pydantic model."""
    first = error.errors()[0]
    inside = [str(part) for part in first["loc"]]
    # pydantic only gives the path inside the model; the monitors' model starts at the top level.
    section = next((name for name in tree if inside[0] not in tree and _holds(tree[name], inside)), None)
    path = [section, *inside] if section else inside
    if first["type"] == "extra_forbidden":
        known = _fields(_model(error.title), inside[:-1])
        return _unknown(".".join(path), {".".join([*path[:-1], name]) for name in known})
    return f"{'.'.join(path)}={first.get('input')!r}: {first['msg']}"


def _holds(section: Any, path: list[str]) -> bool:
    for part in path:
        if not isinstance(section, Mapping) or part not in section:
            return False
        section = section[part]
    return True


def _model(title: str) -> type[BaseModel]:
    found: list[type[BaseModel]] = [DeepSpeedConfigModel]
    for model in found:
        found += model.__subclasses__()
    return next((model for model in found if model.__name__ == title), DeepSpeedConfigModel)


def _fields(model: type[BaseModel], path: list[str]) -> set[str]:
    """Return the field names of a model, or of the model in its field at ``path``."""
    for part in path:
        annotation = model.model_fields[part].annotation
        inner = [kind for kind in (annotation, *get_args(annotation)) if hasattr(kind, "model_fields")]
        if not inner:
            return set()
        model = inner[0]
    return set(model.model_fields)


def _at(tree: Mapping[str, Any], path: str) -> Any:
    value: Any = tree
    for part in path.split(".") if path else ():
        value = value[part]
    return value


def _unknown(name: str, known: set[str] | frozenset[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"did you mean {near[0]}?" if near else "leave it out, or correct it"
    return f"DeepSpeed knows no key {name}; {hint}"
