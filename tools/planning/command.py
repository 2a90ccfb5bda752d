"""`weft plan`: which sites, GPUs and layout train a model, how long it takes and what it costs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from time import perf_counter
from typing import NoReturn

from weft.conf.host.files import require_writable
from weft.conf.schema import LoraConfig
from weft.pipeline.limits import count, number
from weft.pipeline.memory import USABLE
from weft.pipeline.planner.cluster import Cluster, load_cluster
from weft.pipeline.planner.measured import load_measured
from weft.pipeline.planner.request import Objective, Request, read_pins
from weft.pipeline.planner.routes import FEW_SITES
from weft.pipeline.planner.search import Plan, plan
from weft.pipeline.workload import ModelWork
from weft.tools import parsers
from weft.tools.planning.model import config_of, model_work
from weft.tools.planning.report import as_json, as_markdown, explanation, places, route_text, rows, summary
from weft.tools.planning.what_if import changed, marginal_values

MOST_TOKENS = 10**12
"""Maximum number of tokens of a step."""
SMALL = 64
"""GPUs of a small cluster, at most."""


def main(argv: Sequence[str]) -> int:
    """Run ``weft plan --cluster FILE --model MODEL [options]``, or ``weft plan recipe=NAME ...``.

    Without a cluster it explains how the collectives of a configured run are partitioned.

    Raises:
        ValueError: bad input, or nothing fits; the message names the field and what to change.
    """
    if not any(word == "--cluster" or word.startswith("--cluster=") for word in argv) and "--help" not in argv:
        from weft.tools.planning import collectives  # needs torch

        return collectives.main(argv)
    parser = _parser()
    args = parser.parse_args(argv)
    if args.format in ("json", "png"):
        parsers.refuse_unused(parser, argv, ("explain",), f"--format {args.format} has no place for it; leave out one")
    cluster = load_cluster(args.cluster)
    lora = _lora(args)
    work = model_work(args.model, _whole(args.sequence_length, "--sequence-length", most=2**24), args.cache, lora)
    args.explain = _whole(args.explain, "--explain", least=0)
    args.rows = _whole(args.rows, "--rows", most=1000)
    if args.profile is not None:
        cluster = _as_measured(cluster, work, args.profile)
    request = _request(args, cluster, work)
    questions = {question: changed(cluster, question) for question in args.what_if}
    for name, file in {"--write": args.write, "--out": args.out}.items():
        if file is not None:
            require_writable(name, file)
    if (args.format == "png") != (args.out is not None):
        raise ValueError("--format png: it writes a file, and no other format does; name it with --out FILE")
    started = perf_counter()
    found = plan(cluster, work, request)
    seconds = perf_counter() - started
    _show(found, seconds, args)
    with redirect_stdout(sys.stderr if args.format == "json" else sys.stdout):  # which holds one value and no more
        for question, other in questions.items():
            _answer(found, question, other)
        if args.marginal:
            for name, gain in sorted(marginal_values(found), key=lambda entry: -entry[1]):
                print(f"{name}: {gain:+.2%}")
        if args.write:
            from weft.tools.planning.recipe import write_recipe

            for path in write_recipe(found, config_of(args.model), args.model, args.write, lora):
                print(f"wrote {path}")
    return 0


def _lora(args: argparse.Namespace) -> LoraConfig | None:
    rank = _whole(args.lora_rank, "--lora-rank", least=0)
    if args.lora_target and not rank:
        raise ValueError(f"--lora-target {args.lora_target[0]}: no adapters are trained; give --lora-rank")
    targets = {"target_modules": args.lora_target} if args.lora_target else {}
    return LoraConfig(enabled=True, rank=rank, **targets) if rank else None


def _as_measured(cluster: Cluster, work: ModelWork, path: Path) -> Cluster:
    """Return the cluster with a profile's measured costs of layers and collectives."""
    measured = load_measured(path)
    try:
        return measured.applied(work, cluster)
    except ValueError as error:
        raise ValueError(f"--profile {path}: {error}") from error


def _show(found: Plan, seconds: float, args: argparse.Namespace) -> None:
    if args.format == "json":
        print(as_json(found, args.rows))
        return
    if args.format == "png":
        from weft.tools.planning.picture import plot_plans  # needs matplotlib

        try:
            plot_plans(found, args.rows, args.out)
        except (OSError, ValueError) as error:
            raise ValueError(f"--out {args.out}: cannot be written ({error})") from error
        print(f"wrote {args.out}")
        return
    table = rows(found, args.rows)
    if args.format == "md":
        print(as_markdown(table))
    else:
        from weft.tools.tables import show, table_of

        narrow = table_of(table)
        narrow.padding = (0, 1, 0, 0)  # so that it goes into 100 characters
        show(narrow)
    print("\n".join(["", *places(found, args.rows), "", *summary(found, seconds)]))
    if args.explain:
        if args.explain > len(found.ranked):
            raise ValueError(f"--explain {args.explain}: there are {len(found.ranked)} plans; choose one of them")
        print("\n".join(explanation(found, found.ranked[args.explain - 1])))


def _answer(found: Plan, question: str, cluster: Cluster) -> None:
    """Print how the cluster of a question changes the best plan."""
    try:
        other = found.again(cluster)
    except ValueError as error:
        print(f"{question}: no plan any more: {error}")
        return
    before, after = found.best, other.best
    tokens = found.request.tokens
    faster = after.tokens_per_s / before.tokens_per_s - 1
    print(
        f"{question}: step {before.step_s:.3g} -> {after.step_s:.3g} s, tokens/s {faster:+.1%}, "
        f"cost {before.cost(tokens):,.0f} -> {after.cost(tokens):,.0f}, on {route_text(cluster, after.layout)}"
    )


