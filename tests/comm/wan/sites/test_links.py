"""Where a rank's endpoint for process groups listens: at its host's port for other hosts, which is one run's alone."""

import socket
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from weft.comm import rendezvous
from weft.comm.links import Sites
from weft.comm.wan.sites import links
from weft.comm.wan.sites.links import SiteLinks
from weft.conf.host.processes import free_port
from weft.conf.schema import CommConfig


@pytest.fixture(autouse=True)
def of_one_job(monkeypatch):
    monkeypatch.setenv("WEFT_KEY", "a key for tests, long enough")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("LOCAL_RANK", "0")


def listening(port=0):
    return closing(SiteLinks(dist.HashStore(), Sites((0, 1), CommConfig(port=port)), rank=0))


def test_on_loopback_where_hosts_may_be_one_machine_any_free_port_is_taken(monkeypatch):
    monkeypatch.setattr(rendezvous, "hosts_port", lambda: 29500)
    with listening() as one, listening() as other:
        assert len({one.address[1], other.address[1], 29500}) == 3


@pytest.mark.parametrize("set_port", [False, True])
def test_elsewhere_it_is_the_rendezvous_port_unless_one_is_set(monkeypatch, set_port):
    meeting, own, left = free_port(), free_port(), []
    monkeypatch.setattr(links, "is_loopback", lambda address: False)
    monkeypatch.setattr(rendezvous, "hosts_port", lambda: meeting)
    monkeypatch.setattr(rendezvous, "hand_over", left.append)
    with listening(own if set_port else 0) as here:
        assert here.address[1] == (own if set_port else meeting)
    assert left == [("127.0.0.1", own if set_port else meeting)]


def test_a_port_that_another_run_or_another_program_has_is_refused_with_a_remedy():
    port = free_port()
    with listening(port) as first:
        assert first.address[1] == port
        with pytest.raises(ValueError, match=rf"another run's ranks listen at .*:{port} .*set another comm\.port"):
            listening(port)
    with listening(port):
        pass
    in_use = pytest.raises(ValueError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .* in use; .*comm\.port")
    with socket.create_server(("127.0.0.1", port)), in_use:
        listening(port)
    with listening(port):
        pass


def test_what_is_refused_for_another_reason_says_that(monkeypatch):
    monkeypatch.delenv("WEFT_KEY")
    with pytest.raises(ValueError, match="WEFT_KEY is not set"):
        listening(free_port())


def test_other_ranks_of_the_host_raise_the_same_error(monkeypatch):
    store, port = dist.HashStore(), free_port()
    with listening(port):
        with pytest.raises(ValueError, match="another run"):
            SiteLinks(store, Sites((0, 1), CommConfig(port=port)), rank=0)
        monkeypatch.setenv("LOCAL_RANK", "1")
        with pytest.raises(ValueError, match="another run"):
            SiteLinks(store, Sites((0, 1), CommConfig(port=port)), rank=1)


def test_a_rendezvous_at_another_address_of_the_host_goes_on_listening(monkeypatch):
    proxy = SimpleNamespace(left=0)
    proxy.leave_port = lambda: setattr(proxy, "left", proxy.left + 1)
    monkeypatch.setattr(rendezvous, "_LISTENER", rendezvous._Listener(("10.0.0.1", 29500), proxy))
    rendezvous.hand_over(("10.9.0.1", 29500))
    rendezvous.hand_over(("10.0.0.1", 29501))
    assert not proxy.left
    rendezvous.hand_over(("10.0.0.1", 29500))
    assert proxy.left == 1 and rendezvous.hosts_port() == 29500
