"""Free ports."""

import socket

import pytest

from weft.conf.host import processes


def test_a_port_is_free_and_no_ephemeral_one():
    for _ in range(20):
        port = processes.free_port()
        assert port not in processes._ephemeral()
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_that_is_taken_is_not_chosen(monkeypatch):
    with socket.create_server(("", 0)) as listener:
        taken = listener.getsockname()[1]
        choices = iter([taken, taken, processes.free_port()])
        monkeypatch.setattr(processes.random.SystemRandom, "choice", lambda self, ours: next(choices))
        assert processes.free_port() != taken


def test_where_all_ports_are_ephemeral_the_kernel_chooses(monkeypatch):
    monkeypatch.setattr(processes, "_ephemeral", lambda: range(1, 65_536))
    assert 0 < processes.free_port() < 65_536


def test_that_none_is_free_is_said(monkeypatch):
    def refuse(self, address):
        raise OSError("taken")

    monkeypatch.setattr(processes.socket.socket, "bind", refuse)
    with pytest.raises(OSError, match=r"cluster\.master_port"):
        processes.free_port()
