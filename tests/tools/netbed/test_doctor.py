"""`weft doctor net`: its table, its hints, its cache and its words."""

import pytest

from weft.comm.links import LinkProfile
from weft.comm.wan.probe import ProfileCache
from weft.tools.doctor import main
from weft.tools.netbed import load
from weft.tools.netbed.probing import bed_cache, hints

PROFILE = LinkProfile(rtt_s=0.04, rates_bps=((1, 5e7), (2, 1e8), (8, 4.9e8), (16, 5e8)))


def kernel(tmp_path, **settings):
    for name, value in settings.items():
        (tmp_path / name).write_text(value)
    return tmp_path


def test_a_well_set_kernel_needs_no_hint(tmp_path):
    settings = {"tcp_slow_start_after_idle": "0", "tcp_rmem": "4096 131072 33554432", "tcp_wmem": "4096 1 33554432"}
    assert hints([PROFILE], kernel(tmp_path, **settings)) == []
    assert hints([PROFILE], tmp_path / "nowhere") == []


def test_hints_name_the_setting_and_the_value(tmp_path):
    found = hints([PROFILE], kernel(tmp_path, tcp_slow_start_after_idle="1", tcp_rmem="4096 8192 100000"))
    assert "tcp_slow_start_after_idle=0" in found[0]
    assert "net.ipv4.tcp_rmem (100000 bytes)" in found[1]
    scaling = LinkProfile(rtt_s=0.04, rates_bps=((1, 5e7), (2, 1e8), (4, 2e8)))
    assert "greater --most" in hints([scaling], tmp_path / "nowhere")[0]


def test_a_bed_that_was_probed_is_read_from_the_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("weft.tools.netbed.probing.load", lambda: None)
    path = tmp_path / "bed.yaml"
    path.write_text("sites: {east: 1, west: 1}\nlinks: [{sites: [east, west], latency_ms: 20}]\n")
    ProfileCache(bed_cache(load(path))).add({"east -> west": PROFILE, "west -> east": PROFILE})
    assert main(["net", "--netbed", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "40.0" in shown
    assert "east -> west: Mbit/s 50 with 1, 100 with 2, 490 with 8, 500 with 16" in shown
    other = tmp_path / "other.yaml"
    other.write_text(path.read_text().replace("20", "30"))
    assert bed_cache(load(other)) != bed_cache(load(path))


@pytest.mark.parametrize("peer", ["10.0.0.1", "10.0.0.1:", ":80", "10.0.0.1:x", "10.0.0.1:0", "10.0.0.1:65536"])
def test_a_peer_without_address_and_port_is_refused(peer, monkeypatch):
    monkeypatch.setenv("WEFT_KEY", "a key that is long enough")
    with pytest.raises(ValueError, match="expected ADDRESS:PORT"):
        main(["net", "--bind", "127.0.0.1", "--peer", peer])


@pytest.mark.parametrize(("option", "value"), [("--port", "65536"), ("--port", "-1"), ("--seconds", "nan")])
def test_a_number_that_cannot_be_used_is_refused_before_anything_listens(option, value):
    with pytest.raises(ValueError, match=f"{option}={value}: expected"):
        main(["net", "--bind", "127.0.0.1", option, value])
