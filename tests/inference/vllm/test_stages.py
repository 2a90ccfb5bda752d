"""First tokens of a model that is cut over ranks whose bubbles never overlap are those of a stock vLLM."""

import json
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.inference.vllm.test_tokens import first_tokens
from weft.engine.observability.event_ring import RingReader, RingWriter, decode
from weft.inference.placement.prefill_cost import TRUSTED, PrefillCost
from weft.inference.worker.command import stage_file

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

NUM_PROMPTS = 100
SHORTEST, LONGEST = 5, 1500
ENGINE = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 2**27,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
}


def write_adapter(folder, model, seed=1):
    """Write a LoRA adapter of all layers, large enough to change most tokens."""
    shape, draw = json.loads((model / "config.json").read_text()), torch.Generator().manual_seed(seed)
    size = shape["hidden_size"]
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight": torch.randn(rows, generator=draw)
        for layer in range(shape["num_hidden_layers"])
        for name in ("q_proj", "v_proj")
        for part, rows in (("A", (8, size)), ("B", (size, 8)))
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(("stages", "has_adapter"), [(2, False), (4, False), (2, True)])
def test_first_tokens_over_ranks_with_opposite_bubbles_equal_those_of_one_worker(
    model, tmp_path, monkeypatch, stages, has_adapter
):
    draw = random.Random(5)
    lengths = [SHORTEST, LONGEST, *(draw.randint(SHORTEST, LONGEST) for _ in range(NUM_PROMPTS - 2))]
    prompts = [[draw.randrange(256) for _ in range(length)] for length in lengths]
    boards, trace = [tmp_path / "boards" / f"rank{rank}.board" for rank in range(stages)], tmp_path / "trace.jsonl"
    settings = {
        "boards": [str(board) for board in boards],
        "guard_s": 0.002,
        "quantile": 0.98,
        "cost_file": str(tmp_path / "cost.json"),
        "stages": stages,
        "trace_file": str(trace),
        "rings": str(tmp_path / "rings"),
        "ranks": list(range(stages)),
    }
    for rank in range(stages):
        RingWriter(tmp_path / "rings", rank, 16)  # the ranks record their events
    adapter = write_adapter(tmp_path / "adapter", model) if has_adapter else ""
    engine = ENGINE | {"model": str(model), "enable_lora": has_adapter}
    gated = engine | {
        "scheduler_cls": "weft.inference.worker.vllm_scheduler.BubbleScheduler",
        "worker_cls": "weft.inference.worker.vllm_stage.StageWorker",
        "pipeline_parallel_size": stages,
        "distributed_executor_backend": "mp",
        "additional_config": {"weft": settings},
        "async_scheduling": False,
    }
    stock = engine | {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    trainers = [sys.executable, Path(__file__).with_name("opposite_trainers.py"), "0.2", *boards]
    with subprocess.Popen(trainers, stdout=subprocess.PIPE, text=True) as training:
        try:
            assert training.stdout is not None and training.stdout.readline() == "up\n"
            in_bubbles = first_tokens(tmp_path, prompts, gated, together=True, adapter=adapter)
        finally:
            training.kill()
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {request.partition("-")[0] for step in steps for request in step["tokens"]} >= {str(NUM_PROMPTS - 1)}
    for step in steps:
        assert len(step["spans"]) == stages
        for (_, end_s), (begin_s, _) in pairwise(step["spans"]):
            assert end_s <= begin_s
    for stage in range(stages):  # each rank's timeline shows every chunk once
        (ring,) = (tmp_path / "rings").glob(f"prefill-*-{stage}")
        events = RingReader(ring).read()
        shown = {(event["start"], event["end"], decode(int(event["first"])).microbatch) for event in events}
        assert len(shown) == len(events)
        assert {(*step["spans"][stage], sum(step["tokens"].values())) for step in steps} <= shown
    for stage in range(stages):  # each rank learns its own costs, and saves them once they are trusted
        assert PrefillCost.load(stage_file(tmp_path / "cost.json", stage), quantile=0.98).steps >= TRUSTED
    assert in_bubbles == first_tokens(tmp_path, prompts, stock, together=False, adapter=adapter)
    if has_adapter:
        without = first_tokens(tmp_path, prompts, stock, together=False)
        changed = [ours != base for ours, base in zip(in_bubbles, without, strict=True)]
        assert not any(changed[::2]) and sum(changed[1::2]) > NUM_PROMPTS / 4
