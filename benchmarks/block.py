"""A block of a Llama-8B on one GPU: MFU and memory by kernels and attention, and single kernels next to peers'."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter

import torch

from benchmarks.blocks.clock import Clock, Measured, Passes
from benchmarks.blocks.kernels import candidates
from benchmarks.blocks.llama import LLAMA_8B, TINY, VARIANTS, Block, Shape
from benchmarks.results import finish, parse, show
from weft.conf.schema import Float8
from weft.engine.planning.devices import data_sheet
from weft.pipeline.hardware import GPU_KINDS
from weft.tools.tables import table_of

GOAL = 0.5
"""MFU that the fastest block should reach on an H100."""
MOST_CHARACTERS = 200
"""Characters of an error."""
NOTE = "note"
"""Key of a row that was not measured."""
Row = dict[str, str]


class Rows:
    """Makes rows of computations, each compared with the first one of its kind, until the time has run out."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        """Start the time.

        Args:
            seconds: time after which nothing more is measured.
        """
        self.clock = clock
        self.best_mfu, self.has_failed = 0.0, False
        self._ends = perf_counter() + seconds
        self._kind: tuple = ()
        self._first: Measured | None = None
        sheet = data_sheet(clock.device)
        self._peak = 0.0 if sheet is None else sheet.flops_per_s

    def row(
        self,
        kind: tuple,
        check: Callable[[torch.device], None],
        passes: Callable[[], AbstractContextManager[Passes]],
        flops: float = 0.0,
        *,
        in_bf16: bool = True,
    ) -> Row:
        """Return the cells of a computation, or the reason for which it was not measured.

        Args:
            kind: of computations that are compared.
            check: raises ValueError if this machine does not run it.
            passes: returns the context in which it runs.
            flops: operations of its forward and backward. 0 leaves the cells about speed out.
            in_bf16: whether its MFU, which is of the peak in bf16, counts for the goal.
        """
        found, note = self._tried(check, passes)
        if kind != self._kind:
            self._kind, self._first = kind, None  # frees the last one's results
        base = self._first = self._first or found
        if found is None or base is None:
            return {NOTE: note}
        cells = _cells(found, base)
        if flops:
            speed = flops / found.seconds
            mfu = speed / self._peak if self._peak else 0.0
            self.best_mfu = max(self.best_mfu, mfu if in_bf16 else 0.0)
            cells = {"MFU": f"{mfu:.1%}" if mfu else "", "TFLOP/s": f"{speed / 1e12:.3g}"} | cells
        return cells

    def _tried(
        self, check: Callable[[torch.device], None], passes: Callable[[], AbstractContextManager[Passes]]
    ) -> tuple[Measured | None, str]:
        if perf_counter() > self._ends:
            return None, "left out: no time is left"
        try:
            check(self.clock.device)
        except ValueError as error:
            return None, f"left out: {error}"
        gc.collect()
        try:
            with passes() as running:
                return self.clock.measure(running), ""
        except Exception as error:  # any: compilers and kernels have their own, and the other rows are still measured
            self.has_failed = True
            return None, f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:MOST_CHARACTERS]}"


def _cells(found: Measured, base: Measured) -> Row:
    return {
        "forward ms": f"{1e3 * found.forward_s:.3f}",
        "backward ms": f"{1e3 * found.backward_s:.3f}",
        "time / first": f"{found.seconds / base.seconds:.2f}",
        "peak MB": f"{found.peak_bytes / 1e6:.4g}",
        "difference": f"{found.difference(base):.0e}",
    }


def block_rows(shape: Shape, lengths: Sequence[int], rows: Rows, chosen: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each number of tokens and variant."""
    block = Block(shape, max(lengths), rows.clock.device)
    for tokens in lengths:
        flops = shape.flops(tokens)
        for name in chosen:
            variant = VARIANTS[name]
            passes = partial(block.passes, variant, tokens)
            cells = rows.row(("block", tokens), variant.check, passes, flops, in_bf16=variant.float8 is Float8.none)
            yield {"block": name, "tokens": str(tokens)} | cells


def kernel_rows(shape: Shape, lengths: Sequence[int], rows: Rows, _: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each number of tokens, kernel and implementation."""
    for tokens in lengths:
        for each in candidates(shape, tokens, rows.clock.device):
            cells = rows.row((each.kernel, tokens), each.needs.check, each.passes)
            yield {"kernel": each.kernel, "of": each.name, "tokens": str(tokens)} | cells


PARTS = {"block": (block_rows, 1), "kernels": (kernel_rows, 2)}
"""Functions that make rows, and the number of their columns with text."""


def main(argv: Sequence[str]) -> int:
    """Print the tables and return the exit code.

    Raises:
        ValueError: there is no GPU, or this machine does not run a variant that is named.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks block", description=__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), metavar="PART", help="block, kernels; default both")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help=f"of the block: {'; '.join(VARIANTS)}")
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192], help="tokens of a sequence")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the benchmark on a CPU")
    parser.add_argument("--row-seconds", type=float, default=0.5, help="timed runs of a row")
    parser.add_argument("--seconds", type=float, default=600.0, help="time after which rows are left out")
    args = parse(parser, argv, parts=PARTS, variants=VARIANTS)
    device = _device(args)
    rows = Rows(Clock(device, args.row_seconds), args.seconds)
    tables, notes = {}, {}
    for part in args.parts:
        make, left = PARTS[part]
        found = make(TINY if args.tiny else LLAMA_8B, args.tokens, rows, args.variants or list(VARIANTS))
        made = []
        for row in found:  # printed when it is there, because the machine may be taken away at any time
            print(*row.values(), sep=", ", file=sys.stderr, flush=True)
            made.append(row)
        tables[part] = table_of((row for row in made if NOTE not in row), _title(part, device, args.tiny), left=left)
        notes[part] = [", ".join(row.values()) for row in made if NOTE in row]
        show(tables[part], *notes[part])
    met = None if data_sheet(device) is not GPU_KINDS["H100"] or not rows.best_mfu else rows.best_mfu >= GOAL
    status = finish(args, "block", {**tables, "not measured": notes}, met=met)
    return 1 if rows.has_failed else status


def _device(args: argparse.Namespace) -> torch.device:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.tiny:
        raise ValueError("no GPU: a block of a Llama-8B takes minutes on a CPU; try the benchmark with --tiny")
    if min(args.tokens) < 1:
        raise ValueError(f"--tokens {min(args.tokens)}: at least 1")
    for name in args.variants or ():
        try:
            VARIANTS[name].check(device)
        except ValueError as error:
            raise ValueError(f"--variants {name!r}: {error}") from error
    return device


def _title(part: str, device: torch.device, tiny: bool) -> str:
    model = "a tiny Llama" if tiny else "a Llama-8B"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    goal = "" if part != "block" or tiny else f"; goal: an MFU of {GOAL:.0%} on an H100"
    return f"{'a block' if part == 'block' else 'kernels'} of {model} in bf16 on {name}, one sequence{goal}"
