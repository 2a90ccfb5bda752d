"""Device lines that have run in this process, and waits that can be removed while it runs."""

from __future__ import annotations

import ast
import builtins
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.device.lines import FOLDER, ROOT, device_lines, tree
from tests.device.waits import paths, waits, without_values

ran: set[str] = set()
"""Device lines that have run."""
waited: set[str] = set()
"""Waits of the device that have run."""
_removed = ""


def remove(wait: str) -> None:
    """Remove a wait of the product, and restore the one that was removed before."""
    global _removed
    _removed = wait


def save() -> None:
    """Write the lines that have run to `FOLDER`, if it is set."""
    if FOLDER in os.environ:
        Path(os.environ[FOLDER], f"{os.getpid()}").write_text("\n".join(sorted(ran)))


def install() -> None:
    """Instrument the product's modules that are imported from now on."""
    without_values()  # as long as the syntax trees are those of the sources
    names = {
        f"weft.{path[:-3].replace('/', '.')}".removesuffix(".__init__")
        for path in paths() | {line.path for line in device_lines()}
    }
    builtins.__dict__.update(_weft_ran=ran.add, _weft_wait=_wait, _weft_bound=_bound)
    sys.meta_path.insert(0, _Finder(names - set(sys.modules)))


def _wait(name: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    if _orders(name, function):
        waited.add(name)
        if name == _removed:
            return True
    return function(*args, **named)


def _bound(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return partial(_wait, name, function)


def _orders(name: str, function: Callable[..., Any]) -> bool:
    """True if ``function`` makes the host or a stream wait for the device, or keeps memory for a stream.

    It may do so through a handle of the product, which cannot be skipped where its value is used.
    """
    import torch

    from tests.device.group import EmulatedWork

    owner = getattr(function, "__self__", None)
    kinds = (torch.Tensor, torch.Stream, torch.Event, EmulatedWork)
    return (
        isinstance(owner, kinds)
        or function in (torch.cuda.synchronize, torch.accelerator.synchronize)
        or (type(owner).__module__.startswith("weft.") and name in without_values())
    )


class _Finder(MetaPathFinder):
    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._names:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others))
        assert spec.origin is not None
        spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        path = str(Path(self.path).resolve().relative_to(ROOT))
        module = tree(path)
        lines = {id(line.node): str(line) for line in device_lines() if line.path == path}
        named = {id(node): name for name, node in waits(path)}
        changed = ast.fix_missing_locations(_Rewriter(lines, named).visit(module))
        return compile(changed, self.path, "exec", dont_inherit=True)


class _Rewriter(ast.NodeTransformer):
    """Inserts a note before each device line, and calls waits by their numbers."""

    def __init__(self, lines: dict[int, str], named: dict[int, str]) -> None:
        self._lines, self._named = lines, named

    def visit(self, node: ast.AST) -> Any:
        line, wait = self._lines.get(id(node)), self._named.get(id(node))
        if isinstance(node, ast.Call) and (name := self._named.pop(id(node.func), None)) is not None:
            arguments = [ast.Constant(name), node.func, *node.args]
            node = ast.copy_location(ast.Call(ast.Name("_weft_wait", ast.Load()), arguments, node.keywords), node)
        changed = self.generic_visit(node)
        if wait is not None and id(node) in self._named:  # a method that somebody else calls
            changed = _call("_weft_bound", [ast.Constant(wait), changed], changed)
        if line is None:
            return changed
        note = _call("_weft_ran", [ast.Constant(line)], changed)
        if isinstance(changed, ast.expr):
            return ast.copy_location(ast.BoolOp(ast.Or(), [note, changed]), changed)
        return [ast.copy_location(ast.Expr(note), changed), changed]


def _call(name: str, arguments: list[ast.expr], at: ast.AST) -> ast.Call:
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), arguments, []), at)
