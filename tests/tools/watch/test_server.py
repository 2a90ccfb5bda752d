"""The page's server: views, tokens, host names, and what a run's texts cannot do."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest
import uvicorn
from starlette.testclient import TestClient

from tests.tools.watch.recorded import Recording
from weft.tools.cli import main
from weft.tools.watch import command
from weft.tools.watch import limits as limits_module
from weft.tools.watch.limits import Limits
from weft.tools.watch.record import RunRecord
from weft.tools.watch.server import PAGE, make_app
from weft.tools.watch.views import Views

VIEWS = ("overview", "metrics", "heat", "timeline", "ranks", "links", "time", "explain", "perfetto")
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    recording = Recording(tmp_path_factory.mktemp("run"), name="recorded")
    recording.run(25)
    return RunRecord(recording.write())


def client(record, *, host="127.0.0.1", token="", base="http://127.0.0.1:8765"):
    return TestClient(make_app(record, host=host, token=token), base_url=base)


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_json_of_finite_numbers(record, view):
    answer = client(record).get(f"/api/{view}")
    assert answer.status_code == 200

    def refuse(text):
        raise AssertionError(text)

    assert json.loads(answer.text, parse_constant=refuse) or view == "explain"


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("kept", [0.01, 0.05, 0.5, 1.0])
def test_every_view_is_there_while_a_run_has_few_events(tmp_path, steps, kept):
    recording = Recording(tmp_path, name="young")
    recording.run(steps)
    draw = np.random.default_rng(steps)
    recording.events = [
        events[(draw.random(len(events)) < kept) | (np.arange(len(events)) == 0)] for events in recording.events
    ]
    record = RunRecord(recording.write())
    Views(record).show("explain")
    for view in VIEWS:
        if view == "explain":
            continue  # the server has another process for it
        for query in ("", "?step=1", "?step=9"):
            assert client(record).get(f"/api/{view}{query}").status_code == 200, view


def test_the_timeline_of_a_step_is_that_of_the_files(record):
    found = client(record).get("/api/timeline?step=7").json()
    spans = record.spans(7)
    assert found["step"] == 7 and len(found["spans"]) == len(spans) - len(record.places)
    assert found["step_s"] == pytest.approx(spans.end_s.max() - spans.start_s.min())
    needs = found["needs"][0]
    assert needs["0F1"] == [] and needs["1F0"] == [[2, "1RECV_F0"]] and needs["1RECV_F0"] == [[0, "0SEND_F0"]]
    assert needs["0B0"] == [[0, "0F0"], [0, "0RECV_B0"]]


def test_other_addresses_need_a_token(record):
    with pytest.raises(ValueError, match=r"--host 0\.0\.0\.0: others can reach it"):
        make_app(record, host="0.0.0.0")
    asked = client(record, host="0.0.0.0", token="secret", base="http://example:8765")
    for path in ("/", "/api/overview", "/page/app.js", "/events"):
        assert asked.get(path).status_code == 401
    assert asked.get("/?token=wrong").status_code == 401
    answer = asked.get("/?token=secret", follow_redirects=False)
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert asked.get("/api/overview").status_code == 200


GET = """
import encodings.idna, os, socket, sys
port, user, times, idle = map(int, sys.argv[1:])
os.setuid(user)
held = [socket.create_connection(("127.0.0.1", port)) for _ in range(idle)]
answers = set()
for _ in range(times):
    with socket.create_connection(("127.0.0.1", port)) as end:
        try:
            end.sendall(b"GET /api/overview HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n")
            answers.add(end.recv(12).decode() or "closed")
        except ConnectionError:
            answers.add("closed")
