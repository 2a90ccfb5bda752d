"""Sizes of a model, from its files: weights, layers, positions, KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.conf.host.documents import parse_json, read_text

CACHE_BYTES = 2
"""Bytes of each number in the KV cache."""


def model_bytes(folder: Path) -> int:
    """Return the size of a model's weight files, or 0 if there are none in a known format."""
    try:
        index = parse_json(read_text(folder / "model.safetensors.index.json"))
        return int(index["metadata"]["total_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def stage_bytes(folder: Path, stages: int) -> float:
    """Return an upper bound of the weights of one of ``stages`` stages in bytes, or 0 if the model's size is unknown.

    The first stage has the embedding, and the last one the output's matrix, which are one if they are tied.
    """
    whole = model_bytes(folder)
    if stages == 1 or not whole:
        return whole
    try:
        config = dimensions(folder)
        kind = str(config.get("dtype") or config.get("torch_dtype"))
        matrix = config["vocab_size"] * config["hidden_size"] * (4 if "float32" in kind else 2)
        outside = matrix * (1 if config.get("tie_word_embeddings", True) else 2)
        return (whole - outside) * largest_share(config["num_hidden_layers"], stages) + matrix
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return whole  # cautiously


def num_layers(folder: Path) -> int:
    """Return the number of a model's layers, or 0 if its configuration lacks it."""
    try:
        return int(dimensions(folder)["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def num_positions(folder: Path) -> int:
    """Return the number of a model's positions, or 0 if its configuration lacks it or scales them."""
    try:
        config = dimensions(folder)
        scaled = config.get("rope_scaling") or config.get("rope_parameters", {}).get("rope_type") not in (
            None,
            "default",
        )
        return 0 if scaled else int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def dimensions(folder: Path) -> dict[str, Any]:
    """Return the configuration of a model's text part."""
    config = parse_json(read_text(folder / "config.json"))
    return config.get("text_config", config)


def largest_share(layers: int, stages: int) -> float:
    """Return the share of the layers that the largest stage has."""
    return -(-layers // stages) / layers if layers else 1 / stages


def cache_bytes(folder: Path, tokens: int) -> int:
    """Return the size of a prompt's KV cache in bytes, or 0 if the model's configuration lacks the dimensions."""
    try:
        config = dimensions(folder)
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        pairs = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads)
        return pairs * width * CACHE_BYTES * tokens
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
