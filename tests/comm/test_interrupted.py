"""A wait of one thread ends when another interrupts the channel, at both ends."""

import socket
import threading

import pytest
import torch

from weft.comm.channel import ChannelError, TensorSpec
from weft.comm.shared_channel import SharedReceiver, SharedSender

SPEC = TensorSpec((4,), torch.float32)


@pytest.fixture
def ends():
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = SharedSender(theirs, (0, 1), 60.0), SharedReceiver(ours, (0, 1), 60.0)
    yield sender, receiver
    sender.close()
    receiver.close()


@pytest.mark.parametrize("which", [0, 1])
def test_a_receive_that_waits_fails_whichever_end_is_interrupted(ends, which):
    sender, receiver = ends
    sender.send("first", torch.ones(4))
    first, second = receiver.recv("first", SPEC), receiver.recv("second", SPEC)
    assert first.wait().tolist() == [1.0] * 4
    later = threading.Timer(0.05, ends[which].interrupt)
    later.start()
    with pytest.raises(ChannelError, match="second did not arrive and the peer has exited"):
        second.wait()
    later.join()
    with pytest.raises(ChannelError, match="could not be sent"):
        sender.send("third", torch.ones(4))


def test_an_interruption_of_what_is_closed_is_none(ends):
    for end in ends:
        end.close()
        end.interrupt()
