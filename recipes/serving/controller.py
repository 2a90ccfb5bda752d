"""`weft controller`: one address in front of all prefill workers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from weft.conf import load

NICE = 10
"""Niceness of the controller, so that the ranks of this host have priority."""


def main(argv: Sequence[str]) -> int:
    """Run ``[recipe=NAME] [key=value ...]`` until SIGINT or SIGTERM.

    It needs the same settings as `weft serve`, to locate workers and boards. Either command may
    be started first.

    Raises:
        ValueError: the input is invalid, or the server's packages are not installed.
    """
    parser = argparse.ArgumentParser(
        prog="weft controller",
        usage="weft controller [recipe=NAME] [key=value ...]",
        description="Run the controller, which sends each prompt to the prefill worker that finishes it first.",
    )
    _, overrides = parser.parse_known_args(argv)
    config = load(overrides)
    try:
        from weft.inference.controller.server import app_of, serve
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; pip install 'weft[serve]'") from error
    app = app_of(config, os.environ)
    os.nice(NICE)
    settings = config.inference.controller
    print(f"controller: http://{settings.host}:{settings.port}", flush=True)
    serve(app, settings)
    return 0
