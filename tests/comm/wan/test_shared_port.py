"""One port for all endpoints of a host: who reaches them through it, and who does not."""

import array
import hashlib
import os
import socket
import time
from contextlib import ExitStack

import pytest
import torch

from tests.comm.wan.port_hellos import JOB, KEY, hello_to, is_closed
from weft.comm.channel import ChannelError, TensorSpec
from weft.comm.key import WanKey
from weft.comm.wan.endpoint import WanEndpoint

SPEC = TensorSpec((100_000,), torch.float32)


def endpoint(rank, **settings):
    given = {"bind": "127.0.0.1", "key": KEY, "job": JOB, "shares_port": True, "connections": 3, "timeout_s": 30.0}
    return WanEndpoint(rank=rank, **{**given, **settings})


@pytest.fixture
def host(request):
    """The endpoints of two ranks of one host, and one of another."""
    with ExitStack() as stack:
        tls = getattr(request, "param", True)
        first = stack.enter_context(endpoint(0, tls=tls))
        second = stack.enter_context(endpoint(1, tls=tls, host_address=first.address))
        yield first, second, stack.enter_context(endpoint(2, tls=tls, bind="127.0.0.2"))


def talk(near, far):
    """A tensor each way."""
    here, there = near.channel(far.rank), far.channel(near.rank)
    for sender, receiver in ((here, there), (there, here)):
        tensor = torch.rand(SPEC.shape)
        arrives, sent = receiver.recv("t", SPEC), sender.send("t", tensor)
        sent.wait()
        assert torch.equal(arrives.wait(), tensor)


def meet(near, far):
    near.link(far.rank)
    far.link(near.rank, address=near.address)
    talk(near, far)


@pytest.mark.parametrize("host", [True, False], indirect=True)
def test_two_ranks_are_reached_through_one_port(host):
    first, second, other = host
    assert first.address == second.address
    meet(first, other)
    meet(second, other)
    assert [end.refused for end in host] == [0, 0, 0]


@pytest.mark.parametrize("host", [True, False], indirect=True)
def test_nothing_of_a_peer_without_the_key_is_handed_on(host):
    first, second, other = host
    meet(second, other)
    refused = second.refused
    wrong = [
        os.urandom(96),
        os.urandom(5000),
        hello_to(1, key=WanKey(b"another key, as long as it")),
        hello_to(1, magic=b"weftwan2"),
        hello_to(1)[:-1] + b"!",
        b"GET / HTTP/1.1\r\nHost: a-name-that-is-long-enough-to-be-a-knock\r\nAccept: */*\r\nConnection: close\r\n\r\n",
    ]
    for said in wrong:
        with socket.create_connection(first.address, timeout=5) as client:
            client.sendall(said)
            assert is_closed(client)
    assert first.refused == len(wrong)
    assert second.refused == refused
    talk(second, other)


def test_a_hello_is_valid_for_one_connection(host):
    first, second, _ = host
    said = hello_to(1)
    with socket.create_connection(first.address, timeout=5) as client, socket.create_connection(first.address) as again:
        client.sendall(said)
        assert not is_closed(client, within_s=0.5)  # it waits for the handshake
        again.sendall(said)
        assert is_closed(again)
        client.sendall(os.urandom(200))
        assert is_closed(client)
    assert (first.refused, second.refused) == (1, 1)


@pytest.mark.parametrize("behind", [False, True])
def test_silent_peers_do_not_keep_others_out(host, behind):
    first, second, other = host
    with ExitStack() as stack:
        for _ in range(150):
            client = stack.enter_context(socket.create_connection(first.address, timeout=5))
            client.sendall(hello_to(1) if behind else hello_to(1)[:50])
        meet(second, other)


def test_a_missing_rank_is_distinguished_from_a_slow_one(host):
    first, second, other = host
    meet(second, other)
    second.close(linger_s=0.0)
    with pytest.raises(ChannelError, match=r"closed by the peer|has exited"):
        other.channel(1).recv("t", SPEC).wait()
    with socket.create_connection(first.address, timeout=5) as client:
        client.sendall(hello_to(1))
        assert is_closed(client)
    meet(first, other)


def test_another_attempt_is_not_reached(host):
    first, _, _ = host
    with socket.create_connection(first.address, timeout=5) as client:
        client.sendall(hello_to(1, job="an attempt before"))
        assert is_closed(client)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_mailbox_takes_nothing_from_other_users(host):
    _, second, other = host
    name = b"\0weft-wan-1-" + hashlib.sha256(JOB.encode()).digest()[:16].hex().encode()
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            rights = array.array("i", [theirs.fileno(), theirs.fileno()])
            sender.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], 0, name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    theirs.close()
    assert is_closed(ours)  # the endpoint's copies, too, are closed
    assert second.refused == 0
    meet(second, other)


def test_garbage_while_a_tensor_is_on_its_way(host):
    first, second, other = host
    meet(second, other)
    limit = time.monotonic() + 1.0
    while time.monotonic() < limit:
        with socket.create_connection(first.address, timeout=5) as client:
            client.sendall(os.urandom(300))
        talk(second, other)
