"""A sealed listening socket accepts no connection; others still do."""

import socket

import pytest

from weft.comm.backends import sealed_afterwards


def listener():
    one = socket.create_server(("127.0.0.1", 0))
    one.settimeout(20)
    return one


def test_listeners_from_inside_accept_no_connection_afterwards():
    with listener() as before:
        with sealed_afterwards():
            inside = listener()
        with inside, pytest.raises(TimeoutError):
            socket.create_connection(inside.getsockname(), timeout=0.3)
        with socket.create_connection(before.getsockname(), timeout=20):
            before.accept()[0].close()


def test_connections_that_stand_already_go_on():
    with sealed_afterwards():
        inside = listener()
        early = socket.create_connection(inside.getsockname(), timeout=20)
        there, _ = inside.accept()
    with inside, early, there:
        early.sendall(b"hello")
        assert there.recv(5) == b"hello"
