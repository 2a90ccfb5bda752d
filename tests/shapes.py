"""Sizes of small models."""

from typing import Any


def sizes(hidden: int, inner: int, layers: int, heads: int, groups: int, words: int, **more: Any) -> dict[str, Any]:
    """Return fields of a Llama's config, which many architectures share.

    Args:
        groups: number of heads of keys and values.
        words: size of the vocabulary.
        more: further fields.
    """
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": words,
        **more,
    }
