"""Prompts that an engine computes before it serves: no client's prompt is the first of its kind, and costs are known.

First steps load kernels, allocate buffers and may compile, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm import SamplingParams
from vllm.v1.request import Request

from weft.inference.placement.prefill_cost import TRUSTED

MOST_TOKENS = 32
"""Length of each prompt; computed in two chunks."""
MEASURED = (16, 64, 256)
"""Lengths of the prompts from which the cost model learns, in turns."""


def prompts(tokens: int, block_hasher: Any) -> Iterator[Request]:
    """Yield one prompt of each kind that takes its own path through vLLM's sampler."""
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, top_k=4, top_p=0.9, min_p=0.1),
        SamplingParams(temperature=0.0, logprobs=4),
        SamplingParams(temperature=1.0, logprobs=4, prompt_logprobs=4),
        SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
        SamplingParams(temperature=0.0, logit_bias={0: 1.0}, min_tokens=1),
        SamplingParams(temperature=0.0, allowed_token_ids=[0, 1]),
    ]
    for number, params in enumerate(kinds):
        params.max_tokens = 1
        params.update_from_generation_config({}, eos_token_id=0)
        yield Request(
            request_id=f"warm-up-{number}",
            prompt_token_ids=[0] * tokens,
            sampling_params=params,
            pooling_params=None,
            block_hasher=block_hasher,
        )


def warm_up(engine: Any) -> None:
    """Compute every kind of prompt, alone and together, then measure some, on an engine whose loop has not begun."""
    scheduler = engine.scheduler
    longest = engine.vllm_config.model_config.max_model_len - 1
    tokens = min(MOST_TOKENS, longest)
    with scheduler.ungated(max(1, tokens // 2)):
        for together in (False, True):
            for request in prompts(tokens, engine.request_block_hasher):
                scheduler.add_request(request)
                if not together:
                    _run(engine)
            _run(engine)
    engine.reset_prefix_cache()
    most = min(longest, engine.vllm_config.scheduler_config.max_num_batched_tokens)
    with scheduler.ungated(most, learn=True):
        for step in range(TRUSTED + 1):  # the first one is not used
            tokens = min(MEASURED[step % len(MEASURED)], most)
            scheduler.add_request(next(prompts(tokens, engine.request_block_hasher)))
            _run(engine)
            engine.reset_prefix_cache()


def _run(engine: Any) -> None:
    while engine.scheduler.has_unfinished_requests() or engine.scheduler.has_finished_requests():
        engine.step()
