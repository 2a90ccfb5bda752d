"""vLLM's NIXL connectors with a progress thread that does not poll, or over the WAN.

`--kv-transfer-config '{"kv_connector": "QuietNixlConnector", "kv_connector_module_path":
"weft.inference.worker.vllm_nixl", ...}'`. NIXL's progress thread polls without a pause, which would take a core from
training. Here it blocks until its network has something to do, so that a read of a cache does not wait for the owner's
next step. Which blocks were read is processed in engine steps, which `BubbleScheduler` continues to make, without
tokens, while blocks are to be transferred. With `weft_wan_mbps` in `kv_connector_extra_config`, a `WanAgent` that sends
at most so much takes NIXL's place.

A decode server has no other plug-in of ours in its engine, so this one also corrects LoRA adapters on a CPU.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from math import inf
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlBaseConnector,
    NixlPullConnector,
    NixlPushConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.platforms import current_platform

from weft.comm.listeners import refuse_other_users
from weft.conf.hosts import is_loopback
from weft.inference.requests import DRAWN
from weft.inference.worker.command import WAN_MBPS
from weft.inference.worker.vllm_cpu import keep_base_prompts
from weft.inference.worker.wan_agent import WanAgent

PROGRESS_US = 50_000
"""Longest time in microseconds that NIXL's progress thread blocks without an event."""
PUSH_S = 10.0
"""Seconds in which a worker's stages have to send a prompt's cache, after which the decode server computes it."""
SENT_WITHIN_S = 5.0
"""Seconds after which a stage sends no cache any more."""
_UNTIL, _REQUEST, _PREFILLED = "weft_until", "weft_request", "weft_prefilled"
"""Keys of what a decode server sends to get a cache: the time, since the epoch, at which it may last be sent, and the
names of the request at the decode server and at the worker."""


class _Quiet(NixlBaseConnector):
    """A connector of vLLM whose agent's progress thread blocks, or with a `WanAgent`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Create the connector, while the constructor of the agent or of its configuration is patched.

        The connector's worker creates the agent itself (vLLM 0.32.0), and the agent sets a pause of 0 (NIXL 1.5.1)."""
        host = os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"]
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        owner: Any = base_worker
        name, new = "NixlWrapper", partial(WanAgent, bind=host, mbps=extra.get(WAN_MBPS))
        if WAN_MBPS not in extra:
            owner = sys.modules[base_worker.NixlWrapper.__module__].nixlBind
            name, new = "nixlAgentConfig", partial(blocking(owner.nixlAgentConfig))
        original = getattr(owner, name)
        setattr(owner, name, new)
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            setattr(owner, name, original)
        # ZeroMQ's side channel and UCX accept any peer. Its libraries are loaded now.
        refuse_other_users(one_host=is_loopback(host))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Add the first token to the parameters of a prompt's transfer. See the base class."""
        is_delayed, transfer = super().request_finished(request, block_ids)
        return is_delayed, _with_token(transfer, request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Add the first token, likewise."""
        is_delayed, transfer = super().request_finished_all_groups(request, block_ids)
        return is_delayed, _with_token(transfer, request)


def _with_token(transfer: dict[str, Any] | None, request: Any) -> dict[str, Any] | None:
    return transfer and transfer | {DRAWN: request.output_token_ids[0]}


def blocking(config: type) -> type:
    """Return NIXL's configuration of an agent with a progress thread that blocks for up to `PROGRESS_US`."""

    class Blocking(config):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, PROGRESS_US if name == "pthrDelay" else value)

    return Blocking


class QuietNixlConnector(_Quiet, NixlPullConnector):
    """`NixlConnector`: the decode server reads caches."""


class _Push(NixlPushConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Create the connector with a worker of our own, which `NixlPushConnector` would create itself."""
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        parts = vllm_config, self.engine_id, kv_cache_config
        is_worker = role is KVConnectorRole.WORKER
        self.connector_scheduler = None if is_worker else PushScheduler(*parts)
        self.connector_worker = PushWorker(*parts) if is_worker else None


class QuietNixlPushConnector(_Quiet, _Push):
    """`NixlPushConnector`: workers write caches, so each stage of a worker sends those of its layers."""


class PushScheduler(NixlPushConnectorScheduler):
    """The connector in a scheduler. It adds the prompt's name at its worker to the request for its cache."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Prepare the request for a cache. See the base class."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if (registration := self._push_pending_registrations.get(request.request_id)) is not None:
            registration[_PREFILLED] = request.kv_transfer_params["remote_request_id"]


class PushWorker(NixlPushConnectorWorker):
    """The connector in a process that has a cache. Two things differ from vLLM 0.32.0.

    vLLM's decode server never stops waiting for a cache that it has requested, even if the stage has ended. This one
    computes the prompt itself after `PUSH_S`. A stage that resumes later sends nothing: its blocks may be free by then.

    vLLM's stages find the cache by the request's name without its random part, which is the client's to choose
    (`X-Request-Id`), so that one client's prompt could become another's. Here the name has all parts.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._requested_s: dict[str, float] = {}

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        """Record when caches are requested. See the base class."""
        self._requested_s |= dict.fromkeys(metadata.reqs_to_recv, time.time())
        super().start_load_kv(metadata)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Give up on caches that have not arrived. See the base class."""
        now_s = time.time()
        self._requested_s = {
            name: requested_s for name, requested_s in self._requested_s.items() if name in self._recving_metadata
        }
        for name, requested_s in self._requested_s.items():
            if now_s > requested_s + PUSH_S:
                self._failed_recv_reqs.put(name)
        return super().get_transfer_results()

    def _do_send_reg_notif(self, req_id: str, reg_data: dict[str, Any]) -> None:
        until_s = self._requested_s.get(req_id, time.time()) + SENT_WITHIN_S
        request = {"request_id": reg_data[_PREFILLED], _REQUEST: reg_data["request_id"], _UNTIL: until_s}
        super()._do_send_reg_notif(req_id, reg_data | request)

    def _do_start_push_kv(self, request_id: str, local_block_ids: Any, registration_data: dict[str, Any]) -> None:
        data = dict(registration_data)  # also called again with it, once this process knows the decode server's
        is_named = data["request_id"] == request_id or _REQUEST not in data  # a stock decode server's is not
        if is_named and time.time() < data.get(_UNTIL, inf):
            data["request_id"] = data.pop(_REQUEST, data["request_id"])
            super()._do_start_push_kv(request_id, local_block_ids, data)


if current_platform.is_cpu():
    keep_base_prompts()