def _request(args: argparse.Namespace, cluster: Cluster, work: ModelWork) -> Request:
    pins = read_pins(args.pin)
    batch_tokens = _whole(args.batch_tokens, "--batch-tokens", least=0, most=MOST_TOKENS)
    sequences, rest = divmod(batch_tokens, work.sequence_length)
    if batch_tokens and (rest or not sequences):
        raise ValueError(
            f"--batch-tokens {batch_tokens}: not a multiple of --sequence-length {work.sequence_length}; choose "
            f"{max(1, sequences) * work.sequence_length}"
        )
    if not sequences and "microbatches" not in pins:
        raise ValueError(
            "--batch-tokens 0: then the micro-batches of a replica have to be given; add --pin pipeline.microbatches=N"
        )
    return Request(
        sequences=sequences,
        objective=Objective(args.objective),
        tokens=number(args.tokens, "--tokens", above=0.0),
        max_memory=_share(number(args.max_memory, "--max-memory")),
        max_sites=_whole(args.max_sites, "--max-sites", least=0),
        max_cost_per_hour=number(args.max_cost_per_hour, "--max-cost-per-hour"),
        home=_home(cluster, args.keep_data_in),
        pins=pins,
        effort=effort_of(cluster),
    )


def effort_of(cluster: Cluster) -> int:
    """Return the maximum number of actions to schedule; in a small cluster each takes less time."""
    if sum(site.gpus for site in cluster.sites) <= SMALL:
        return 60_000
    return 14_000 if len(cluster.sites) <= FEW_SITES else 110_000


def _home(cluster: Cluster, name: str) -> frozenset[int]:
    """Return the sites whose name or region is ``name``."""
    if not name:
        return frozenset()
    found = frozenset(number for number, site in enumerate(cluster.sites) if name in (site.name, site.region))
    if not found:
        known = sorted({name for site in cluster.sites for name in (site.name, site.region) if name})
        raise ValueError(f"--keep-data-in {name}: no such site or region; the cluster has {', '.join(known)}")
    return found


def _whole(text: str, name: str, least: int = 1, most: int = 10**9) -> int:
    """Parse a whole number, such as 4096, 8 or 1e9."""
    try:
        value: float = int(text)
    except ValueError:
        value = number(text, name)
    return count(int(value) if value == int(value) else value, name, least=least, most=most)


def _share(value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError(f"--max-memory {value:g}: a share of a GPU's memory, above 0 and at most 1")
    return value


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; `weft plan --help` lists what there is")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="weft plan",
        description="Find and rank the layouts to train a model with on a cluster. Without a cluster, `weft plan "
        "recipe=NAME` explains the collectives of a run.",
        allow_abbrev=False,
    )
    parser.add_argument("--cluster", type=Path, required=True, help="YAML file of sites, GPUs, prices and links")
    parser.add_argument("--model", required=True, help="config.json, a folder that contains one, or a hub name")
    parser.add_argument("--sequence-length", default="4096", metavar="N", help="tokens per sequence; default 4096")
    parser.add_argument(
        "--lora-rank", default="0", metavar="N", help="train adapters of this rank (LoRA); default 0: all weights"
    )
    parser.add_argument(
        "--lora-target", action="append", default=[], metavar="NAME", help="a module that gets them, as in model.lora"
    )
    parser.add_argument(
        "--batch-tokens",
        default=str(2**22),
        metavar="N",
        help="tokens per step; default 4194304; 0 leaves the batch size open",
    )
    parser.add_argument(
        "--tokens", default="1e12", help="tokens to train on, from which hours and cost follow; default 1e12"
    )
    parser.add_argument(
        "--objective", choices=[kind.value for kind in Objective], default="throughput", help="what to optimise"
    )
    parser.add_argument(
        "--max-memory",
        default=str(USABLE),
        metavar="SHARE",
        help=f"fraction of a GPU's memory that a plan may use; default {USABLE}",
    )
    parser.add_argument("--max-sites", default="0", metavar="N", help="most sites per pipeline; default 0: no limit")
    parser.add_argument(
        "--max-cost-per-hour",
        default="0",
        metavar="PRICE",
        help="highest price of all GPUs per hour; default 0: no limit",
    )
    parser.add_argument(
        "--keep-data-in", default="", metavar="SITE", help="site or region that must hold the first and the last stage"
    )
    parser.add_argument(
        "--pin", action="append", default=[], metavar="FIELD=VALUE", help="fix a field, as in pipeline.stages=8"
    )
    parser.add_argument(
        "--what-if", action="append", default=[], metavar="CHANGE", help="change the cluster, as in 'site west gpus=0'"
    )
    parser.add_argument(
        "--marginal", action="store_true", help="show the gain from 10 percent more of each link and site"
    )
    parser.add_argument(
        "--explain", default="0", metavar="RANK", help="break down the time and memory of a plan, by its rank"
    )
    parser.add_argument("--rows", default="8", metavar="N", help="number of plans to show; default 8")
    parser.add_argument("--format", choices=("table", "json", "md", "png"), default="table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write; needed with --format png")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="use the measurements that `weft profile` wrote on one of the GPUs"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the best plan as a recipe, with its hostfile and costs"
    )
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/weft/models.json"), help=argparse.SUPPRESS)
    return parser
