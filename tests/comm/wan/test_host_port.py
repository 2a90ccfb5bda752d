"""One TCP port of a host for all of a run: whoever accepts a connection, it gets to whom it is for."""

import array
import asyncio
import os
import socket
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch

from tests.comm.wan.port_hellos import JOB, KEY, hello_to, is_closed
from tests.security.test_rendezvous import another_rank, environment, first_rank
from weft.comm.authenticated_socket import AuthenticatedTcpSocket
from weft.comm.channel import TensorSpec
from weft.comm.host_port import HandedOn, HostPort, Service, claim, port_hello
from weft.comm.key import WanKey
from weft.comm.wan.endpoint import WanEndpoint
from weft.conf.host.processes import free_port

HOST = "127.0.0.1"
ANOTHER = WanKey(b"another key, as long as it")


class Listening:
    """A service at a host's port, on a thread of its own, that answers each connection with its name."""

    def __init__(self, port, service, key=KEY):
        self.served, self.handed, self.refused = 0, 0, 0
        self.service, self.part = service, HostPort((HOST, port), service, key)
        self.loop = asyncio.new_event_loop()
        self.accepting = self.loop.create_task(self._accept())
        self.loop.call_soon(self.part.take_handed, self.loop, self._serve)
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self._end)
        self.thread.join(10)

    def _end(self):
        self.accepting.cancel()
        self.loop.call_soon(self.part.close)
        self.loop.call_soon(self.loop.stop)

    def _serve(self, connection):
        self.served += 1
        connection.send(self.service.name.encode())
        connection.close()

    async def _accept(self):
        while True:
            connection, _ = await self.loop.sock_accept(self.part.listener)
            connection.setblocking(False)
            self.loop.create_task(self._answer(connection))

    async def _answer(self, connection):
        try:
            await self.part.answer(connection)
            self._serve(connection)
        except HandedOn:
            self.handed += 1
            connection.close()
        except OSError:
            self.refused += 1
            connection.close()


def endpoint(rank, **settings):
    given = {"bind": HOST, "key": KEY, "job": JOB, "shares_port": True, "connections": 3, "timeout_s": 30.0}
    return WanEndpoint(rank=rank, **{**given, **settings})


@contextmanager
def services(port):
    with Listening(port, Service.CONTROL) as driver, Listening(port, Service.RENDEZVOUS) as rendezvous:
        yield driver, rendezvous


def ask(port, said):
    """Return the answer to a connection that sends ``said``."""
    with socket.create_connection((HOST, port), timeout=10) as client:
        client.sendall(said)
        answer = b""
        while more := client.recv(100):
            answer += more
        return answer


def test_whoever_accepts_it_each_connection_gets_to_whom_it_is_for():
    port = free_port()
    with services(port) as (driver, rendezvous), endpoint(0, port=port), endpoint(5, bind="127.0.0.2"):
        for _ in range(100):
            for service in Service:
                assert ask(port, port_hello(KEY, service)) == service.name.encode()
        assert driver.served == rendezvous.served == 100
        assert driver.handed > 10 and rendezvous.handed > 10
        assert driver.served - rendezvous.handed > 10, "what the endpoint accepted is handed on as well"


def test_a_link_uses_a_port_that_others_share():
    port, spec = free_port(), TensorSpec((100_000,), torch.float32)
    with services(port) as (driver, rendezvous), ExitStack() as stack:
        first = stack.enter_context(endpoint(0, port=port, connections=12))
        behind = stack.enter_context(endpoint(1, host_address=first.address, connections=12))
        far = stack.enter_context(endpoint(2, bind="127.0.0.2", connections=12))
        for near in (first, behind):
            near.link(2)
            far.link(near.rank, address=near.address)
            tensor = torch.rand(spec.shape)
            arrives, sent = near.channel(2).recv("t", spec), far.channel(near.rank).send("t", tensor)
            sent.wait()
            assert torch.equal(arrives.wait(), tensor)
        limit = time.monotonic() + 20
        while far.counters(0).ready + far.counters(1).ready < 24 and time.monotonic() < limit:
            time.sleep(0.01)
        assert far.counters(0).ready == far.counters(1).ready == 12
        assert driver.handed + rendezvous.handed > 2
        assert first.refused + behind.refused + far.refused + driver.refused + rendezvous.refused == 0


