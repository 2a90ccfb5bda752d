"""Differences between stages and Hugging Face's own run, by architecture and variant."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.results import finish, parse
from benchmarks.verification.parity_cases import VARIANTS, ParityCase, cases
from benchmarks.verification.parity_engine import through_engine
from benchmarks.verification.tiny_models import TINY
from weft.conf.schema import ContextExchange
from weft.engine.stages.checking.comparison import Difference, Outcome, difference, staged_outcome, whole_outcome


@dataclass(frozen=True, kw_only=True)
class Row(Difference):
    """The difference of a backend from Hugging Face's own run."""

    arch: str
    variant: str
    stages: int
    backend: str


Backend = Callable[[Sequence[ParityCase]], Iterator[Outcome]]
"""Runs cases in order."""


def in_process(cases: Sequence[ParityCase]) -> Iterator[Outcome]:
    """Yield the outcome of each case, with all its stages run one after the other in this process."""
    return (staged_outcome(case.stages(range(case.num_stages)), case.microbatches, case.num_items) for case in cases)


BACKENDS: dict[str, Backend] = {
    "in-process": in_process,
    "gpipe": partial(through_engine, "gpipe"),
    "1f1b": partial(through_engine, "1f1b"),
}
AXES = ("tensor", "context", "expert")
"""Axes along which ``--all`` can share the work of layers."""


def hugging_face(case: ParityCase) -> Outcome:
    """Return the outcome of Hugging Face's own run of the whole model."""
    return whole_outcome(case.whole(), case.microbatches, case.num_items)


def compare(case: ParityCase, backend: str, got: Outcome) -> Row:
    """Compare a backend's outcome of a case with Hugging Face's own run."""
    want = hugging_face(case)
    assert got.gradients.keys() == want.gradients.keys(), got.gradients.keys() ^ want.gradients.keys()
    off = vars(difference(got, want))
    return Row(**off, arch=case.arch, variant=case.variant, stages=case.num_stages, backend=backend)


def main(argv: Sequence[str]) -> int:
    """Run ``[ARCH ...] [--variants ...] [--stages ...]``, or ``--all``, and return 1 if a difference is too large.

    Raises:
        ValueError: an unknown architecture or variant.
    """
    args = parse(_parser(), argv)
    if args.all:
        return _all(args)
    _require_known("variant", args.variants, VARIANTS)
    _require_known("architecture", args.archs, TINY)
    rows = []
    print(f"{'architecture':<14}{'variant':<9}{'stages':>6}  {'run by':<11}{'logits':>9}{'loss':>10}{'gradients':>11}")
    chosen = list(cases(args.archs or list(TINY), args.variants, args.stages))
    for backend in args.backends:
        for case, outcome in zip(chosen, BACKENDS[backend](chosen), strict=True):
            rows.append(compare(case, backend, outcome))
            print(_line(rows[-1]), flush=True)
    worst = max(row.worst for row in rows)
    print(f"{len(rows)} cases, largest difference {worst:.2g}, tolerance {args.tolerance:.2g}")
    return finish(args, "parity", rows, met=worst <= args.tolerance)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks parity",
        description="Largest differences of logits, loss and gradients between stages and Hugging Face's own run.",
    )
    parser.add_argument("archs", nargs="*", metavar="ARCH", help="model types, such as llama; all if none")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), metavar="NAME", help=", ".join(VARIANTS))
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4], metavar="N")
    parser.add_argument(
        "--backends", nargs="+", choices=list(BACKENDS), default=list(BACKENDS), help="what runs the stages; all"
    )
    parser.add_argument("--tolerance", type=float, default=1e-4, help="difference that is still accepted")
    parser.add_argument(
        "--all", action="store_true", help="try ARCH of transformers' causal types; those left, if none"
    )
    parser.add_argument("--results", default="architectures.jsonl", metavar="FILE", help="of --all: read and added to")
    parser.add_argument("--table", default="", metavar="FILE", help="of --all: a page to write, once all are tried")
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=int, default=1, metavar="N", help="of --all: ranks that share layers")
    exchanges = [one.name for one in ContextExchange]
    parser.add_argument("--exchange", choices=exchanges, default="auto", help="of --all --context: between these ranks")
    parser.add_argument("--schedules", action="store_true", help="of --all with an axis: under zbv, dualpipev and auto")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="of --all: processes at a time")
    parser.add_argument("--seconds", type=float, default=0.0, metavar="S", help="of --all: start none after these")
    return parser


def _all(args: argparse.Namespace) -> int:
    """Try every causal architecture that an earlier call has not tried; return 1 if one is silently wrong."""
    from benchmarks.verification import (
        architecture_page,
        architectures,
        scheduled_architectures,
        shared_architectures,
    )

    types = architectures.causal_types()
    _require_known("causal architecture", args.archs, types)
    file, sizes = Path(args.results).expanduser(), {axis: getattr(args, axis) for axis in AXES}
    exchange = ContextExchange[args.exchange]
    if args.context == 1 and exchange is not ContextExchange.auto:
        raise ValueError(f"--exchange {args.exchange}: no ranks share sequences; add --context 2")
    shared = shared_architectures.shared_text(sizes, exchange)
    inside = partial(shared_architectures.examine_shared, sizes=sizes, exchange=exchange)
    trial: Callable[[str], architectures.ArchitectureResult] = inside if shared else architectures.examine
    if args.schedules:
        if shared not in architecture_page.SCHEDULED:
            raise ValueError("--schedules: no ranks share layers; add --tensor 2 or --context 2")
        tried = architectures.read_results(file, shared)
        trial = partial(scheduled_architectures.examine_scheduled, sizes=sizes, known=tried)
        shared = scheduled_architectures.scheduled_text(sizes)
    found = architectures.read_results(file, shared)

    def note(result: architectures.ArchitectureResult) -> None:
        result = replace(result, shared=shared)
        found[result.model_type] = result
        architectures.write_result(result, file)
        print(f"{result.model_type:<26}{result.support.value:<9}{result.reason}", flush=True)

    todo = args.archs or [name for name in types if name not in found]
    architectures.survey(todo, jobs=args.jobs, stop_after_s=args.seconds, note=note, trial=trial)
    results = [found[name] for name in types if name in found]
    print(architecture_page.summary(results))
    if args.table:
        known = {kind: architectures.read_results(file, kind) for kind in ("", *architecture_page.SHARED)}
        for kind, of_kind in known.items():
            if missing := [name for name in types if name not in of_kind]:
                axes = f" with {kind}" if kind else ""
                raise ValueError(
                    f"--table: {len(missing)} architectures are still to be tried{axes}; call again without --table"
                )
        whole, *others = (list(of_kind.values()) for of_kind in known.values())
        scheduled = {
            kind: architectures.read_results(file, f"{kind}, schedules") for kind in architecture_page.SCHEDULED
        }
        text = architecture_page.page(whole, dict(zip(architecture_page.SHARED, others, strict=True)), scheduled)
        Path(args.table).expanduser().write_text(text)
    return int(any(result.support is architectures.Support.wrong for result in results))


def _require_known(kind: str, given: Sequence[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{name}: no such {kind}; one of {', '.join(known)}")


def _line(row: Row) -> str:
    numbers = f"{row.logits:>9.2g}{row.loss:>10.2g}{row.gradients:>11.2g}"
    return f"{row.arch:<14}{row.variant:<9}{row.stages:>6}  {row.backend:<11}{numbers}"
