"""The control wire: small JSON messages between a run's driver and its agents, authenticated, torch-free."""

from weft.engine.supervision.control.client import ControlClient
from weft.engine.supervision.control.server import ControlServer

__all__ = ["ControlClient", "ControlServer"]
