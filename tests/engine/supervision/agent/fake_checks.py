"""A check that leaves the number of the process which imported it."""

import os
from pathlib import Path

IMPORTED_BY = os.getpid()


def run(argv):
    path, code = argv
    assert os.getpid() != IMPORTED_BY
    Path(path).write_text(str(IMPORTED_BY))
    return int(code)
