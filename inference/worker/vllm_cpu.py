"""Corrections of vLLM 0.32.0 on a CPU: seeded sampling of prompts in chunks, and prompts without an adapter.

vLLM samples after each chunk, discards the tokens of all chunks but the last, and rewinds the random numbers by the
generator's offset. Generators on a CPU have no offset, and the error ends the engine.

Prompts without a LoRA adapter have the adapter's number -1, which on a CPU is the last adapter of a batch
(vllm-project/vllm pull request 49656).
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np
import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu


def keep_generators(runner: type) -> None:
    """Make a class of model runners restore the state of generators whose samples are discarded."""
    sample, bookkeeping = runner._sample, runner._bookkeeping_sync  # type: ignore[attr-defined]

    @wraps(sample)
    def keeping_sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        discarded = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])
        states = {index: generators[index].get_state() for index in discarded.tolist() if index in generators}
        sampled = sample(self, *args, **kwargs)
        for index, state in states.items():
            generators[index].set_state(state)
        return sampled

    @wraps(bookkeeping)
    def bookkeeping_without_generators(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    runner._sample, runner._bookkeeping_sync = keeping_sample, bookkeeping_without_generators  # type: ignore[attr-defined]


def keep_base_prompts() -> None:
    """Compute prompts without a LoRA adapter without one, also in a batch with prompts of an adapter."""
    shrink = lora_ops.bgmv_shrink
    if hasattr(shrink, "__wrapped__"):  # scheduler and connector are in one process
        return

    @wraps(shrink)
    def shrink_of_adapters(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        adapters: torch.Tensor,
        scaling: float = 1.0,
    ) -> None:
        shrink(inputs, weights, output, adapters, scaling)
        output.masked_fill_((adapters < 0)[:, None], 0.0)  # of all tokens, if there is one prompt

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = shrink_of_adapters
