"""HTTPS: of the controller, and to the servers behind it."""

import asyncio
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.inference.controller.fake_workers import FakeWorkers
from tests.inference.controller.test_controller_server import HEAD, PREFILL, ask, server
from weft.conf.schema import ControllerConfig, WeftConfig
from weft.inference.worker.command import addresses, controller_url
from weft.recipes.serving.checks import check_certificate


def write_certificate(folder):
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key", "-out"]
    subprocess.run([*words, folder / "cert"], check=True, capture_output=True, timeout=60)
    return {"ssl_certfile": str(folder / "cert"), "ssl_keyfile": str(folder / "key")}


async def test_clients_with_the_certificate_are_served_by_https(tmp_path, caplog):
    files = write_certificate(tmp_path)
    config = WeftConfig()
    config.inference.controller = ControllerConfig(**files)
    check_certificate(config)
    assert controller_url(config) == "https://127.0.0.1:8300"
    async with server(FakeWorkers(1), **files) as (port, _):
        trust = ssl.create_default_context(cafile=files["ssl_certfile"])
        async with httpx.AsyncClient(verify=trust) as client:
            answer = await client.post(f"https://127.0.0.1:{port}/v1/completions", content=PREFILL)
            assert answer.status_code == 200
        assert not await ask(port, HEAD + PREFILL), "plain HTTP gets no answer"
    assert not caplog.records


@pytest.mark.parametrize("limit", ["count", "time"])
@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"])
async def test_connections_without_a_handshake_lock_no_client_out(tmp_path, monkeypatch, limit, sent):
    monkeypatch.setattr("weft.inference.controller.server.IDLE_S", 0.0)
    files, idle = write_certificate(tmp_path), []
    limits = {"max_connections": 5} if limit == "count" else {"receive_timeout_s": 0.3}
    async with server(FakeWorkers(1), **{"receive_timeout_s": 60.0, **limits, **files}) as (port, _):
        for _ in range(20):
            idle.append(await asyncio.open_connection("127.0.0.1", port))
            idle[-1][1].write(sent)
            await asyncio.sleep(0)
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=files["ssl_certfile"])) as client:
            answer = await client.post(f"https://127.0.0.1:{port}/v1/completions", content=PREFILL)
            assert answer.status_code == 200
        ends = [asyncio.create_task(reader.read()) for reader, _ in idle]
        async with asyncio.timeout(5):
            while sum(end.done() for end in ends) < (20 if limit == "time" else 14):
                await asyncio.sleep(0.01)
        assert ends[-1].done() == (limit == "time"), "of many connections the youngest stays"
        for _, writer in idle:
            writer.close()
        await asyncio.gather(*ends, return_exceptions=True)


async def test_a_server_is_reached_by_https_if_its_certificate_is_trusted(tmp_path, monkeypatch):
    files = write_certificate(tmp_path)
    statuses = []
    async with server(FakeWorkers(1), **files) as (behind, _):
        for trusted in ("", files["ssl_certfile"]):
            monkeypatch.setenv("SSL_CERT_FILE", trusted)
            async with server(FakeWorkers(1), f"https://127.0.0.1:{behind}", over_tcp=True) as (port, _):
                statuses.append((await ask(port, HEAD + PREFILL)).split(b" ")[1])
    assert statuses == [b"503", b"200"]


def test_a_worker_with_a_certificate_has_an_address_with_https():
    config = WeftConfig()
    for arguments, scheme in (["--ssl-keyfile=x", "--ssl_certfile", "y"], "https"), ([], "http"):
        config.inference.prefill.arguments = arguments
        assert addresses(config)[0].url == f"{scheme}://127.0.0.1:8301"


@pytest.mark.parametrize("broken", ["ssl_certfile", "ssl_keyfile", "no certificate"])
def test_a_certificate_that_cannot_be_loaded_is_refused_before_any_process_starts(tmp_path, broken):
    files = write_certificate(tmp_path)
    if broken in files:
        Path(files[broken]).write_text("none")
    else:
        files["ssl_certfile"] = ""
    config = WeftConfig()
    config.inference.controller = ControllerConfig(**files)
    with pytest.raises(ValueError, match=r"inference\.controller\.ssl_certfile=") as raised:
        check_certificate(config)
    assert "give PEM files" in str(raised.value) or "set inference.controller.ssl_certfile" in str(raised.value)
