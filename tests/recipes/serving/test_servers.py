"""The servers that `weft serve` keeps running."""

import contextlib
import ctypes
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weft.conf import load
from weft.conf.host.processes import give_way
from weft.inference.worker.command import workers_of
from weft.recipes.serving import processes, serve
from weft.recipes.serving.checks import reason_of

SHARE_OF_CORES = """
import ctypes, os
print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), ctypes.CDLL(None).prctl(30))
if os.path.exists("/proc/self/autogroup"):
    print(open("/proc/self/autogroup").read().split()[-1])
"""
"""A program that says how it is scheduled, its timer slack in nanoseconds (30 is PR_GET_TIMERSLACK), and how nice its
session is."""


@pytest.mark.parametrize(
    ("become", "policy", "nicer", "slack_s"),
    [
        (processes.run_on_idle_cores, os.SCHED_IDLE, processes.MOST_NICE, processes.SLACK_S),
        (processes.run_below_ranks, os.SCHED_OTHER, processes.NICE, None),
    ],
)
def test_a_worker_yields_cores_as_configured(become, policy, nicer, slack_s):
    """Also beside other sessions, which Linux may give equal shares.

    A worker on a GPU keeps the timers that it was born with: a late one would hold up a launch.
    """
    words = [sys.executable, "-c", SHARE_OF_CORES]
    done = subprocess.run(words, preexec_fn=become, start_new_session=True, capture_output=True, text=True, check=True)
    slack_ns = ctypes.CDLL(None).prctl(30) if slack_s is None else round(slack_s * 1e9)
    nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + nicer)
    of_session = [nicer] * Path("/proc/self/autogroup").exists()
    assert done.stdout.split() == list(map(str, [policy, nice, slack_ns, *of_session]))


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not group sessions")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_several_servers_of_a_user_without_privileges_give_way_at_once():
    """Linux accepts such changes once in a tenth of a second."""

    def become():
        os.setuid(54321)
        ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: files in /proc/self are the user's, as after an exec
        give_way(7)

    shows = ["cat", "/proc/self/autogroup"]
    started = [
        subprocess.Popen(shows, preexec_fn=become, start_new_session=True, stdout=subprocess.PIPE) for _ in range(3)
    ]
    assert all(process.communicate()[0].split()[-1] == b"7" for process in started)


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not group sessions")
def test_who_gives_way_leaves_the_session_of_others_as_it_is():
    before = Path("/proc/self/autogroup").read_text()
    subprocess.run([sys.executable, "-c", "pass"], preexec_fn=lambda: give_way(7), check=True)
    assert Path("/proc/self/autogroup").read_text() == before


def test_workers_on_gpus_and_those_that_do_not_yield_are_willing(config, monkeypatch, tmp_path):
    """SCHED_IDLE would keep a GPU worker's launches waiting for a core while its bubble passes."""
    started = []
    monkeypatch.setattr(processes.subprocess, "Popen", lambda words, **options: started.append(options["preexec_fn"]))
    config.inference.boards = str(tmp_path / "boards")
    for devices, yields in (([], True), ([], False), (["0", "1"], True)):
        monkeypatch.setattr(serve, "visible_gpus", lambda devices=devices: devices)
        config.inference.prefill.yield_cores = yields
        serve.worker_server(config, workers_of(config)[0], None).start(0.0)
    assert started == [processes.run_on_idle_cores, processes.run_below_ranks, processes.run_below_ranks]


def test_a_worker_that_never_answers_ends_with_the_reason(config, tmp_path, monkeypatch, capsys, fake_python):
    error = "OSError: tiny/lama is not a local folder and is not a valid model identifier"
    config.inference.prefill.python = fake_python(
        then=f'echo "(APIServer pid=7) {error}"; echo "RuntimeError: see above"; exit 1'
    )
    monkeypatch.setattr(serve, "POLL_S", 0.01)
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.01)
    given = {
        "cluster.ranks": 2,
        "inference.boards": tmp_path / "boards",
        "inference.prefill.model": "tiny/lama",
        "inference.prefill.python": config.inference.prefill.python,
        "inference.prefill.first_port": 28401,
    }
    with pytest.raises(ValueError, match=error) as caught:
        serve.main([f"{name}={value}" for name, value in given.items()])
    assert "it has not answered once in 3 starts, log " in str(caught.value)
    assert capsys.readouterr().err.count("again in") == 4, "two workers, two more starts each"


