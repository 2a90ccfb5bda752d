"""The ranks' store hears ranks of the job alone: not the network, not other users, not other processes."""

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
from weft.comm.gateway import CredentialDoor, Gateway, KeyDoor, Vault
from weft.comm.rendezvous import own_address
from weft.tools.ranks import run_ranks

KEY = "a key of sixteen bytes or more"
TIMEOUT = timedelta(seconds=20)


@contextmanager
def environment(**variables):
    """Of threads that stand for ranks, which read it when they start."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def first_rank(door):
    """The store behind a door, as rank 0 opens it, and the vault's port."""
    vault = Vault.open()
    Gateway(vault.enter, host=vault.SIDE, port=vault.port).open_door(door)
    store = dist.TCPStore(
        vault.SIDE,
        vault.port,
        is_master=True,
        wait_for_workers=False,
        timeout=TIMEOUT,
        master_listen_fd=vault.listener.detach(),
    )
    return store, vault.port


def another_rank(door):
    gateway = Gateway(door.enter)
    gateway.try_way(5.0)
    return dist.TCPStore("127.0.0.1", gateway.port, is_master=False, timeout=TIMEOUT)


@pytest.fixture(params=["key", "user"])
def doors(request):
    """A door that listens, and the same as others see it."""
    if request.param == "user":
        name = f"weft-test-{os.getpid()}-{time.monotonic_ns()}"
        return CredentialDoor(name, listens=True), CredentialDoor(name, listens=False)
    with environment(WEFT_KEY=KEY):
        listening = KeyDoor(("127.0.0.1", 0), listens=True)
        return listening, KeyDoor(listening.address, listens=False)


def test_ranks_share_a_store_through_the_door(doors):
    store, _ = first_rank(doors[0])
    others = [another_rank(doors[1]) for _ in range(3)]
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


def test_the_threads_end_with_the_store(doors):
    before = set(threading.enumerate())
    store, _ = first_rank(doors[0])
    other = another_rank(doors[1])
    carrying = set(threading.enumerate()) - before
    assert len(carrying) == 2
    del other, store
    for thread in carrying:
        thread.join(10)
        assert not thread.is_alive()


def test_who_waits_is_told_when_the_store_has_gone(doors):
    store, _ = first_rank(doors[0])
    other = another_rank(doors[1])
    del store
    with pytest.raises(dist.DistError):
        for _ in range(100):  # what is on its way may still be taken
            other.add("weft/failures", 1)
            time.sleep(0.05)


def test_no_other_process_of_this_host_is_heard(doors):
    """Neither at the store's own port, nor at a gateway's, whoever runs it."""
    store, port = first_rank(doors[0])
    other = another_rank(doors[1])
    store.set("secret", b"1")
    for address in [("127.0.0.1", port), ("127.0.0.2", port), ("127.0.0.1", other.port)]:
        assert ask_the_store(address) == b""
    assert other.get("secret") == b"1"


def test_another_key_and_no_key_stay_outside():
    with environment(WEFT_KEY=KEY):
        door = KeyDoor(("127.0.0.1", 0), listens=True)
    store, _ = first_rank(door)
    with (
        environment(WEFT_KEY=KEY[::-1], MASTER_ADDR="127.0.0.1", MASTER_PORT=str(door.address[1])),
        pytest.raises(ValueError, match=r"is another's .* set the same WEFT_KEY everywhere"),
    ):
        another_rank(KeyDoor(door.address, listens=False))
    for said in [b"", os.urandom(32), os.urandom(64), b"GET / HTTP/1.1\r\n\r\n" * 9, os.urandom(70_000)]:
        with socket.create_connection(door.address, timeout=8) as client:
            client.sendall(said)
            heard = b""
            with suppress(ConnectionError):
                while more := client.recv(4096):
                    heard += more
            assert len(heard) in (0, 64)  # a random number and a proof that fits only what was said
    with environment(WEFT_KEY=KEY):
        assert another_rank(KeyDoor(door.address, listens=False)).set("a", b"1") is None
    assert store.get("a") == b"1"


