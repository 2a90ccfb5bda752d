"""Delay models: durations of emulated ranks' operations. Users can provide their own class."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from itertools import permutations, starmap
from pathlib import Path
from typing import Any

import msgspec

from weft.comm.collectives.collective import Primitive
from weft.comm.collectives.costs import AlphaBeta, CollectiveCosts
from weft.comm.collectives.group import LinkClass
from weft.comm.emulated.operation_log import EmulationError
from weft.comm.emulated.step import Call
from weft.conf.host.documents import read_text
from weft.pipeline.costs import CostModel

ENTRY_POINTS = "weft.delay_models"
"""Group of entry points with which packages provide delay models by name."""


@dataclass(frozen=True)
class Message:
    """A message between neighbouring pipeline ranks.

    Attributes:
        tag: name of the send, such as ``2SEND_F7``.
        sender, receiver: pipeline ranks.
        crosses: whether they are at different sites.
        num_bytes: size of the message in bytes.
    """

    tag: str
    sender: int
    receiver: int
    crosses: bool
    num_bytes: float


@dataclass(frozen=True)
class Job:
    """Facts about a job that a delay model may use.

    Attributes:
        collectives: measured costs of collectives over each class of link, or None without measurements.
        links: costs of links inside a node (``intra``) and between nodes of a site (``inter``).
        costs: the job's planned costs; `CostModel.link` returns the link between two sites.
    """

    num_ranks: int
    collectives: CollectiveCosts | None
    links: Mapping[LinkClass, AlphaBeta]
    costs: CostModel


class DelayModel:
    """Default delays: collectives by alpha and beta, computations as planned, messages by their links.

    Subclasses may override single methods. All durations are at least 0 seconds.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._costs = job.collectives or CollectiveCosts.of_links(job.links)

    def collective_s(self, call: Call) -> float:
        """Return the seconds from the start of a collective's last member to its end on this rank."""
        size = len(call.ranks)
        if size == 1:
            return 0.0
        link = link_of(call)
        line = self.job.links[LinkClass.intra if link is LinkClass.intra else LinkClass.inter]
        inside_s = math.ceil(math.log2(size)) * line.alpha_s + call.num_bytes * line.beta_s
        if call.crosses:  # leaders of sites exchange once
            between = starmap(self.job.costs.link, permutations(call.sites, 2))
            return inside_s + max(wan.latency_s + wan.transit_s(call.num_bytes) for wan in between)
        primitive = _PRIMITIVES.get(call.operation)
        if primitive is None or (link, primitive) not in self._costs.table:
            return inside_s
        return self._costs.step_s(primitive, link, size, call.num_bytes)

    def compute_s(self, rank: int, action: str, seconds: float) -> float:
        """Return the seconds of an emulated pipeline rank's action. The plan has ``seconds`` for it."""
        return seconds

    def late_s(self, message: Message) -> float:
        """Return the seconds that a message takes in addition to its link's latency and bandwidth."""
        return 0.0


class AlphaBetaDelays(DelayModel):
    """Delays of links and collectives only. Computations of emulated ranks take no time, so they are always ready."""

    def compute_s(self, rank: int, action: str, seconds: float) -> float:
        """Return 0."""
        return 0.0


def link_of(call: Call) -> LinkClass:
    """Return the class of the link between the members of a collective."""
    spread = LinkClass.inter if call.num_hosts == len(call.ranks) else LinkClass.mixed
    return LinkClass.intra if call.num_hosts == 1 else spread


class TraceDelays(DelayModel):
    """Delays in which emulated ranks' actions take as long as an earlier emulation has recorded."""

    def __init__(self, job: Job, file: str = "") -> None:
        """Read a file that ``weft emulate --record FILE`` has written.

        Raises:
            EmulationError: the file cannot be read.
        """
        super().__init__(job)
        try:
            text = read_text(Path(file).expanduser())
            self._seconds = msgspec.json.decode(text, type=dict[str, dict[str, dict[str, float]]])["compute"]
        except (ValueError, KeyError, msgspec.MsgspecError) as error:
            raise EmulationError(f"--delays trace:{file}: {error}; `weft emulate --record FILE` writes one") from error

    def compute_s(self, rank: int, action: str, seconds: float) -> float:
        """Return the recorded seconds, or the planned seconds for an action without a record."""
        return self._seconds.get(str(rank), {}).get(action, seconds)


BUILT_IN: Mapping[str, Callable[..., DelayModel]] = {
    "alpha-beta": AlphaBetaDelays,
    "simulate": DelayModel,
    "trace": TraceDelays,
}
_PRIMITIVES = {
    "all_reduce": Primitive.all_reduce,
    "reduce_scatter": Primitive.reduce_scatter,
    "all_gather": Primitive.all_gather,
    "all_to_all": Primitive.all_to_all,
}


class CheckedDelays:
    """A delay model whose errors and invalid results are raised as `EmulationError`."""

    def __init__(self, name: str, make: Callable[[Job], Any], job: Job) -> None:
        self._name = name
        self._model = self._ask("it", lambda: make(job))

    def collective_s(self, call: Call) -> float:
        """Return the checked result of `DelayModel.collective_s`."""
        return self._seconds("collective_s", call)

    def compute_s(self, rank: int, action: str, seconds: float) -> float:
        """Return the checked result of `DelayModel.compute_s`."""
        return self._seconds("compute_s", rank, action, seconds)

    def late_s(self, message: Message) -> float:
        """Return the checked result of `DelayModel.late_s`."""
        return self._seconds("late_s", message)

    def _seconds(self, method: str, *args: Any) -> float:
        found = self._ask(method, lambda: getattr(self._model, method)(*args))
        if not isinstance(found, int | float) or not math.isfinite(found) or found < 0:
            raise EmulationError(f"--delays {self._name}: {method}{args} is {found!r}; return seconds of at least 0")
        return float(found)

    def _ask(self, what: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except EmulationError:
            raise
        except Exception as error:
            raise EmulationError(f"--delays {self._name}: {what} raised {type(error).__name__}: {error}") from error


def delay_model(given: str) -> tuple[str, Callable[[Job], Any]]:
    """Return the name of a delay model, and the function that creates it.

    Args:
        given: ``NAME``, ``trace:FILE``, ``FILE.py:CLASS`` or ``package.module:CLASS``.

    Raises:
        EmulationError: there is no such model, or it cannot be loaded.
    """
    name, _, option = given.partition(":")
    if name in BUILT_IN:
        make: Callable[..., Any] = BUILT_IN[name]
        return given, partial(make, file=option) if option else make
    offered = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    try:
        if given in offered:
            return given, offered[given].load()
        place, _, name = given.rpartition(":")
        if place:
            return given, getattr(_module(place), name)
    except Exception as error:
        raise EmulationError(f"--delays {given}: cannot be loaded: {type(error).__name__}: {error}") from error
    names = ", ".join(sorted({*BUILT_IN, *offered}))
    raise EmulationError(f"--delays {given}: not known; choose from {names}, or give FILE.py:CLASS or MODULE:CLASS")


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        return import_module(place)
    path = Path(place).expanduser()
    spec = importlib.util.spec_from_file_location(f"weft_delays_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
