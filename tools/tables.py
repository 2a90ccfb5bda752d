"""Tables in a terminal, as benchmarks and other commands print them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 130
"""Characters of a line: the same in a terminal and in a log."""


def table_of(rows: Iterable[Mapping[str, object]], title: str = "", *, left: int = 1) -> Table:
    """Return a table of rows, whose keys are the column heads; the first ``left`` columns are text."""
    table = Table(title=f"\n{title}", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for row in rows:
        if not table.columns:
            for number, head in enumerate(row):
                table.add_column(head, justify="left" if number < left else "right")
        table.add_row(*map(str, row.values()))
    return table


def show(*parts: Table | str) -> None:
    """Print tables and lines."""
    console = Console(width=WIDTH, highlight=False)
    for part in parts:
        console.print(part, markup=False)
