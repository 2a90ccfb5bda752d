"""How members of a context group let each query meet the keys of the whole sequence: which of two ways costs less."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from transformers import PreTrainedConfig

from weft.conf.schema import ContextExchange
from weft.engine.parallel.unshareable import UnshareableError

MASKED = ("sdpa", "eager")
"""Attention that takes any mask, so that keys and values can be gathered for it."""


def choose_exchange(
    config: PreTrainedConfig,
    wanted: ContextExchange,
    *,
    context: int,
    tensor: int,
    seconds: Callable[[str, float], float] | None = None,
) -> tuple[ContextExchange, str]:
    """One that is not auto, and why it was chosen.

    Of S positions with h heads of queries and k of keys and values, a gather brings each member 2 k S vectors of a head
    per layer, and an exchange there and back (2 h + 2 k) S / members; its own part of either stays where it is.

    Args:
        config: of the model, with the attention that it is to run.
        context, tensor: members of the groups; of the heads a member of a tensor group has a part.
        seconds: that a collective takes with so many elements per position of the whole sequence; where that is not
            known, what moves less is chosen.

    Raises:
        UnshareableError: what is wanted cannot be done.
    """
    if context == 1:
        return ContextExchange.gather, "sequences are not shared"
    text = config.get_text_config()
    attention = str(text._attn_implementation or "sdpa")
    heads = _count(text, "num_attention_heads") // tensor
    of_keys = _count(text, "num_key_value_heads") // tensor or heads
    obstacle = _obstacle(attention, heads, of_keys, context)
    why = f"{2 * (heads + of_keys) / context:g} heads of a whole sequence there and back, {2 * of_keys} gathered"
    if wanted is ContextExchange.all_to_all and obstacle:
        raise UnshareableError(f"parallel.context_exchange=all_to_all: {obstacle}; set it to gather")
    if wanted is not ContextExchange.auto:
        return wanted, f"given ({why})"
    if obstacle:
        return ContextExchange.gather, obstacle
    if attention not in MASKED:
        return ContextExchange.all_to_all, f"{attention} takes no mask"
    less = heads + of_keys < of_keys * context
    if seconds is not None:
        of_head = key_value_size(config) / (2 * of_keys * tensor)
        there, back = ((heads + 2 * of_keys) / context * of_head, heads / context * of_head)
        exchanged_s = 2 * (seconds("all_to_all", there) + seconds("all_to_all", back))
        gathered_s = sum(seconds(name, 2 * of_keys * of_head) for name in ("all_gather", "reduce_scatter"))
        less = exchanged_s < gathered_s
        why += f"; {exchanged_s * 1e3:.3g} ms a layer and micro-batch, {gathered_s * 1e3:.3g} ms gathered"
    return (ContextExchange.all_to_all if less else ContextExchange.gather), why


def key_value_size(config: PreTrainedConfig) -> int:
    """Elements of a position's keys and values in a layer; 0 where that is not known."""
    text = config.get_text_config()
    heads = _count(text, "num_attention_heads")
    if of_value := _count(text, "v_head_dim"):  # multi-head latent attention, when it has been unfolded
        return heads * (_count(text, "qk_nope_head_dim") + _count(text, "qk_rope_head_dim") + of_value)
    of_head = _count(text, "head_dim") or (text.hidden_size // heads if heads else 0)
    return (_count(text, "num_key_value_heads") or heads) * 2 * of_head


def _count(config: PreTrainedConfig, name: str) -> int:
    """0 where there are none, or layers have different numbers."""
    count = None
    with suppress(AttributeError, RuntimeError):  # the second where layers differ, since transformers 5.18
        count = getattr(config, name)
    return count if isinstance(count, int) else 0


def _obstacle(attention: str, heads: int, of_keys: int, members: int) -> str:
    """Why heads cannot be exchanged; empty if they can."""
    if attention == "eager":
        return "model.attn_implementation=eager has parameters of all heads"
    for what, count in (("heads", heads), ("key and value heads", of_keys)):
        if not count or count % members:
            return f"parallel.context={members} members cannot have as many of a rank's {count} {what} each"
    return ""
