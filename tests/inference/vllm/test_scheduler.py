"""Tests of the plug-in's requests to the gate, and of its refusals to start."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.v1.core.sched.scheduler import Scheduler

from weft.inference.worker.vllm_scheduler import MAX_LOOKUPS, BubbleScheduler

pytestmark = pytest.mark.vllm


def request(tokens, computed=0, cached=0):
    return SimpleNamespace(num_tokens=tokens, num_computed_tokens=computed, cached=cached)


def wanted(running=(), holding=(), waiting=(), most=100_000):
    scheduler = BubbleScheduler.__new__(BubbleScheduler)
    scheduler.running, scheduler.kv_holding_waiting, scheduler.waiting = running, holding, waiting
    scheduler._most_tokens = most
    found = SimpleNamespace(get_computed_blocks=lambda asked: ((), asked.cached, 0))
    scheduler.kv_cache_manager = found
    return scheduler._wanted()


def test_what_the_prefix_cache_holds_is_context_and_not_work():
    assert wanted(waiting=[request(8100, cached=8000)]) == (100, 8000)
    assert wanted(running=[request(900, computed=300)], waiting=[request(8100, cached=8000)]) == (700, 8000)


def test_requests_under_way_are_counted_from_where_they_are():
    assert wanted(running=[request(900, computed=300), request(50, computed=49)]) == (601, 300)
    # One that holds its blocks while it waits is past the cache's look-up.
    assert wanted(holding=[request(900, computed=500, cached=800)]) == (400, 500)
    assert wanted() == (0, 0)


def test_no_more_is_wanted_than_a_step_takes_and_few_look_ups_are_made():
    assert wanted(waiting=[request(1000)] * 50, most=2048) == (2048, 0)
    many = [request(10, cached=8)] * (MAX_LOOKUPS + 4)
    assert wanted(waiting=many) == (2 * MAX_LOOKUPS + 10 * 4, 8)


@pytest.mark.parametrize(
    ("section", "field", "value", "part"),
    [
        ("parallel_config", "data_parallel_size", 2, "start one worker per rank"),
        ("scheduler_config", "async_scheduling", True, "--no-async-scheduling"),
        ("scheduler_config", "enable_chunked_prefill", False, "leave it on"),
    ],
)
def test_what_cannot_work_in_bubbles_is_refused(monkeypatch, section, field, value, part):
    monkeypatch.setattr(Scheduler, "__init__", lambda *_, **__: None)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=False, enable_chunked_prefill=True),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
        additional_config={},
    )
    with pytest.raises(ValueError, match="weft serve"):  # all is well but the settings
        BubbleScheduler(config)
    config.additional_config = {"weft": {"boards": ["b"], "guard_s": 0, "quantile": 0.9, "cost_file": "", "stages": 2}}
    with pytest.raises(ValueError, match="pipeline_parallel_size=1: 2 stages"):
        BubbleScheduler(config)
    setattr(getattr(config, section), field, value)
    with pytest.raises(ValueError, match=f"{field}={value}: .*{part}"):
        BubbleScheduler(config)
