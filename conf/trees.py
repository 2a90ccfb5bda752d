"""Conversion of configurations to plain trees (dictionaries and lists) and back. Errors name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from weft.conf.fields import expectation, field_types, item_class, unknown
from weft.conf.host.private import without_credentials
from weft.conf.schema import WeftConfig


def from_tree(tree: Mapping[str, Any], *, source: str) -> WeftConfig:
    """Return the default configuration with the values of ``tree``, without checking it.

    Args:
        tree: fields by group, with enum members by name.
        source: origin of the tree, for messages.

    Raises:
        ValueError: ``tree`` has an unknown key or a value of the wrong type.
    """
    try:
        merged = OmegaConf.merge(_defaults(), OmegaConf.create(dict(tree)))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(f"{source}: {explain(error)}") from error
    assert isinstance(config, WeftConfig)
    return config


@cache
def _defaults() -> DictConfig:
    """Return the default configuration, which `OmegaConf.merge` copies, and takes six times longer to make."""
    return OmegaConf.structured(WeftConfig)


def to_tree(value: Any) -> Any:
    """Convert a configuration, or a part of one, to dictionaries, lists and plain values."""
    if is_dataclass(value):
        return {field.name: to_tree(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {key: to_tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_tree(item) for item in value]
    return value


def shown_tree(config: WeftConfig) -> dict[str, Any]:
    """Return `to_tree` of a configuration without the credentials of its URLs, to be shown or stored."""
    tree: dict[str, Any] = without_credentials(to_tree(config))
    return tree


def to_yaml(config: WeftConfig) -> str:
    """Convert a configuration to YAML that ``recipe=FILE`` reads, without the credentials of URLs."""
    return yaml.safe_dump(shown_tree(config), sort_keys=False)


def explain(error: OmegaConfBaseException) -> str:
    """Return a line of text that names the field of OmegaConf's error."""
    known = field_types()
    name = str(error.full_key or error.key or "")
    value = getattr(error, "value", None)
    given = "null" if value is None else repr(value)
    listed = re.sub(r"\[\d+\].*", "", name)
    if listed in known:
        return f"{name}={given}: expected {expectation(known[listed])}"
    owner = error.object_type
    if isinstance(owner, type) and is_dataclass(owner) and (above := _list_of(owner)):
        types = field_types(owner)
        leaf = name.rpartition(".")[2]
        if leaf in types:
            return f"{above}.{leaf}={given}: expected {expectation(types[leaf])}"
        return f"{above}: {unknown(leaf, types)}"
    return unknown(name, known) if name else str(error).splitlines()[0]


def _list_of(kind: type) -> str:
    """Return the field whose list items are of class ``kind``, or an empty string."""
    return next((name for name, listed in field_types().items() if item_class(listed) is kind), "")
