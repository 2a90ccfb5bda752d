"""`weft controller`: one address in front of all prefill workers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from weft.conf import load
from weft.conf.host.processes import give_way
from weft.inference.worker.command import controller_url
from weft.recipes.serving.checks import check_certificate
from weft.recipes.serving.processes import NICE


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
    check_certificate(config)
    app = app_of(config, os.environ)
    give_way(NICE)
    print(f"controller: {controller_url(config)}", flush=True)
    serve(app, config.inference.controller)
    return 0
