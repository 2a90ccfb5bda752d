"""A rank of `weft doctor ring`, as a job's launcher starts it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

from weft.tools import doctor


def ring_rank(options: Sequence[str]) -> tuple[int, str]:
    """The exit code, and what this rank prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = doctor.main(["ring", "--json", *options])
    return code, said.getvalue()
