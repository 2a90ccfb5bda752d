"""`weft bench`: the modules of `tools/benchmarks/` that have a ``main``, each a benchmark."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path


@cache
def benches() -> Mapping[str, str]:
    """What each benchmark says it is, by its name."""
    trees = {
        path.stem: ast.parse(path.read_text()) for path in sorted(Path(__file__).with_name("benchmarks").glob("*.py"))
    }
    return {
        name: (ast.get_docstring(tree) or "").partition(": ")[2].rstrip(".")
        for name, tree in trees.items()
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    }


def main(argv: Sequence[str]) -> int:
    """Run ``NAME [options]``, or list the benchmarks; returns the exit code.

    Each is `main(argv) -> int` of the module ``weft.tools.benchmarks.NAME``, and prints a table of
    ratios measured side by side in one run.

    Raises:
        ValueError: there is no such benchmark.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: weft bench NAME ...\n")
        for name, summary in benches().items():
            print(f"  {name:<12} {summary}")
        return 0
    name, *rest = argv
    if name not in benches():
        near = difflib.get_close_matches(name, benches(), n=1)
        hint = f"did you mean {near[0]}?" if near else "`weft bench` lists them"
        raise ValueError(f"{name}: there is no such benchmark; {hint}")
    return import_module(f"weft.tools.benchmarks.{name}").main(rest)
