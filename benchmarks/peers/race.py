"""The race: engines taking turns on the same case, and the table that comes of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.peers.case import EngineCase, middle_and_spread
from benchmarks.peers.table import PEERS, PeerRun, measure
from benchmarks.results import show
from weft.tools.links import Way, measure_link
from weft.tools.tables import table_of


@dataclass(frozen=True, kw_only=True)
class Result(PeerRun):
    """An engine on a case: the steps of all rounds, and what the first predicts.

    Attributes:
        peer: key of `PEERS`.
        case: what it ran.
        median_s: of all steps.
        spread: the range of their middle half, over the median.
    """

    peer: str
    case: EngineCase
    median_s: float
    spread: float

    @property
    def over_simulated(self) -> float:
        """Measured step over the simulated one."""
        return self.median_s / self.simulated_s

    @property
    def over_profiled(self) -> float | None:
        """Measured step over the profiled one."""
        return None if self.profiled_s is None else self.median_s / self.profiled_s


def race(peers: Sequence[str], cases: Sequence[EngineCase], *, rounds: int) -> Iterator[Result]:
    """Run every engine on every case, a case at a time.

    The engines take turns, ``rounds`` times, so that a change of the machine's load meets all
    of them alike.

    Raises:
        RuntimeError: an engine failed or took too long.
    """
    for case in cases:
        links = {way is Way.shared: measure_link(case.work.hidden_bytes, way) for way in (Way.gloo, Way.shared)}
        runs: dict[str, list[PeerRun]] = {peer: [] for peer in peers}
        for turn in range(rounds):
            for peer in peers:
                print(f"{case.name}: round {turn + 1} of {rounds}, {PEERS[peer].title}", file=sys.stderr)
                runs[peer].append(measure(peer, replace(case, link=links[PEERS[peer].shares_memory])))
        yield from (_result(peer, case, runs[peer]) for peer in peers)


def _result(peer: str, case: EngineCase, runs: Sequence[PeerRun]) -> Result:
    step_s = tuple(seconds for run in runs for seconds in run.step_s)
    median_s, spread = middle_and_spread(step_s)
    return Result(**vars(runs[0]) | {"step_s": step_s}, peer=peer, case=case, median_s=median_s, spread=spread)


def print_table(results: Sequence[Result], title: str, note: Callable[[Result], str] = lambda _: "") -> None:
    """A table per case, a row per engine; ``note`` fills the last column."""
    show(title)
    for case in dict.fromkeys(result.case for result in results):
        show(table_of((_cells(r) | {"": note(r)} for r in results if r.case == case), case.name))
    show(f"\n{_LEGEND}")


_LEGEND = (
    "ideal: the engine's own schedule simulated with free communication. simulated: with the link as measured here.\n"
    "profiled: with the times that computations took in the run's warm-up, too, where the engine tells them.\n"
    "measured: median step, barrier to barrier. spread: middle half of the steps over the median.\n"
    "live layers: most layer activations alive at once, rank by rank. Compare engines that hold as much: ZBV, the\n"
    "best peer, holds two chunks for each rank, and so does Weft auto with ZBV's memory; Weft auto by itself takes\n"
    "what it needs, up to four times what 1F1B holds."
)


def _cells(result: Result) -> dict[str, str]:
    return {
        "engine": PEERS[result.peer].title,
        "ideal ms": f"{1e3 * result.ideal_s:.0f}",
        "simulated": f"{1e3 * result.simulated_s:.0f}",
        "profiled": "" if result.profiled_s is None else f"{1e3 * result.profiled_s:.0f}",
        "measured": f"{1e3 * result.median_s:.0f}",
        "spread": f"{100 * result.spread:.1f} %",
        "/ sim.": f"{result.over_simulated:.3f}",
        "/ prof.": "" if result.over_profiled is None else f"{result.over_profiled:.3f}",
        "live layers": " ".join(map(str, result.live_layers)),
    }
