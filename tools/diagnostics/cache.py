"""`weft doctor cache`: list the measurements of this machine, with date, load and spread, or remove them."""

from __future__ import annotations

import argparse
from pathlib import Path

from weft.comm.native import cache_folder
from weft.conf.host.files import JsonCache
from weft.conf.host.measurements import MEASURED, TRACED, Measurements, files_in
from weft.conf.schema import DataConfig
from weft.tools.tables import show, table_of


def run(args: argparse.Namespace) -> int:
    """List the values, or remove those that the options name.

    Raises:
        ValueError: there is no measurement with the name to remove.
    """
    folder = Path(args.folder or DataConfig.cache_dir).expanduser()
    folders = dict.fromkeys((folder, cache_folder().parent))
    if args.clear is not None:
        return _clear([JsonCache(path) for each in folders for path in files_in(each)], args.clear)
    rows = [row for each in folders for path in files_in(each) for row in _rows(path)]
    if rows:
        show(table_of(rows, f"measured and kept in {folder}", left=3), "`weft doctor cache --clear [NAME ...]` removes")
    else:
        print(f"nothing was measured yet ({folder})")
    return 0


def _rows(path: Path) -> list[dict[str, object]]:
    file = path.name if path.name in (*MEASURED, *TRACED) else f"{path.parent.name}/{path.name}"
    if path.name in TRACED:
        return [{"file": file, "value": name, "measured": "traced"} for name in JsonCache(path).read()]
    return [
        {"file": file, "value": name, "measured": f"{found}{'; to be measured anew' if found.is_due else ''}"}
        for name, found in Measurements(path).read().items()
    ]


def _clear(caches: list[JsonCache], names: list[str]) -> int:
    count = 0
    for cache in caches:
        chosen = {
            value
            for value in cache.read()
            if not names or any(name in value or name in (cache.path.name, cache.path.stem) for name in names)
        }
        if chosen:
            cache.remove(chosen)
            count += len(chosen)
    if names and not count:
        raise ValueError(
            f"--clear {' '.join(names)}: nothing that is kept has such a name; `weft doctor cache` lists all"
        )
    print(f"{count} values removed")
    return 0