@pytest.mark.parametrize("accepts", [Service.CONTROL, 0])
def test_a_burst_of_connections_waits_for_a_recipient_that_is_late(accepts):
    """The kernel queues about ten messages for a socket. More connections are neither refused nor lost."""
    port, taken = free_port(), 0
    with ExitStack() as stack:
        mailbox = stack.enter_context(claim(port, Service.RENDEZVOUS))
        first = stack.enter_context(endpoint(0, port=port) if accepts == 0 else Listening(port, accepts))
        for _ in range(40):
            client = stack.enter_context(socket.create_connection((HOST, port), timeout=10))
            client.sendall(port_hello(KEY, Service.RENDEZVOUS))
        time.sleep(0.5)
        limit = time.monotonic() + 20
        while taken < 40 and time.monotonic() < limit:
            with suppress(BlockingIOError):
                _, parts, _, _ = mailbox.recvmsg(1, socket.CMSG_SPACE(4) + socket.CMSG_SPACE(12))
                for _, kind, data in parts:
                    if kind == socket.SCM_RIGHTS:
                        os.close(int.from_bytes(data, sys.byteorder))
                        taken += 1
        assert taken == 40 and first.refused == 0


def test_who_is_left_goes_on_when_another_has_gone():
    port = free_port()
    with endpoint(0, port=port):
        with services(port):
            pass
        for service in Service:
            assert ask(port, port_hello(KEY, service)) == b""
        with services(port):
            for service in Service:
                assert ask(port, port_hello(KEY, service)) == service.name.encode()
    with services(port):
        assert ask(port, port_hello(KEY, Service.CONTROL)) == b"CONTROL"
        assert ask(port, hello_to(0)) == b"", "an endpoint that has gone"


INVALID_HELLOS = [
    os.urandom(200),
    b"weft" + os.urandom(200),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(500),
    b"GET / HTTP/1.1\r\n\r\n" * 10,
    hello_to(Service.CONTROL, job="", magic=b"weftwan2"),
    hello_to(Service.CONTROL, job="")[:50],
]
NOBODYS = [hello_to(77, job=""), hello_to(9), hello_to(Service.RENDEZVOUS), hello_to(Service.RENDEZVOUS, job="")]


@pytest.mark.parametrize("said", INVALID_HELLOS + NOBODYS, ids=range(len(INVALID_HELLOS + NOBODYS)))
def test_a_connection_without_hello_or_recipient_is_closed(said):
    port = free_port()
    with Listening(port, Service.CONTROL) as driver:
        with socket.create_connection((HOST, port), timeout=10) as client:
            client.sendall(said)
            with suppress(OSError):  # it may be closed by now
                client.shutdown(socket.SHUT_WR)
            assert is_closed(client)
        assert (driver.served, driver.handed, driver.refused) == (0, 0, 1)


def test_a_hello_of_another_key_reaches_the_handshake_of_its_process_only():
    """There both sides learn that they have different keys."""
    port = free_port()
    with services(port) as (driver, rendezvous):
        for _ in range(40):
            assert ask(port, hello_to(Service.CONTROL, job="", key=ANOTHER)) in {b"CONTROL", b"RENDEZVOUS"}
        assert driver.handed == rendezvous.handed == 0


def test_a_hello_is_valid_for_one_connection():
    port, said = free_port(), port_hello(KEY, Service.CONTROL)
    with Listening(port, Service.CONTROL) as driver:
        assert ask(port, said) == b"CONTROL"
        assert ask(port, said) == b""
        assert (driver.served, driver.refused) == (1, 1)


def test_a_hello_may_arrive_byte_by_byte():
    port, said = free_port(), port_hello(KEY, Service.CONTROL)
    with Listening(port, Service.CONTROL), socket.create_connection((HOST, port), timeout=10) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in said:
            client.sendall(bytes([byte]))
        assert client.recv(100) == b"CONTROL"


def test_bytes_after_a_hello_are_left_for_the_handshake():
    port = free_port()

    class Echoing(Listening):
        def _serve(self, connection):
            connection.settimeout(10)
            connection.sendall(connection.recv(100))
            connection.close()

    with Echoing(port, Service.CONTROL):
        assert ask(port, port_hello(KEY, Service.CONTROL) + b"what follows") == b"what follows"


