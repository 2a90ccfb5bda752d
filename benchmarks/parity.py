"""Every causal architecture of transformers, in stages and with shared layers, against Hugging Face's own run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.results import finish, parse
from benchmarks.verification import architecture_page, architectures, scheduled_architectures, shared_architectures
from weft.conf.schema import ContextExchange

AXES = ("tensor", "context", "expert")
"""Axes along which ranks can share the work of layers."""


def main(argv: Sequence[str]) -> int:
    """Try architectures in stages, or with shared layers, and return 1 if one is silently wrong."""
    args = parse(_parser(), argv)
    types = architectures.causal_types()
    if unknown := [name for name in args.archs if name not in types]:
        raise ValueError(f"{unknown[0]}: no such causal architecture; one of {', '.join(types)}")
    if not (args.archs or args.all):
        raise ValueError("no architecture is given; name some, or give --all for those that are still to be tried")
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
    right = all(result.support is not architectures.Support.wrong for result in results)
    return finish(args, "parity", results, met=right)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks parity", description=__doc__)
    parser.add_argument("archs", nargs="*", metavar="ARCH", help="model types, such as llama")
    parser.add_argument("--all", action="store_true", help="all types that --results does not have")
    parser.add_argument("--results", default="architectures.jsonl", metavar="FILE", help="read and added to")
    parser.add_argument("--table", default="", metavar="FILE", help="a page to write, once all are tried")
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=int, default=1, metavar="N", help="ranks that share layers")
    exchanges = [one.name for one in ContextExchange]
    parser.add_argument("--exchange", choices=exchanges, default="auto", help="with --context: between these ranks")
    parser.add_argument("--schedules", action="store_true", help="with an axis: under zbv, dualpipev and auto")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--seconds", type=float, default=0.0, metavar="S", help="start none after these")
    return parser