print(*answers)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("times", "idle"), [(1, 0), (15, 80)])
def test_another_user_of_the_host_cannot_read_the_page(record, times, idle):
    """Both users ask at the same time, the second time often and with many connections that stay open."""
    words = [sys.executable, "-m", "weft.tools.cli", "watch", str(record.folder), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as serving:
        try:
            port = serving.stdout.readline().rpartition(":")[2].strip("/\n")
            asked = {
                user: subprocess.Popen(
                    [sys.executable, "-c", GET, port, str(user), str(times), str(idle)],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for user in (0, 54321)
            }
            heard = {user: process.communicate(timeout=60)[0] for user, process in asked.items()}
        finally:
            serving.terminate()
    assert heard == {0: "HTTP/1.1 200\n", 54321: "closed\n"}


def test_another_web_site_cannot_read_the_page_through_a_name_of_its_own(record):
    assert client(record, base="http://evil.example:8765").get("/api/overview").status_code == 421
    assert client(record, base="http://localhost:8765").get("/api/overview").status_code == 200


@pytest.mark.parametrize(
    "path", ["/page/../server.py", "/page/%2e%2e/server.py", "/page/%2e%2e%2fserver.py", "/page/x"]
)
def test_only_the_page_is_served(record, path):
    assert client(record).get(path).status_code == 404


def test_the_page_runs_no_script_but_its_own(record):
    answer = client(record).get("/")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    for path in PAGE.iterdir():
        text = path.read_text()
        assert not any(
            word in text for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "document.write")
        )
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text


def test_texts_of_a_run_are_passed_on_unchanged(tmp_path):
    recording = Recording(tmp_path / "run", name=HOSTILE)
    recording.run(3)
    folder = recording.write()
    logs = folder / "supervisor" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank0.log").write_bytes(b"\xff" + f"line {HOSTILE}\n".encode())
    found = client(RunRecord(folder)).get("/api/overview").json()
    assert found["name"] == HOSTILE and any(HOSTILE in line for line in found["log"])


def test_nothing_listens_beyond_loopback_by_default(record, monkeypatch, capsys):
    listening = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: listening.extend(sockets))
    assert command.main([str(record.folder), "--port", "0"]) == 0
    assert [each.getsockname()[0] for each in listening] == ["127.0.0.1"]
    assert "token" not in capsys.readouterr().out
    monkeypatch.setenv(command.TOKEN, "mine")
    assert command.main([str(record.folder), "--port", "0", "--host", "0.0.0.0"]) == 0
    assert "/?token=mine" in capsys.readouterr().out
    monkeypatch.delenv(command.TOKEN)
    assert command.main([str(record.folder), "--port", "0", "--host", "0.0.0.0"]) == 0
    assert len(capsys.readouterr().out.partition("token=")[2].strip()) == 32
    for each in listening:
        each.close()


def test_a_port_in_use_and_missing_packages_are_named(record, monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["watch", str(record.folder), "--port", port]) == 2
        assert f"--port {port}: Address already in use" in capsys.readouterr().err
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main(["watch", str(record.folder)]) == 2
    assert "the page needs fastapi and uvicorn: pip install 'weft[watch]'" in capsys.readouterr().err
    assert main(["watch", str(record.folder / "nothing")]) == 2


@pytest.mark.parametrize("port", ["-3", "99999"])
def test_a_port_that_no_host_has_is_one_line(record, capsys, port):
    assert main(["watch", str(record.folder), f"--port={port}"]) == 2
    assert f"--port={port}: expected a whole number" in capsys.readouterr().err


def test_time_is_shown_next_to_another_step_and_another_run(record, tmp_path):
    def of(url, other=None):
        app = make_app(record, host="127.0.0.1", other=other)
        return TestClient(app, base_url="http://127.0.0.1").get(url).json()

    steps = [of(f"/api/time?step={step}") for step in (5, 7)]
    assert steps[0]["against"] is None
    found = of("/api/time?step=5&against=7")
    assert found["against"] == {"name": record.name, "step": 7, "seconds": steps[1]["measured"]}
    differences = [abs(found["measured"][name] - steps[1]["measured"][name]) for name in found["order"]]
    assert found["measured"] == steps[0]["measured"] and differences == sorted(differences, reverse=True)

    other = Recording(tmp_path, name="<b>other", stages=2)
    other.run(6)
    compared = RunRecord(other.write())
    found = of("/api/time?step=5", compared)
    assert found["against"]["name"] == "<b>other" and found["against"]["step"] == compared.step_with_spans()
    for path in (tmp_path / "watch").glob("spans-*"):
        path.unlink()
    assert of("/api/time?step=5", compared)["against"] is None


