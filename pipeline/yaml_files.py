"""Read the YAML files that users give, which may be damaged or hostile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from weft.pipeline.limits import read_text

MOST_NESTING = 32
"""Nesting depth of brackets: PyYAML's time grows with its square."""


def read_yaml(path: Path, *, most_bytes: int) -> Any:
    """Load a YAML file of at most ``most_bytes``, with plain values only.

    Raises:
        ValueError: the file cannot be read, is larger, is no YAML, or is nested too deep.
    """
    text = read_text(path, most_bytes=most_bytes)
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        if depth > MOST_NESTING:
            raise ValueError(f"cannot be read (brackets nested more than {MOST_NESTING} deep)")
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"cannot be read ({' '.join(str(error).split()) or 'nested too deep'})") from error
