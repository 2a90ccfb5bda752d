"""The work of a prompt: seconds that add up to the same wherever the prompt is cut."""

from __future__ import annotations

from dataclasses import dataclass

from weft.inference.placement.prefill_cost import PrefillCost


@dataclass(frozen=True, kw_only=True)
class PromptWork:
    """A chunk of n tokens behind c tokens of context takes
    ``step_s + token_s n + context_s (n c + n^2 / 2)`` seconds.

    Without ``step_s`` the chunks of a prompt sum to the same, wherever it is cut. That is
    what lets a placement reason about a prompt without deciding on its chunks.
    """

    step_s: float
    """Seconds of an engine step, however few tokens it has."""
    token_s: float
    """Seconds per token."""
    context_s: float = 0.0
    """Seconds per token and token of context before it."""
    chunk_tokens: int = 2048
    """Most tokens of an engine step."""
    max_tokens: int = 131_072
    """Longest prompt."""

    @classmethod
    def of(cls, cost: PrefillCost, *, gap_s: float, chunk_tokens: int, max_tokens: int) -> PromptWork:
        """As learnt, for steps that follow ``gap_s`` of idle time."""
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
        """Seconds of one engine step that computes ``tokens`` behind ``context``."""
        return self.step_s + self._tokens_s(tokens, context)

    def work_s(self, tokens: int, cached: int = 0) -> float:
        """Seconds of work in a prompt of which the first ``cached`` tokens are known.

        Contains the engine steps that full chunks need; the step at the beginning of each
        bubble is `overhead_s`.
        """
        new = tokens - cached
        return self._tokens_s(new, cached) + self.step_s * ((new - 1) // self.chunk_tokens)

    @property
    def overhead_s(self) -> float:
        """Seconds that each bubble loses to a prompt it takes up: an engine step, and the
        part of a token that no longer fits."""
        return self.step_s + self.token_s + self.context_s * self.max_tokens

    def _tokens_s(self, tokens: int, context: int) -> float:
        return tokens * (self.token_s + self.context_s * (context + tokens / 2))
