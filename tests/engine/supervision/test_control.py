"""The control wire: messages arrive once and in order over broken connections, and only from peers with the key."""

import asyncio
import os
import random
import socket
import ssl
import struct
from contextlib import asynccontextmanager, suppress

import pytest

from weft.comm.host_port import Service, port_hello
from weft.comm.key import WanKey, contexts
from weft.engine.supervision import connection as link
from weft.engine.supervision.connection import pack
from weft.engine.supervision.control import ControlClient, ControlServer


async def until(condition):
    while not condition():
        await asyncio.sleep(0.002)


class Driver:
    """A server that records its messages."""

    def __init__(self, **options):
        self.heard, self.lost, self.came = [], [], []
        self.server = ControlServer(
            on_message=lambda peer, message: self.heard.append((peer, message)),
            on_lost=self.lost.append,
            on_connected=self.came.append,
            **options,
        )


@asynccontextmanager
async def driver(address=("127.0.0.1", 0), **options):
    it = Driver(**options)
    it.address = await it.server.listen(address)
    try:
        yield it
    finally:
        await it.server.close()


@asynccontextmanager
async def agent(address, name="a", **options):
    heard = []
    client = ControlClient(address, name=name, on_message=heard.append, **options)
    client.heard = heard
    client.start()
    try:
        yield client
    finally:
        await client.close()


def unix_name(request):
    return f"weft-test-{os.getpid()}-{request.node.name}"


@pytest.mark.parametrize("unix", [False, True])
async def test_both_sides_hear_each_other(unix, request):
    async with driver(unix_name(request) if unix else ("127.0.0.1", 0)) as it, agent(it.address) as client:
        client.send({"hello": 1})
        await until(lambda: it.heard)
        assert it.heard == [("a", {"hello": 1})]
        assert it.came == ["a"] and it.server.connected == {"a"}
        for number in range(100):
            it.server.send("a", {"number": number})
        await until(lambda: len(client.heard) == 100)
        assert client.heard == [{"number": number} for number in range(100)]


async def test_messages_wait_for_a_driver_that_is_not_there_yet(request):
    name = unix_name(request)
    async with agent(name) as client:
        for number in range(10):
            client.send({"number": number})
        await asyncio.sleep(0.3)
        async with driver(name) as it:
            it.server.send("a", {"waits": True})
            await until(lambda: len(it.heard) == 10 and client.heard)
            assert [message["number"] for _, message in it.heard] == list(range(10))


async def test_of_waiting_messages_of_a_kind_the_last_arrives(request):
    name = unix_name(request)
    async with agent(name) as client:
        for number in range(5):
            client.send({"beat": number}, latest_of="beat")
            client.send({"event": number})
        async with driver(name) as it:
            await until(lambda: ("a", {"beat": 4}) in it.heard and ("a", {"event": 4}) in it.heard)
            assert [message["event"] for _, message in it.heard if "event" in message] == list(range(5))
            assert [message["beat"] for _, message in it.heard if "beat" in message] == [4]


async def test_broken_connections_lose_double_and_reorder_nothing():
    """Connections are cut at random moments in both directions, while both sides send."""
    dice = random.Random(1)
    async with driver() as it, agent(it.address) as client:
        await until(lambda: client.connected)
        for number in range(300):
            client.send({"number": number})
            it.server.send("a", {"number": number})
            if number % 30 == 29:
                ends = [client._session.link, it.server._sessions["a"].link]
                end = dice.choice([end for end in ends if end is not None] or [None])
                if end is not None:
                    end.end("cut")
            if dice.random() < 0.3:
                await asyncio.sleep(0)
        await until(lambda: len(it.heard) >= 300 and len(client.heard) >= 300)
        assert [message["number"] for _, message in it.heard] == list(range(300))
        assert [message["number"] for message in client.heard] == list(range(300))
        assert it.lost


