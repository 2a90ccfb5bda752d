"""The predicted step of twelve layouts on emulated sites, compared with the measured one."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import mean
from time import perf_counter
from typing import Any

from benchmarks.netbed.ranks import run_ranks_in
from benchmarks.peers.case import EngineCase, StageProfile, middle_and_spread, time_steps
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.layout import NUM_LAYERS, Layout, Links, measured_links, wan_topology
from benchmarks.peers.weft_engine import emulated_engine
from benchmarks.results import finish, parse, show, write_json
from weft.comm.wan.library import load
from weft.conf.schema import WeftConfig
from weft.pipeline.costs import StageCost
from weft.pipeline.profile import fit_costs
from weft.tools.netbed import NetBed
from weft.tools.tables import table_of

NEAR, FAR = 0.03, 0.05
"""Errors: of ten layouts in twelve at most, and of all."""
MOST_BEYOND_NEAR = 1 / 6
APART = 0.05
"""Layouts whose steps differ by more are to be predicted in their order."""


MICROBATCHES = 12
"""Micro-batches of a step, over all replicas."""


def _at(*sites: int, **settings: Any) -> Layout:
    """Create a layout with ``sites`` pipeline ranks at each site, named by its settings."""
    replicas = settings.get("replicas", 1)
    given = {"schedule": "auto", "zero": 0, "microbatches": MICROBATCHES // replicas, **settings}
    layout = Layout("", stages=sum(sites), sites=sites, **given)
    return replace(layout, name="; ".join(_words(layout)))


def _words(layout: Layout) -> Iterator[str]:
    yield f"{len(layout.sites)} site{'s' * (len(layout.sites) > 1)} of {' + '.join(map(str, layout.sites))}"
    yield f"{layout.placement.replace('_', ' ')} {layout.schedule}"
    if layout.layers:
        yield f"layers {' '.join(map(str, layout.layers))}"
    if layout.replicas > 1:
        yield f"{layout.replicas} replicas"
    if layout.cell > 1:
        yield f"cell of {layout.cell}"
    if layout.replicas > 1:
        yield f"ZeRO-{layout.zero}"


LAYOUTS = (
    _at(4, schedule="1f1b"),
    _at(4, placement="fold"),
    _at(4, layers=(1, 2, 3, 2)),
    _at(2, replicas=2, zero=1),
    _at(2, 2),
    _at(2, 2, placement="fold"),
    _at(2, 2, placement="site_fold"),
    _at(2, 2, replicas=2, cell=2, zero=1),
    _at(3, 1, layers=(3, 2, 2, 1), replicas=2, zero=2),
    _at(1, 2, 1, schedule="1f1b"),
    _at(1, 2, 1, replicas=3, cell=3, zero=2),
    _at(1, 1, 1, layers=(3, 2, 3), replicas=3, cell=3),
)
"""All of them train the same layers on the same micro-batches, so that their steps can be ranked."""

PROFILED = _at(4, layers=(1, 3, 3, 1))
"""Measured before the others. They give the time of stages of few and of many layers."""


def profile_stages(case: EngineCase, config: WeftConfig) -> tuple[StageCost, ...]:
    """Train a few steps, and fit the costs of each virtual stage. A collective call."""
    engine = emulated_engine(case, config)
    try:
        time_steps(replace(case, num_warmup=0), engine.train_batch)
        found = fit_costs(engine.measured_timelines()[1:], engine.plan.costs).stages
        return tuple(replace(stage, reduce_s=0.0, unshard_s=0.0) for stage in found)
    finally:
        engine.destroy()


def measure(case: EngineCase, config: WeftConfig) -> tuple[float, tuple[float, ...]]:
    """Return the predicted step, and the seconds of steps that are trained in a row. A collective call."""
    engine = emulated_engine(case, config)
    try:
        return engine.plan.step_s, time_steps(case, engine.train_batch)
    finally:
        engine.destroy()


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A layout's step, predicted and measured.

    Attributes:
        measured_s: median of the measured steps.
        spread: range of the middle half of the steps over the median.
    """

    name: str
    predicted_s: float
    measured_s: float
    spread: float

    @property
    def error(self) -> float:
        """The error of the prediction, as a share of the measurement."""
        return self.predicted_s / self.measured_s - 1


