"""Lines of the product that run only where there is CUDA, found in its syntax trees."""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path

from weft.conf.host.files import write_atomic

ROOT = Path(__file__).parents[2]
FOLDER = "WEFT_DEVICE_LINES"
"""Environment variable with the folder to which each process writes the lines that it has run."""
FOLDERS = ("conf", "pipeline", "comm", "engine", "inference", "recipes", "tools")
CALLS = {"record_stream", "wait_stream", "wait_event", "cudart", "ProcessGroupNCCL"}
"""Attributes that only tensors, streams and modules of CUDA have."""
CONDITIONS = {"is_available", "is_initialized", "device_count"}
"""Functions of `torch.cuda` that a CPU calls as well."""
_HINT = re.compile(r"cuda|device\.type|" + "|".join(CALLS))
LIST = Path(__file__).with_name("lines.tsv")
UNKNOWN = "?"
UPDATE = "WEFT_UPDATE_DEVICE_LINES"
Statement = ast.stmt | ast.expr


@dataclass(frozen=True)
class Line:
    """A statement, or the part of a conditional expression, that only CUDA runs."""

    path: str
    function: str
    text: str
    node: Statement = field(compare=False, hash=False, repr=False)

    def __str__(self) -> str:
        return f"{self.path}::{self.function}: {self.text}"


@cache
def texts() -> dict[str, str]:
    """Return the sources of the product by path."""
    files = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return {str(path.relative_to(ROOT)): path.read_text() for path in files}


@cache
def tree(path: str) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(texts()[path])


@cache
def _words(path: str) -> frozenset[str]:
    """Return all words in a file, less those of imports."""
    return frozenset(re.findall(r"[A-Za-z_]\w*", re.sub(r"(?m)^\s*(from|import) .*$", "", texts()[path])))


def _references(module: ast.Module, device: set[int]) -> Iterator[tuple[ast.Name | ast.Attribute, bool]]:
    """Yield names and attributes outside annotations, each with whether it is part of a device line."""
    stack: list[tuple[ast.AST, bool]] = [(module, False)]
    while stack:
        node, on_device = stack.pop()
        on_device |= id(node) in device
        if isinstance(node, ast.Name | ast.Attribute):
            yield node, on_device
        annotations = {id(part) for name in ("annotation", "returns") for part in [getattr(node, name, None)]}
        stack += [(child, on_device) for child in ast.iter_child_nodes(node) if id(child) not in annotations]


@cache
def device_lines() -> tuple[Line, ...]:
    """Return all lines that only CUDA runs: they use CUDA, a condition guards them, or only such lines call them."""
    only: set[str] = set()
    while True:
        paths = [path for path, text in texts().items() if _HINT.search(text) or not only.isdisjoint(_words(path))]
        found = {path: list(_File(path, tree(path), only).lines()) for path in paths}
        more = _called_only_by(found) - only
        if not more:
            return tuple(_numbered(chain.from_iterable(found.values())))
        only |= more


def listed() -> dict[str, str]:
    """Return what runs each device line: a group of tests, or a reason in brackets why none does."""
    rows = (row.partition("\t") for row in LIST.read_text().splitlines())
    return {line: runner for runner, _, line in rows}


def require(runner: str, folder: Path) -> None:
    """Check that ``runner`` has run the lines that the list states, by what its processes wrote to ``folder``.

    With `UPDATE` in the environment, change the list instead.
    """
    ran = {line for file in folder.iterdir() for line in file.read_text().splitlines()}
    rows = listed()
    if UPDATE in os.environ:
        update({line: runner for line in ran if rows.get(line, UNKNOWN) == UNKNOWN})
    else:
        missing = sorted(line for line, other in rows.items() if other == runner and line not in ran)
        assert not missing, f"{runner} no longer run these lines of {LIST.name}: {missing}"


def update(runners: Mapping[str, str]) -> None:
    """Write the list of the product's lines as they are, with ``runners`` of some of them."""
    rows = (listed() if LIST.exists() else {}) | dict(runners)
    lines = sorted(str(line) for line in device_lines())
    write_atomic(LIST, "".join(f"{rows.get(line, UNKNOWN)}\t{line}\n" for line in lines))


def _numbered(lines: Iterable[Line]) -> Iterator[Line]:
    """Give lines of a function with the same text numbers."""
    seen: Counter[str] = Counter()
    for line in lines:
        number = seen[str(line)]
        seen[str(line)] += 1
        yield replace(line, text=f"{line.text} ({number})") if number else line


def _called_only_by(found: dict[str, list[Line]]) -> set[str]:
    """Return names of classes and functions that are used in device lines and nowhere else."""
    inside = set[str]()
    outside = set[str]().union(*(_words(path) for path in texts() if not found.get(path)))
    for path, lines in found.items():
        if lines:
            for node, on_device in _references(tree(path), {id(line.node) for line in lines}):
                (inside if on_device else outside).add(node.id if isinstance(node, ast.Name) else node.attr)
    defined = {name for text in texts().values() for name in re.findall(r"(?m)^(?:class|def) (\w+)", text)}
    return (inside & defined) - outside


