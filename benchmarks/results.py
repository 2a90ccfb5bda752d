"""Results of a benchmark as a table and as JSON: figures, goals, machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import asdict, is_dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.table import Table

from weft.conf.host.files import require_writable, write_atomic
from weft.tools import tables

ROOT = Path(__file__).resolve().parents[1]
_SHOWN: list[Table] = []


def parse(parser: argparse.ArgumentParser, argv: Sequence[str], **known: Collection) -> argparse.Namespace:
    """Return the arguments of a benchmark, with ``--json FILE`` as an additional option.

    Args:
        known: allowed names, by option.
    """
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure here")
    args = parser.parse_args(argv)
    args.command = shlex.join([*parser.prog.split(), *argv])
    if args.json is not None:
        require_writable("--json", args.json)
    for option, names in known.items():
        if unknown := [str(name) for name in getattr(args, option) or () if name not in names]:
            raise ValueError(f"--{option} {' '.join(unknown)}: not known; choose from {', '.join(map(str, names))}")
    return args


def finish(args: argparse.Namespace, bench: str, figures: Any, *, met: bool | None = None) -> int:
    """Call `write_json`, and return the exit status: 1 if the goals were not met, else 0."""
    write_json(args, bench, figures, met=met)
    return 1 if met is False else 0


def write_json(args: argparse.Namespace, bench: str, figures: Any, *, met: bool | None = None) -> None:
    """Write ``args.json``, if it was given.

    Args:
        figures: a list of dataclasses or dictionaries, or a `rich.table.Table`.
        met: True if the benchmark's goals were met, or None if it has none.
    """
    if args.json is None:
        return
    given = {name: value for name, value in vars(args).items() if name not in ("json", "command")}
    asked = {"bench": bench, "command": args.command, "arguments": given, "met": met}
    found = {**asked, **_measured_on(), "figures": _plain(figures), "tables": list(map(_printed, _SHOWN))}
    write_atomic(args.json, json.dumps(found, indent=1, ensure_ascii=False, default=str) + "\n")


def show(*parts: Table | str) -> None:
    """Print tables and lines, and keep them so that `write_json` can write them as printed (see `benchmarks.page`)."""
    _SHOWN.extend(part for part in parts if isinstance(part, Table))
    tables.show(*parts)


def _printed(table: Table) -> dict[str, Any]:
    rows = zip(*(map(str, column.cells) for column in table.columns), strict=True)
    heads = [str(column.header) for column in table.columns]
    return {"title": str(table.title or "").strip(), "columns": heads, "rows": [list(row) for row in rows]}


def _plain(figures: Any) -> Any:
    if isinstance(figures, Table):
        printed = _printed(figures)
        return [dict(zip(printed["columns"], row, strict=True)) for row in printed["rows"]]
    if is_dataclass(figures) and not isinstance(figures, type):
        return asdict(figures)
    if isinstance(figures, dict):
        return {str(name): _plain(value) for name, value in figures.items()}
    return [_plain(figure) for figure in figures] if isinstance(figures, list | tuple) else figures


def _measured_on() -> dict[str, Any]:
    return {
        "commit": _commit(),
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _commit() -> str | None:
    """Return the commit of this checkout, with a plus if files differ from it, or None outside of a checkout."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
