"""The ends of a channel of ready-to-send messages give their threads back, whatever the other end does."""

import gc
import threading

import pytest
import torch
import torch.distributed as dist

from tests.thread_ranks import run_in_threads
from weft.comm.channel import ChannelError, TensorSpec
from weft.comm.rts_channel import RtsReceiver, RtsSender

SPEC = TensorSpec((3,), torch.float32)
CPU = torch.device("cpu")


def ends() -> tuple[RtsSender | None, RtsReceiver | None]:
    """Rank 0 sends to rank 1."""
    data, notes = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    settings = {"peer": 1 - dist.get_rank(), "group": data, "rts_group": notes, "device": CPU, "timeout_s": 20.0}
    return (RtsSender(**settings), None) if dist.get_rank() == 0 else (None, RtsReceiver(**settings))


def threads_left() -> int:
    """Return the remaining threads of this rank's channels."""
    world = dist.distributed_c10d._world._get_world()
    own = [t for t in threading.enumerate() if t.name.startswith("weft rts") and t.__dict__.get("weft_world") is world]
    for thread in own:
        thread.join(10.0)
    return sum(thread.is_alive() for thread in own)


def error_of(action) -> str:
    with pytest.raises(ChannelError) as caught:
        action()
    return str(caught.value)


def sender_leaves() -> list[str]:
    """Receives are posted ahead, as in a step that another rank's death ends."""
    sender, receiver = ends()
    if sender is not None:
        sender.send("first", torch.ones(3)).wait()
        sender.leave()
        left = threads_left()
        dist.barrier()  # with the channel goes what it has not delivered yet
        return [str(left)]
    assert receiver is not None
    handles = [receiver.recv(name, SPEC) for name in ("first", "second", "third")]
    assert handles[0].wait().tolist() == [1.0] * 3
    said = [error_of(handle.wait) for handle in handles[1:]]
    said.append(error_of(receiver.recv("fourth", SPEC).wait))
    receiver.close()
    left = threads_left()
    dist.barrier()
    return [*said, str(left)]


def test_a_sender_that_leaves_ends_the_receiver_that_waits_for_it():
    sent, heard = run_in_threads(2, sender_leaves)
    assert sent == ["0"]
    assert heard[-1] == "0"
    for name, text in zip(("second", "third", "fourth"), heard, strict=False):
        assert text == f"link rank 0 -> rank 1: {name} did not arrive and the peer has exited: it has left"


def sender_has_gone() -> list[str]:
    """The receive is posted when nothing of the sending end is left, but other ends keep its group's connections."""
    sender, receiver = ends()
    if sender is not None:
        kept = sender.rts_group
        sender.leave()
        left = threads_left()
        del sender
        gc.collect()
        dist.barrier()
        dist.barrier()
        del kept
        return [str(left)]
    assert receiver is not None
    dist.barrier()
    said = error_of(receiver.recv("late", SPEC).wait)
    receiver.close()
    left = threads_left()
    dist.barrier()
    return [said, str(left)]


def test_a_receive_that_is_posted_when_the_sender_has_gone_does_not_wait_for_it():
    sent, (said, left) = run_in_threads(2, sender_has_gone)
    assert sent == [left] == ["0"]
    assert said == "link rank 0 -> rank 1: late did not arrive and the peer has exited: it has left"


def sender_has_left_the_job(met: threading.Barrier) -> list[str]:
    """Its thread is late, and says that it leaves when the process has left the job already."""
    sender, receiver = ends()
    if sender is not None:
        left_job = threading.Event()
        sender._rts_thread.submit(left_job.wait)
        sender.leave()
        dist.distributed_c10d._abort_process_group()
        left_job.set()
        met.wait(60.0)
        return [str(threads_left())]
    assert receiver is not None
    said = error_of(receiver.recv("next", SPEC).wait)
    receiver.close()
    met.wait(60.0)
    return [said, str(threads_left())]


def test_a_sender_says_that_it_leaves_when_it_has_left_the_job():
    sent, (said, left) = run_in_threads(2, sender_has_left_the_job, threading.Barrier(2))
    assert sent == [left] == ["0"]
    assert said == "link rank 0 -> rank 1: next did not arrive and the peer has exited: it has left"


def receiver_leaves() -> list[str]:
    """It has posted nothing that the sender's messages could go to."""
    sender, receiver = ends()
    dist.barrier()
    if sender is not None:
        for number in range(3):
            sender.send(str(number), torch.ones(3))
        sender.interrupt(ChannelError("rank 1 has ended"))
        said = error_of(lambda: sender.send("more", torch.ones(3)))
        sender.leave()
        return [said, str(threads_left())]
    assert receiver is not None
    receiver.close()
    return [str(threads_left())]


def test_a_sender_does_not_wait_for_a_receiver_that_has_left():
    sent, heard = run_in_threads(2, receiver_leaves)
    assert sent == ["link rank 0 -> rank 1: rank 1 has ended", "0"] and heard == ["0"]


def interrupted() -> list[str]:
    """Both what is posted and what comes later."""
    sender, receiver = ends()
    said = []
    if receiver is not None:
        posted = receiver.recv("posted", SPEC)
        receiver.interrupt(ChannelError("rank 7 has ended"))
        said = [error_of(posted.wait), error_of(receiver.recv("later", SPEC).wait)]
    dist.barrier()
    if sender is not None:
        sender.leave()
    return said


def test_an_interrupted_receiver_fails_what_is_posted_and_what_comes_later():
    _, said = run_in_threads(2, interrupted)
    assert [text.partition(": ")[2] for text in said] == [
        f"{name} did not arrive and the peer has exited: rank 7 has ended" for name in ("posted", "later")
    ]