async def test_a_driver_that_is_started_again_gets_what_the_old_one_has_not(request):
    name = unix_name(request)
    async with agent(name) as client:
        async with driver(name) as old:
            client.send({"number": 0})
            await until(lambda: old.heard)
        await until(lambda: not client.connected)
        client.send({"number": 1})
        async with driver(name) as new:
            await until(lambda: ("a", {"number": 1}) in new.heard)
            new.server.send("a", {"welcome": True})
            await until(lambda: client.heard)


async def test_an_agent_that_is_started_again_replaces_its_old_connection(request):
    async with driver(unix_name(request)) as it, agent(it.address) as old:
        await until(lambda: it.came)
        async with agent(it.address) as new:
            new.send({"new": True})
            await until(lambda: it.heard)
            assert it.lost[:1] == ["a"]
            old._running.cancel()
            it.server.send("a", {"to": "new"})
            await until(lambda: {"to": "new"} in new.heard)


async def test_a_silent_peer_is_given_up(request, monkeypatch):
    monkeypatch.setattr(link, "PING_S", 0.05)
    monkeypatch.setattr(link, "SILENCE_S", 0.3)
    async with driver(unix_name(request)) as it:
        _, writer = await asyncio.open_unix_connection("\0" + it.address)
        writer.write(pack({"name": "mute", "session": "x", "of": "", "received": 0}))
        await until(lambda: it.lost == ["mute"])
        writer.close()


async def test_a_peer_that_does_not_read_is_given_up(request, monkeypatch):
    monkeypatch.setattr(link, "MOST_UNSENT_BYTES", 100_000)
    async with driver(unix_name(request)) as it:
        reader, writer = await asyncio.open_unix_connection("\0" + it.address, limit=1)
        writer.write(pack({"name": "slow", "session": "x", "of": "", "received": 0}))
        await until(lambda: it.came)
        reader._transport.pause_reading()
        for _ in range(100):
            it.server.send("slow", {"x": "y" * 50_000})
        await until(lambda: it.lost == ["slow"])
        writer.close()


async def test_a_failing_callback_is_no_reason_to_hang_up(request):
    def fail(peer, message):
        heard.append(message)
        raise RuntimeError("a mistake")

    heard = []
    server = ControlServer(on_message=fail)
    address = await server.listen(unix_name(request))
    async with agent(address) as client:
        client.send({"first": 1})
        client.send({"second": 2})
        await until(lambda: len(heard) == 2)
    await server.close()


# --- who is not of this job


def hostile_frames():
    yield os.urandom(500)
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield struct.pack("<I", 1 << 30) + b"x" * 1000
    yield struct.pack("<I", 0xFFFFFFFF)
    yield pack({"no": "greeting"})
    yield pack({"name": 1, "session": "x", "of": "", "received": "0"})
    texts = [b"[" * 100_000, b'{"a":' * 100_000, b"null", b'"' * 7, b"\xff\xfe", b"{", b'{"a":' + b"9" * 10_000 + b"}"]
    for text in texts:
        yield struct.pack("<I", len(text)) + text


async def closes(address, data, context=None, *, hello=True):
    """Send ``data``, over TCP after a valid hello, and check that the connection is closed without an answer."""
    if isinstance(address, str):
        reader, writer = await asyncio.open_unix_connection("\0" + address)
    else:
        guest = socket.create_connection(address)
        if hello:
            guest.sendall(port_hello(WanKey.from_environment(), Service.CONTROL))
        reader, writer = await asyncio.open_connection(sock=guest, ssl=context, server_hostname="" if context else None)
    try:
        with suppress(ConnectionError, ssl.SSLError):
            writer.write(data)
            await writer.drain()
            return await reader.read()
        return b""
    finally:
        writer.close()


