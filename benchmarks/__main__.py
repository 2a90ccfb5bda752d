"""Run a benchmark, a module with a ``main``: `python -m benchmarks NAME`, from the root of a checkout."""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

from weft.conf.host.processes import unwind_on_termination
from weft.tools.cli import report_bad_input


@cache
def benches() -> Mapping[str, str]:
    """Return a one-line summary of each benchmark, by name."""
    trees = {path.stem: ast.parse(path.read_text()) for path in sorted(Path(__file__).parent.glob("[!_]*.py"))}
    return {
        name: (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".")
        for name, tree in trees.items()
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    }


def main(argv: Sequence[str]) -> int:
    """Run ``NAME [options]`` and return its exit code (2 for bad input), or list the benchmarks.

    Each is `main(argv) -> int` of the module ``benchmarks.NAME``. It prints a table of ratios between
    measurements of the same run.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m benchmarks NAME ...\n")
        for name, summary in benches().items():
            print(f"  {name:<12} {summary}")
        return 0
    return report_bad_input(f"benchmarks {argv[0]}", lambda: run(*argv))


def run(name: str, *rest: str) -> int:
    """Run the benchmark of this name. Raise ValueError if there is no such benchmark, or it refuses its arguments."""
    if name not in benches():
        near = difflib.get_close_matches(name, benches(), n=1)
        hint = f"did you mean {near[0]}?" if near else "`python -m benchmarks` lists them"
        raise ValueError(f"there is no such benchmark; {hint}")
    status: int = import_module(f"benchmarks.{name}").main(list(rest))
    return status


if __name__ == "__main__":
    unwind_on_termination()
    sys.exit(main(sys.argv[1:]))
