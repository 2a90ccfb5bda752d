"""Only ranks of the job reach their store: not the network, not other users, not other processes."""

import os
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.security.meeting import ask_the_store, listens_beyond_this_host
from weft.comm import rendezvous
from weft.comm.authenticated_socket import AuthenticatedTcpSocket, AuthenticatedUnixSocket
from weft.comm.loopback_proxy import LoopbackProxy, ProcessLocalPort
from weft.comm.rendezvous import own_address
from weft.tools.ranks import run_ranks

KEY = "a key of sixteen bytes or more"
TIMEOUT = timedelta(seconds=20)


@contextmanager
def environment(**variables):
    """Set the environment of threads that stand for ranks, which read it when they start."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def first_rank(address, endpoint=None):
    """The store behind an authenticated socket, as rank 0 opens it, and the store's own port.

    Args:
        endpoint: listens at the same port, and is left to accept.
    """
    local = ProcessLocalPort.open()
    proxy = LoopbackProxy(local.connect, host=local.PROXY_HOST, port=local.port)
    proxy.also_accept(address)
    if endpoint is not None:
        proxy.leave_port()
    store = dist.TCPStore(
        local.PROXY_HOST,
        local.port,
        is_master=True,
        wait_for_workers=False,
        timeout=TIMEOUT,
        master_listen_fd=local.listener.detach(),
    )
    return store, local.port


def another_rank(address):
    proxy = LoopbackProxy(address.connect)
    proxy.preconnect(5.0)
    return dist.TCPStore("127.0.0.1", proxy.port, is_master=False, timeout=TIMEOUT)


@pytest.fixture(params=["key", "user"])
def sockets(request):
    """A socket that listens, and one that connects to it."""
    if request.param == "user":
        name = f"weft-test-{os.getpid()}-{time.monotonic_ns()}"
        return AuthenticatedUnixSocket(name, listens=True), AuthenticatedUnixSocket(name, listens=False)
    with environment(WEFT_KEY=KEY):
        listening = AuthenticatedTcpSocket(("127.0.0.1", 0), listens=True)
        return listening, AuthenticatedTcpSocket(listening.address, listens=False)


def test_ranks_share_a_store_through_an_authenticated_socket(sockets):
    store, _ = first_rank(sockets[0])
    others = [another_rank(sockets[1]) for _ in range(3)]
    store.set("a", b"1")
    assert [other.get("a") for other in others] == [b"1"] * 3
    long = os.urandom(5_000_000)
    others[0].set("long", long)
    assert others[1].get("long") == store.get("long") == long
    assert others[2].clone().get("a") == b"1"
    waiting = threading.Thread(target=others[0].wait, args=(["b"],))
    waiting.start()
    others[1].set("b", b"2")
    waiting.join(5)
    assert not waiting.is_alive()


def test_the_threads_end_with_the_store(sockets):
    before = set(threading.enumerate())
    store, _ = first_rank(sockets[0])
    other = another_rank(sockets[1])
    carrying = set(threading.enumerate()) - before
    assert len(carrying) == 2
    del other, store
    for thread in carrying:
        thread.join(10)
        assert not thread.is_alive()


def test_waiting_ranks_fail_when_the_store_is_gone(sockets):
    store, _ = first_rank(sockets[0])
    other = another_rank(sockets[1])
    del store
    with pytest.raises(dist.DistError):
        for _ in range(100):  # what is on its way may still be taken
            other.add("weft/failures", 1)
            time.sleep(0.05)


def test_other_processes_of_this_host_cannot_reach_the_store(sockets):
    """Neither at the store's own port, nor at a proxy's, whoever runs it."""
    store, port = first_rank(sockets[0])
    other = another_rank(sockets[1])
    store.set("secret", b"1")
    for address in [("127.0.0.1", port), ("127.0.0.2", port), ("127.0.0.1", other.port)]:
        assert ask_the_store(address) == b""
    assert other.get("secret") == b"1"


def test_peers_with_another_key_or_none_are_refused():
    with environment(WEFT_KEY=KEY):
        listening = AuthenticatedTcpSocket(("127.0.0.1", 0), listens=True)
    store, _ = first_rank(listening)
    with (
        environment(WEFT_KEY=KEY[::-1], MASTER_ADDR="127.0.0.1", MASTER_PORT=str(listening.address[1])),
        pytest.raises(ValueError, match=r"belongs to another job .* set the same WEFT_KEY on all hosts"),
    ):
        another_rank(AuthenticatedTcpSocket(listening.address, listens=False))
    for said in [b"", os.urandom(32), os.urandom(64), b"GET / HTTP/1.1\r\n\r\n" * 9, os.urandom(70_000)]:
        with socket.create_connection(listening.address, timeout=8) as client:
            client.sendall(said)
            heard = b""
            with suppress(ConnectionError):
                while more := client.recv(4096):
                    heard += more
            assert len(heard) < 100  # at most TLS's alert
    with environment(WEFT_KEY=KEY):
        assert another_rank(AuthenticatedTcpSocket(listening.address, listens=False)).set("a", b"1") is None
    assert store.get("a") == b"1"


def test_a_replayed_handshake_is_refused():
    with environment(WEFT_KEY=KEY):
        listening = AuthenticatedTcpSocket(("127.0.0.1", 0), listens=True)
        store, _ = first_rank(listening)
        with socket.create_server(("127.0.0.1", 0)) as between:
            recorded = bytearray()
            threading.Thread(target=_pass_between, args=(between, listening.address, recorded), daemon=True).start()
            another_rank(AuthenticatedTcpSocket(between.getsockname(), listens=False)).set("a", b"1")
    with socket.create_connection(listening.address, timeout=8) as client:
        heard = b""
        with suppress(OSError):  # the server may have closed before all of it is sent
            client.sendall(bytes(recorded))  # a copy: the first client may still be heard
            client.shutdown(socket.SHUT_WR)
            while more := client.recv(4096):
                heard += more
        assert len(heard) < 2000  # the server's side of a handshake and its alert
    assert store.get("a") == b"1"


def test_what_ranks_say_to_the_store_is_not_seen_on_the_way():
    with environment(WEFT_KEY=KEY):
        listening = AuthenticatedTcpSocket(("127.0.0.1", 0), listens=True)
        store, _ = first_rank(listening)
        with socket.create_server(("127.0.0.1", 0)) as between:
            recorded = bytearray()
            threading.Thread(target=_pass_between, args=(between, listening.address, recorded), daemon=True).start()
            other = another_rank(AuthenticatedTcpSocket(between.getsockname(), listens=False))
            other.set("an address of a rank", b"a value that no other process may read")
            assert store.get("an address of a rank") == b"a value that no other process may read"
    for said in (b"an address of", b"a value that", KEY.encode()):
        assert said not in recorded


def _pass_between(server, address, recorded):
    client, _ = server.accept()
    upstream = socket.create_connection(address)

    def back():
        while data := upstream.recv(4096):
            client.sendall(data)

    threading.Thread(target=back, daemon=True).start()
    while data := client.recv(4096):
        recorded += data
        upstream.sendall(data)


def test_silent_connections_do_not_block_a_rank():
    with environment(WEFT_KEY=KEY), ExitStack() as stack:
        listening = AuthenticatedTcpSocket(("127.0.0.1", 0), listens=True)
        store, _ = first_rank(listening)
        for _ in range(300):
            stack.enter_context(socket.create_connection(listening.address))
        another_rank(AuthenticatedTcpSocket(listening.address, listens=False)).set("a", b"1")
        assert store.get("a") == b"1"


def test_an_impostor_in_rank_0s_place_learns_a_hello_and_tls_greeting_only():
    with environment(WEFT_KEY=KEY, MASTER_ADDR="x", MASTER_PORT="1"), socket.create_server(("127.0.0.1", 0)) as false:
        heard = []

        def answer():
            client, _ = false.accept()
            with client:
                heard.append(client.recv(96, socket.MSG_WAITALL))
                heard.append(client.recv(4096))
                client.sendall(os.urandom(64))
                heard.append(client.recv(4096))

        server = threading.Thread(target=answer, daemon=True)
        server.start()
        with pytest.raises(ValueError, match="belongs to another job"):
            another_rank(AuthenticatedTcpSocket(false.getsockname(), listens=False))
        server.join(20)
        assert heard[0][:8] == b"weftdoor"
        assert heard[1][:1] == b"\x16"  # TLS's handshake, whose first message is random numbers and a list of ciphers
        assert len(heard[2]) < 100  # its alert
        assert KEY.encode() not in b"".join(heard)


def test_under_torchrun_the_agents_store_tells_the_address_only(monkeypatch):
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    monkeypatch.setattr(rendezvous, "on_one_host", lambda: False)
    settings = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job", "WEFT_KEY": KEY}
    with environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(agent.port), **settings):
        store, _ = first_rank(rendezvous.job_socket(0, TIMEOUT))
        another_rank(rendezvous.job_socket(1, TIMEOUT)).set("a", b"1")
        assert store.get("a") == b"1"
        with socket.create_server(("127.0.0.1", 0)) as false:
            agent.set("weft/store_address/job/None", f"127.0.0.1 {false.getsockname()[1]}")
            monkeypatch.setattr("weft.comm.authenticated_socket.HANDSHAKE_TIMEOUT_S", 0.2)
            proxy = LoopbackProxy(rendezvous.job_socket(1, TIMEOUT).connect)
            with pytest.raises(ConnectionError, match=r"rank 0 did not listen within 1 s"):
                proxy.preconnect(1.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("squats", [False, True])
def test_another_user_is_refused_at_the_unix_socket(squats):
    name = f"weft-test-{os.getpid()}-{squats}"
    ours = AuthenticatedUnixSocket(name, listens=not squats)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # nothing but system calls: this process has threads
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as other:
            if squats:
                other.bind("\0" + name)
                other.listen()
                os.write(write, b"x")
                other.accept()[0].recv(1)
            else:
                other.connect("\0" + name)
                other.settimeout(10)
                os.write(write, other.recv(1) or b"closed")
        os._exit(0)
    try:
        if squats:
            assert os.read(read, 1) == b"x"
            with environment(MASTER_ADDR="127.0.0.1", MASTER_PORT="1"), pytest.raises(ValueError, match=r"user 65534"):
                another_rank(ours)
        else:
            first = first_rank(ours)
            assert os.read(read, 10) == b"closed"
            del first
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_an_address_in_use_is_an_error_with_a_remedy():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        environment(WEFT_KEY=KEY),
        pytest.raises(ValueError, match=r"cannot meet at 127.0.0.1:\d+: .*; stop what listens there"),
    ):
        AuthenticatedTcpSocket(taken.getsockname(), listens=True)
    with (
        environment(MASTER_ADDR="no.such.host.invalid", MASTER_PORT="1"),
        pytest.raises(ValueError, match=r"MASTER_ADDR=no.such.host.invalid: .*; set cluster.master_addr"),
    ):
        own_address()


@pytest.mark.slow
def test_a_job_on_one_host_listens_on_loopback_alone():
    assert run_ranks(2, listens_beyond_this_host) == [[], []]


def test_supervised_runs_with_one_port_do_not_meet(monkeypatch):
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "WEFT_ATTEMPT": "2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    listening = []
    for run in ("one", "other"):
        monkeypatch.setenv("WEFT_RUN", f"{run}-{os.getpid()}")
        listening.append(rendezvous.job_socket(0, timedelta(seconds=5)))
    try:
        with pytest.raises(ValueError, match=r"cannot meet at .*: Address already in use"):
            rendezvous.job_socket(0, timedelta(seconds=5))
    finally:
        for each in listening:
            each.listener.close()
