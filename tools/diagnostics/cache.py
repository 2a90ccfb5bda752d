"""`weft doctor cache`: list what was measured on this machine, with date, load and spread, or remove it."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path

from weft.comm.native import cache_folder
from weft.conf.files import JsonCache
from weft.conf.measurements import files_in, notes_of, remove
from weft.conf.schema import DataConfig
from weft.tools.tables import show, table_of


def run(args: argparse.Namespace) -> int:
    """List the values, or remove those that the options name.

    Raises:
        ValueError: nothing has the name of what is to be removed.
    """
    folder = Path(args.folder or DataConfig.cache_dir).expanduser()
    caches = [cache for each in dict.fromkeys((folder, cache_folder().parent)) for cache in files_in(each)]
    if args.clear is not None:
        return _clear(caches, args.clear)
    rows = [row for cache in caches for row in _rows(cache)]
    if rows:
        show(table_of(rows, f"measured and kept in {folder}", left=3), "`weft doctor cache --clear [NAME ...]` removes")
    else:
        print(f"nothing was measured yet ({folder})")
    return 0


def _rows(cache: JsonCache) -> list[dict[str, object]]:
    notes = notes_of(cache)
    written = f"before {datetime.fromtimestamp(cache.path.stat().st_mtime):%Y-%m-%d %H:%M}"
    if cache.path.parent.name == "prefill":
        return [{"file": f"prefill/{cache.path.name}", "value": "costs of prefills", "measured": written}]
    return [{"file": cache.path.name, "value": name, "measured": notes.get(name, written)} for name in cache.read()]


def _clear(caches: list[JsonCache], names: list[str]) -> int:
    count = 0
    for cache in caches:
        chosen = {
            value
            for value in cache.read()
            if not names or any(name in value or name in (cache.path.name, cache.path.stem) for name in names)
        }
        if chosen:
            remove(cache, set(cache.read()) if cache.path.parent.name == "prefill" else chosen)
            count += len(chosen)
    if names and not count:
        raise ValueError(
            f"--clear {' '.join(names)}: nothing that is kept has such a name; `weft doctor cache` lists all"
        )
    print(f"{count} values removed")
    return 0
