"""Reading of untrusted text, JSON and YAML, which may be damaged, or written to exhaust time or memory."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

MOST_FILE_BYTES = 256 * 2**20
MOST_NESTING = 32
"""Largest depth of nested containers. PyYAML's time is quadratic in it."""
MOST_VALUES = 10_000
"""Largest number of values of a small YAML file after its aliases are expanded.

A larger file may have one per character.
"""
_MOST_DIGITS = 1000
_SCALARS = [f"tag:yaml.org,2002:{kind}" for kind in ("bool", "float", "int")]
_TEXT = "tag:yaml.org,2002:str"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_NAMED = re.compile("(alias|anchor|handle|the tag) .*")
"""The quotation of a file's text in an error of PyYAML."""
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_OWN_PIPES = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))


def read_text(path: Path, *, most_bytes: int = MOST_FILE_BYTES) -> str:
    """Read a UTF-8 text file of at most ``most_bytes``.

    Raises:
        ValueError: the file cannot be read, is larger, or is not UTF-8; or it is a pipe, which may never be written to.
            A pipe of this process, such as ``/dev/stdin``, is read.
    """
    try:
        if path.is_fifo() and path.parent not in _OWN_PIPES:
            raise ValueError("a pipe")
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot be read ({error}); give a text file in UTF-8") from error
    if len(data) > most_bytes:
        raise ValueError(f"more than {most_bytes >> 20} MiB; give a smaller file")
    return text


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raise ValueError if the text is not JSON, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def nests_deeper(body: bytes, depth: int) -> bool:
    """True if the brackets of JSON are nested deeper than ``depth``, without a recursive parser."""
    if body.count(b"[") + body.count(b"{") <= depth:
        return False
    brackets = _STRING.sub(b"", body).translate(None, _NOT_BRACKETS)
    return any(level > depth for level in accumulate(1 if bracket in b"[{" else -1 for bracket in brackets))


def read_yaml(path: Path, *, most_bytes: int, texts: Collection[str] = ()) -> Any:
    """Load a YAML file of at most ``most_bytes``, with plain values only. Dates are text.

    Args:
        texts: dotted places, as `weft.conf.fields.text_places` names them, whose values stay as they are written:
            YAML reads ``007`` as 7, ``12:30`` as 750 and ``on`` as true.

    Raises:
        ValueError: the file cannot be read, is too large, not YAML or nested too deeply, has a key twice, or its
            aliases make it large.
    """
    text = read_text(path, most_bytes=most_bytes)
    try:
        loader = _Loader(text, texts)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(f"cannot be read: not YAML ({_problem(error)}); correct it") from None
    except (RecursionError, ValueError, ArithmeticError) as error:
        raise ValueError(f"cannot be read: {' '.join(str(error).split()) or 'nested too deep'}") from error
    except (AttributeError, LookupError):  # of PyYAML's constructors
        raise ValueError("cannot be read: a value does not match its tag, such as !!bool; leave out the tag") from None


def _problem(error: yaml.YAMLError) -> str:
    """Return what is wrong with a file and where, without its text, which may contain keys."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is None:
        return " ".join(str(error).split())
    problem = _NAMED.sub(r"\1", error.problem)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


class _Loader(yaml.SafeLoader):
    """PyYAML's loader of plain values, with limits on nesting, aliases and numbers."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str, texts: Collection[str] = ()) -> None:
        super().__init__(text)
        self._depth, self._most_values, self._texts = 0, max(MOST_VALUES, len(text)), texts

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a value. Raise ValueError if it is nested too deeply."""
        self._depth += 1
        if self._depth > MOST_NESTING + 1:  # values inside of the innermost container
            raise ValueError(f"nested more than {MOST_NESTING} deep; write it flatter")
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def get_single_node(self) -> yaml.Node | None:
        """Compose the document. Raise ValueError if its expanded aliases have too many values."""
        node = super().get_single_node()
        if node is not None and self._size(node, {}) > self._most_values:
            raise ValueError(f"its aliases stand for more than {self._most_values:,} values; write them out")
        if node is not None:
            self._check(node, "")
        return node

    def _check(self, node: yaml.Node, place: str) -> None:
        """Make texts of the values at places of texts. Raise ValueError if a mapping has a key twice."""
        if isinstance(node, yaml.SequenceNode):
            for each in node.value:
                self._check(each, f"{place}.*")
        elif isinstance(node, yaml.MappingNode):
            seen = set[str]()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        line = key.start_mark.line + 1
                        raise ValueError(f"line {line}: the key {key.value} is there twice; leave one of them")
                    seen.add(key.value)
                if key.tag.endswith(":bool"):  # names such as `no` and `on`
                    key.tag = _TEXT
                self._check(value, f"{place}.{key.value}" if place else str(key.value))
        elif place in self._texts and node.tag in _SCALARS:
            node.tag = _TEXT

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Convert a number of limited length, because the conversion time of a long one is quadratic."""
        if len(node.value) > _MOST_DIGITS:
            raise ValueError(f"a number of {len(node.value)} characters; shorten it")
        return super().construct_yaml_int(node)

    def _size(self, node: yaml.Node, known: dict[int, int]) -> int:
        """Count the values below a node. A value with aliases counts once for each of them."""
        if id(node) in known:
            if not (size := known[id(node)]):
                raise ValueError("an alias inside of what it stands for; write it out")
            return size
        known[id(node)] = 0
        below = [part for parts in node.value for part in parts] if isinstance(node, yaml.MappingNode) else node.value
        size = 1 + (0 if isinstance(node, yaml.ScalarNode) else sum(self._size(each, known) for each in below))
        known[id(node)] = size
        return size


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