async def test_nonsense_in_the_clear_earns_nothing():
    async with driver() as it, agent(it.address) as client:
        frames = [data for data in hostile_frames() if len(data) > 4]
        answers = await asyncio.gather(*(closes(it.address, data) for data in frames))
        assert all(b"name" not in answer for answer in answers)  # a TLS alert at most
        answers = await asyncio.gather(*(closes(it.address, data, hello=False) for data in frames))
        assert set(answers) == {b""}
        client.send({"still": "here"})
        await until(lambda: it.heard)
        assert it.came == ["a"]


@pytest.mark.parametrize("data", list(hostile_frames()), ids=range(13))
async def test_nonsense_of_one_with_the_key_ends_its_connection(data, request):
    async with driver(unix_name(request)) as it:
        assert await closes(it.address, data) == b""
        greeting = pack({"name": "insider", "session": "x", "of": "", "received": 0})
        await closes(it.address, greeting + data)
        assert not it.heard


def client_context(key):
    return contexts(WanKey(key), "control certificate")[1]


def anonymous_context():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.mark.parametrize("kind", ["another key", "no certificate"])
async def test_messages_without_the_key_are_refused(kind):
    context = client_context(b"another key, long enough") if kind == "another key" else anonymous_context()
    async with driver() as it, agent(it.address) as client:
        greeting = pack({"name": "a", "session": "x", "of": "", "received": 0})
        with suppress(ConnectionError, ssl.SSLError):
            assert await closes(it.address, greeting, context) == b""
        client.send({"still": "here"})
        await until(lambda: it.heard)
        assert it.came == ["a"] and not it.lost


async def test_a_driver_without_the_key_receives_nothing(monkeypatch):
    async with driver() as it:
        monkeypatch.setenv("WEFT_KEY", "another key, long enough")
        async with agent(it.address) as client:
            client.send({"secret": 1})
            await until(lambda: it.server.refused >= 2)
            assert not client.connected and not it.heard


async def test_older_tls_is_refused():
    context = client_context(os.environ["WEFT_KEY"].encode())
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    async with driver() as it:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await closes(it.address, b"", context)


async def test_silent_connections_are_dropped_for_peers():
    async with driver(most_unknown=4) as it:
        silent = [socket.create_connection(it.address) for _ in range(20)]
        for number, guest in enumerate(silent):  # some begin a handshake, a byte of it
            if number % 2:
                guest.sendall(port_hello(WanKey.from_environment(), Service.CONTROL) + b"\x16")
        async with agent(it.address) as client:
            client.send({"here": 1})
            await until(lambda: it.heard)
        for guest in silent:
            guest.close()


async def test_never_more_connections_wait_to_be_greeted_than_the_limit(monkeypatch):
    monkeypatch.setattr("weft.engine.supervision.control.HANDSHAKE_TIMEOUT_S", 60.0)
    async with driver(most_unknown=4) as it:
        guests = [socket.create_connection(it.address) for _ in range(40)]
        for guest in guests:
            guest.sendall(port_hello(WanKey.from_environment(), Service.CONTROL) + b"\x16")
        await until(lambda: it.server.refused == 36)
        assert len(it.server._unknown) == 4
        for guest in guests:
            guest.close()


async def test_a_handshake_has_a_time_limit(monkeypatch):
    monkeypatch.setattr("weft.engine.supervision.control.HANDSHAKE_TIMEOUT_S", 0.2)
    async with driver() as it:
        reader, writer = await asyncio.open_connection(*it.address)
        writer.write(port_hello(WanKey.from_environment(), Service.CONTROL) + b"\x16\x03\x01")
        assert await reader.read() == b""
        writer.close()
        assert it.server.refused == 1


async def test_a_tcp_address_needs_a_key(monkeypatch):
    monkeypatch.delenv("WEFT_KEY")
    with pytest.raises(ValueError, match="WEFT_KEY"):
        await ControlServer(on_message=print).listen(("127.0.0.1", 0))


async def test_an_address_in_use_is_named():
    async with driver() as it:
        with pytest.raises(ValueError, match=r"supervise\.port"):
            await ControlServer(on_message=print).listen(it.address)
