"""First tokens computed in bubbles, greedy or sampled with a seed, are those of a stock vLLM."""

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from weft.inference.placement.prefill_cost import TRUSTED, PrefillCost

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

NUM_PROMPTS = 100
LONGEST = 1500
PATIENCE_S = 1000.0
"""In which an engine has to start and compute all prompts, on a machine that is busy with other things."""
GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
asked = json.load(open(sys.argv[1]))
llm = LLM(**asked["engine"])
prompts = [TokensPrompt(prompt_token_ids=ids) for ids in asked["prompts"]]
# Every third is sampled with a seed, every fifth reports log-probabilities.
params = [
    SamplingParams(
        max_tokens=1, temperature=float(n % 3 == 0), seed=n if n % 3 == 0 else None, logprobs=3 if n % 5 == 0 else None
    )
    for n in range(len(prompts))
]
adapter = LoRARequest("adapter", 1, asked["adapter"]) if asked["adapter"] else None
adapters = [adapter if n % 2 else None for n in range(len(prompts))]
if asked["together"]:
    found = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
else:  # never in chunks, in which vLLM cannot sample with seeds on a CPU
    asked = zip(prompts, params, adapters)
    found = [llm.generate(one, each, use_tqdm=False, lora_request=lora)[0] for one, each, lora in asked]
json.dump([list(one.outputs[0].token_ids) for one in found], open(sys.argv[2], "w"))
"""


def first_tokens(folder, prompts, engine, *, together, adapter=""):
    """The first tokens of prompts, of which every second one is for a LoRA adapter, if there is one."""
    import json

    asked, told = folder / "asked.json", folder / "told.json"
    asked.write_text(json.dumps({"prompts": prompts, "engine": engine, "together": together, "adapter": str(adapter)}))
    env = dict(
        os.environ,
        VLLM_NO_USAGE_STATS="1",
        OMP_NUM_THREADS="1",
        VLLM_LOGGING_LEVEL="WARNING",
        TORCH_COMPILE_DISABLE="1",
    )
    with subprocess.Popen([sys.executable, "-c", GENERATE, asked, told], env=env, start_new_session=True) as process:
        try:
            assert process.wait(PATIENCE_S) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # its engine is a process of its own
    return json.loads(told.read_text())


def test_first_tokens_equal_those_of_an_ungated_vllm(model, tmp_path):
    import json

    draw = random.Random(5)
    prompts = [[draw.randrange(256) for _ in range(draw.randint(1, LONGEST))] for _ in range(NUM_PROMPTS)]
    engine = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 2**28,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        "disable_log_stats": True,
    }
    board, trace = tmp_path / "boards" / "rank0.board", tmp_path / "trace.jsonl"
    settings = {
        "boards": [str(board)],
        "guard_s": 0.002,
        "quantile": 0.98,
        "cost_file": str(tmp_path / "cost.json"),
        "trace_file": str(trace),
    }
    gated = engine | {
        "scheduler_cls": "weft.inference.worker.vllm_scheduler.BubbleScheduler",
        "additional_config": {"weft": settings},
        "async_scheduling": False,
    }
    trainer = [sys.executable, Path(__file__).with_name("trainer.py"), board, "0.016", "0.01"]
    first_tokens(tmp_path, [], gated, together=True)
    assert PrefillCost.load(tmp_path / "cost.json", quantile=0.98).steps >= TRUSTED, "measured before the first prompt"
    with subprocess.Popen(trainer, stdout=subprocess.PIPE, text=True) as training:
        try:
            assert training.stdout is not None and training.stdout.readline() == "up\n"
            in_bubbles = first_tokens(tmp_path, prompts, gated, together=True)
        finally:
            training.kill()
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    # Also of steps in which the host ran something else: their processor time, and nothing of the warm-up.
    assert all(0.0 < step["computed_s"] <= step["end_s"] - step["start_s"] for step in steps)
    bubbles: dict[str, set] = {}
    for step in steps:
        for request in step["tokens"]:
            bubbles.setdefault(request, set()).add((step["step"], step["bubble"]))
    assert len(bubbles) == NUM_PROMPTS
    assert sum(len(found) > 3 for found in bubbles.values()) > 5
    assert in_bubbles == first_tokens(tmp_path, prompts, engine, together=False)
