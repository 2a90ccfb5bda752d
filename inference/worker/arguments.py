"""vLLM arguments that Weft sets itself, or that are incompatible with bubbles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

REMEDIES = {
    "pipeline-parallel-size": "a step would be granted while others are still in the stages; span ranks "
    "with inference.prefill.ranks_per_worker",
    "data-parallel-size": "its engines step together, also outside of bubbles; start one worker per rank",
    "tensor-parallel-size": "set inference.prefill.ranks_per_worker",
    "async-scheduling": "a step would be granted while the one before it runs; leave it out",
    "no-enable-chunked-prefill": "prompts could not be split over bubbles; leave it out",
    "scheduler-cls": "Weft's scheduler is what keeps prompts inside bubbles; leave it out",
    "additional-config": "Weft's scheduler gets its settings by it; leave it out",
    "middleware": "Weft's middleware must be the only one; leave it out",
    "root-path": "Weft's middleware expects the original paths; leave it out",
    "config": "a file could set any of these; give the arguments themselves",
    "api-key": "it would be visible in the process list; set the variable named by inference.controller.api_key_env",
    "host": "set inference.prefill.host",
    "port": "set inference.prefill.first_port",
    "uds": "the controller reaches workers by TCP; leave it out",
    "model": "set inference.prefill.model",
    "max-model-len": "set inference.prefill.max_tokens",
    "shutdown-timeout": "a worker would wait for bubbles, and drop its prompts after all; leave it out",
    "gpu-memory-utilization": "set inference.prefill.memory_share",
    "kv-transfer-config": "set inference.prefill.connector",
}
"""Reason and remedy, by argument name."""
SHORT = {"-pp": "pipeline-parallel-size", "-dp": "data-parallel-size", "-tp": "tensor-parallel-size"}


def problems_of(arguments: Sequence[str]) -> Iterator[str]:
    """Problems with additional server arguments, each with a remedy."""
    for argument in arguments:
        option = argument.partition("=")[0]
        name = SHORT.get(option, option.removeprefix("--").replace("_", "-") if option.startswith("--") else "")
        if name in REMEDIES:
            yield f"{argument}: {REMEDIES[name]}"
