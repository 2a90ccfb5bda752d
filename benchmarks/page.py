"""Write the tables of `docs/benchmarks.md` from the files in `benchmarks/results/`: `python -m benchmarks.page`.

A table stands between ``<!-- results: FILE: column | column -->`` and ``<!-- end -->``. Without columns it has all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT

RESULTS = Path(__file__).with_name("results")
PAGE = ROOT / "docs" / "benchmarks.md"
BLOCK = re.compile(r"(?ms)^<!-- results: ([\w-]+)(?:: ([^\n]+?))? -->\n.*?^<!-- end -->$")
"""A generated part of the page, with the name of its file and its columns."""


def with_tables(page: str) -> str:
    """Return the page with every generated part replaced."""
    return BLOCK.sub(lambda found: "\n".join(_block(found[1], found[2])), page)


def _block(name: str, chosen: str | None) -> Iterator[str]:
    yield f"<!-- results: {name}{f': {chosen}' if chosen else ''} -->"
    result = json.loads((RESULTS / f"{name}.json").read_text())
    yield f"\n{_source(name, result)}"
    for table in result["tables"]:
        columns = _chosen(table["columns"], chosen)
        if columns:
            yield f"\n{table['title']}:\n" if table["title"] else ""
            for row in (table["columns"], ["---"] * len(table["columns"]), *table["rows"]):
                yield _line([row[column] for column in columns])
    yield "\n<!-- end -->"


def _chosen(columns: Sequence[str], chosen: str | None) -> list[int]:
    """Return the numbers of the chosen columns; a table that has none of them is left out."""
    wanted = columns if chosen is None else chosen.split(" | ")
    return [number for number, column in enumerate(columns) if column in wanted]


def _source(name: str, result: dict[str, Any]) -> str:
    """Return a line with the command, commit and day of a result, and a link to its file."""
    retired = result.get("retired", False)
    command = f"{result['command']} (since removed)" if retired else f"`{result['command']}`"
    gpu = "" if result["gpu"] == "none" else f", {result['gpu']}"
    return f"{command}, [{result['commit']}, {result['date']}](../benchmarks/results/{name}.json){gpu}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
