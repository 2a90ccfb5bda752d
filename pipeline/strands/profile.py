"""The strands of a cost model's YAML: kinds of layers, the layers of each stage, and the overlap of operators."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

from weft.pipeline.limits import count, known_fields, number, short_repr
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.pairs import StrandCosts
from weft.pipeline.strands.segments import Kind, LinkScope, Segment, StageStrands, Strand, StrandPair, WeightGradient

MOST_SEGMENTS = 200
"""Maximum number of segments of a layer; one with experts has some twenty."""
MOST_LAYERS = 1000
"""Maximum number of layers of a stage."""
Member = TypeVar("Member", bound=Enum)


def strands_from_tables(data: Any, num_stages: int) -> StrandCosts:
    """Read what `strands_to_tables` writes.

    The format; see `weft.pipeline.strands.segments` for the meaning of the terms::

        strands:
          layers:
            block:                      # any name
              forward:                  # segments in order; without a link one goes on into what follows
                - {compute_ms: 1, kind: memory, link: inside_host, comm_ms: 2}
                - {compute_ms: 9, link: inside_host, comm_ms: 2}
              backward: [...]
              weights: [{after: 0, compute_ms: 4}]
          stages: {block: 4}            # of every virtual stage; or a list with one table for each
          overlap: {default: 1, links: 1, compute: [{kind: gemm, link: inside_host, factor: 0.9}]}
          handover_ms: 0.05

    Args:
        num_stages: virtual stages, or layers, that the costs are for.

    Raises:
        ValueError: a field is unknown, missing or wrong; the message names it.
    """
    fields = known_fields(data, "strands", ("layers", "stages", "overlap", "handover_ms"))
    known = fields.get("layers")
    if not isinstance(known, dict) or not known:
        raise ValueError(f"strands.layers={short_repr(known)}: expected a table of kinds of layers")
    layers = {name: _layer(value, f"strands.layers.{name}") for name, value in known.items()}
    stages = fields.get("stages")
    each = stages if isinstance(stages, list) else [stages] * num_stages
    if len(each) != num_stages:
        raise ValueError(
            f"strands.stages: {len(each)} tables where there are {num_stages}; give one each, or one table"
        )
    return StrandCosts(
        stages=tuple(_stage(value, f"strands.stages[{index}]", layers) for index, value in enumerate(each)),
        overlap=_overlap(fields.get("overlap", {})),
        handover_s=number(fields.get("handover_ms", 0.0), "strands.handover_ms") / 1e3,
    )


def strands_to_tables(pairs: StrandCosts) -> dict[str, Any]:
    """Return plain tables, which YAML can store."""
    names: dict[StrandPair, str] = {}
    stages = [[{names.setdefault(part, f"layer{len(names)}"): n} for part, n in s.runs] for s in pairs.stages]
    compute = [
        {"kind": kind.value, "link": link.value, "factor": factor}
        for (kind, link), factor in sorted(pairs.overlap.compute.items(), key=str)
    ]
    return {
        "layers": {name: _layer_table(layer) for layer, name in names.items()},
        "stages": stages,
        "overlap": {"default": pairs.overlap.default, "links": pairs.overlap.links, "compute": compute},
        "handover_ms": pairs.handover_s * 1e3,
    }


def _stage(data: Any, name: str, layers: dict[str, StrandPair]) -> StageStrands:
    """Parse the layers of a stage: one table, or a list of tables if a layer occurs again after another."""
    runs = []
    for entry in data if isinstance(data, list) else [data]:
        for layer, times in known_fields(entry, name, tuple(layers)).items():
            runs.append((layers[layer], count(times, f"{name}.{layer}", most=MOST_LAYERS)))
    if not runs:
        raise ValueError(f"{name}: no layers; name those of the stage, as in {{{next(iter(layers))}: 4}}")
    return StageStrands(tuple(runs))


def _layer(data: Any, name: str) -> StrandPair:
    fields = known_fields(data, name, ("forward", "backward", "weights"))
    strands = [
        Strand(
            tuple(_segment(entry, f"{name}.{way}[{n}]") for n, entry in enumerate(_list(fields.get(way), name, way)))
        )
        for way in ("forward", "backward")
    ]
    weights = [
        _weight(entry, f"{name}.weights[{n}]")
        for n, entry in enumerate(_list(fields.get("weights", []), name, "weights"))
    ]
    try:
        return StrandPair(strands[0], strands[1], tuple(weights))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _list(data: Any, name: str, way: str) -> list[Any]:
    if not isinstance(data, list) or len(data) > MOST_SEGMENTS:
        raise ValueError(f"{name}.{way}={short_repr(data)}: expected a list of at most {MOST_SEGMENTS} tables")
    return data


def _segment(data: Any, name: str) -> Segment:
    fields = known_fields(data, name, ("compute_ms", "kind", "link", "comm_ms"))
    link = fields.get("link")
    return Segment(
        compute_s=number(fields.get("compute_ms", 0.0), f"{name}.compute_ms") / 1e3,
        link=None if link is None else _member(LinkScope, link, f"{name}.link"),
        comm_s=number(fields.get("comm_ms", 0.0), f"{name}.comm_ms") / 1e3,
        kind=_member(Kind, fields.get("kind", Kind.gemm.value), f"{name}.kind"),
    )


def _weight(data: Any, name: str) -> WeightGradient:
    fields = known_fields(data, name, ("after", "compute_ms", "kind"))
    return WeightGradient(
        after=count(fields.get("after"), f"{name}.after", least=0, most=MOST_SEGMENTS),
        compute_s=number(fields.get("compute_ms", 0.0), f"{name}.compute_ms") / 1e3,
        kind=_member(Kind, fields.get("kind", Kind.gemm.value), f"{name}.kind"),
    )


def _overlap(data: Any) -> OverlapTable:
    fields = known_fields(data, "strands.overlap", ("default", "links", "compute"))
    compute = {}
    for index, entry in enumerate(_list(fields.get("compute", []), "strands.overlap", "compute")):
        name = f"strands.overlap.compute[{index}]"
        row = known_fields(entry, name, ("kind", "link", "factor"))
        key = _member(Kind, row.get("kind"), f"{name}.kind"), _member(LinkScope, row.get("link"), f"{name}.link")
        compute[key] = number(row.get("factor"), f"{name}.factor")
    plain = {field: number(fields.get(field, 1.0), f"strands.overlap.{field}") for field in ("default", "links")}
    return OverlapTable(compute, **plain)


def _member(kind: type[Member], value: Any, name: str) -> Member:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise ValueError(f"{name}={short_repr(value)}: expected one of {known}") from None


def _layer_table(layer: StrandPair) -> dict[str, Any]:
    return {
        "forward": [_segment_table(segment) for segment in layer.forward.segments],
        "backward": [_segment_table(segment) for segment in layer.backward.segments],
        "weights": [
            {"after": weight.after, "compute_ms": weight.compute_s * 1e3, "kind": weight.kind.value}
            for weight in layer.weights
        ],
    }


def _segment_table(segment: Segment) -> dict[str, Any]:
    comm = {} if segment.link is None else {"link": segment.link.value, "comm_ms": segment.comm_s * 1e3}
    return {"compute_ms": segment.compute_s * 1e3, "kind": segment.kind.value, **comm}