@pytest.mark.parametrize("answers", [False, True], ids=["starts", "has answered"])
@pytest.mark.parametrize(
    ("per_probe_s", "least"),
    [(0.02, 1), (0.5, 61), (20.0, 16)],
    ids=["waits", "computes on a busy host", "computes without end"],
)
def test_a_server_need_not_answer_as_long_as_it_makes_progress(answers, per_probe_s, least, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "STARTING_S", 19 * processes.PROBE_S)
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    launch = processes.Launch(words=words, env={}, folder=None, log=tmp_path / "log", become=lambda: None)
    server = processes.ServerProcess("worker", "http://127.0.0.1:9", lambda: launch, max_starts=1)
    server.start(0.0)
    if answers:
        with monkeypatch.context() as healthy:
            healthy.setattr(processes.urllib.request, "urlopen", lambda *_, **__: contextlib.nullcontext())
            server._probe(0.0)
    first, missed = server._process, 0
    monkeypatch.setattr(processes, "processor_seconds", lambda pid: missed * per_probe_s)
    while missed < 60 and server._process is first:
        missed += 1
        server._probe(missed * processes.PROBE_S)
    assert (missed if server._process is None else 61) == max(least, processes.MISSED + 1 if answers else 20)
    first.kill()
    first.wait()


def test_processor_time_includes_descendants():
    program = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ntime.sleep(60)"
    words = ["sh", "-c", f"{sys.executable} -c '{program}'; true"]
    with subprocess.Popen(words, start_new_session=True) as process:
        while processes.processor_seconds(process.pid) < 0.3:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    assert processes.processor_seconds(process.pid) == 0.0


@pytest.mark.parametrize("failing", ["worker 0", "decode server", "controller"])
def test_with_decode_the_first_server_that_does_not_start_ends_all(tmp_path, monkeypatch, failing, fake_python):
    error = "OSError: no such model"
    is_failing = {"worker 0": "*scheduler-cls*", "decode server": "*8402*"}.get(failing, "*nothing*")
    then = f'case "$*" in {is_failing}) echo "{error}"; exit 1;; esac; echo $$ >>{tmp_path}/pids; exec sleep 300'
    monkeypatch.setattr(serve, "POLL_S", 0.01)
    if failing == "controller":
        monkeypatch.setattr(serve.sys, "executable", fake_python("other", then=f'echo "{error}"; exit 1'))
    given = {
        "cluster.ranks": 1,
        "inference.boards": tmp_path / "boards",
        "inference.prefill.model": "tiny/llama",
        "inference.prefill.python": fake_python(then=then),
        "inference.prefill.first_port": 28401,
        "inference.prefill.first_side_port": 28411,
        "inference.controller.port": 28400,
        "inference.decode.port": 28402,
        "inference.decode.side_port": 28412,
    }
    with pytest.raises(
        ValueError, match=rf"^{failing}: ended with code 1; {error}; it has not answered once in 1 start"
    ):
        serve.main(["--with-decode", *(f"{name}={value}" for name, value in given.items())])
    pids = tmp_path / "pids"
    assert not any(Path("/proc", pid).exists() for pid in (pids.read_text().split() if pids.exists() else ()))


@pytest.mark.parametrize(
    ("host", "key", "word"), [("site-a", "a key, long enough", "IP address"), ("10.0.0.1", None, "WEFT_KEY is not set")]
)
def test_with_decode_keeps_the_chosen_connector_which_needs_an_address_and_a_key(monkeypatch, host, key, word):
    monkeypatch.setenv("WEFT_API_KEY", "of the servers")
    monkeypatch.delenv("WEFT_KEY")
    if key:
        monkeypatch.setenv("WEFT_KEY", key)
    given = {"inference.prefill.model": "m", "inference.prefill.connector": "wan", "inference.prefill.host": host}
    with pytest.raises(ValueError, match=word):
        serve.main(["--with-decode", *(f"{name}={value}" for name, value in given.items())])


