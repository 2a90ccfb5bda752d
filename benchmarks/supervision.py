"""What watching over a run costs: a slot, a heartbeat of thousands of agents, the culprit."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time

from benchmarks.results import finish, parse, show
from benchmarks.survival import cost
from benchmarks.survival.driver_load import driver_load
from weft.comm.control.frames import Frames, pack
from weft.engine.supervision.alerts import READ_S, Alerts
from weft.engine.supervision.deadlines import Deadlines
from weft.engine.supervision.driver import collect_rarely
from weft.engine.supervision.message import AgentMessage
from weft.engine.supervision.place_writer import PlaceWriter
from weft.engine.supervision.places import Phase, make_page
from weft.engine.supervision.report import HostReport, RankReport
from weft.engine.supervision.watch import Watch
from weft.pipeline.action import RECEIVES, SENDS, Action, Op, receive_of
from weft.pipeline.culprit import JobRows, Place, Replica, find_culprits
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement
from weft.tools.tables import table_of

MOST_SLOT_US, MOST_SHARE, MOST_CULPRIT_S = 1.0, 0.2, 1.0
"""Goals: a slot, the heartbeats' share of a core, and the culprit among all ranks."""
LOOKS_PER_S = 20
"""How often a driver asks for a verdict."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What something took.

    Attributes:
        least, usual, most: of the repetitions.
        goal: that the usual has to stay below.
    """

    what: str
    unit: str
    least: float
    usual: float
    most: float
    goal: float

    @classmethod
    def of(cls, what: str, unit: str, found: Sequence[float], goal: float) -> Figure:
        """From repetitions."""
        return cls(what=what, unit=unit, least=min(found), usual=median(found), most=max(found), goal=goal)


def main(argv: Sequence[str]) -> int:
    """Print what each part takes; returns 1 if one exceeds its goal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks supervision", description=__doc__)
    parser.add_argument("--agents", type=int, default=4096, help="agents, and ranks among which the culprit is found")
    parser.add_argument("--ranks-per-agent", type=int, nargs="+", default=[1, 8], help="ranks of an agent's host")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--cost", type=float, metavar="MINUTES", help="instead: a run with supervision and without")
    parser.add_argument("--driver", action="store_true", help="only the driver with its sockets")
    args = parse(parser, argv)
    if args.cost:
        return _cost(args)
    collect_rarely()
    figures = [driver_cost(args.agents, args.repeat)] if args.driver else _figures(args)
    lines = (
        {
            "": figure.what,
            "least": f"{figure.least:.3g} {figure.unit}",
            "usual": f"{figure.usual:.3g} {figure.unit}",
            "most": f"{figure.most:.3g} {figure.unit}",
            "goal": f"below {figure.goal:g} {figure.unit}",
        }
        for figure in figures
    )
    show(table_of(lines, f"watching over {args.agents} agents"))
    met = all(figure.usual < figure.goal for figure in figures)
    return finish(args, "supervision", figures, met=met)


def _cost(args: argparse.Namespace) -> int:
    """A run's steps with supervision and without, by turns."""
    with tempfile.TemporaryDirectory(prefix="weft-cost-") as folder:
        found = cost.measure(Path(folder, "run"), args.cost)
    show(table_of(found.rows, "2 ranks on 2 hosts, all on this machine"))
    met = found.high - 1.0 < cost.GOAL
    bound = f"a step takes longer by at most {max(0.0, found.high - 1.0):.2%} (95 %); goal {cost.GOAL:.1%}"
    print(f"{bound}: {'met' if met else 'not shown' if found.low - 1.0 < cost.GOAL else 'MISSED'}")
    return finish(args, "supervision", found, met=met)


def _figures(args: argparse.Namespace) -> list[Figure]:
    figures = [slot_cost(args.repeat)]
    figures += [heartbeat_cost(args.agents, ranks, args.repeat) for ranks in args.ranks_per_agent]
    figures.append(driver_cost(args.agents, args.repeat))
    for stages in (8, 64):
        for name, places, rows, expected in standing_jobs(stages, args.agents // stages):
            figures.append(culprit_cost(f"{name}, {stages} stages", rows, places, expected, args.repeat))
    return figures


def slot_cost(repeat: int, slots: int = 20_000) -> Figure:
    """Microseconds of this processor that telling the place takes per slot: its beginning and its end."""
    slot = (Action(Op.F, 0, 0),)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "private", "page")
        make_page(page, 1)
        place = PlaceWriter(page, local_rank=0, rank=0, attempt=0)
        begins, ends = place.slot_begins, place.slot_ends

        def run() -> None:
            place.begin_step(1, 1)
            for _ in range(slots):
                begins(slot)
                ends(slot)

        found = [taken / slots * 1e6 for taken in _processor_times(run, repeat)]
        place.close()
    return Figure.of("telling the place, per slot", "us", found, MOST_SLOT_US)


