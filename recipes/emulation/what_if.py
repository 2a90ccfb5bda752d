"""What-if conditions of an emulation: differences from the configured job."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.comm.emulated.operation_log import EmulationError
from weft.pipeline.costs import CostModel, LinkCost

TIMEOUT_S = 0.2
"""Seconds until TCP retransmits a lost packet: the kernel's shortest timeout."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Conditions that differ from the configured job.

    Attributes:
        slow: factor of the speed of single global ranks.
        speed: factor of the speed of all ranks of a pipeline rank's stages, as for another kind of GPU.
        bandwidth: factor of the bandwidth of links between sites.
        latency_ms: extra one-way latency between sites.
        jitter_ms: maximum extra delay of a message between sites, uniformly distributed.
        loss: fraction of messages between sites that are retransmitted.
        replicas: number of replicas; 0 keeps the job's.
    """

    slow: dict[int, float] = field(default_factory=dict)
    speed: dict[int, float] = field(default_factory=dict)
    bandwidth: float = 1.0
    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    replicas: int = 0

    @classmethod
    def parse(cls, given: Sequence[str]) -> WhatIf:
        """Parse conditions such as ``slow-rank=7:0.8``, ``speed=0-3:1.5``, ``bandwidth=2`` and ``latency-ms=10``.

        Raises:
            EmulationError: a condition is unknown, or its value is invalid.
        """
        found: dict[str, Any] = {"slow": {}, "speed": {}}
        for text in given:
            name, _, value = text.partition("=")
            try:
                if name == "slow-rank":
                    rank, _, factor = value.partition(":")
                    found["slow"][int(rank)] = _above_zero(factor)
                elif name == "speed":
                    stages, _, factor = value.partition(":")
                    first, _, last = stages.partition("-")
                    found["speed"] |= dict.fromkeys(range(int(first), int(last or first) + 1), _above_zero(factor))
                elif name == "bandwidth":
                    found["bandwidth"] = _above_zero(value)
                elif name in ("latency-ms", "jitter-ms"):
                    found[name.replace("-", "_")] = _at_least_zero(value)
                elif name == "loss" and _at_least_zero(value) < 1:
                    found["loss"] = float(value)
                elif name == "replicas" and int(value) > 0:
                    found["replicas"] = int(value)
                else:
                    raise ValueError
            except ValueError:
                raise EmulationError(
                    f"--what-if {text}: give slow-rank=RANK:SPEED, speed=STAGES:SPEED (as in 0-3:1.5), "
                    "bandwidth=FACTOR, latency-ms=MS, jitter-ms=MS, loss=SHARE or replicas=N"
                ) from None
        return cls(**found)

    def check(self, num_ranks: int, num_stages: int) -> None:
        """Check that the job has the named ranks and stages. Raise EmulationError if the job lacks one of them."""
        for name, keys, count in (("slow-rank", self.slow, num_ranks), ("speed", self.speed, num_stages)):
            if unknown := [key for key in keys if not 0 <= key < count]:
                raise EmulationError(f"--what-if {name}={unknown[0]}: the job has 0 to {count - 1}")

    def factor(self, rank: int, stage: int) -> float:
        """Return the factor of a global rank's speed at a pipeline rank."""
        return self.slow.get(rank, 1.0) * self.speed.get(stage, 1.0)

    def costs(self, costs: CostModel) -> CostModel:
        """Return the costs with the changed latency and bandwidth of links between sites."""
        links = tuple((pair, self._link(link)) for pair, link in costs.wan_links)
        return replace(costs, wan=self._link(costs.wan), wan_links=links)

    def _link(self, link: LinkCost) -> LinkCost:
        return replace(
            link,
            latency_s=link.latency_s + self.latency_ms / 1e3,
            bandwidth_bps=link.bandwidth_bps * self.bandwidth,
            pair_bps=link.pair_bps * self.bandwidth,
        )

    def late_s(self, rng: random.Random) -> float:
        """Draw the additional seconds of the next message between sites, from jitter and loss."""
        late_s = rng.uniform(0.0, self.jitter_ms / 1e3) if self.jitter_ms else 0.0
        return late_s + (TIMEOUT_S if self.loss and rng.random() < self.loss else 0.0)


def _above_zero(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise ValueError(text)
    return float(text)


def _at_least_zero(text: str) -> float:
    if not 0 <= float(text) < float("inf"):
        raise ValueError(text)
    return float(text)
