"""Write the tables of `docs/benchmarks.md` from the files in `benchmarks/results/`: `python -m benchmarks.page`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT

RESULTS = Path(__file__).with_name("results")
PAGE = ROOT / "docs" / "benchmarks.md"
BLOCK = re.compile(r"(?ms)^<!-- results: ([\w -]+?) -->\n.*?^<!-- end -->$")
"""A generated part of the page, with the names of its files."""


def with_tables(page: str) -> str:
    """Return the page with every generated part replaced."""
    return BLOCK.sub(lambda found: "\n".join(_block(found[1].split())), page)


def _block(names: list[str]) -> Iterator[str]:
    yield f"<!-- results: {' '.join(names)} -->"
    for name in names:
        result = json.loads((RESULTS / f"{name}.json").read_text())
        yield f"\n{_source(name, result)}"
        for table in result["tables"]:
            yield f"\n{table['title']}:\n" if table["title"] else ""
            yield from map(_line, (table["columns"], ["---"] * len(table["columns"]), *table["rows"]))
    yield "\n<!-- end -->"


def _source(name: str, result: dict[str, Any]) -> str:
    """Return a line with the command, commit, day and machine of a result, and a link to its file."""
    retired = result.get("retired", False)
    command = f"{result['command']} (since removed)" if retired else f"`{result['command']}`"
    machine = f"{result['cores']} cores, GPU: {result['gpu']}, torch {result['torch']}"
    return (
        f"{command}; commit {result['commit']}, {result['date']}; {machine}; [file](../benchmarks/results/{name}.json)"
    )


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
