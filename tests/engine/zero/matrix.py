"""Every ZeRO stage with every kind of pipeline: 20 clipped steps against a single process.

python -m tests.engine.zero.matrix [WORLD] [fp32|bf16]
"""

from __future__ import annotations

import sys

from tests.engine.tiny import many_losses, reference_losses, tiny_config
from weft.conf.schema import WeftConfig
from weft.tools.ranks import run_ranks

STEPS = 20
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}
"""Largest relative difference of a step's loss."""
PIPELINES = {
    "no pipeline": {"stages": 1},
    "1f1b": {"stages": 2, "schedule": "1f1b"},
    "w on fold": {"stages": 2, "schedule": "w", "placement": "fold"},
    "auto on fold": {"stages": 2, "schedule": "auto", "placement": "fold"},
}


def cases(world: int, precisions: tuple[str, ...] = ("fp32", "bf16")) -> dict[str, WeftConfig]:
    """Configurations whose replicas are 2 or 4 over ``world`` ranks."""
    return {
        f"{name}, {world // layout['stages']} replicas, ZeRO-{zero}, {precision}": tiny_config(
            **layout, zero=zero, precision=precision, layers=4, tied=True
        )
        for name, layout in PIPELINES.items()
        if world // layout["stages"] in (2, 4)
        for zero in range(4)
        for precision in precisions
    }


def worst(configs: list[WeftConfig], world: int, steps: int = STEPS) -> list[float]:
    """Return for each configuration the largest relative difference of a loss from that of one process."""
    results = run_ranks(world, many_losses, configs, steps, timeout_s=590)
    assert all(result == results[0] for result in results), "ranks report different losses"
    found = []
    for config, losses in zip(configs, results[0], strict=True):
        expected = reference_losses(config, world // config.pipeline.stages, steps)
        found.append(max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)))
    return found


if __name__ == "__main__":
    worlds = [int(sys.argv[1])] if len(sys.argv) > 1 else [2, 4, 8]
    for world in worlds:
        chosen = cases(world, tuple(sys.argv[2:]) or ("fp32", "bf16"))
        for name, difference in zip(chosen, worst(list(chosen.values()), world), strict=True):
            print(f"{name:45s} {difference:.1e}", flush=True)
