"""Mutants: small changes of the sources, drawn at random, each of which some fast test has to notice.

python -m tests.mutants [--count N] [--seed S] [FOLDER ...]

Third-party packages are imported once; each mutant is a fork of that process which compiles the changed source in the
place of the file's, so nothing is written to the checkout. mutmut and cosmic-ray change the files of a tree, and start
an interpreter for each mutant, which here is ten seconds of imports.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib.machinery
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("pipeline", "engine/zero", "engine/backward", "engine/checkpoint", "comm/collectives", "inference")
"""Folders of sources; their tests are in the folder of the same name in ``tests``."""
PARTS = ("pipeline", "engine", "comm", "inference")
"""Folders of tests in which other files count that name a module."""
STARTS_RANKS = re.compile(r"\brun_ranks\(|import subprocess|get_context\(")
"""Other processes do not see a mutant. Such files are left out of those others; one with slow tests has others, too."""
COMPARED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is not": "is", "not in": "in"}
COMPARED |= {"is": "is not", "in": "not in"}
COMPUTED = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "*", "|": "&", "&": "|", "<<": ">>", "**": "*"}
NOT_HERE = re.compile(r"^(?:from|import) vllm\b", re.MULTILINE)
"""Sources that only `make test-vllm` can import."""
ON_GPU = re.compile(r"\bcuda\b|\.is_cuda\b")
"""In a condition: what is done where it holds is seen by `make test-gpu`; the condition itself is changed."""
EXTREMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
LIMIT_S = 150
"""Processor time for the tests of a mutant: a longer run counts as detected."""
PATIENCE = 6
"""Times as long as that a mutant may wait or be kept waiting by what else the machine does."""
MOST_BYTES = 8 << 30
"""Memory of a process of these tests; who wants more has been noticed, before the machine has none left."""


@dataclass(frozen=True)
class Mutant:
    """A change of one file: its bytes from ``start`` to ``end`` become ``new``."""

    path: str
    line: int
    start: int
    end: int
    new: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def diff(self) -> str:
        before = (ROOT / self.path).read_bytes()
        lines = difflib.unified_diff(
            before.decode().splitlines(), self.apply(before).decode().splitlines(), lineterm="", n=0
        )
        return "\n".join(line for line in lines if line[:2] not in ("--", "++", "@@"))


class Mutator(ast.NodeVisitor):
    """Collects every change that can be made to a file."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.starts = [0]
        for line in source.split(b"\n"):
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.found: list[Mutant] = []

    def _at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()

    def _add(self, node: ast.AST, start: int, end: int, new: str) -> None:
        self.found.append(Mutant(self.path, node.lineno, start, end, new))

    def _replace(self, node: ast.AST, new: str) -> None:
        self._add(node, *self._span(node), new)

    def _between(self, left: ast.AST, right: ast.AST, table: dict[str, str]) -> None:
        """Change the operator that stands between two nodes."""
        start, end = self._span(left)[1], self._span(right)[0]
        found = re.search(
            r"not in|is not|\*\*|//|<<|[<>=!]=|\b(?:in|is|and|or)\b|[-+*/%|&<>]", self.source[start:end].decode()
        )
        if found and found.group() in table:
            self._add(left, start + found.start(), start + found.end(), table[found.group()])

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
            self._between(left, right, COMPARED)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (node.left, node.right)):
            self._between(node.left, node.right, COMPUTED)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, {"and": "or", "or": "and"})
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._replace(node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._replace(node, f"({self._text(node)} + 1)")

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in EXTREMES:
            self._replace(node, EXTREMES[node.id])

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        test = self._text(node.test)
        if test == "TYPE_CHECKING":
            return
        self._replace(node.test, f"not ({test})")
        if not ON_GPU.search(test):
            self.generic_visit(node)
            return
        self.visit(node.test)
        for other in node.orelse if isinstance(node, ast.If) else [node.orelse]:
            self.visit(other)

    visit_IfExp = visit_If  # type: ignore[assignment]

    def visit_While(self, node: ast.While) -> None:
        self._replace(node.test, f"not ({self._text(node.test)})")
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # of zip: it states that lengths are equal, as an assert would
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) or re.match(r"_?log\.", self._text(node)):
            return
        if isinstance(node.value, ast.Call):
            self._replace(node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass")
        self.visit(node.value)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self._replace(node, "return None")
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "pass")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.args.defaults, *node.args.kw_defaults, *node.body):
            if part is not None:
                self.visit(part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:  # not its decorators, because a frozen dataclass behaves as one that is not frozen
            self.visit(part)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Left as it is: it states what cannot happen."""

    visit_JoinedStr = visit_Import = visit_ImportFrom = visit_Assert  # type: ignore[assignment]


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a file, in the order of its text; none of one that cannot be imported here."""
    source = path.read_bytes()
    if NOT_HERE.search(source.decode()):
        return []
    mutator = Mutator(str(path.relative_to(ROOT)), source)
    mutator.visit(ast.parse(source))
    return sorted(mutator.found, key=lambda mutant: (mutant.start, mutant.new))


def tests_of(path: str) -> list[str]:
    """Test files for a source file: all of its folder's, first those that name its module, and others that name it."""
    folder = next(folder for folder in FOLDERS if path.startswith(f"{folder}/"))
    module = "weft." + path.removesuffix(".py").replace("/", ".")
    package, name = module.rsplit(".", 1)
    direct = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
    found = []
    for file in (file for part in PARTS for file in (ROOT / "tests" / part).rglob("test_*.py")):
        text, away = file.read_text(), not file.is_relative_to(ROOT / "tests" / folder)
        names = direct.search(text) is not None
        apart = STARTS_RANKS.search(text) and "mark.slow" not in text
        if not away or (names and not apart):
            found.append((away, not names, str(file)))
    return [file for *_, file in sorted(found)]


def run_tests(mutant: Mutant, output: str, limit_s: int) -> None:
    """Run the tests of a mutant in this process, which ends with pytest's exit code."""
    os.setsid()
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + limit_s, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, resource.RLIM_INFINITY))
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    target = ROOT / mutant.path
    changed = mutant.apply(target.read_bytes())
    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader: importlib.machinery.SourceFileLoader, name: str) -> object:
        if loader.path.endswith(mutant.path) and target.samefile(loader.path):
            return compile(changed, loader.path, "exec", dont_inherit=True)
        return original(loader, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[assignment]
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.mkdtemp()
    import pytest

    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu and not vllm"]
    os._exit(int(pytest.main([*options, *tests_of(mutant.path)])))


def judge(mutant: Mutant, limit_s: int) -> str:
    """``killed`` if a test fails or breaks, ``time out`` if they compute without end, ``no end`` if they wait, or
    the machine has too much else to do; else ``SURVIVED``."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            try:
                run_tests(mutant, f"{folder}/output", limit_s)
            finally:
                os._exit(70)
        deadline = time.monotonic() + PATIENCE * limit_s
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.1)
        else:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "no end"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what the tests have left running
        ended = os.waitstatus_to_exitcode(status)
        return {0: "SURVIVED", -signal.SIGXCPU: "time out"}.get(ended, "killed")


def sample(folders: Sequence[str], count: int, seed: int) -> Iterator[Mutant]:
    """``count`` mutants of each folder's sources."""
    for folder in folders:
        files = sorted((ROOT / folder).rglob("*.py"))
        everything = [mutant for file in files for mutant in mutants_of(file)]
        yield from random.Random(f"{seed} {folder}").sample(everything, min(count, len(everything)))


def main(argv: Sequence[str]) -> int:
    """Judge a sample, print what survives; 0 where at least 95 % were noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "folders", nargs="*", default=list(FOLDERS), help="of sources (default: all that are held to it)"
    )
    parser.add_argument("--count", type=int, default=14, help="mutants of each folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=int, default=LIMIT_S, help="processor seconds for the tests of one")
    options = parser.parse_args(argv)
    if unknown := [folder for folder in options.folders if folder not in FOLDERS]:
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(FOLDERS)}")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name in ("deepspeed", "hypothesis", "peft", "torch.distributed.pipelining", "transformers", "xxhash"):
        __import__(name)
    counts = {"killed": 0, "time out": 0, "no end": 0, "SURVIVED": 0}
    for mutant in sample(options.folders, options.count, options.seed):
        began = time.monotonic()
        found = judge(mutant, options.limit_s)
        counts[found] += 1
        print(f"{found:8s} {mutant.path}:{mutant.line} ({time.monotonic() - began:.0f} s)", flush=True)
        if found != "killed":
            print(mutant.diff(), flush=True)
    total = sum(counts.values())
    noticed = total - counts["SURVIVED"]
    print(f"seed {options.seed}: {noticed} of {total} mutants noticed ({noticed / max(1, total):.0%}); {counts}")
    return 0 if noticed >= 0.95 * total else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
