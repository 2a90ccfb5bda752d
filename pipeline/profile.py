"""Read and write cost models as YAML, in milliseconds, bytes and megabits per second."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from weft.conf.features import entry
from weft.conf.host.documents import read_yaml
from weft.pipeline.action import COMPUTE, SENDS, Op
from weft.pipeline.costs import SECONDS_OF, CostModel, LinkCost, StageCost
from weft.pipeline.jitter import MOST_JITTER, jitter_of
from weft.pipeline.limits import MOST_RANKS, count, known_fields, number, short_repr
from weft.pipeline.timeline import SEND_LANE, Timeline

MOST_BYTES = 2**21
"""Largest file; the costs of a thousand stages take a twentieth of it."""
_STAGE_FIELDS = {
    # field of StageCost: (name in the file, units of the file per unit of the field)
    "forward_s": ("forward_ms", 1e3),
    "input_s": ("input_ms", 1e3),
    "weight_s": ("weight_ms", 1e3),
    "activation_bytes": ("activation_bytes", 1),
    "weight_saved_bytes": ("weight_saved_bytes", 1),
    "output_bytes": ("output_bytes", 1),
    "reduce_s": ("reduce_ms", 1e3),
    "unshard_s": ("unshard_ms", 1e3),
    "step_s": ("step_ms", 1e3),
    "send_s": ("send_ms", 1e3),
    "jitter": ("jitter", 1),
}
_STAGE_NAMES = tuple(name for name, _ in _STAGE_FIELDS.values())
_REQUIRED = ("forward_ms", "input_ms", "weight_ms")
_LINK_FIELDS = ("latency_ms", "bandwidth_mbps", "pair_mbps", "streams", "sharing", "jitter")


def load_costs(path: Path, num_stages: int) -> CostModel:
    """Read a cost model.

    The format. Only the first three fields are required; the others default to 0, and links to infinite speed::

        stages:                       # each field is one number for all virtual stages, or a list
          forward_ms: 10
          input_ms: [10, 10, 10, 14]
          weight_ms: 10
          activation_bytes: 33.5e6
          weight_saved_bytes: 8.4e6   # kept from the input gradient to the weight gradient
          output_bytes: 8.4e6         # sent to the next stage; its gradient has the same size
          reduce_ms: 40               # gradient reduction over replicas
          unshard_ms: 20
          step_ms: 5                  # optimiser
          send_ms: 0.2                # for which starting a send occupies the rank
          jitter: 0.1                 # standard deviation of the logarithms of computations' durations; at most 3
        links:
          local: {latency_ms: 0.01, bandwidth_mbps: 100000}
          wan: {latency_ms: 20, bandwidth_mbps: 500, streams: 16, sharing: 2, jitter: 0.2}  # jitter: of transfers
          # bandwidth_mbps: of a node's uplink; pair_mbps: between a pair of nodes, if it is less
          pairs:                      # particular pairs of sites, both directions
            - {sites: [0, 1], latency_ms: 40, bandwidth_mbps: 300}
        strands: {...}                # what pairs of micro-batches interleave: see `weft.pipeline.strands.profile`

    To give costs for any number of stages, use ``layers`` instead of ``stages``: the same fields,
    each a number or a list with one entry per layer, and ``count``, the number of layers, if no
    field is a list.

    Args:
        num_stages: number of virtual stages that the costs must be for.

    Raises:
        ValueError: the file cannot be read, or a field is unknown, missing or wrong; the message names it.
    """

    def read(data: dict[str, Any]) -> CostModel:
        if "layers" in data:
            return _model(data, _layers(data)).cut(num_stages)
        return _model(data, _stages(data, num_stages))

    return _read(path, read)


def load_pieces(path: Path) -> CostModel:
    """Read costs per layer, or per stage of a previous run, which `CostModel.cut` regroups.

    Raises:
        ValueError: see `load_costs`; or the file gives only one number for all virtual stages.
    """

    def read(data: dict[str, Any]) -> CostModel:
        if "layers" in data:
            return _model(data, _layers(data))
        table = known_fields(data.get("stages", {}), "stages", _STAGE_NAMES)
        if not any(isinstance(value, list) for value in table.values()):
            raise ValueError(
                "stages: one number for every virtual stage, whatever its layers, so placements cannot be compared; "
                "give costs per layer (`layers:` with a `count:`), or choose a placement"
            )
        return _model(data, _stages(data, _length(table, "stages")))

    return _read(path, read)


def _read(path: Path, read: Callable[[dict[str, Any]], CostModel]) -> CostModel:
    try:
        data = read_yaml(path, most_bytes=MOST_BYTES)
        return read(known_fields(data, "the file", ("stages", "layers", "links", "strands", "measured")))
    except ValueError as error:
        raise ValueError(f"costs file {path}: {error}") from error


def costs_to_yaml(costs: CostModel, *, per: str = "stages", measured: Mapping[str, Any] | None = None) -> str:
    """Return YAML text of ``costs`` that `load_costs` reads.

    Args:
        per: unit of ``costs.stages``: ``stages`` or ``layers``.
        measured: GPU and model of the measurement. See `Measured`.
    """
    stages = {
        name: [getattr(stage, field) * scale for stage in costs.stages]
        for field, (name, scale) in _STAGE_FIELDS.items()
    }
    links: dict[str, Any] = {"local": _link_to_dict(costs.local), "wan": _link_to_dict(costs.wan)}
    del links["local"]["pair_mbps"]
    links["pairs"] = [{"sites": list(pair), "one_way": True, **_link_to_dict(link)} for pair, link in costs.wan_links]
    strands = {} if costs.pairs is None else {"strands": entry("strands").strands_to_tables(costs.pairs)}
    measurements = {} if measured is None else {"measured": dict(measured)}
    tree = {**measurements, per: stages, "links": links, **strands}
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=None)


def _link_to_dict(link: LinkCost) -> dict[str, Any]:
    return {
        "latency_ms": link.latency_s * 1e3,
        "bandwidth_mbps": link.bandwidth_bps / 1e6,
        "pair_mbps": link.pair_bps / 1e6,
        "streams": link.streams,
        "sharing": link.sharing,
        "jitter": link.jitter,
    }


def _model(data: dict[str, Any], stages: tuple[StageCost, ...]) -> CostModel:
    links = known_fields(data.get("links", {}), "links", ("local", "wan", "pairs"))
    return CostModel(
        stages=stages,
        local=_link(links.get("local", {}), "links.local", local=True),
        wan=_link(links.get("wan", {}), "links.wan"),
        wan_links=_pairs(links.get("pairs", [])),
        pairs=entry("strands").strands_from_tables(data["strands"], len(stages)) if "strands" in data else None,
    )


def _layers(data: dict[str, Any]) -> tuple[StageCost, ...]:
    if "stages" in data:
        raise ValueError("layers: given together with stages; leave one of them out")
    table = known_fields(data["layers"], "layers", (*_STAGE_NAMES, "count"))
    given = count(table.pop("count"), "layers.count", most=MOST_RANKS) if "count" in table else 0
    return _columns(table, "layers", given or _length(table, "layers"), "layers")


def _length(table: dict[str, Any], name: str) -> int:
    lengths = [len(value) for value in table.values() if isinstance(value, list)]
    if not lengths or not lengths[0]:
        raise ValueError(f"{name}.count: missing; say how many layers the model has")
    return lengths[0]


def _stages(data: dict[str, Any], num_stages: int) -> tuple[StageCost, ...]:
    return _columns(
        known_fields(data.get("stages", {}), "stages", _STAGE_NAMES), "stages", num_stages, "virtual stages"
    )


def _columns(table: dict[str, Any], name: str, length: int, what: str) -> tuple[StageCost, ...]:
    for required in _REQUIRED:
        if required not in table:
            raise ValueError(f"{name}.{required}: missing; give a number, or a list of {length}")
    columns = {
        field: [value / scale for value in _column(table.get(column, 0.0), f"{name}.{column}", length, what)]
        for field, (column, scale) in _STAGE_FIELDS.items()
    }
    stages = tuple(StageCost(**{field: column[stage] for field, column in columns.items()}) for stage in range(length))
    _check_jitter(max((stage.jitter for stage in stages), default=0.0), name)
    return stages


def _check_jitter(jitter: float, name: str) -> float:
    if jitter > MOST_JITTER:
        raise ValueError(f"{name}.jitter={jitter:g}: above {MOST_JITTER:g}; give the deviation of natural logarithms")
    return jitter


def _column(value: Any, name: str, length: int, what: str) -> list[float]:
    if not isinstance(value, list):
        return [number(value, name)] * length
    if len(value) != length:
        raise ValueError(f"{name}: {len(value)} values for {length} {what}; give one each, or one number")
    return [number(entry, f"{name}[{stage}]") for stage, entry in enumerate(value)]


def _pairs(data: Any) -> tuple[tuple[tuple[int, int], LinkCost], ...]:
    if not isinstance(data, list):
        raise ValueError(f"links.pairs={short_repr(data)}: expected a list")
    found = []
    for place, given in enumerate(data):
        name = f"links.pairs[{place}]"
        table = known_fields(given, name, ("sites", "one_way", *_LINK_FIELDS))
        sites = table.pop("sites", None)
        if not (isinstance(sites, list) and len(sites) == 2 and all(type(site) is int for site in sites)):
            raise ValueError(f"{name}.sites={short_repr(sites)}: expected the numbers of two sites, as in [0, 1]")
        one_way = table.pop("one_way", False)
        link = _link(table, name)
        found.append(((sites[0], sites[1]), link))
        if not one_way:
            found.append(((sites[1], sites[0]), link))
    return tuple(found)


def _link(data: Any, name: str, *, local: bool = False) -> LinkCost:
    table = known_fields(data, name, tuple(field for field in _LINK_FIELDS if not (local and field == "pair_mbps")))
    rates = {
        field: number(table.get(field, float("inf")), f"{name}.{field}", above=0.0, free=True) * 1e6
        for field in ("bandwidth_mbps", "pair_mbps")
    }
    return LinkCost(
        latency_s=number(table.get("latency_ms", 0.0), f"{name}.latency_ms") / 1e3,
        bandwidth_bps=rates["bandwidth_mbps"],
        pair_bps=rates["pair_mbps"],
        streams=count(table.get("streams", 1), f"{name}.streams"),
        sharing=count(table.get("sharing", 1), f"{name}.sharing"),
        jitter=_check_jitter(number(table.get("jitter", 0.0), f"{name}.jitter"), name),
    )


def fit_costs(timelines: Sequence[Timeline], costs: CostModel) -> CostModel:
    """Replace each stage's seconds in ``costs`` by the measured median, and its jitter by that around the medians.

    If a stage never split its backward, half of the backward counts for each gradient. Strand
    pairs are ignored, because their halves are not timed separately.

    Args:
        timelines: measured steps of one schedule.
        costs: provides links and bytes, and the seconds of actions that were not measured.
    """
    seconds: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for span in timeline.spans:
            if len(span.slot) == 1 and (span.slot[0].op not in SENDS or span.lane == SEND_LANE):
                action = span.slot[0]
                op = Op.SEND_F if action.op in SENDS else action.op  # both directions cost the same
                seconds[op, action.stage].append(span.end_s - span.start_s)
    medians = {key: median(values) for key, values in seconds.items()}
    computed: dict[int, list[list[float]]] = defaultdict(list)
    for (op, stage), values in seconds.items():
        if op in COMPUTE and medians[op, stage] > 0:
            computed[stage].append(values)
    jitter = {stage: jitter_of(groups) for stage, groups in computed.items()}
    stages = (_fit_stage(s, cost, medians, jitter.get(s, cost.jitter)) for s, cost in enumerate(costs.stages))
    return replace(costs, stages=tuple(stages))


def _fit_stage(stage: int, cost: StageCost, medians: dict[tuple[Op, int], float], jitter: float) -> StageCost:
    whole = medians.get((Op.B, stage), cost.input_s + cost.weight_s)
    measured = {SECONDS_OF[op]: s for (op, at), s in medians.items() if at == stage and op in SECONDS_OF}
    return replace(cost, jitter=jitter, **{"input_s": whole / 2, "weight_s": whole / 2} | measured)
