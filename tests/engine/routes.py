"""Training of replicas that use different sites, and their reductions of gradients."""

from __future__ import annotations

from tests.engine.tiny import many_losses
from weft.conf.schema import WeftConfig
from weft.engine.initialize import init_distributed


def losses_over_sites(configs: list[WeftConfig], steps: int) -> list[list[float]]:
    """Losses of several runs of one job, whose ranks know from the beginning which sites they are at."""
    init_distributed(configs[0])
    return many_losses(configs, steps)


def meshes_of_reductions(config: WeftConfig) -> tuple[list[tuple[int, ...]], list[str], tuple[int, ...], str]:
    """Return the meshes of this rank's reductions: those that are open, the kind of each group, the nodes, and the
    cost."""
    from weft.engine.initialize import initialize

    init_distributed(config)
    engine, *_ = initialize(config=config)
    gradients = engine.collectives.gradients
    axes = [] if gradients is None else gradients.axes()
    kinds = [
        type(gradients.process_group(mesh, axis)._get_backend_name and gradients.process_group(mesh, axis))
        for mesh, axis in axes
    ]
    found = [mesh.shape for mesh, _ in axes], [kind.__name__ for kind in kinds], engine.collectives.group.nodes
    source = engine.plan.facts.sources["collectives"]
    engine.destroy()
    return *found, source
