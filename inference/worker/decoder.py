"""The decode server of a run: its address and command line, and whether it continues answers that have begun."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from weft.conf.schema import DecodeConfig, WeftConfig
from weft.inference.worker.command import IN_PROCESS, UNLOGGED, kv_transfer, model_options, server_environment

_PLAIN_OPTIONS = {
    *("--dtype", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--gpu-memory-utilization"),
    *("--max-num-queued-reqs", "--max-num-queued-tokens", "--scheduling-policy", "--kv-cache-memory-bytes"),
    *("--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank", "--max-cpu-loras"),
    *("--enable-prefix-caching", "--no-enable-prefix-caching", "--enable-chunked-prefill", "--block-size"),
    *("--no-enable-chunked-prefill", "--ssl-certfile", "--ssl-keyfile", "--tensor-parallel-size", "--quantization"),
}
"""Options of vLLM with which a worker's first token is the first chunk of a stock server's stream."""


def decode_url(decode: DecodeConfig) -> str:
    """Return the URL of the decode server, or an empty string if there is none."""
    return (decode.url or f"http://127.0.0.1:{decode.port}").rstrip("/") if decode.enabled else ""


def continues_answers(config: WeftConfig) -> bool:
    """True if the decode server continues streams that have begun with a worker's first token.

    Not a server of others, nor one with arguments that may change the text of a stream, as parsers of reasoning do.
    """
    arguments = [*config.inference.prefill.arguments, *config.inference.decode.arguments]
    options = {name.partition("=")[0].replace("_", "-") for name in arguments if name.startswith("-")}
    return config.inference.decode.enabled and not config.inference.decode.url and options <= _PLAIN_OPTIONS


def decode_command(config: WeftConfig, *, python: str) -> list[str]:
    """Return the command line of the decode server: a stock vLLM server with the workers' connector."""
    decode, on_cpu = config.inference.decode, not config.inference.decode.gpus
    options = model_options(config.inference.prefill) | {
        "--host": "127.0.0.1",
        "--port": decode.port,
        "--max-model-len": "auto",  # the model's, or what fits into the KV cache
        # Workers have the same path of the model, so only a wrong number format or version is refused.
        "--kv-transfer-config": json.dumps(kv_transfer(config.inference.prefill, on_cpu=on_cpu, enforce=True)),
        # vLLM's own check of the key covers /v1 only.
        "--middleware": "weft.inference.worker.vllm_middleware.KeyMiddleware",
    }
    if on_cpu:
        options |= {"--kv-cache-memory-bytes": decode.kv_cache_bytes, "--distributed-executor-backend": IN_PROCESS}
    else:
        options["--tensor-parallel-size"] = len(decode.gpus)
    listed = [text for name, value in options.items() for text in (name, str(value))]
    # vLLM's engine ends at a seed of a prompt in chunks on a CPU (0.32.0).
    flags = ["--enforce-eager", "--no-enable-chunked-prefill"] if on_cpu else []
    flags += ["--enable-scale-out", UNLOGGED]  # the first for the route that renders prompts
    if continues_answers(config):
        flags += ["--logits-processors", "weft.inference.worker.vllm_given_token:GivenToken"]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *listed, *flags, *decode.arguments]


def decode_environment(config: WeftConfig, outer: Mapping[str, str], *, key: str, package: Path) -> dict[str, str]:
    """Return the environment of the decode server. See `command.environment`."""
    decode = config.inference.decode
    env = server_environment(config, outer, key=key, package=package, side_port=decode.side_port)
    if decode.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(decode.gpus)
    else:
        env.setdefault("TORCH_COMPILE_DISABLE", "1")
    return env
