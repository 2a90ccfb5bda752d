"""Read and write schedules: Weft's JSON, and the CSV of torch.distributed.pipelining."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from weft.conf.host.documents import parse_json, read_text
from weft.pipeline.action import COMPUTE, Action, Slot, parse_slot, slot_text
from weft.pipeline.limits import check_size, count, short_repr
from weft.pipeline.order import time_slots
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule

_VERSION = 1


def load_schedule(path: Path) -> Schedule:
    """Read a schedule: torch's compute-only CSV if the name ends in ``.csv``, JSON otherwise.

    Raises:
        ValueError: the file does not exist, or holds no valid schedule. The message names the invalid part.
    """
    try:
        text = read_text(path)
        return schedule_from_csv(text, name=path.stem) if path.suffix == ".csv" else schedule_from_json(text)
    except ValueError as error:
        raise ValueError(f"schedule file {path}: {error}") from error


def schedule_to_json(schedule: Schedule) -> str:
    """Return JSON with one line per rank, and slots in their text form."""
    rows = ",\n".join(f"    {json.dumps([slot_text(slot) for slot in row])}" for row in schedule.rows)
    head = {
        "format": "weft.schedule",
        "version": _VERSION,
        "name": schedule.name,
        "placement": _placement_to_dict(schedule.placement),
        "num_microbatches": schedule.num_microbatches,
    }
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
    return f'{{\n{lines},\n  "rows": [\n{rows}\n  ]\n}}\n'


def schedule_from_json(text: str) -> Schedule:
    """Parse the output of `schedule_to_json`.

    Raises:
        ValueError: a field is missing or wrong; the message names it.
    """
    data = _read(text, "weft.schedule")
    rows = _field(data, "rows", list)
    for rank, row in enumerate(rows):
        if not isinstance(row, list):
            raise ValueError(f"rows: rank {rank} is no list of cells")
    placement = _placement_from_dict(_field(data, "placement", dict))
    num_microbatches = count(data.get("num_microbatches"), "num_microbatches")
    check_size(placement.num_stages, num_microbatches)
    slots = tuple(tuple(_parse_row(enumerate(row), rank)) for rank, row in enumerate(rows))
    if len(rows) != placement.num_ranks:
        raise ValueError(
            f"rows: {len(rows)} rows, its placement has {placement.num_ranks} ranks; write one row per rank"
        )
    return Schedule(_field(data, "name", str), placement, num_microbatches, slots)


def schedule_to_csv(schedule: Schedule) -> str:
    """Torch's compute-only CSV: one row per rank and one cell per time slot, empty while idle.

    ``_PipelineScheduleRuntime._load_csv(path, format="compute_only")`` reads it. Transfers,
    reductions and steps are left out, because torch adds its own.
    """
    compute = schedule.with_rows([[slot for slot in row if slot[0].op in COMPUTE] for row in schedule.rows])
    rows = time_slots(compute)
    return "\n".join(",".join("" if slot is None else slot_text(slot) for slot in row) for row in rows) + "\n"


def schedule_from_csv(text: str, *, name: str) -> Schedule:
    """Parse torch's compute-only CSV (``_dump_csv(path, format="compute_only")``).

    The placement is inferred from the cells. The format has no sites, so each group of ranks
    becomes a site.

    Raises:
        ValueError: a cell is not a compute action, or no `Placement` matches the cells.
    """
    rows: list[list[Slot]] = []
    for rank, cells in enumerate(_csv_rows(text)):
        row = _parse_row(((index, cell.strip()) for index, cell in enumerate(cells) if cell.strip()), rank)
        rows.append(row)
        for slot in row:
            if slot[0].op not in COMPUTE:
                raise ValueError(f"rank {rank}: {slot_text(slot)} in a compute-only schedule; dump it as compute_only")
    if not any(rows):
        raise ValueError("no actions in it")
    held = [(action.stage, rank) for rank, row in enumerate(rows) for slot in row for action in slot]
    stage_ranks = dict(held)
    for stage, rank in held:
        if stage_ranks[stage] != rank:
            raise ValueError(f"stage {stage} stands on rank {rank} and on rank {stage_ranks[stage]}")
    missing = next((number for number, stage in enumerate(sorted(stage_ranks)) if number != stage), None)
    if missing is not None:
        raise ValueError(f"stage {missing} is missing: stages run from 0 to {max(stage_ranks)}")
    num_microbatches = 1 + max(a.microbatch for row in rows for slot in row for a in slot if a.microbatch is not None)
    placement = Placement.infer(tuple(stage_ranks[stage] for stage in range(len(stage_ranks))))
    check_size(placement.num_stages, num_microbatches)
    if placement.num_ranks != len(rows):
        raise ValueError(f"{len(rows)} rows for stages on {placement.num_ranks} ranks")
    return Schedule(name, placement, num_microbatches, tuple(map(tuple, rows)))


def _csv_rows(text: str) -> Iterator[list[str]]:
    try:
        yield from csv.reader(text.splitlines())
    except csv.Error as error:
        raise ValueError(f"it is not CSV ({error})") from error


def _parse_row(cells: Iterable[tuple[int, object]], rank: int) -> list[Slot]:
    """Parse the slots of a row; refuse duplicates before anything else is built from them."""
    row: list[Slot] = []
    seen: set[Action] = set()
    for index, cell in cells:
        if not isinstance(cell, str):
            raise ValueError(f"rank {rank}, cell {index}: {short_repr(cell)} is not text")
        try:
            slot = parse_slot(cell)
        except ValueError as error:
            raise ValueError(f"rank {rank}, cell {index}: {error}") from error
        for action in slot:
            if action.op in COMPUTE and action in seen:
                raise ValueError(f"rank {rank}, cell {index}: {action} stands twice; leave one out")
            seen.add(action)
        row.append(slot)
    return row


def _placement_to_dict(placement: Placement) -> dict[str, Any]:
    cell = {"pipelines": placement.pipelines} if placement.pipelines > 1 else {}
    return {"groups": list(placement.groups), "legs": placement.legs, "sites": list(placement.sites), **cell}


def _placement_from_dict(data: dict[str, Any]) -> Placement:
    pipelines = count(data.get("pipelines", 1), "placement.pipelines")
    groups, sites = _whole_numbers(data, "groups"), _whole_numbers(data, "sites")
    return Placement(groups, _field(data, "legs", str), sites, pipelines)


def _read(text: str, form: str) -> dict[str, Any]:
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != form:
        raise ValueError(f"format: expected {form!r}; write it with weft schedule --format json")
    if data.get("version") != _VERSION:
        raise ValueError(
            f"version={short_repr(data.get('version'))}: this Weft reads version {_VERSION}; write it anew"
        )
    return data


def _field(data: dict[str, Any], name: str, kind: type) -> Any:
    value = data.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name}={short_repr(value)}: expected {kind.__name__}")
    return value


def _whole_numbers(data: dict[str, Any], name: str) -> tuple[int, ...]:
    values = _field(data, name, list)
    if not all(type(value) is int for value in values):
        raise ValueError(f"{name}={short_repr(values)}: expected whole numbers")
    return tuple(values)
