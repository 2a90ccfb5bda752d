"""Choice of the cheapest implementation of attention over a context group: gather, all-to-all or ring."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from transformers import PreTrainedConfig

from weft.conf.schema import ContextExchange
from weft.engine.parallel.axis import UnshareableError

MASKED = ("sdpa", "eager")
"""Attention implementations that support arbitrary masks. Gathered keys and values need them."""
BACKWARD_TIMES = 2.5
"""Ratio of the time of attention's backward to its forward. They have five and two matrix products."""
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Config fields with the dropout probability of attention weights."""


def choose_exchange(
    config: PreTrainedConfig,
    wanted: ContextExchange,
    *,
    context: int,
    tensor: int,
    seconds: Callable[[str, float], float] | None = None,
    attention_s: float = 0.0,
    fits: Callable[[ContextExchange], bool] = lambda _: True,
) -> tuple[ContextExchange, str]:
    """Return the exchange to use, which is never auto, and the reason.

    For ``auto`` it is the fastest exchange that fits into memory. Without ``seconds`` it is the one with the least
    traffic. If none fits, gather is the last choice.

    Args:
        config: config of the model, with its attention implementation.
        context, tensor: sizes of the groups. Members of a tensor group share the heads.
        seconds: returns the time of a collective for a number of elements per position of the whole sequence.
        attention_s: a member's time in the attention of a layer's forward, which hides the ring's shifts. 0 means
            unknown.
        fits: returns whether a rank's memory suffices for an exchange.

    Raises:
        UnshareableError: the model does not support the ``wanted`` exchange.
    """
    if context == 1:
        return ContextExchange.gather, "sequences are not shared"
    text = config.get_text_config()
    attention = str(text._attn_implementation or "sdpa")
    heads = _count(text, "num_attention_heads") // tensor
    of_keys = _count(text, "num_key_value_heads") // tensor or heads
    obstacles = {
        ContextExchange.gather: "" if attention in MASKED else f"{attention} takes no mask",
        ContextExchange.all_to_all: _heads_obstacle(attention, heads, of_keys, context),
        ContextExchange.ring: ring_obstacle(config, attention),
    }
    possible = [exchange for exchange, obstacle in obstacles.items() if not obstacle]
    moved = _moved(heads, of_keys, context)
    why = _listed({exchange: f"{moved[exchange]:.4g}" for exchange in possible}, "heads of a whole sequence")
    if wanted is not ContextExchange.auto:
        if obstacles[wanted] and wanted is not ContextExchange.gather:  # a gather is checked where it is set up
            remedy = "" if wanted is ContextExchange.ring else "; set it to gather"
            raise UnshareableError(f"parallel.context_exchange={wanted.value}: {obstacles[wanted]}{remedy}")
        return wanted, f"given ({why})"
    if len(possible) < 2:
        chosen = possible[0] if possible else ContextExchange.gather
        other = ContextExchange.gather if chosen is not ContextExchange.gather else ContextExchange.all_to_all
        return chosen, obstacles[other]
    costs = moved
    if seconds is not None:
        of_head = key_value_size(config) / (2 * of_keys * tensor)
        costs = _seconds(seconds, heads * of_head, 2 * of_keys * of_head, context, attention_s)
        listed = {exchange: f"{1e3 * costs[exchange]:.3g} ms" for exchange in possible}
        why += f"; {_listed(listed, 'a layer and micro-batch')} that attention does not hide"
    why += "".join(f"; not {exchange.value}: {obstacle}" for exchange, obstacle in obstacles.items() if obstacle)
    order = sorted(possible, key=lambda exchange: costs[exchange])
    fitting = next((exchange for exchange in order if fits(exchange)), None)
    if fitting is not order[0]:
        why += f"; {order[0].value} does not fit in memory" + ("" if fitting else ", nor do others")
    return fitting or min(order, key=lambda exchange: exchange is ContextExchange.gather), why


def ring_obstacle(config: PreTrainedConfig, attention: str) -> str:
    """Return why attention cannot be computed block by block, with a remedy, or an empty string if it can.

    Args:
        attention: name of the attention implementation.
    """
    if attention != "sdpa":
        return (
            f"model.attn_implementation={attention} cannot merge results of blocks of keys; set it to sdpa, "
            "whose blocks run as torch's flash attention, or parallel.context_exchange to another"
        )
    text = config.get_text_config()
    for name in _DROPOUTS:
        if dropped := getattr(text, name, 0.0):
            return (
                f"{name}={dropped} drops weights of attention, which blocks do not; set model.overrides.{name}=0, or "
                "parallel.context_exchange=gather"
            )
    return ""


def _moved(heads: int, of_keys: int, members: int) -> dict[ContextExchange, float]:
    """Return a member's traffic for each exchange, in heads of a whole sequence, averaged over forward and backward.

    A gather receives keys and values of all S positions. An exchange of heads transfers queries, keys, values and
    outputs of S / members positions. Both include a member's own part, although it is not sent. The ring passes on keys
    and values in forward and backward. In the backward it also passes on their gradients, which return to their owner.
    """
    return {
        ContextExchange.gather: 2 * of_keys,
        ContextExchange.all_to_all: 2 * (heads + of_keys) / members,
        ContextExchange.ring: of_keys * (3 * members - 2) / (members - 1),
    }


def _seconds(
    seconds: Callable[[str, float], float], query: float, key_value: float, members: int, attention_s: float
) -> dict[ContextExchange, float]:
    """Return the seconds per layer and micro-batch in which a member waits for each exchange, forward and backward.

    Args:
        seconds: see `choose_exchange`.
        query, key_value: elements of a position's queries, and of its keys and values.
    """
    there, back = (query + key_value) / members, query / members
    shift_s, step_s = seconds("shift", key_value / members), attention_s / members
    behind = max(0.0, shift_s - step_s) + max(0.0, 2 * shift_s - BACKWARD_TIMES * step_s)
    return {
        ContextExchange.gather: sum(seconds(name, key_value) for name in ("all_gather", "reduce_scatter")),
        ContextExchange.all_to_all: 2 * (seconds("all_to_all", there) + seconds("all_to_all", back)),
        ContextExchange.ring: (members - 1) * behind + shift_s,
    }


def _listed(of: dict[ContextExchange, str], unit: str) -> str:
    names = {
        ContextExchange.gather: "gathered",
        ContextExchange.all_to_all: "by heads",
        ContextExchange.ring: "round the ring",
    }
    listed = [f"{value} {names[exchange]}" for exchange, value in of.items()]
    return f"{unit}: {', '.join(listed)}"


def key_value_size(config: PreTrainedConfig) -> int:
    """Return the number of elements of a position's keys and values in a layer, or 0 if it is unknown."""
    text = config.get_text_config()
    heads = _count(text, "num_attention_heads")
    if of_value := _count(text, "v_head_dim"):  # multi-head latent attention, after decompression
        return heads * (_count(text, "qk_nope_head_dim") + _count(text, "qk_rope_head_dim") + of_value)
    of_head = _count(text, "head_dim") or (text.hidden_size // heads if heads else 0)
    return (_count(text, "num_key_value_heads") or heads) * 2 * of_head


def _count(config: PreTrainedConfig, name: str) -> int:
    """Return an integer field of the config, or 0 if it is missing or differs between layers."""
    count = None
    with suppress(AttributeError, RuntimeError):  # RuntimeError if layers differ, since transformers 5.18
        count = getattr(config, name)
    return count if isinstance(count, int) else 0


def _heads_obstacle(attention: str, heads: int, of_keys: int, members: int) -> str:
    """Return why members cannot exchange heads, or an empty string if they can."""
    if attention == "eager":
        return "model.attn_implementation=eager has parameters of all heads"
    for what, count in (("heads", heads), ("key and value heads", of_keys)):
        if not count or count % members:
            return f"parallel.context={members} members cannot have as many of a rank's {count} {what} each"
    return ""
