"""The engine under NCCL's rules: it ends, computes what one process computes, and no step makes its host wait."""

import os
from dataclasses import replace
from functools import partial

import pytest

from tests.comm.collectives.balanced import regular
from tests.device.build import obstacle
from tests.device.engines import (
    a_run,
    adapted_under_rules,
    divided_under_rules,
    losses_under_rules,
    without_eager_connection,
)
from tests.device.ranks import run_on_devices
from tests.engine.parallel.axis_training import pair_config
from tests.engine.stages.tiny import tiny
from tests.engine.tiny import reference_losses, tiny_config
from tests.quickstart import TINY_QUICKSTART
from weft.comm.collectives import AlphaBeta, CollectiveCosts, LinkClass, Primitive
from weft.comm.collectives.cache import CostCache, topology_key
from weft.conf.host.measurements import Measurements
from weft.conf.schema import Partition

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(bool(obstacle()), reason=obstacle())]

STEPS = 3
ALLOWED = {
    "parallel/experts.py": "has to know how many tokens travel before they can",
    "a group over sites at execution/loss.py": "the loss of the whole step crosses sites when its work is done",
    "a group over sites at execution/step_state.py": "refuses a step without labels, whose count crosses sites",
    "a group over sites at zero/bucket.py": "so does the sum of tied weights, after the last reduction",
    "a group over sites at zero/finite.py": "so does the norm",
    "a group over sites at zero/optimizer.py": "so does the sum of squares for it",
    "event.synchronize at comm/rts_channel.py": "a sender's thread waits until the device has reached the send",
    "event.synchronize at wan/staging.py": "a thread waits for copies that cross sites",
    "event.synchronize at sites/work.py": "so does the thread of a group over sites",
}
"""Where the host may wait inside a step, and why."""
GROUPED_IN_FP32 = tuple(f"copy to pageable memory at {where}" for where in ("autograd", "backward/split.py"))
"""Further places with experts: torch multiplies matrices of fp32 in groups whose sizes the host reads."""
FOUR = {
    "gpipe": (4, {"schedule": "gpipe", "microbatches": 5}),
    "1f1b": (4, {}),
    "1f1b, tied over ranks": (4, {"tied": True}),
    "interleaved": (4, {"schedule": "interleaved"}),
    "w, fold, tied": (4, {"schedule": "w", "placement": "fold", "tied": True}),
    "dualpipev, fold": (4, {"schedule": "dualpipev", "placement": "fold", "microbatches": 8}),
    "zbv, fold, LoRA": (4, {"schedule": "zbv", "placement": "fold", "lora": True}),
    "auto, straight": (4, {"schedule": "auto", "microbatches": 8}),
    "auto, fold": (4, {"schedule": "auto", "placement": "fold"}),
    "auto, site fold": (4, {"schedule": "auto", "placement": "site_fold", "sites": (2, 2)}),
    "several tensors in one message": (2, {"arch": "gemma4_text"}),
    "several tensors in one message, w, fold": (2, {"arch": "gemma4_text", "schedule": "w", "placement": "fold"}),
    "two sites, a DP-cell of two": (2, {"sites": (1, 1), "cell": 2, "zero": 1}),
    "no pipeline, ZeRO-3": (1, {"zero": 3}),
    "replicas compared in every step": (2, {"compare_every": 1}),
    "replicas compared in every second step, ZeRO-1": (1, {"compare_every": 2, "zero": 1}),
    "bf16, ZeRO-2": (2, {"zero": 2, "precision": "bf16"}),
    **{
        f"{schedule}, ZeRO-{zero}, tied": (
            2,
            {"schedule": schedule, "placement": placement, "zero": zero, "tied": True},
        )
        for schedule, placement in (("1f1b", "straight"), ("w", "fold"))
        for zero in range(4)
    },
}
SHARED = {
    "context 2 x stages 2": {"context": 2, "stages": 2},
    "context 2 x replicas 2, ZeRO-3": {"context": 2, "stages": 1, "zero": 3},
    "context 2, heads": {"context": 2, "exchange": "all_to_all", "stages": 2},
    "context 2, ring, w, fold": {"context": 2, "exchange": "ring", "stages": 2, "schedule": "w", "placement": "fold"},
    "context 2, w, fold": {"context": 2, "stages": 2, "schedule": "w", "placement": "fold"},
    "expert 2 x stages 2, ZeRO-1": {"expert": 2, "stages": 2, "zero": 1},
    "expert 2 x replicas 4, ZeRO-3": {"expert": 2, "stages": 1, "zero": 3},
    "context 2, expert 4, ZeRO-2": {"context": 2, "expert": 4, "stages": 1, "zero": 2},
    "tensor 2, expert 4, ZeRO-1": {"tensor": 2, "expert": 4, "stages": 1, "zero": 1},
    "tensor 2 x stages 2": {"tensor": 2, "stages": 2},
    "tensor 2, w, fold, tied": {"tensor": 2, "stages": 2, "schedule": "w", "placement": "fold", "tied": True},
    "tensor 2, zbv, fold, LoRA": {"tensor": 2, "stages": 2, "schedule": "zbv", "placement": "fold", "lora": True},
    "tensor 2 x context 2, ZeRO-1": {"tensor": 2, "context": 2, "stages": 1, "zero": 1},
    **{f"tensor 2 x replicas 2, ZeRO-{zero}": {"tensor": 2, "stages": 1, "zero": zero} for zero in range(4)},
}
"""Keywords of `tiny_config` for ranks that share sequences, experts and matrices."""
RING = {
    "ring": {"context": 3, "exchange": "ring", "stages": 1},
    "ring, ZeRO-3": {"context": 3, "exchange": "ring", "stages": 1, "zero": 3},
    "gather": {"context": 3, "exchange": "gather", "stages": 1},
}
"""Keywords of `tiny_config` for three ranks: of two, each is before and behind the other."""
PAIRS = {
    "tensor 2, recomputed": {"tensor": 2, "stages": 2, "checkpointing": True},
    "context 2, ZeRO-3": {"context": 2, "stages": 2, "zero": 3},
    "context 2, heads": {"context": 2, "exchange": "all_to_all", "stages": 2},
    "context 2, ring": {"context": 2, "exchange": "ring", "stages": 2},
    "expert 2, ZeRO-1": {"arch": "mixtral", "expert": 2, "stages": 2, "zero": 1},
}
"""Keywords of `pair_config`, for pairs of a fold that run interleaved."""
OVER_SITES = {
    "1f1b, tied over sites": (4, {"sites": (2, 2), "tied": True}),
    "w, fold, ZeRO-1": (4, {"sites": (2, 2), "schedule": "w", "placement": "fold", "zero": 1}),
    "auto, site fold": (4, {"sites": (2, 2), "schedule": "auto", "placement": "site_fold"}),
    "a DP-cell of two, ZeRO-2, tied": (2, {"sites": (1, 1), "cell": 2, "zero": 2, "tied": True}),
    "a DP-cell of two, ZeRO-3, compared": (2, {"sites": (1, 1), "cell": 2, "zero": 3, "compare_every": 1}),
    "bf16": (2, {"sites": (1, 1), "precision": "bf16"}),
}
"""Configuration of two sites of two ranks each, whose process groups are those of `weft.comm.wan.sites`."""
WHOLE = {"sites": (2, 2), "routes": [["site0"], ["site1"]]}
MIXED = {"sites": (1, 1, 2), "routes": [["site0", "site1"], ["site2"]]}
ROUTES = {
    (0, 0, 1, 1): {
        "a replica at each site, tied": (2, {**WHOLE, "tied": True}),
        "a replica at each site, w, fold, ZeRO-2": (2, {**WHOLE, "schedule": "w", "placement": "fold", "zero": 2}),
        "a replica at each site, ZeRO-3": (2, {**WHOLE, "zero": 3}),
    },
    (0, 1, 2, 2): {
        "a replica over two sites, and one at a third, tied, ZeRO-1": (2, {**MIXED, "tied": True, "zero": 1}),
        "a replica over two sites, and one at a third, compared": (2, {**MIXED, "compare_every": 1}),
    },
}
"""By the site of each of four ranks: replicas that go through different sites."""
EIGHT = {
    "1f1b, 8 stages": (8, {"layers": 8, "microbatches": 8}),
    "w, fold, two replicas, ZeRO-1, tied": (4, {"schedule": "w", "placement": "fold", "zero": 1, "tied": True}),
    "auto, fold, two replicas, ZeRO-3": (4, {"schedule": "auto", "placement": "fold", "zero": 3}),
    "1f1b, four replicas, ZeRO-2": (2, {"zero": 2}),
}
SCATTER, GATHER = Primitive.reduce_scatter, Primitive.all_gather
FLAT, ALONG_AXES, IN_CHUNKS, REDUCED_IN_CHUNKS = (
    {(SCATTER, (4,), (Primitive.reduces,), 1), (GATHER, (4,), (Primitive.broadcasts,), 1)},
    {(SCATTER, (2, 2), (SCATTER, SCATTER), 1), (GATHER, (2, 2), (GATHER, GATHER), 1)},
    {(SCATTER, (2, 2), (SCATTER, SCATTER), 8), (GATHER, (2, 2), (GATHER, GATHER), 8)},
    {(Primitive.all_reduce, (2, 2), (SCATTER, SCATTER, GATHER, GATHER), 8)},
)
"""Rewrites, as `divided_under_rules` returns them."""
DIVIDED = {
    "1f1b, ZeRO-2": (Partition.primitive, {"zero": 2}, FLAT),
    "interleaved, ZeRO-1": (Partition.group, {"schedule": "interleaved", "zero": 1}, ALONG_AXES),
    "interleaved, ZeRO-3": (Partition.group, {"schedule": "interleaved", "zero": 3}, ALONG_AXES),
    "interleaved, ZeRO-1, chunks": (Partition.workload, {"schedule": "interleaved", "zero": 1}, IN_CHUNKS),
    "interleaved, ZeRO-3, chunks": (Partition.workload, {"schedule": "interleaved", "zero": 3}, IN_CHUNKS),
    "w, fold, chunks": (Partition.workload, {"schedule": "w", "placement": "fold"}, REDUCED_IN_CHUNKS),
}
"""`zero.partition`, keywords of `tiny_config`, and rewrites, for two stages of four replicas on two hosts."""


