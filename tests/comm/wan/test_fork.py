"""A process that forks while it has an endpoint, as data loaders do: what its child may do, and what it cannot harm."""

import array
import contextlib
import fcntl
import os
import signal
import socket
import termios

import pytest
import torch

from tests.comm.wan.test_endpoint import KEY, Pair, noise, until
from weft.comm.channel import ChannelError, TensorSpec
from weft.comm.wan.endpoint import WanEndpoint


@contextlib.contextmanager
def forked(work=lambda: None):
    """A child that does `work` and then lives until the end; yields what it printed or raised."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(work())
        except BaseException as error:
            said = repr(error)
        os.write(writes, said.encode())
        signal.pause()
    os.close(writes)
    try:
        with os.fdopen(reads, "rb", closefd=True) as words:
            yield words.read1(4096).decode()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def unread(client):
    """True if what it said has not come to the other side."""
    waiting = array.array("i", [0])
    fcntl.ioctl(client, termios.TIOCOUTQ, waiting)
    return waiting[0] > 0


def test_a_child_keeps_no_connection_open_and_unauthenticated_peers_find_nothing_to_break(stack):
    """Otherwise the loop would go on to hear of connections that it has closed."""
    pair = Pair(stack)
    pair.exchange("a", noise(1000))
    clients = [socket.create_connection(pair.ends[1].address, timeout=5) for _ in range(8)]
    for client in clients:
        client.sendall(b"x")  # it is accepted, and more is waited for
    for client in clients:
        until(lambda client=client: not unread(client))
    with forked():
        for client in clients:
            client.sendall(b"x" * 200)  # nonsense: the connection is closed
            with contextlib.suppress(ConnectionError):
                assert client.recv(1) == b""
            with contextlib.suppress(OSError):
                client.sendall(b"more" * 1000)
        # A connection that a slow process had begun to replace, and then did not, counts as well.
        until(lambda: pair.ends[1].refused >= len(clients))
        pair.exchange("b", noise(200_000))
        pair.ends[1].close()
        with pytest.raises(ChannelError, match="closed by the peer: closed"):
            pair.channels[0].recv("c", TensorSpec((1,), torch.uint8)).wait()
        with pytest.raises(ConnectionRefusedError):  # nor does it listen
            socket.create_connection(pair.ends[1].address)


def test_what_a_child_tries_with_an_endpoint_is_refused_by_name(stack):
    pair = Pair(stack)
    pair.exchange("a", noise(1000))
    waiting = pair.channels[0].recv("b", TensorSpec((1000,), torch.uint8))
    end, channel = pair.ends[0], pair.channels[0]
    tries = [
        lambda: channel.send("x", noise(8)),
        lambda: channel.recv("x", TensorSpec((8,), torch.uint8)),
        waiting.wait,
        lambda: end.link(7),
        lambda: end.counters(1),
        lambda: end.refused,
    ]
    for attempt in tries:
        with forked(attempt) as said:
            assert said.startswith("ChannelError")
            assert f"belongs to process {os.getpid()}, of which this is a fork" in said
    with forked(end.close) as said:
        assert said == "None"
    send = pair.channels[1].send("b", noise(1000))
    assert torch.equal(waiting.wait(), noise(1000))
    send.wait()


def test_a_child_may_have_endpoints_of_its_own(stack):
    pair = Pair(stack)
    pair.exchange("a", noise(1000))
    address = pair.ends[1].address
    pair.ends[1].link(2)

    def send():
        with WanEndpoint(rank=2, bind="127.0.0.1", key=KEY, tls=False, deadline_s=10.0, timeout_s=10.0) as mine:
            mine.link(1, address=address)
            mine.channel(1).send("from the child", noise(5000)).wait()

    receive = pair.ends[1].channel(2).recv("from the child", TensorSpec((5000,), torch.uint8))
    with forked(send) as said:
        assert said == "None"
    assert torch.equal(receive.wait(), noise(5000))
    pair.exchange("b", noise(1000))


def test_forks_beside_unauthenticated_peers_and_transfers_do_no_harm(stack):
    """Connections come and go while processes are forked; each side hears of each of them."""
    pair = Pair(stack)
    for index in range(20):
        client = socket.create_connection(pair.ends[1].address, timeout=5)
        with forked():
            client.sendall(b"nonsense" * 20)
            with contextlib.suppress(ConnectionError):
                assert client.recv(1) == b""
            client.close()
            pair.exchange("a", noise(20_000, index))
    # A connection that a slow process had begun to replace, and then did not, counts as well.
    until(lambda: pair.ends[1].refused >= 20)