def heartbeat_cost(agents: int, ranks: int, repeat: int) -> Figure:
    """Share of a core that a second of heartbeats takes: parsed, observed, judged, and looked at for alerts."""
    now = 0.0
    deadlines = Deadlines(least_s=4.0, setup_s=600.0)
    watch = Watch(
        attempt=1, num_ranks=agents * ranks, deadlines=deadlines, heartbeat_s=1.0, link_deadline_s=30.0, now=now
    )
    alerts, stream = Alerts(watch), Frames()

    def messages(second: int) -> list[bytes]:
        reports = (
            HostReport(f"host{agent}", tuple(_reports(agent, ranks, second)), {"load": 1.0}) for agent in range(agents)
        )
        return [pack(AgentMessage(1, True, report, {}, {}, {}, 0, []).to_wire()) for report in reports]

    def handle(frames: list[bytes], second: int) -> None:
        for frame in frames:
            for message in stream.feed(frame):
                watch.observe(AgentMessage.from_wire(message).report, float(second))
        for look in range(LOOKS_PER_S):
            assert watch.verdict(second + look / LOOKS_PER_S) is None
        assert not alerts.look(float(second))

    found, between = [], int(READ_S)  # alerts are looked for every so many seconds, which a repetition spans
    for first in range(1, repeat * between + 1, between):
        taken = 0.0
        for second in range(first, first + between):
            frames = messages(second)
            taken += _processor_time(lambda frames=frames, second=second: handle(frames, second))  # type: ignore[misc]
        found.append(taken / between)
    return Figure.of(f"a second of heartbeats, {ranks} rank(s) per agent", "of a core", found, MOST_SHARE)


def driver_cost(agents: int, repeat: int) -> Figure:
    """Share of a core that a driver takes whose agents, of a rank each, are at the other end of a socket."""
    return Figure.of("a second of the driver with its sockets", "of a core", driver_load(agents, repeat), MOST_SHARE)


def _reports(agent: int, ranks: int, second: int) -> Iterator[RankReport]:
    for rank in range(agent * ranks, (agent + 1) * ranks):
        yield RankReport(
            rank,
            1,
            Phase.steady,
            Place(3 * second, rank % 50, True),
            num_microbatches=64,
            still_s=0.05,
            tick=10 * second,
            busy_s=0.25 * second,
            measured_steps=3 * second,
            state="R",
            cpu_s=0.9 * second,
            resident_bytes=1 << 34,
            device_bytes=1 << 36,
        )


def standing_jobs(
    stages: int, replicas: int, microbatches: int = 64
) -> Iterator[tuple[str, dict[int, Place], JobRows, object]]:
    """Jobs that stand still because of a rank of the first replica or of a link, and who it is."""
    placement = Placement.straight(stages, (stages // 2, stages - stages // 2))
    schedule = lower(generate("1f1b", placement, microbatches), zero_stage=1)
    numbers = [tuple(stage * replicas + replica for stage in range(stages)) for replica in range(replicas)]
    rows = JobRows(tuple(Replica(schedule, ranks) for ranks in numbers))
    waiting = {rank: Place(9, len(rows.row(rank)) - 1, True, 3) for rank in rows.seats}
    stuck = stages // 3 * replicas
    yield "one does nothing", waiting | _places(rows, stuck, None), rows, stuck
    link = (stages // 2 - 1) * replicas, stages // 2 * replicas
    yield "a link is dead", waiting | _places(rows, None, link), rows, link
    yield "one is late in STEP", waiting | {stuck: waiting[stuck]._replace(waits=2)}, rows, stuck


def _places(rows: JobRows, stuck: int | None, dead: tuple[int, int] | None) -> dict[int, Place]:
    """Where the ranks of the first replica stand when one of them stops in the middle of a step, or a link early on."""
    replica = rows.replicas[0]
    row_of = dict(zip(replica.ranks, replica.schedule.rows, strict=True))
    done = dict.fromkeys(replica.ranks, 0)
    sent: set[Action] = set()

    def can_go_on(rank: int) -> bool:
        row = row_of[rank]
        action = row[done[rank]][0]
        if action.op is Op.STEP or (rank == stuck and done[rank] >= len(row) // 2):
            return False
        return action.op not in RECEIVES or action in sent

    def go_on(rank: int) -> None:
        action = row_of[rank][done[rank]][0]
        done[rank] += 1
        if action.op in SENDS:
            receive = receive_of(action)
            to = replica.ranks[replica.schedule.placement.stage_ranks[receive.stage]]
            if dead is None or {rank, to} != set(dead) or receive.microbatch == 0:
                sent.add(receive)

    moving = True
    while moving:
        moving = False
        for rank in replica.ranks:
            while can_go_on(rank):
                go_on(rank)
                moving = True
    steps = {rank: row_of[rank][done[rank]][0].op is Op.STEP for rank in replica.ranks}
    return {rank: Place(9, done[rank], rank != stuck, 3 if steps[rank] else 0) for rank in replica.ranks}


def culprit_cost(what: str, rows: JobRows, places: dict[int, Place], expected: object, repeat: int) -> Figure:
    """Seconds to name who holds everybody up; what is found is checked."""

    def find() -> None:
        (suspect,) = find_culprits(rows, places).suspects
        assert expected in (suspect.rank, *suspect.links), suspect

    return Figure.of(
        f"the culprit among {len(places)} ranks: {what}", "s", _processor_times(find, repeat), MOST_CULPRIT_S
    )


def _processor_times(run: Callable[[], None], repeat: int) -> list[float]:
    return [_processor_time(run) for _ in range(repeat)]


def _processor_time(run: Callable[[], None]) -> float:
    """Seconds of processor time that it takes this process; what else the machine does is not counted."""
    start = process_time()
    run()
    return process_time() - start
