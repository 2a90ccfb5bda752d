"""Connections between hosts: only peers with the key send messages, and a lost peer is an error."""

import pickle
import queue
import socket
import ssl
import threading
import time

import pytest

from weft.comm import message_stream
from weft.comm.key import WanKey, contexts
from weft.comm.message_stream import Listener, connect

PURPOSE = "test"
KEY, OTHER = "k" * 32, "o" * 32


@pytest.fixture
def streams(monkeypatch):
    """The listener's port, and a queue of the connections that it has authenticated."""
    monkeypatch.setenv("WEFT_KEY", KEY)
    found = queue.Queue()
    listener = Listener("127.0.0.1", 0, PURPOSE, found.put)
    return listener.address[1], found


def test_messages_of_any_length_arrive_both_ways(streams):
    port, found = streams
    ours = connect("127.0.0.1", port, PURPOSE, limit_s=5.0)
    theirs = found.get(timeout=5.0)
    for message in (b"", b"x", bytes(range(256)) * 40_000):
        sender = threading.Thread(target=ours.send, args=(message,))
        sender.start()
        assert theirs.receive(limit_s=5.0, most=len(message)) == message
        sender.join()
        theirs.send(message[:100])
        assert ours.receive() == message[:100]
    with pytest.raises(OSError, match=r"the peer has sent nothing for 0\.01 s"):
        theirs.receive(limit_s=0.01)


@pytest.mark.parametrize("sent", [1, 8, 3_000_000])
def test_a_peer_that_stops_within_a_message_is_lost(streams, monkeypatch, sent):
    port, found = streams
    monkeypatch.setattr(message_stream, "STALL_S", 0.3)
    ours = connect("127.0.0.1", port, PURPOSE, limit_s=5.0)
    begin = (2**32).to_bytes(8, "little") + bytes(3_000_000)
    threading.Thread(target=ours._connection.sendall, args=(begin[:sent],)).start()
    with pytest.raises(OSError, match=r"the peer has sent nothing for 0\.3 s"):
        found.get(timeout=5.0).receive()


def test_a_message_is_refused_by_its_length(streams):
    port, found = streams
    ours = connect("127.0.0.1", port, PURPOSE, limit_s=5.0)
    ours._connection.sendall((11).to_bytes(8, "little"))
    with pytest.raises(OSError, match="a message of 11 bytes, and the limit is 10; use the same version of Weft"):
        found.get(timeout=5.0).receive(most=10)


def test_a_lost_peer_raises_in_receive(streams):
    port, found = streams
    ours = connect("127.0.0.1", port, PURPOSE, limit_s=5.0)
    theirs = found.get(timeout=5.0)
    theirs.close()
    with pytest.raises(OSError):
        ours.receive()


def test_closing_ends_a_receive_of_another_thread(streams):
    port, found = streams
    ours = connect("127.0.0.1", port, PURPOSE, limit_s=5.0)
    found.get(timeout=5.0)
    failed = threading.Event()

    def receive():
        with pytest.raises(OSError):
            ours.receive()
        failed.set()

    thread = threading.Thread(target=receive)
    thread.start()
    ours.close()
    assert failed.wait(5.0)


def test_a_connection_with_another_key_is_refused_by_both_sides(streams, monkeypatch):
    port, found = streams
    monkeypatch.setenv("WEFT_KEY", OTHER)
    with pytest.raises(ValueError, match=r"has another WEFT_KEY; set the same on all hosts"):
        connect("127.0.0.1", port, PURPOSE, limit_s=5.0)
    assert found.empty()


@pytest.mark.parametrize("certificate", [None, ("o" * 32, PURPOSE), ("k" * 32, "another purpose")])
def test_a_pickle_of_a_peer_without_the_key_is_never_read(streams, certificate, tmp_path):
    """A client that does not verify the listener, with no certificate, another key's, or another purpose's."""
    port, found = streams
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if certificate:
        key, purpose = certificate
        _, context = contexts(WanKey(key.encode()), f"{purpose} certificate")
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    message = pickle.dumps("never read")
    with socket.create_connection(("127.0.0.1", port)) as plain, pytest.raises(OSError):
        connection = context.wrap_socket(plain)
        connection.sendall(len(message).to_bytes(8, "little") + message)
        if not connection.recv(1):
            raise ConnectionError("closed")
    assert found.empty()


def test_plain_text_is_refused_and_others_connect_meanwhile(streams):
    port, found = streams
    with socket.create_connection(("127.0.0.1", port)) as silent, socket.create_connection(("127.0.0.1", port)) as loud:
        loud.sendall(pickle.dumps("never read") * 100)
        connect("127.0.0.1", port, PURPOSE, limit_s=5.0)
        found.get(timeout=5.0)
        assert silent.fileno() > 0 and found.empty()


def test_a_peer_that_sends_its_handshake_slowly_is_cut_off(streams, monkeypatch):
    port, found = streams
    monkeypatch.setattr(message_stream, "HANDSHAKE_S", 0.3)
    with socket.create_connection(("127.0.0.1", port)) as slow, pytest.raises(OSError):
        slow.sendall(b"\x16\x03\x01\x02\x00\x01")  # the begin of a client's first message
        for _ in range(200):
            slow.sendall(b"\0")
            time.sleep(0.1)
    assert found.empty()


def test_a_host_that_does_not_listen_is_named(monkeypatch):
    monkeypatch.setenv("WEFT_KEY", KEY)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"127.0.0.1:{port} has not answered within 0 s"):
        connect("127.0.0.1", port, PURPOSE, limit_s=0.0)
