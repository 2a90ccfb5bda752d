"""The work of a prompt in seconds, additive over chunks."""

from __future__ import annotations

from dataclasses import dataclass

from weft.inference.placement.prefill_cost import PrefillCost


@dataclass(frozen=True, kw_only=True)
class PromptWork:
    """The cost of a prompt's chunks in seconds, which is additive except for a fixed cost per step.

    A chunk of n tokens after c tokens of context takes ``step_s + token_s n + context_s (n c + n^2 / 2)`` seconds.

    Without ``step_s``, the sum over a prompt's chunks does not depend on how it is cut. So placement does not have to
    decide on chunks.
    """

    step_s: float
    """Fixed seconds per engine step."""
    token_s: float
    """Seconds per token."""
    context_s: float = 0.0
    """Seconds per pair of a token and a token of its context."""
    chunk_tokens: int = 2048
    """Maximum number of tokens of an engine step."""
    max_tokens: int = 131_072
    """Longest prompt."""

    @classmethod
    def of(cls, cost: PrefillCost, *, gap_s: float, chunk_tokens: int, max_tokens: int) -> PromptWork:
        """Derive the work from a learnt cost model, for steps after ``gap_s`` of idle time."""
        none, one, pair = (cost.predict_s(tokens, context, gap_s) for tokens, context in ((0, 0), (1, 0), (1, 1)))
        context_s = pair - one
        return cls(
            step_s=none,
            token_s=one - none - context_s / 2,
            context_s=context_s,
            chunk_tokens=chunk_tokens,
            max_tokens=max_tokens,
        )

    def chunk_s(self, tokens: int, context: int = 0) -> float:
        """Return the seconds of one engine step of ``tokens`` after ``context`` tokens."""
        return self.step_s + self._tokens_s(tokens, context)

    def work_s(self, tokens: int, cached: int = 0) -> float:
        """Return the seconds of work of a prompt whose first ``cached`` tokens are cached.

        This includes the fixed cost of each full chunk's step. The fixed cost of a bubble's first step is in
        `overhead_s`.
        """
        new = tokens - cached
        return self._tokens_s(new, cached) + self.step_s * ((new - 1) // self.chunk_tokens)

    @property
    def overhead_s(self) -> float:
        """Seconds of overhead per bubble: an engine step, and the part of a token that does not fit."""
        return self.step_s + self.token_s + self.context_s * self.max_tokens

    def _tokens_s(self, tokens: int, context: int) -> float:
        return tokens * (self.token_s + self.context_s * (context + tokens / 2))