def test_a_failing_explanation_says_why(tmp_path):
    recording = Recording(tmp_path, name="young")
    recording.run(1)
    limits = Limits(recording.write())
    limits.newest()
    limits._process.wait(280)  # it has a low priority
    assert "too few steps are recorded" in json.loads(limits.newest())
    limits.close()


def test_views_do_not_wait_for_the_limits_and_old_ones_are_shown_meanwhile(record, monkeypatch):
    monkeypatch.setattr(limits_module, "REST", 0.0)
    monkeypatch.setattr(limits_module, "EXPLAIN_S", 0.0)
    limits = Limits(record.folder)
    assert limits.newest() == b"null"
    limits._process.wait(280)  # it has a low priority
    limits._command = ["sleep", "600"]
    found = json.loads(limits.newest())
    assert found and all(set(each) == {"kind", "gain", "text"} for each in found)
    assert json.loads(limits.newest()) == found
    sleeping = limits._process
    limits.close()
    assert sleeping.returncode == -9
    assert json.loads(limits.newest()) == found and limits._process is None


def test_news_are_sent_as_the_run_grows(tmp_path):
    recording = Recording(tmp_path / "run")
    recording.run(3)
    record = RunRecord(recording.write())
    config = uvicorn.Config(make_app(record, host="127.0.0.1"), port=0, log_level="error", timeout_graceful_shutdown=1)
    serving = uvicorn.Server(config)
    listener = command._listen("127.0.0.1", 0)
    thread = threading.Thread(target=serving.run, args=([listener],), daemon=True)
    thread.start()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{listener.getsockname()[1]}/events", timeout=20) as events:
            assert json.loads(next(events).decode().removeprefix("data: "))["step"] == 3
            recording.run(2)
            recording.write()
            until = time.monotonic() + 20
            for line in events:
                assert time.monotonic() < until
                if line.startswith(b"data: ") and json.loads(line[6:])["step"] == 5:
                    break
    finally:
        serving.should_exit = True
        thread.join(10)


def test_a_hang_leads_from_the_waiting_ranks_to_the_culprit(tmp_path):
    recording = Recording(tmp_path / "run", lines=1)
    recording.run(3)
    folder = recording.write()
    slots = {0: "0RECV_B0", 1: "1RECV_B0", 2: "2F1", 3: "3RECV_F1"}
    now = [{"rank": r, "slot": s, "step": 4, "since": 0.0, "alive": True} for r, s in slots.items()]
    (folder / "watch" / "now-h.json").write_text(json.dumps({"at": time.time(), "host": "h", "ranks": now}))
    found = Views(RunRecord(folder)).show("ranks")
    assert [each["waits_for"] for each in found] == [1, 2, None, 2]
    assert [(each["stage"], each["pipeline"]) for each in found] == [(stage, 0) for stage in range(4)]


def test_restarts_faults_and_alerts_are_those_of_the_journal(tmp_path):
    recording = Recording(tmp_path / "run")
    recording.run(2)
    folder = recording.write()
    assert Views(RunRecord(folder)).show("overview").items() >= {"restarts": 0, "alerts": []}.items()
    (folder / "supervisor").mkdir()
    events = [{"event": "attempt"}, {"event": "alert", "at": 5.0, "kind": "slow_link", "culprit": {"link": [1, 2]}}]
    events += [{"event": "fault", "at": 6.0, "kind": "hang", "evidence": HOSTILE}, {"event": "attempt"}]
    (folder / "supervisor" / "journal.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    shown = Views(RunRecord(folder)).show("overview")
    assert shown["restarts"] == 1 and [each["kind"] for each in shown["alerts"]] == ["slow_link", "hang"]
    assert shown["alerts"][1]["evidence"] == HOSTILE and shown["alerts"][0]["culprit"] == "{'link': [1, 2]}"


def test_the_terminal_shows_the_same(record, capsys):
    assert main(["watch", str(record.folder), "--text", "--once"]) == 0
    text = capsys.readouterr().out
    assert "recorded" in text and "step 25 of 1000" in text and "compute" in text and "limit: " in text
    assert main(["explain", str(record.folder)]) == 0
    assert "1. " in capsys.readouterr().out


def test_reading_a_run_does_not_load_torch():
    code = "import sys, weft.tools.watch.command, weft.tools.watch.views; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
