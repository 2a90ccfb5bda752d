"""vLLM's NIXL connector without a progress thread, whose polling would take a core from training.

`--kv-transfer-config '{"kv_connector": "QuietNixlConnector", "kv_connector_module_path":
"weft.inference.worker.vllm_nixl", ...}'`. Reads by decode instances then progress in engine steps, which
`BubbleScheduler` continues to make, without tokens, while blocks are to be transferred.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from weft.comm.listeners import refuse_other_users
from weft.conf.hosts import is_loopback


class QuietNixlConnector(NixlPullConnector):
    """vLLM's `NixlConnector` with `enable_prog_thread=False` for its agent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create the connector, while the constructor of the agent's configuration is patched.

        The connector's worker creates that configuration itself, and takes no argument for it (vLLM 0.32.0)."""
        original = base_worker.nixl_agent_config
        base_worker.nixl_agent_config = partial(original, enable_prog_thread=False)
        try:
            super().__init__(*args, **kwargs)
        finally:
            base_worker.nixl_agent_config = original
        # ZeroMQ's side channel and UCX accept any peer. Its libraries are loaded now.
        refuse_other_users(one_host=is_loopback(os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"]))