def _config(*, stages, arch=None, **keywords):
    """One of `tiny_config`, of ``arch`` where it is given."""
    config = tiny_config(stages=stages, **keywords)
    if arch is not None:
        config.model = replace(tiny(arch), self_check=False)
    return config


def _check(cases, world, **job):
    configs = [_config(stages=stages, **keywords) for stages, keywords in cases.values()]
    first_device = int("sites" not in job)  # of a host with sites, the rank of device 0 listens
    train = partial(losses_under_rules, **job)
    results = run_on_devices(world, train, configs, STEPS, timeout_s=800, first_device=first_device)
    wrong = {}
    for name, config, losses in zip(cases, configs, results[0][0], strict=True):
        low = config.train.precision.value
        expected = reference_losses(config, world // config.pipeline.stages, STEPS)
        if losses != pytest.approx(expected, rel=1e-5 if low == "fp32" else 1e-3):
            wrong[name] = (losses, expected)
    assert not wrong
    assert all(losses == results[0][0] for losses, _ in results), "ranks report different losses"
    _refuse_waits(waits for _, waits in results)


def _refuse_waits(waits, *more):
    allowed = (*ALLOWED, *more)
    found = {place for of_rank in waits for place in of_rank if not any(part in place for part in allowed)}
    assert not found, "the host waits inside a step:\n" + "\n".join(sorted(found))


def test_every_schedule_and_zero_stage_on_four_ranks():
    _check(FOUR, 4, bound=False)


def test_process_groups_that_span_sites(monkeypatch):
    monkeypatch.setenv("WEFT_KEY", "a key of this test")
    _check(OVER_SITES, 4, sites=(0, 0, 1, 1))


@pytest.mark.parametrize("sites", ROUTES)
def test_replicas_that_go_through_different_sites(sites, monkeypatch):
    monkeypatch.setenv("WEFT_KEY", "a key of this test")
    _check(ROUTES[sites], 4, sites=sites)


def test_pipelines_and_replicas_on_eight_ranks_of_a_job_that_has_bound_its_devices():
    _check(EIGHT, 8, bound=True)


def test_collectives_that_the_planner_divides(tmp_path):
    """Costs are given, so that no probe decides: between hosts links are slow, and over both kinds at once more so.

    So is what a processor computes in a second, for on a slow one fewer micro-batches cover as much.
    """
    links = {LinkClass.intra: AlphaBeta(1e-6, 1e-8), LinkClass.inter: AlphaBeta(1e-6, 1e-7)}
    slow = {(LinkClass.mixed, primitive): AlphaBeta(1e-6, 2e-7) for primitive in (SCATTER, GATHER)}
    costs = CollectiveCosts({**CollectiveCosts.of_links(links).table, **slow})
    CostCache.in_folder(str(tmp_path)).write(topology_key(regular(2, 2), "cuda"), costs)
    Measurements(tmp_path / "devices.json").store({f"emulated, {os.uname().nodename}": 1e11})
    configs = [tiny_config(stages=2, microbatches=6, **keywords) for _, keywords, _ in DIVIDED.values()]
    for config, (partition, *_) in zip(configs, DIVIDED.values(), strict=True):
        config.zero.partition, config.data.cache_dir = partition, str(tmp_path)
    results = run_on_devices(8, divided_under_rules, configs, STEPS, (0, 0, 1, 1, 2, 2, 3, 3), timeout_s=800)
    expected = reference_losses(configs[0], 4, STEPS)
    for number, (name, (partition, _, rewrites)) in enumerate(DIVIDED.items()):
        for found in (runs[number] for runs, _ in results):
            assert found["losses"] == results[0][0][number]["losses"] == pytest.approx(expected, rel=1e-5), name
            assert rewrites <= found["started"], name
            if partition is Partition.workload:
                assert found["together"] > 2 and max(found["buckets"]) > 1, name
    _refuse_waits(waits for _, waits in results)


@pytest.mark.parametrize(("world", "cases"), [(4, SHARED), (3, RING)], ids=["four", "ring"])
def test_ranks_that_share_sequences_experts_and_matrices(world, cases):
    configs = {name: tiny_config(layers=4, **keywords) for name, keywords in cases.items()}
    for config in configs.values():
        config.data.sequence_length = 24  # a multiple of 6; batches are made by hand
    results = run_on_devices(world, losses_under_rules, list(configs.values()), STEPS, timeout_s=800)
    for number, (name, config) in enumerate(configs.items()):
        replicas = world // config.pipeline.stages // (config.parallel.context * config.parallel.tensor)
        expected = reference_losses(config, replicas, STEPS)
        for losses, _ in results:
            assert losses[number] == pytest.approx(expected, rel=1e-5), name
    _refuse_waits((waits for _, waits in results), *GROUPED_IN_FP32)


def test_strand_pairs(tmp_path):
    """Two threads of a rank launch collectives in one order, and a strand that hands over does not wait on the host."""
    configs = {name: pair_config("always", str(tmp_path), **keywords) for name, keywords in PAIRS.items()}
    # Routers balance by micro-batch, unlike the reference.
    configs["expert 2, ZeRO-1"].model.overrides["output_router_logits"] = False
    results = run_on_devices(4, losses_under_rules, list(configs.values()), STEPS, timeout_s=800)
    for number, (name, config) in enumerate(configs.items()):
        expected = reference_losses(config, config.parallel.expert, STEPS)
        for losses, _ in results:
            assert losses[number] == pytest.approx(expected, rel=1e-5), name
    _refuse_waits((waits for _, waits in results), *GROUPED_IN_FP32)


def test_sharded_replicas_change_their_schedule_and_keep_their_losses():
    configs = [tiny_config("auto", "fold", stages=2, zero=zero) for zero in (1, 2) for _ in range(2)]
    for config in configs[::2]:
        config.pipeline.adapt, config.pipeline.adapt_steps = True, 2
    ranks = run_on_devices(4, adapted_under_rules, configs, timeout_s=400)
    for runs in ranks:
        for adapted, plain in zip(runs[::2], runs[1::2], strict=True):
            assert adapted["losses"] == plain["losses"]
            assert adapted["proposals"] and adapted["schedules"][-1] != plain["schedules"][-1]


def test_without_eager_connection_the_first_send_deadlocks():
    said = run_on_devices(2, without_eager_connection, tiny_config(), 4.0, timeout_s=100)
    assert any("rank 0 waits for first exchange: the send to rank 1" in text for text in said), said
    assert any("comm/rts_channel.py" in text and "execution/executor.py" in text for text in said), said


@pytest.mark.parametrize("tensor", [1, 2])
def test_evaluation_checkpoints_and_an_end_by_the_clock(tmp_path, tensor):
    config = tiny_config(stages=2, zero=1, tied=True, tensor=tensor)
    config.checkpoint.background = True
    clock = ["train.max_seconds=0.001", "train.steps=50", f"train.output_dir={tmp_path}/run"]
    overrides = [*TINY_QUICKSTART, *clock, f"pipeline.stages={4 // tensor}", f"parallel.tensor={tensor}"]
    ranks = run_on_devices(4, a_run, config, str(tmp_path / "checkpoints"), overrides, timeout_s=400)
    first = ranks[0]
    assert first["losses"] == pytest.approx(reference_losses(config, 2 // tensor, STEPS), rel=1e-5)
    assert all(rank["losses"] == first["losses"] and rank["evaluated"] == first["evaluated"] for rank in ranks)
    assert [rank["again"] for rank in ranks] == [first["losses"][1:]] * 4
    assert [rank["loaded"] for rank in ranks] == ["step-00000001"] * 4
    assert sum(rank["logits"] for rank in ranks) == 2 * 3 and all(rank["spans"] > 0 for rank in ranks)
    assert all(rank["stopped"] == 1 for rank in ranks), "rank 0's clock ends all of them after the same step"
    _refuse_waits(rank["waits"] for rank in ranks)
