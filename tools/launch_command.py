"""The command `weft launch`: another process begins the ranks' imports before this one runs its own."""

from __future__ import annotations

from collections.abc import Sequence

from weft.conf.features import is_installed
from weft.tools.launch_arguments import early_agent, read_arguments


def main(argv: Sequence[str]) -> int:
    """Run ``[launcher options] [recipe=NAME] [key=value ...]`` and return the ranks' exit code.

    Raises:
        ValueError: bad input, found before any rank starts.
    """
    arguments = read_arguments(argv)
    early = early_agent() if arguments.may_run_here and is_installed("supervision") else None
    try:
        from weft.tools.launch import run  # takes a second on a busy machine

        return run(arguments, early)
    finally:
        if early is not None:
            early.close()
