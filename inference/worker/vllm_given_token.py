"""vLLM's logits processor of a decode server that continues a worker's first token.

`--logits-processors weft.inference.worker.vllm_given_token:GivenToken`.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from weft.inference.requests import GIVEN


class GivenToken(AdapterLogitsProcessor):
    """Leaves the first token of an answer no choice, if a worker has drawn it and a client has it."""

    def is_argmax_invariant(self) -> bool:
        """Return False, because greedy answers get the token as well."""
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        """Return the processor of a request's logits, or None if nothing is given."""
        transfer = (params.extra_args or {}).get("kv_transfer_params") or {}
        token = transfer.get(GIVEN)
        if not isinstance(token, int):
            return None

        def leave_given(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            if output or not 0 <= token < len(logits):
                return logits
            only = torch.full_like(logits, -inf)
            only[token] = 0.0
            return only

        return leave_given
