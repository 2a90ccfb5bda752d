"""Waits of the product's files that use torch or channels, and what notices the removal of each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.device.lines import UNKNOWN, texts, tree
from weft.conf.host.files import write_atomic

LIST = Path(__file__).with_name("waits.tsv")
NAMES = {"wait_stream", "wait_event", "record_stream", "synchronize", "wait"}
_NAME = re.compile(rf"\.({'|'.join(NAMES)})\b")
_TORCH = re.compile(r"(?m)^\s*(import|from) (torch|weft\.comm\.channel)\b")


@cache
def paths() -> frozenset[str]:
    """Return files with waits that use torch or channels. Others wait for processes, threads and sockets only."""
    return frozenset(path for path, text in texts().items() if _NAME.search(text) and _TORCH.search(text))


def waits(path: str) -> Iterator[tuple[str, ast.Attribute]]:
    """Yield each attribute in a file that is a wait by its name, with the number of the wait in its function."""
    for function, nodes in _functions(tree(path)):
        named = (n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load) and n.attr in NAMES)
        for number, node in enumerate(named):
            yield f"{path}::{function}: {ast.unparse(node)}" + (f" ({number})" if number else ""), node


def all_waits() -> set[str]:
    """Return the names of all waits."""
    return {name for path in paths() for name, _ in waits(path)}


@cache
def without_values() -> frozenset[str]:
    """Return the waits whose values are not used, so that they can be removed."""
    calls = {id(node.value.func) for path in paths() for node in ast.walk(tree(path)) if _is_call(node)}
    return frozenset(name for path in paths() for name, node in waits(path) if id(node) in calls)


def listed() -> dict[str, str]:
    """Return what noticed the removal of each wait, with the run in brackets, or a reason in brackets."""
    rows = (row.partition("\t") for row in LIST.read_text().splitlines()) if LIST.exists() else ()
    return {wait: notice for notice, _, wait in rows}


def update(noticed: Mapping[str, str]) -> None:
    """Write the list of the product's waits as they are, with what noticed the removal of some."""
    rows = listed() | dict(noticed)
    write_atomic(LIST, "".join(f"{rows.get(wait, UNKNOWN)}\t{wait}\n" for wait in sorted(all_waits())))


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _functions(module: ast.AST, name: str = "") -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield each function's dotted name with its own nodes, in the order of the source."""
    own: list[ast.AST] = []
    inner: list[ast.AST] = []
    stack = list(reversed(list(ast.iter_child_nodes(module))))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner.append(node)
        else:
            own.append(node)
            stack.extend(reversed(list(ast.iter_child_nodes(node))))
    yield name, own
    for node in inner:
        yield from _functions(node, f"{name}.{node.name}".lstrip("."))


if __name__ == "__main__":
    update({})
