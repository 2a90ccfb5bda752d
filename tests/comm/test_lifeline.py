"""A rank that dies is named to all others, and the devices of those that do not leave in time are freed."""

import threading
from contextlib import nullcontext, suppress
from time import sleep

import pytest
import torch.distributed as dist

from tests.thread_ranks import run_in_threads
from tests.waiting import until
from weft.comm import lifeline as module
from weft.comm.channel import ChannelError
from weft.comm.lifeline import Lifeline

DEAD = 2


@pytest.fixture(autouse=True)
def freed(monkeypatch):
    """Names of the threads that have aborted their rank's communicators."""
    found: list[str] = []
    monkeypatch.setattr(module, "GRACE_S", 0.2)
    monkeypatch.setattr(module, "abort_devices_groups", lambda: found.append(threading.current_thread().name))
    return found


def line(group: dist.ProcessGroup) -> Lifeline:
    """Return the line of the rank whose thread calls."""
    return Lifeline(group)


def outlive(size: int, freed: list[str], *, in_step: bool, num_freed: int) -> str:
    """Return a rank's error after `DEAD` has closed its connections, as the kernel does for a process that has died.

    Args:
        num_freed: number of ranks that free their devices before this one leaves.
    """
    group = dist.new_group(backend="gloo")
    if dist.get_rank() == DEAD:
        dist.barrier(group=group)
        dist.destroy_process_group()
        return ""
    mine, heard = line(group), []
    mine.on_loss = heard.append
    dist.barrier(group=group)
    try:
        with mine.watching() if in_step else nullcontext():
            until(lambda: heard and len(freed) == num_freed, timeout_s=10.0)
        mine.check()
    except ChannelError as error:
        assert [str(each) for each in heard] == [str(error)], "the waits of its channels fail once"
        return str(error)
    finally:
        mine.close(leaving=True)
    return "nothing"


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("size", [3, 5])
def test_all_hear_of_a_death_and_free_their_devices_in_a_step_and_between_steps(size, in_step, freed):
    said = run_in_threads(size, outlive, size, freed, in_step=in_step, num_freed=size - 1)
    lost = f"rank {DEAD} has ended or cannot be reached"
    assert said == [lost if rank != DEAD else "" for rank in range(size)]
    assert len(freed) == size - 1


def test_ranks_that_leave_in_time_abort_nothing(freed, monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 10.0)
    said = run_in_threads(3, outlive, 3, freed, in_step=False, num_freed=0)
    assert said[0] == f"rank {DEAD} has ended or cannot be reached"
    assert not freed


def lose_while_a_step_begins(freed: list[str]) -> int:
    """Aborts of this process after `DEAD` has ended between this rank's check and its step."""
    group = dist.new_group(backend="gloo")
    if dist.get_rank() == DEAD:
        dist.barrier(group=group)
        dist.destroy_process_group()
        return 1
    mine = line(group)
    heard, check = [], mine.check
    mine.on_loss = heard.append

    def check_and_lose() -> None:
        check()
        dist.barrier(group=group)
        until(lambda: heard, timeout_s=10.0)
        sleep(0.1)
        mine.check = check

    mine.check = check_and_lose
    with suppress(ChannelError), mine.watching():
        sleep(0.5)
    mine.close(leaving=True)
    return len(freed)


def test_a_death_while_a_step_begins_frees_its_device(freed):
    assert all(run_in_threads(3, lose_while_a_step_begins, freed))


def close_in_order() -> int:
    """Threads of this rank that are left."""
    group = dist.new_group(backend="gloo")
    mine = line(group)
    with mine.watching():
        sleep(0.01)
    mine.close()
    mine.close()
    own = [
        t for t in threading.enumerate() if t.__dict__.get("weft_world") is dist.distributed_c10d._world._get_world()
    ]
    for thread in own:
        if thread.name.startswith("weft lifeline"):
            thread.join(20.0)
    mine.check()
    return sum(thread.is_alive() and thread.name.startswith("weft lifeline") for thread in own)


@pytest.mark.parametrize("size", [2, 3])
def test_an_end_in_order_is_no_death(size, freed):
    assert run_in_threads(size, close_in_order) == [0] * size
    assert not freed


def leave_alone() -> None:
    """Rank 0 leaves and says so; the others are in a step, which nothing of it ends."""
    group = dist.new_group(backend="gloo")
    mine = line(group)
    dist.barrier(group=group)
    if dist.get_rank() == 0:
        mine.close(leaving=True)
    with mine.watching():
        sleep(0.5)
    dist.barrier(group=group)
    mine.close(leaving=True)


def test_a_rank_that_leaves_has_not_died(freed):
    run_in_threads(3, leave_alone)
    assert not freed


def fail_alone() -> list[str]:
    """Errors of a rank whose others are well."""
    mine, said = line(dist.new_group(backend="gloo")), []
    for error in (RuntimeError("out of memory"), ValueError("no labels")):
        try:
            with mine.watching():
                raise error
        except Exception as caught:
            assert caught is error
            said.append(str(caught))
    mine.close()
    return said


def test_an_error_of_ones_own_stays_what_it_is():
    assert run_in_threads(2, fail_alone) == [["out of memory", "no labels"]] * 2


def fail_because_of_it() -> str:
    """Return a step's error that comes before the report of the death that caused it."""
    group = dist.new_group(backend="gloo")
    if dist.get_rank() == 0:
        dist.barrier(group=group)
        dist.destroy_process_group()
        return ""
    mine = line(group)
    dist.barrier(group=group)
    try:
        with mine.watching():
            raise RuntimeError("the communicator was aborted")
    except ChannelError as error:
        assert isinstance(error.__cause__, RuntimeError)
        return str(error)
    finally:
        mine.close(leaving=True)


def test_an_error_that_a_death_has_caused_names_it(monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 10.0)
    assert run_in_threads(2, fail_because_of_it)[1] == "rank 0 has ended or cannot be reached"
