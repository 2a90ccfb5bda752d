"""Plans that ranks make together, without engines."""

from __future__ import annotations

import torch.distributed as dist

from weft.conf.schema import WeftConfig
from weft.engine.distributed import from_rank_zero, init_distributed
from weft.engine.initialize import PreparedRun
from weft.engine.planning.gathering import facts_of_ranks
from weft.engine.planning.run_plan import RunPlan, settle_placement
from weft.engine.stages.files.loading import load_hf_config
from weft.pipeline.placement import Placement


def plans_of_ranks(configs: list[WeftConfig]) -> list[RunPlan]:
    """The plans that this rank holds of several runs, one after the other."""
    device = init_distributed(60.0)
    plans = []
    for config in configs:
        facts = facts_of_ranks(config, load_hf_config(config.model), device)
        placement = from_rank_zero(lambda config=config, facts=facts: settle_placement(config, facts), Placement)
        run = PreparedRun.open(config, facts, placement, device)
        plans.append(run.plan)
        if run.wan is not None:
            run.wan.close()
        run.collectives.close()
        dist.barrier()
    return plans
