"""The route of a worker that scores a prompt. See `weft.inference.worker.score_arrays`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

import numpy as np

from weft.inference.requests import Refusal
from weft.inference.worker.score_arrays import SPARE, as_array


async def score(state: Any, value: Mapping[str, Any], receive: Callable[[], Awaitable[Any]]) -> bytes:
    """Return the scores of the prompt in a request.

    Args:
        state: the state of vLLM's server.
        value: ``model``, ``prompt`` (token ids), ``top_k``, and ``words``, the number of tokens that count.
        receive: returns when the client has gone, and then the prompt is dropped.

    Raises:
        Refusal: the request is wrong, or the engine dropped it.
    """
    model, prompt, top_k, words = _checked(value)
    if not state.openai_serving_models.is_base_model(model):
        raise Refusal(404, f"model={model!r:.200}: not this worker's", field="model")
    vocabulary = state.engine_client.model_config.get_vocab_size()
    most = min(top_k + SPARE * (words < vocabulary), vocabulary) if top_k else 0
    computed = asyncio.ensure_future(_compute(state.engine_client, prompt, most))
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((computed, gone), return_when=asyncio.FIRST_COMPLETED)
        if not computed.done():
            raise Refusal(499, "the client has gone")
        found = computed.result()
    finally:
        computed.cancel()
        gone.cancel()
    if found is None or len(found.start_indices) != len(prompt):
        raise Refusal(503, "the worker dropped the prompt; send it to another one, or again", retry_after_s=1)
    pairs = np.stack([found.token_ids, found.logprobs], -1).reshape(len(prompt) - 1, -1, 2)
    return as_array(pairs[:, 1:] if top_k else pairs, top_k, words).tobytes()


def _checked(value: Mapping[str, Any]) -> tuple[str, list[int], int, int]:
    model, prompt, top_k, words = (value.get(name) for name in ("model", "prompt", "top_k", "words"))
    prompt = prompt if isinstance(prompt, list) else []
    if len(prompt) < 2 or not all(type(token) is int and token >= 0 for token in prompt):
        raise Refusal(400, "prompt: not a list of at least two token ids", field="prompt")
    if type(top_k) is not int or type(words) is not int or top_k < 0 or words < 1:
        raise Refusal(400, f"top_k={top_k!r:.20} words={words!r:.20}: give numbers from 0 and from 1")
    return str(model), prompt, top_k, words


async def _compute(engine: Any, prompt: list[int], most: int) -> Any:
    from vllm import SamplingParams, TokensPrompt
    from vllm.exceptions import VLLMClientError

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=most, flat_logprobs=True, detokenize=False)
    found = None
    try:
        async for output in engine.generate(TokensPrompt(prompt_token_ids=prompt), params, f"weft-{uuid4().hex}"):
            found = output.prompt_logprobs or found
    except (ValueError, VLLMClientError) as error:
        raise Refusal(400, str(error), field="prompt") from error
    return found