def main(argv: Sequence[str]) -> int:
    """Run ``prediction ...`` and return 0 if the predictions meet their goals."""
    args = parse(_parser(), argv)
    if unknown := [number for number in args.only or () if not 1 <= number <= len(LAYOUTS)]:
        raise ValueError(f"--only {unknown[0]}: there are {len(LAYOUTS)} layouts; choose from 1 to {len(LAYOUTS)}")
    load()  # compiled here, not while a run is timed
    layouts = [LAYOUTS[number - 1] for number in args.only or range(1, len(LAYOUTS) + 1)]
    stage_s = args.layer / 1e3 * NUM_LAYERS / 4
    each = args.layer / 1e3
    work = EmulatedWork(
        forward_s=each,
        input_s=each,
        weight_s=each,
        hidden_bytes=int(args.transfer * stage_s * args.rate * 1e6 / 8 / 4) * 4,
        weight_elements=args.elements,
    )
    links = measured_links(wan_topology((2, 1), args.rate, args.latency, args.window), work)
    near, wan = links.near, links.wan
    print(
        f"{NUM_LAYERS} layers of {args.layer:g} ms forward, input and weight gradient each, {args.elements:,} weights; "
        f"hidden state {work.hidden_bytes / 1e6:.3g} MB; {args.latency:g} ms one way, "
        f"{wan.bandwidth_bps / 1e6:.1f} Mbit/s; inside a site {near.occupancy_s(work.hidden_bytes) * 1e3:.1f} ms"
    )
    stages = _profile(work, links, args)
    found: list[Predicted] = []
    for layout in layouts:
        started = perf_counter()
        found.append(_measure(layout, layout.case(links, args.steps, work), stages, args))
        print(f"{found[-1].name}: {found[-1].error:+.1%} in {perf_counter() - started:.0f} s", file=sys.stderr)
        write_json(args, "prediction", found)  # at once: a run of many layouts may be cut short
    show(table_of(map(_cells, found), "steps, predicted before the first and measured"))
    met = judge(found)
    print("\n".join(verdict(found)))
    return finish(args, "prediction", found, met=met)


def judge(found: Sequence[Predicted]) -> bool:
    """Return True if the errors are within their limits and the predicted ranking equals the measured one."""
    errors = [abs(one.error) for one in found]
    beyond = sum(error > NEAR for error in errors)
    return max(errors) <= FAR and beyond <= MOST_BEYOND_NEAR * len(found) and not misranked(found)


def misranked(found: Iterable[Predicted]) -> list[tuple[Predicted, Predicted]]:
    """Return pairs of layouts that differ by more than `APART` when measured, but are predicted in the other order."""
    return [
        (one, other)
        for one, other in combinations(sorted(found, key=lambda layout: layout.measured_s), 2)
        if other.measured_s > (1 + APART) * one.measured_s and other.predicted_s <= one.predicted_s
    ]


def verdict(found: Sequence[Predicted]) -> list[str]:
    """Return the goals, and the layouts that miss them, as text."""
    errors = [abs(one.error) for one in found]
    wrong = misranked(found)
    lines = [
        f"{sum(error <= NEAR for error in errors)} of {len(found)} within {NEAR:.0%}, "
        f"{sum(error <= FAR for error in errors)} within {FAR:.0%}, the worst {max(errors):.1%} off",
        f"{len(wrong)} pairs of layouts that differ by more than {APART:.0%} are ranked the wrong way round",
    ]
    return lines + [f"  {one.name} is measured faster than {other.name}" for one, other in wrong]


def _profile(work: EmulatedWork, links: Links, args: argparse.Namespace) -> StageProfile:
    """Measure stages of few and of many layers in the engine, as `weft profile` does for a real model."""
    stages, *_ = _run(PROFILED, profile_stages, PROFILED.case(links, args.steps, work), args)
    few, many = min(PROFILED.layers), max(PROFILED.layers)

    def of(layers: int) -> tuple[int, StageCost]:
        alike = [stage for stage, its in zip(stages, PROFILED.layers, strict=True) if its == layers]
        return layers, replace(
            alike[0], **{name: mean(getattr(stage, name) for stage in alike) for name in StageProfile.SECONDS}
        )

    return StageProfile(of(few), of(many))


def _run(layout: Layout, of_rank: Callable[..., Any], case: EngineCase, args: argparse.Namespace) -> list[Any]:
    with (
        NetBed.up(layout.topology(args.rate, args.latency, args.window)) as bed,
        tempfile.TemporaryDirectory(prefix="weft-prediction-") as folder,
    ):
        config = layout.config(folder, timeout_s=args.timeout)
        return run_ranks_in(bed, bed.nodes, of_rank, case, config, timeout_s=args.timeout)


def _measure(layout: Layout, case: EngineCase, stages: StageProfile, args: argparse.Namespace) -> Predicted:
    ranks = _run(layout, measure, replace(case, profile=stages), args)
    measured_s, spread = max(middle_and_spread(step_s) for _, step_s in ranks)
    return Predicted(
        name=layout.name,
        predicted_s=ranks[0][0],
        measured_s=measured_s,
        spread=spread,
    )


def _cells(one: Predicted) -> dict[str, str]:
    seconds: Callable[[float], str] = "{:.3f}".format
    return {
        "layout": one.name,
        "predicted s": seconds(one.predicted_s),
        "measured s": seconds(one.measured_s),
        "error": f"{one.error:+.1%}",
        "spread": f"{one.spread:.1%}",
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks prediction", description=__doc__)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="some layouts, counted from 1")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a layout")
    parser.add_argument("--layer", type=float, default=60.0, help="a layer's forward in ms, and each of its gradients")
    parser.add_argument("--transfer", type=float, default=2.0, help="a transfer over one uplink, in forwards of a rank")
    parser.add_argument("--elements", type=int, default=250_000, help="weights of a layer")
    parser.add_argument("--latency", type=float, default=20.0, help="one-way delay between sites in ms")
    parser.add_argument("--rate", type=float, default=50.0, help="uplink of a node in Mbit/s")
    parser.add_argument("--window", type=float, default=50.0, help="receive buffer of a connection in kB")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds after which a layout is given up")
    return parser
