"""Settings of earlier versions, as commands and recipe files still name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED = {"model.gradient_checkpointing": ("pipeline.recompute", {"true": "layers", "false": "none"})}
"""By earlier name, the name and the values now."""


def renamed_override(text: str) -> str:
    """Return an override with the name and value of now. Leave other text as it is."""
    name, _, value = text.partition("=")
    now, values = RENAMED.get(name.lstrip("+"), ("", {}))
    return f"{now}={values[value.lower()]}" if value.lower() in values else text


def renamed_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's tree with the names and values of now."""
    found = {name: dict(value) if isinstance(value, Mapping) else value for name, value in tree.items()}
    for earlier, (now, values) in RENAMED.items():
        (group, field), (new_group, new_field) = earlier.split("."), now.split(".")
        held, into = found.get(group), found.setdefault(new_group, {})
        if isinstance(held, dict) and isinstance(into, dict) and str(held.get(field)).lower() in values:
            into.setdefault(new_field, values[str(held.pop(field)).lower()])
        if not into:
            del found[new_group]
    return found
