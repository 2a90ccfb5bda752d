"""Restriction of gloo and NCCL to connections from this user's processes (see own_user.c)."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

from weft.comm.native import Kind, build

_SOURCE = Path(__file__).with_name("own_user.c")

log = logging.getLogger(__name__)


def refuse_other_users(*, one_host: bool) -> None:
    """Close connections of other users at every listener of torch's and NCCL's libraries; idempotent.

    Listeners that any code opens later are included. Without a C compiler, or on a kernel that does not
    report the owner of a connection, a warning is logged.

    Args:
        one_host: also refuse connections from other hosts, because no rank is there.
    """
    try:
        redirected = _library().weft_refuse_other_users(one_host)
    except (ValueError, OSError) as error:
        _warn(str(error).partition("\n")[0])
        return
    if not redirected:
        _warn("the kernel does not tell whose a connection is (enable INET_DIAG)")


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build([_SOURCE], kind=Kind.library)))


@cache
def _warn(reason: str) -> None:
    log.warning("other users of this host can connect to ranks while process groups are made: %s", reason)
