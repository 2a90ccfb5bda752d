"""Emulated layers as a job most of whose ranks are emulated, too."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers.case import EngineCase
from benchmarks.peers.weft_engine import emulated_engine
from weft.conf.schema import WeftConfig
from weft.engine.engine import WeftEngine


@dataclass(frozen=True)
class LayersJob:
    """A job of layers, compared with the same job without emulation; see
    `weft.recipes.emulation.job.EmulatedJob`."""

    case: EngineCase
    config: WeftConfig

    def engine(self) -> WeftEngine:
        """Create the engine, as benchmarks do."""
        return emulated_engine(self.case, self.config)
