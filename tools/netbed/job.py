"""A process that runs a Python function in a node."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from weft.tools.children import Child
from weft.tools.netbed.bed import NetBed


class Job(Child):
    """A `Child` in a node, with this process's environment variables."""

    def __init__(self, bed: NetBed, node: str, function: Callable[..., Any], *args: Any) -> None:
        name = f"{function.__name__} in node {node}"
        super().__init__(name, function, *args, enter=partial(bed.enter, node), environment=os.environ)