class _File:
    def __init__(self, path: str, module: ast.Module, only: set[str]) -> None:
        self._path, self._tree, self._only = path, module, only
        has_cuda = "cuda" in texts()[path]
        self._optional = {name for node in ast.walk(module) if has_cuda for name in _names_that_cuda_sets(node)}

    def lines(self) -> Iterator[Line]:
        """Yield the file's device lines."""
        return self._block(self._tree.body, "", on_device=False)

    def _block(self, body: Sequence[ast.stmt], name: str, *, on_device: bool) -> Iterator[Line]:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{name}.{node.name}".lstrip(".")
                yield from self._block(node.body, inner, on_device=on_device or (not name and node.name in self._only))
                continue
            if isinstance(node, ast.Import | ast.ImportFrom | ast.Pass) or _is_docstring(node):
                continue
            unevaluated = node.annotation if isinstance(node, ast.AnnAssign) else None
            headers = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr | ast.withitem)]
            headers = [part for part in headers if part is not unevaluated]
            if on_device or any(map(_uses_cuda, headers)):
                yield self._line(node, name)
            else:
                yield from self._parts(headers, name)
            then, otherwise = self._branches(node.test) if isinstance(node, ast.If) else (False, False)
            for field_name, guarded in (("body", then), ("orelse", otherwise), ("finalbody", False)):
                yield from self._block(getattr(node, field_name, []), name, on_device=on_device or guarded)
            for handler in getattr(node, "handlers", []):
                yield from self._block(handler.body, name, on_device=on_device)
            if isinstance(node, ast.If) and _leaves(node.body):
                on_device |= otherwise

    def _parts(self, headers: Iterable[ast.AST], name: str) -> Iterator[Line]:
        """Yield the parts of conditional expressions that only CUDA evaluates."""
        for node in chain.from_iterable(map(ast.walk, headers)):
            if isinstance(node, ast.IfExp):
                then, otherwise = self._branches(node.test)
                for part, guarded in ((node.body, then), (node.orelse, otherwise)):
                    if guarded and not isinstance(part, ast.Constant):
                        yield self._line(part, name)

    def _line(self, node: Statement, name: str) -> Line:
        return Line(self._path, name, ast.unparse(node).partition("\n")[0], node)

    def _branches(self, test: ast.expr) -> tuple[bool, bool]:
        """Return whether only CUDA takes the branch where ``test`` is true, and the one where it is false."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._branches(test.operand)[::-1]
        if isinstance(test, ast.BoolOp):
            both = [self._branches(value) for value in test.values]
            some = isinstance(test.op, ast.And)
            return (any if some else all)(b[0] for b in both), (all if some else any)(b[1] for b in both)
        if isinstance(test, ast.NamedExpr):
            return self._branches(test.value)
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            left, right = _dotted(test.left), test.comparators[0]
            value = right.value if isinstance(right, ast.Constant) else ""
            same = isinstance(test.ops[0], ast.Eq | ast.Is)
            if value is None and left in self._optional:
                return not same, same
            if left.endswith(".type") and value in ("cuda", "cpu"):
                cuda = (value == "cuda") == same
                return cuda, not cuda
        text = _dotted(test.func if isinstance(test, ast.Call) else test)
        return text in self._optional or text.endswith(".is_cuda") or text in _QUESTIONS, False


_QUESTIONS = {f"torch.cuda.{name}" for name in CONDITIONS}


def _dotted(node: ast.expr) -> str:
    """Return the text of a name or of attributes of one, or an empty string."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _names_that_cuda_sets(node: ast.AST) -> Iterator[str]:
    """Yield names whose values are streams, events or conditions of CUDA, or None."""
    if isinstance(node, ast.AnnAssign) and "torch.cuda" in ast.unparse(node.annotation):
        yield ast.unparse(node.target)
    elif isinstance(node, ast.Assign):
        targets = [ast.unparse(target) for target in node.targets]
        values = [node.value]
        if isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple):
            targets, values = [ast.unparse(part) for part in node.targets[0].elts], node.value.elts
        for target, value in zip(targets, values, strict=False):
            text = ast.unparse(value)
            if (
                text == "torch.cuda.is_available()"
                or (" else None" in text and "torch.cuda.Stream" in text)
                or text.endswith(".type == 'cuda'")
            ):
                yield target


def _uses_cuda(node: ast.AST) -> bool:
    """True if evaluating ``node`` calls CUDA; conditions and parts of conditional expressions do not count."""
    stack = [node]
    while stack:
        part = stack.pop()
        if isinstance(part, ast.IfExp | ast.Lambda):
            continue
        if isinstance(part, ast.Attribute):
            inner = part.value
            is_module = _dotted(inner) == "torch.cuda"
            if part.attr in CALLS or (is_module and part.attr not in CONDITIONS):
                return True
        if isinstance(part, ast.keyword) and part.arg == "pin_memory":
            return True
        stack += ast.iter_child_nodes(part)
    return False


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


if __name__ == "__main__":
    update({})