def test_sigterm_lets_the_controller_end_first(monkeypatch):
    calls = []

    class Server:
        def __init__(self, name):
            self.name, self.failure, self.polls = name, "", 3

        def check(self):
            calls.append(f"check {self.name}")
            if self.name == "controller":
                signal.raise_signal(signal.SIGTERM)

        @property
        def is_running(self):
            self.polls -= 1
            return self.polls > 0

        def send_signal(self, _):
            calls.append(f"signal {self.name}")

        def end(self, _):
            assert self.polls == 0 or self.name != "controller"
            calls.append(f"end {self.name}")

    for name in ("check_serving", "check_decode", "check_ports", "check_engine"):
        monkeypatch.setattr(serve, name, lambda _: None)
    monkeypatch.setattr(serve, "worker_server", lambda *_, **__: Server("worker"))
    monkeypatch.setattr(serve, "_decode_server", lambda _: Server("decode"))
    monkeypatch.setattr(serve, "_controller_server", lambda *_: Server("controller"))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        assert serve.main(["--with-decode"]) == 0
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    assert calls[:5] == ["check worker", "check decode", "check controller", "signal controller", "signal worker"]
    assert sorted(calls[-3:]) == ["end controller", "end decode", "end worker"]


def test_who_computes_prompts_is_printed_once(config, monkeypatch, capsys):
    readiness = serve._Readiness(config)
    monkeypatch.setattr(serve, "PROBE_S", 0.0)
    for state in ({"serving": 0}, {"serving": 0}, {"serving": 1}):
        monkeypatch.setattr(
            serve.urllib.request, "urlopen", lambda *_, state=state, **__: io.StringIO(json.dumps(state))
        )
        readiness.check()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert printed[0].endswith("no training publishes bubbles, so the decode server computes prompts itself")
    assert printed[1] == "http://127.0.0.1:8300: ready, workers compute prompts in bubbles"


def test_a_worker_that_has_answered_is_started_again_for_ever(config, tmp_path, monkeypatch, fake_python):
    config.inference.boards = str(tmp_path / "boards")
    config.inference.prefill.python = fake_python(then="exit 1")
    process = serve.worker_server(config, workers_of(config)[0], None)
    process.ever_answered = True
    for _ in range(processes.MAX_STARTS + 2):
        process.start(0.0)
        process.restart("ended", 0.0)
    assert not process.failure


def test_the_reason_is_the_first_error_of_the_last_start(tmp_path):
    log = tmp_path / "log"
    assert reason_of(log, 0) == ""
    log.write_text("ValueError: of an earlier start\n")
    begin = log.stat().st_size
    with log.open("a") as file:
        file.write("(EngineCore pid=3) ERROR 11-26 11:04:18 [core.py:1512] Traceback\n")
        file.write(
            "(EngineCore pid=3) ERROR 11-26 11:04:18 [core.py:1512] torch.OutOfMemoryError: CUDA out of memory\n"
        )
        file.write("(APIServer pid=1) RuntimeError: Engine core initialization failed\n")
    assert reason_of(log, begin) == "torch.OutOfMemoryError: CUDA out of memory"
    log.write_text(
        "(APIServer pid=1) pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, no\n"
    )
    assert reason_of(log, 0) == "pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, no"


@pytest.mark.parametrize("where", ["boards", "package"])
def test_workers_import_nothing_that_another_user_could_have_written(tmp_path, monkeypatch, where):
    boards = tmp_path / "boards"
    trap = boards if where == "boards" else boards / "package"
    boards.mkdir(mode=0o700)
    trap.mkdir(exist_ok=True)
    trap.chmod(0o777)
    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, **__: pytest.fail("a process would start"))
    config = load([f"inference.boards={boards}", "inference.enabled=true"])
    (worker,) = serve.workers_of(config)
    with pytest.raises(ValueError, match=r"not a folder of this user alone"):
        serve.worker_server(config, worker, None).check()
