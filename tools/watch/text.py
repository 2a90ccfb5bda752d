"""`weft watch --text`: a run in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from time import sleep
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weft.tools.watch.record import RunRecord
from weft.tools.watch.views import Views

EVERY_S = 2.0
MOST_RANKS = 32
COLOURS = {
    "compute": "blue",
    "optimiser": "magenta",
    "exposed transfers": "yellow",
    "exposed collectives": "bright_magenta",
    "bubbles": "bright_black",
    "data": "red",
    "other": "white",
}
WIDTH = 40


def show(record: RunRecord, *, once: bool, other: RunRecord | None = None) -> int:
    """Show a run until it has ended, or once, and return the exit code."""
    views, console = Views(record, other), Console()
    with Live(screen(views), console=console, auto_refresh=False) as live:
        try:
            while not once and views.show("overview")["live"]:
                sleep(EVERY_S)
                live.update(screen(views), refresh=True)
        except KeyboardInterrupt:
            pass
    return 0


def screen(views: Views) -> RenderableType:
    """Return a run's state: its progress, where the time goes, what ranks do, outliers and limits."""
    return Group(*_parts(views))


def _parts(views: Views) -> Iterator[RenderableType]:
    run = views.show("overview")
    last, state = run["last"], "running" if run["live"] else "ended"
    head = Text(run["name"], style="bold")
    head.append(f"  {state}, step {run['step']} of {run['steps']}", style="dim")
    yield head
    if last:
        yield Text(
            f"loss {last['loss'] or 0:.4f}   step {last['step_seconds']:.4g} s (predicted "
            f"{run['predicted']['step_s']:.4g} s)   {last['tokens_per_second']:,.0f} tokens/s   "
            f"MFU {last['mfu']:.1%}   bubbles {last['bubble_share']:.0%}"
        )
    found = views.show("time")
    if found["measured"].get("step"):
        yield _shares(found)
    yield _ranks(views.show("ranks"))
    heat = views.show("heat")
    for outlier in heat["outliers"]:
        yield Text(f"outlier: {outlier['text']}", style="red")
    for text in heat["pauses"]:
        yield Text(f"irregular: {text}", style="red")
    for limit in views.show("explain"):
        yield Text(f"limit: {limit['text']} (+{limit['gain']:.0%} tokens/s)")


def _shares(found: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, title_justify="left")
    columns, against = {"measured": found["measured"], "predicted": found["predicted"]}, found["against"]
    if against is not None:
        columns[f"{against['name']}, step {against['step']}"] = against["seconds"]
    table.add_column(f"step {found['step']}")
    for name in columns:
        table.add_column(Text(name), justify="right")
    table.add_column("")
    for name in found["order"]:
        cells = round(WIDTH * found["measured"][name] / found["measured"]["step"])
        bar = Text("█" * cells, style=COLOURS[name])
        table.add_row(name, *(f"{seconds[name] * 1e3:.2f} ms" for seconds in columns.values()), bar)
    return table


def _ranks(ranks: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "stage", "pipeline", "site", "host", "does", "waits for"):
        table.add_column(name)
    for rank in ranks[:MOST_RANKS]:
        waits = "" if rank["waits_for"] is None else f"rank {rank['waits_for']}"
        values = (rank["rank"], rank["stage"], rank["pipeline"], rank["site"], rank["host"], rank["slot"], waits)
        table.add_row(*(Text(str(value)) for value in values))  # markup in a name has no effect
    if len(ranks) > MOST_RANKS:
        table.add_row(f"and {len(ranks) - MOST_RANKS} more")
    return table
