"""A command that a signal ends leaves nothing behind."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from weft.tools.cli import report_bad_input

CODE = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` has it ignored
from weft.tools import cli
cli.COMMANDS["slow"] = ("tests.tools.slow_command", "")
sys.argv = ["weft", "slow", sys.argv[1]]
sys.exit(cli.main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_ended_removes_its_temporary_folders(tmp_path, number):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = subprocess.Popen([sys.executable, "-c", CODE, str(tmp_path)], **pipes, text=True)
    assert command.stdout.readline().startswith(str(tmp_path))
    command.send_signal(number)
    _, printed = command.communicate(timeout=30)
    assert command.returncode == 128 + number
    assert printed == f"weft slow: ended by {number.name}\n"
    assert list(tmp_path.iterdir()) == []


LAUNCH = """
import signal, sys
for number in (signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_DFL if number == signal.SIGHUP else signal.default_int_handler)
from weft.tools import cli
sys.exit(cli.main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_launch_that_is_ended_in_its_checks_prints_a_line_and_leaves_nothing(tmp_path, number):
    pytest.importorskip("weft.engine.supervision", reason="needs the feature supervision")
    settings = ["recipe=quickstart", f"train.output_dir={tmp_path}"]
    command = subprocess.Popen([sys.executable, "-c", LAUNCH, "launch", *settings], stderr=subprocess.PIPE, text=True)
    checked = tmp_path / "quickstart" / ".checked.yaml"
    while not checked.exists() and command.poll() is None:
        time.sleep(0.01)
    children = psutil.Process(command.pid).children(recursive=True)
    command.send_signal(number)
    _, printed = command.communicate(timeout=30)
    assert command.returncode == 128 + number
    how = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert printed.splitlines()[1:] == [f"weft launch: {how}"]
    assert children and not psutil.wait_procs(children, timeout=30)[1]
    assert [path.name for path in tmp_path.rglob("*")] == ["quickstart"]


def test_a_command_runs_without_standard_output(monkeypatch):
    """Python has none if a shell closes it with >&-."""
    monkeypatch.setattr(sys, "stdout", None)
    assert report_bad_input("weft", lambda: 0) == 0
