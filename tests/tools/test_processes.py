"""A run's processes end together, however they are asked to."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tests.waiting import until

# A launcher that leaves its ranks behind when it is terminated, as DeepSpeed's does.
CARELESS = """
import subprocess, sys, time
for rank in range(2):
    subprocess.Popen([sys.executable, "-c", sys.argv[1], str(rank)])
time.sleep(float(sys.argv[2])); sys.exit(int(sys.argv[3]))
"""
RANK = """
import os, signal, sys, time
{extra}
open(f"{folder}/{{sys.argv[1]}}.tmp", "w").write(str(os.getpid()))
os.replace(f"{folder}/{{sys.argv[1]}}.tmp", f"{folder}/{{sys.argv[1]}}.pid")
time.sleep({seconds})
"""
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


class Run:
    """`run_group` in a process of its own, since it handles signals."""

    def __init__(self, folder: Path, command: list[str], grace_s: float = 30) -> None:
        code = textwrap.dedent(f"""
            import os, sys
            from weft.tools.processes import run_group
            sys.exit(run_group({command!r}, env=dict(os.environ), grace_s={grace_s}))
        """)
        self.folder = folder
        self.process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)

    def ranks(self, count: int = 2) -> list[psutil.Process]:
        """The ranks, once all have started."""
        deadline = time.monotonic() + 60
        while len(files := list(self.folder.glob("*.pid"))) < count:
            assert time.monotonic() < deadline and self.process.poll() is None, self.process.stderr.read()
            time.sleep(0.05)
        return [psutil.Process(int(file.read_text())) for file in files]

    def end(self) -> int:
        return self.process.wait(timeout=200)


def careless(folder: Path, *, rank_seconds=300.0, extra="", seconds=300.0, code=0) -> list[str]:
    rank = RANK.format(folder=folder, seconds=rank_seconds, extra=extra)
    return [sys.executable, "-c", CARELESS, rank, str(seconds), str(code)]


def gone(processes: list[psutil.Process]) -> bool:
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_every_rank(number, tmp_path):
    run = Run(tmp_path, careless(tmp_path))
    ranks = run.ranks()
    run.process.send_signal(number)
    assert run.end() == 128 + number
    assert gone(ranks)


def test_a_second_signal_kills_ranks_that_do_not_listen(tmp_path):
    run = Run(tmp_path, careless(tmp_path, extra=STUBBORN))
    ranks = run.ranks()
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert not gone(ranks)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert gone(ranks)


def test_ranks_that_do_not_listen_are_killed_after_the_grace(tmp_path):
    run = Run(tmp_path, careless(tmp_path, extra=STUBBORN), grace_s=0.3)
    ranks = run.ranks()
    run.process.terminate()
    assert run.end() == 143
    assert gone(ranks)


def test_a_launcher_that_ends_before_its_ranks_is_a_failure(tmp_path):
    run = Run(tmp_path, careless(tmp_path, seconds=3))
    ranks = run.ranks()
    assert run.end() == 1
    assert gone(ranks)
    assert "ended before its ranks" in run.process.stderr.read()


@pytest.mark.parametrize("code", [0, 3])
def test_exit_codes_come_through(code, tmp_path):
    assert Run(tmp_path, [sys.executable, "-c", f"import sys; sys.exit({code})"]).end() == code


def test_death_by_signal_comes_through(tmp_path):
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert Run(tmp_path, command).end() == 128 + 9


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_deepspeeds_launcher_leaves_no_rank(number, tmp_path):
    script = tmp_path / "rank.py"
    body = RANK.format(folder=tmp_path, seconds=300, extra="sys.argv[1] = os.environ['RANK']")
    script.write_text(body)
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--quiet", "--num_gpus", "3"]
    run = Run(tmp_path, [*launcher, str(script)])
    ranks = run.ranks(3)
    run.process.send_signal(number)
    assert run.end() == 128 + number
    assert gone(ranks)


@pytest.mark.slow
def test_the_code_of_a_failed_rank_comes_through_deepspeeds_launcher(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text("import os, sys, time\nsys.exit(5) if os.environ['RANK'] == '1' else time.sleep(300)")
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--quiet", "--num_gpus", "2"]
    assert Run(tmp_path, [*launcher, str(script)]).end() == 5


def test_the_first_signal_goes_to_ranks_alone(tmp_path):
    """A launcher that is asked to end kills its ranks half a minute later, and a checkpoint may take longer."""
    extra = f"""
import subprocess
os.environ["LOCAL_RANK"] = sys.argv[1]
if sys.argv[-1] != "rank":
    sys.exit(subprocess.call([sys.executable, "-c", open({str(tmp_path / "code")!r}).read(), sys.argv[1], "rank"]))
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), os._exit(0)))
"""
    code = RANK.format(folder=tmp_path, seconds=300, extra=extra)
    (tmp_path / "code").write_text(code)
    run = Run(tmp_path, [sys.executable, "-c", CARELESS, code, "3", "0"])
    ranks = run.ranks()
    launchers = [rank.parent() for rank in ranks]
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143
    assert gone(ranks) and gone(launchers)


def test_ranks_end_when_the_launcher_of_their_launcher_is_killed(tmp_path):
    extra = "from weft.tools.processes import end_with_launcher\nend_with_launcher(os.environ)"
    run = Run(tmp_path, careless(tmp_path, extra=extra))
    ranks = run.ranks()
    run.process.kill()
    until(lambda: gone(ranks))
    for process in psutil.process_iter(["cmdline"]):
        if str(tmp_path) in " ".join(process.info["cmdline"] or []):
            process.kill()
