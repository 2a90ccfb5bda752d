"""The probe of a bed's links: between two nodes that have nothing else to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.comm.key import WanKey
from weft.comm.wan.endpoint import WanEndpoint
from weft.comm.wan.probe import LinkProfile, probe_both
from weft.tools.netbed.bed import NetBed
from weft.tools.netbed.job import Job

_KEY = WanKey(b"the key of a bed that no other process can reach")


def probe_nodes(
    bed: NetBed, near: str, far: str, *, settings: Mapping[str, Any] | None = None, **effort: Any
) -> tuple[LinkProfile, LinkProfile]:
    """The ways from ``near`` to ``far`` and back.

    Args:
        settings: arguments of `WanEndpoint` for both endpoints.
        effort: arguments of `weft.comm.wan.probe.probe_both`, with ``most``.

    Raises:
        ChannelError: the link failed.
    """
    args = (dict(settings or {}), effort)
    with (
        Job(bed, far, _answer, bed.address(far), *args) as answering,
        Job(bed, near, _start, bed.address(near), answering.hear(), *args) as starting,
    ):
        found = starting.result(timeout_s=300.0)
        answering.say("end")
    return found


def _start(
    say: Callable, hear: Callable, bind: str, address: tuple[str, int], settings: dict, effort: dict
) -> tuple[LinkProfile, LinkProfile]:
    with WanEndpoint(rank=0, bind=bind, key=_KEY, connections=effort["most"], tls=False, **settings) as endpoint:
        endpoint.link(1, address=address)
        return probe_both(endpoint, 1, first=True, **effort)


def _answer(say: Callable, hear: Callable, bind: str, settings: dict, effort: dict) -> None:
    with WanEndpoint(rank=1, bind=bind, key=_KEY, tls=False, **settings) as endpoint:
        endpoint.link(0)
        say(endpoint.address)
        probe_both(endpoint, 0, first=False, **effort)
        hear()
