"""Exchanges of two ranks for each rule of NCCL; every function reports the result on its rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.device import cuda, rules
from tests.device.group import EmulatedGroup
from weft.engine.distributed import process_groups

LIMIT_S = 3.0
DEVICE = torch.device("cuda")


def every_rule() -> dict[str, str]:
    """Return this rank's error for each rule, "" where nothing stopped it."""
    rules.join(LIMIT_S)
    exchanges = {
        "receives first": _receives_first,
        "receives first, after a first contact": _receives_after_contact,
        "sends that cross on one communicator": _crossing_sends,
        "sends that cross on two": _crossing_sends_apart,
        "a value behind a posted receive": _value_behind_a_receive,
        "a wait with a time-out": _timed_wait,
        "a tensor in host memory": _host_tensor,
        "a tensor that was moved": _moved_tensor,
        "groups in another order": _another_order,
    }
    between = dist.new_group(backend="gloo")
    said = {name: _said(exchange, between) for name, exchange in exchanges.items()}
    dist.barrier(group=between)  # rank 0 has the store
    return said


def under_rules(function: Callable[..., Any], *args: Any) -> Any:
    """Return a function's result in a job that has joined."""
    rules.join(60.0)
    return function(*args)


def _said(exchange: Callable[[], str | None], between: dist.ProcessGroup) -> str:
    dist.barrier(group=between)
    try:
        return exchange() or ""
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier(group=between)
        for group in process_groups():
            if isinstance(group, EmulatedGroup) and group is not dist.group.WORLD:
                group.abort()


def _other() -> int:
    return 1 - dist.get_rank()


def _pair(name: str) -> dist.ProcessGroup:
    return dist.new_group([0, 1], group_desc=name)


def _both(first: Callable[[], dist.Work | None], second: Callable[[], dist.Work | None]) -> None:
    for work in (first(), second()):
        assert work is not None
        work.wait()
    torch.cuda.synchronize()


def _receive_then_send(to: dist.ProcessGroup, back: dist.ProcessGroup) -> None:
    mine, theirs = (to, back) if dist.get_rank() == 0 else (back, to)
    buffer = torch.zeros(1000, device=DEVICE)
    receive = dist.irecv(buffer, _other(), group=theirs)
    send = dist.isend(torch.ones(1000, device=DEVICE), _other(), group=mine)
    _both(lambda: receive, lambda: send)
    assert buffer.sum() == 1000


def _receives_first() -> None:
    _receive_then_send(_pair("to"), _pair("back"))


def _receives_after_contact() -> None:
    from weft.comm.torch_channel import connect_pairs

    to, back = _pair("to"), _pair("back")
    connect_pairs([((0, 1), to), ((1, 0), back)], DEVICE)
    _receive_then_send(to, back)


def _met(name: str) -> dist.ProcessGroup:
    from weft.comm.torch_channel import connect_pairs

    group = _pair(name)
    connect_pairs([((0, 1), group), ((1, 0), group)], DEVICE)
    return group


def _cross(mine: dist.ProcessGroup, theirs: dist.ProcessGroup) -> None:
    """Both send before they receive."""
    send = dist.isend(torch.ones(1000, device=DEVICE), _other(), group=mine)
    receive = dist.irecv(torch.zeros(1000, device=DEVICE), _other(), group=theirs)
    _both(lambda: send, lambda: receive)


def _crossing_sends() -> None:
    group = _met("both ways")
    _cross(group, group)


def _crossing_sends_apart() -> None:
    to, back = _met("to"), _met("back")
    _cross(*((to, back) if dist.get_rank() == 0 else (back, to)))


def _value_behind_a_receive() -> None:
    group = _met("late")
    if dist.get_rank() == 1:
        receive = dist.irecv(torch.zeros(10, device=DEVICE), 0, group=group)
        float(torch.ones((), device=DEVICE) + 1)
        assert receive is not None


def _timed_wait() -> str:
    from datetime import timedelta

    cuda.forget()
    for timeout in (None, timedelta(seconds=5)):
        assert not cuda.observed("waits")
        work = dist.all_reduce(torch.ones(3, device=DEVICE), async_op=True)
        assert work is not None
        work.wait() if timeout is None else work.wait(timeout)
    return " ".join(wait.partition(" at ")[0] for wait in cuda.observed("waits") if "event" not in wait)


def _host_tensor() -> None:
    dist.all_reduce(torch.tensor(1) * 2)


def _moved_tensor() -> None:
    dist.all_reduce((torch.tensor(1) * 2).to(DEVICE))


def _another_order() -> None:
    names = ([0], [1]) if dist.get_rank() == 0 else ([1], [0])
    for ranks in names:
        dist.new_group(ranks)