def test_two_of_one_service_at_a_port_are_an_error():
    port = free_port()
    with Listening(port, Service.CONTROL):
        with pytest.raises(OSError, match="in use"):
            HostPort((HOST, port), Service.CONTROL, KEY)
        assert ask(port, port_hello(KEY, Service.CONTROL)) == b"CONTROL"


def test_a_port_of_another_program_is_not_shared():
    with socket.create_server((HOST, 0)) as taken:
        for reuse in (0, 1):
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            with pytest.raises(OSError, match="in use"):
                HostPort(taken.getsockname(), Service.CONTROL, KEY)


def test_one_that_is_about_to_end_is_waited_for():
    port = free_port()
    first = claim(port, Service.CONTROL)
    threading.Timer(0.3, first.close).start()
    claim(port, Service.CONTROL).close()


def test_a_forked_child_keeps_neither_port_nor_name():
    port = free_port()
    with Listening(port, Service.CONTROL):
        child = os.fork()
        if child == 0:  # nothing but system calls: this process has threads
            time.sleep(60)
            os._exit(0)
    try:
        with Listening(port, Service.CONTROL):
            for _ in range(20):
                assert ask(port, port_hello(KEY, Service.CONTROL)) == b"CONTROL"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_mailbox_takes_nothing_from_other_users():
    port = free_port()
    with Listening(port, Service.CONTROL) as driver:
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))
                sender.sendmsg([b"\0"], [rights], 0, f"\0weft-port-{port}-{int(Service.CONTROL)}")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        theirs.close()
        assert is_closed(ours)
        assert ask(port, port_hello(KEY, Service.CONTROL)) == b"CONTROL"
        assert driver.served == 1
        ours.close()


def test_messages_without_a_connection_or_with_many_leave_nothing_open():
    port = free_port()
    with Listening(port, Service.CONTROL) as driver:
        name = f"\0weft-port-{port}-{int(Service.CONTROL)}"
        before = len(os.listdir("/proc/self/fd"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            pairs = [socket.socketpair() for _ in range(3)]
            rights = array.array("i", [theirs.fileno() for _, theirs in pairs])
            sender.sendmsg([b"\0"], [], 0, name)
            sender.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], 0, name)
            for ours, theirs in pairs:
                theirs.close()
                ours.settimeout(10)
                assert ours.recv(100) in (b"CONTROL", b"")
                ours.close()
        assert ask(port, port_hello(KEY, Service.CONTROL)) == b"CONTROL"
        assert len(os.listdir("/proc/self/fd")) <= before + 1
        assert driver.refused == 0


def test_few_peers_with_another_key_shake_hands_at_once(monkeypatch):
    monkeypatch.setattr("weft.comm.host_port._MOST_OTHER_KEYS", 3)
    with Listening(0, Service.CONTROL) as driver:
        driver.part._other_keys = deque(maxlen=3)
        answers = []
        for _ in range(10):
            with socket.create_connection(driver.part.address, timeout=20) as client:
                client.sendall(port_hello(ANOTHER, Service.CONTROL))
                answers.append(client.recv(100))
        assert answers == [b"CONTROL"] * 3 + [b""] * 7
        with socket.create_connection(driver.part.address, timeout=20) as client:
            client.sendall(port_hello(KEY, Service.CONTROL))
            assert client.recv(100) == b"CONTROL"


def test_a_rendezvous_that_left_its_port_to_an_endpoint_is_reached_through_it():
    with environment(WEFT_KEY=KEY.secret.decode()):
        listening = AuthenticatedTcpSocket(("127.0.0.1", free_port()), listens=True)
        key = WanKey.from_environment()
        with WanEndpoint(rank=0, bind="127.0.0.1", key=key, shares_port=True, port=listening.address[1]) as endpoint:
            store, _ = first_rank(listening, endpoint)
            limit = time.monotonic() + 10
            while listening.port.listener.fileno() >= 0 and time.monotonic() < limit:
                time.sleep(0.01)
            assert listening.port.listener.fileno() < 0
            others = [another_rank(AuthenticatedTcpSocket(listening.address, listens=False)) for _ in range(5)]
            for number, other in enumerate(others):
                other.set(str(number), b"1")
                assert store.get(str(number)) == b"1"
            assert endpoint.refused == 0
