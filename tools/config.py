"""`weft config`: the resolved configuration, with the meaning of every field."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import yaml

from weft.conf.checks import check, missing
from weft.conf.compose import compose
from weft.conf.deepspeed import deepspeed_config
from weft.conf.fields import docstrings
from weft.conf.host.private import without_credentials
from weft.conf.hosts import world_size
from weft.conf.trees import shown_tree, to_tree, to_yaml

WIDTH = 100


def main(argv: Sequence[str]) -> int:
    """Run ``[--yaml | --json | --deepspeed] [recipe=NAME] [key=value ...]``.

    Raises:
        ValueError: bad input.
    """
    parser = argparse.ArgumentParser(
        prog="weft config",
        usage="weft config [--yaml | --json | --deepspeed] [recipe=NAME] [key=value ...]",
        description="Print the resolved configuration; as commented YAML if no form is chosen.",
        allow_abbrev=False,
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--yaml", action="store_true", help="plain YAML, as a recipe's file")
    form.add_argument("--json", action="store_true", help="plain JSON")
    form.add_argument("--deepspeed", action="store_true", help="the resulting DeepSpeed JSON")
    known, overrides = parser.parse_known_args(argv)
    config = compose(overrides)
    if known.deepspeed:
        check(config, complete=False)
        print(json.dumps(deepspeed_config(config, world_size(config.cluster)), indent=2))
    elif known.json:
        print(json.dumps(shown_tree(config), indent=2))
    elif known.yaml:
        print(to_yaml(config), end="")
    else:
        print("\n".join(commented(config)))
    check(config, complete=False)  # last, so that a wrong configuration is still printed
    for line in missing(config):  # only a note, because an incomplete configuration may be printed too
        print(f"weft config: before a run: {line}", file=sys.stderr)
    return 0


def commented(part: Any, indent: int = 0) -> Iterator[str]:
    """Yield the YAML lines of a configuration or a part of one, with each field's docstring above it."""
    docs, pad = docstrings()[type(part).__name__], " " * indent
    for field in fields(part):
        value = getattr(part, field.name)
        text = docs.get(field.name) or type(value).__doc__ or ""
        if isinstance(value, Enum) and not all(member in text for member in type(value).__members__):
            text += f" One of: {', '.join(type(value).__members__)}."
        yield from textwrap.wrap(text, WIDTH, initial_indent=f"{pad}# ", subsequent_indent=f"{pad}# ")
        if is_dataclass(value):
            yield f"{pad}{field.name}:"
            yield from commented(value, indent + 2)
            if not indent:
                yield ""
        else:
            style = None if isinstance(value, list) else False  # lists on one line
            entry = {field.name: without_credentials(to_tree(value))}
            block = yaml.safe_dump(entry, sort_keys=False, width=WIDTH, default_flow_style=style)
            yield textwrap.indent(block.rstrip("\n"), pad)
