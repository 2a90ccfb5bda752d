"""The profile: a cost model in a YAML file, in milliseconds, bytes and megabits per second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from weft.pipeline.costs import CostModel, LinkCost, StageCost

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
}
_REQUIRED = ("forward_ms", "input_ms", "weight_ms")
_LINK_FIELDS = ("latency_ms", "bandwidth_mbps", "streams", "sharing")


def load_costs(path: Path, num_stages: int) -> CostModel:
    """Read a cost model.

    The form, with everything but the first three optional (default 0, and free links)::

        stages:                       # each a number for all virtual stages, or a list
          forward_ms: 10
          input_ms: [10, 10, 10, 14]
          weight_ms: 10
          activation_bytes: 33.5e6
          weight_saved_bytes: 8.4e6   # kept from the input gradient to the weight gradient
          output_bytes: 8.4e6         # sent to the next stage; its gradient is as large
          reduce_ms: 40               # gradient reduction over replicas
          unshard_ms: 20
          step_ms: 5                  # optimiser
          send_ms: 0.2                # of the rank's own time, to start sending an output or gradient
        links:
          local: {latency_ms: 0.01, bandwidth_mbps: 100000}
          wan: {latency_ms: 20, bandwidth_mbps: 500, streams: 16, sharing: 2}
          pairs:                      # particular sites, in both directions
            - {sites: [0, 1], latency_ms: 40, bandwidth_mbps: 300}
        pair_scale: 0.9               # strand pair over the sum of its halves

    Args:
        num_stages: virtual stages that the model must be for.

    Raises:
        ValueError: the file cannot be read, or a field is unknown, missing or wrong; names it.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"costs file {path}: cannot be read ({error})") from error
    try:
        return _model(data, num_stages)
    except ValueError as error:
        raise ValueError(f"costs file {path}: {error}") from error


def costs_to_yaml(costs: CostModel) -> str:
    """`load_costs`'s form of ``costs``."""
    stages = {
        name: [getattr(stage, field) * scale for stage in costs.stages]
        for field, (name, scale) in _STAGE_FIELDS.items()
    }
    links: dict[str, Any] = {"local": _link_to_dict(costs.local), "wan": _link_to_dict(costs.wan)}
    links["pairs"] = [{"sites": list(pair), "one_way": True, **_link_to_dict(link)} for pair, link in costs.wan_links]
    return yaml.safe_dump(
        {"stages": stages, "links": links, "pair_scale": costs.pair_scale}, sort_keys=False, default_flow_style=None
    )


def _link_to_dict(link: LinkCost) -> dict[str, Any]:
    return {
        "latency_ms": link.latency_s * 1e3,
        "bandwidth_mbps": link.bandwidth_bps / 1e6,
        "streams": link.streams,
        "sharing": link.sharing,
    }


def _model(data: Any, num_stages: int) -> CostModel:
    data = _table(data, "the file", ("stages", "links", "pair_scale"))
    links = _table(data.get("links", {}), "links", ("local", "wan", "pairs"))
    return CostModel(
        stages=_stages(data.get("stages", {}), num_stages),
        local=_link(links.get("local", {}), "links.local"),
        wan=_link(links.get("wan", {}), "links.wan"),
        wan_links=_pairs(links.get("pairs", [])),
        pair_scale=_number(data.get("pair_scale", 1.0), "pair_scale", above=0.0),
    )


def _stages(data: Any, num_stages: int) -> tuple[StageCost, ...]:
    table = _table(data, "stages", tuple(name for name, _ in _STAGE_FIELDS.values()))
    for name in _REQUIRED:
        if name not in table:
            raise ValueError(f"stages.{name}: missing; give a number, or a list of {num_stages}")
    columns = {
        field: [value / scale for value in _column(table.get(name, 0.0), f"stages.{name}", num_stages)]
        for field, (name, scale) in _STAGE_FIELDS.items()
    }
    return tuple(
        StageCost(**{field: column[stage] for field, column in columns.items()}) for stage in range(num_stages)
    )


def _column(value: Any, name: str, num_stages: int) -> list[float]:
    if not isinstance(value, list):
        return [_number(value, name)] * num_stages
    if len(value) != num_stages:
        raise ValueError(f"{name}: {len(value)} values for {num_stages} virtual stages; give one each, or one number")
    return [_number(entry, f"{name}[{stage}]") for stage, entry in enumerate(value)]


def _pairs(data: Any) -> tuple[tuple[tuple[int, int], LinkCost], ...]:
    if not isinstance(data, list):
        raise ValueError(f"links.pairs={data!r}: expected a list")
    found = []
    for number, entry in enumerate(data):
        name = f"links.pairs[{number}]"
        table = _table(entry, name, ("sites", "one_way", *_LINK_FIELDS))
        sites = table.pop("sites", None)
        if not (isinstance(sites, list) and len(sites) == 2 and all(type(site) is int for site in sites)):
            raise ValueError(f"{name}.sites={sites!r}: expected the numbers of two sites, as in [0, 1]")
        one_way = table.pop("one_way", False)
        link = _link(table, name)
        found.append(((sites[0], sites[1]), link))
        if not one_way:
            found.append(((sites[1], sites[0]), link))
    return tuple(found)


def _link(data: Any, name: str) -> LinkCost:
    table = _table(data, name, _LINK_FIELDS)
    return LinkCost(
        latency_s=_number(table.get("latency_ms", 0.0), f"{name}.latency_ms") / 1e3,
        bandwidth_bps=_number(table.get("bandwidth_mbps", float("inf")), f"{name}.bandwidth_mbps", above=0.0) * 1e6,
        streams=_count(table.get("streams", 1), f"{name}.streams"),
        sharing=_count(table.get("sharing", 1), f"{name}.sharing"),
    )


def _table(data: Any, name: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{name}: expected a table of {', '.join(known)}; got {data!r}")
    unknown = [key for key in data if key not in known]
    if unknown:
        raise ValueError(f"{name}: field {unknown[0]!r} is not known; one of {', '.join(known)}")
    return dict(data)


def _number(value: Any, name: str, *, above: float | None = None) -> float:
    # YAML 1.1 reads 1e6 as text; Python reads it as what is meant.
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not (number >= 0 if above is None else number > above):
        least = "at least 0" if above is None else f"above {above:g}"
        raise ValueError(f"{name}={value!r}: expected a number {least}")
    return number


def _count(value: Any, name: str) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: expected a whole number of at least 1")
    return value