def test_what_was_said_once_opens_nothing_again():
    with environment(WEFT_KEY=KEY):
        door = KeyDoor(("127.0.0.1", 0), listens=True)
        store, _ = first_rank(door)
        with socket.create_server(("127.0.0.1", 0)) as between:
            recorded = bytearray()
            threading.Thread(target=_pass_between, args=(between, door.address, recorded), daemon=True).start()
            another_rank(KeyDoor(between.getsockname(), listens=False)).set("a", b"1")
    with socket.create_connection(door.address, timeout=8) as client:
        client.sendall(recorded[:64])
        assert len(client.recv(64, socket.MSG_WAITALL)) == 64
        assert client.recv(1) == b""
    assert store.get("a") == b"1"


def _pass_between(server, address, recorded):
    guest, _ = server.accept()
    inside = socket.create_connection(address)

    def back():
        while data := inside.recv(4096):
            guest.sendall(data)

    threading.Thread(target=back, daemon=True).start()
    while data := guest.recv(4096):
        recorded += data
        inside.sendall(data)


def test_silent_guests_do_not_keep_a_rank_out():
    with environment(WEFT_KEY=KEY), ExitStack() as stack:
        door = KeyDoor(("127.0.0.1", 0), listens=True)
        store, _ = first_rank(door)
        for _ in range(300):
            stack.enter_context(socket.create_connection(door.address))
        another_rank(KeyDoor(door.address, listens=False)).set("a", b"1")
        assert store.get("a") == b"1"


def test_a_false_door_hears_a_random_number_and_no_more():
    with environment(WEFT_KEY=KEY, MASTER_ADDR="x", MASTER_PORT="1"), socket.create_server(("127.0.0.1", 0)) as false:
        heard = []

        def answer():
            guest, _ = false.accept()
            with guest:
                heard.append(guest.recv(4096))
                guest.sendall(os.urandom(64))
                heard.append(guest.recv(4096))

        door = threading.Thread(target=answer, daemon=True)
        door.start()
        with pytest.raises(ValueError, match="is another's"):
            another_rank(KeyDoor(false.getsockname(), listens=False))
        door.join(20)
        assert [len(said) for said in heard] == [32, 0]


def test_under_torchrun_the_agents_store_says_where_the_door_is_and_no_more(monkeypatch):
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    monkeypatch.setattr(rendezvous, "_alone_on_host", lambda master: False)
    settings = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job", "WEFT_KEY": KEY}
    with environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(agent.port), **settings):
        store, _ = first_rank(rendezvous._door(0, TIMEOUT))
        another_rank(rendezvous._door(1, TIMEOUT)).set("a", b"1")
        assert store.get("a") == b"1"
        with socket.create_server(("127.0.0.1", 0)) as false:
            agent.set("weft/door/job/None", f"127.0.0.1 {false.getsockname()[1]}")
            monkeypatch.setattr("weft.comm.gateway.KNOCK_S", 0.2)
            gateway = Gateway(rendezvous._door(1, TIMEOUT).enter)
            with pytest.raises(ConnectionError, match=r"rank 0 was not there within 1 s"):
                gateway.try_way(1.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("squats", [False, True])
def test_another_user_at_the_unix_door_is_refused(squats):
    name = f"weft-test-{os.getpid()}-{squats}"
    ours = CredentialDoor(name, listens=not squats)
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


def test_a_place_that_is_taken_is_said_with_a_remedy():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        environment(WEFT_KEY=KEY),
        pytest.raises(ValueError, match=r"cannot meet at 127.0.0.1:\d+: .*; end what is there"),
    ):
        KeyDoor(taken.getsockname(), listens=True)
    with (
        environment(MASTER_ADDR="no.such.host.invalid", MASTER_PORT="1"),
        pytest.raises(ValueError, match=r"MASTER_ADDR=no.such.host.invalid: .*; set cluster.master_addr"),
    ):
        own_address()


@pytest.mark.slow
def test_a_job_on_one_host_listens_on_loopback_alone():
    assert run_ranks(2, listens_beyond_this_host) == [[], []]
