"""Facts that are made up, for plans without a machine."""

from __future__ import annotations

from transformers import LlamaConfig

from weft.conf.schema import WeftConfig
from weft.engine.layout import RankLayout
from weft.engine.models.sizes import ModelSizes, PartSize
from weft.engine.planning.facts import Facts, Links
from weft.engine.planning.gathering import facts_before_start

MODEL = LlamaConfig(vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=12, num_attention_heads=4)


def given_facts(layout: RankLayout) -> Facts:
    """Four equal layers on ranks of 1 TFLOP/s and a megabyte, with free links."""
    part = PartSize(100, 100)
    return Facts(
        layout=layout,
        model=ModelSizes(before=part, layers=(part,) * 4, after=part, hidden_size=8, vocab_size=10),
        flops_per_s=1e12,
        device_bytes=1e6,
        stage_costs={},
        links=Links(),
        replica_nodes=(0,) * layout.replicas,
        sources={"links": "given"},
    )


def facts_of(config: WeftConfig, hf_config: LlamaConfig = MODEL) -> Facts:
    """Return the facts of a run of ``config`` with one replica, before it starts."""
    config.cluster.ranks = config.pipeline.stages
    return facts_before_start(config, hf_config)
