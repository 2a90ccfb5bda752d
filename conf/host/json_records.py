"""Files with one JSON object per line, read as they grow."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

from weft.conf.host.documents import MOST_FILE_BYTES


class JsonRecords:
    """Reads a file of records. It may be truncated, so it is read again if it has become shorter."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position, self._inode, self._records = 0, 0, list[dict[str, Any]]()

    def read(self) -> list[dict[str, Any]]:
        """Return all complete records, in order. Lines that are not JSON objects are left out."""
        try:
            if not self._path.is_file():
                return []
            with open(self._path, "rb") as file:
                found = self._path.stat()
                if found.st_size < self._position or found.st_ino != self._inode:
                    self._position, self._inode, self._records = 0, found.st_ino, []
                file.seek(self._position)
                lines = BytesIO(file.read(MOST_FILE_BYTES)).readlines()
        except FileNotFoundError:
            return []
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self._position += len(line)
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                self._records.append(record)
        return self._records
