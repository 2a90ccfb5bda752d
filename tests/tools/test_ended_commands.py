"""A command that a signal ends leaves nothing behind."""

import signal
import subprocess
import sys

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
    command = subprocess.Popen([sys.executable, "-c", CODE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert command.stdout.readline().startswith(str(tmp_path))
    command.send_signal(number)
    assert command.wait(30) == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_a_command_runs_without_standard_output(monkeypatch):
    """Python has none if a shell closes it with >&-."""
    monkeypatch.setattr(sys, "stdout", None)
    assert report_bad_input("weft", lambda: 0) == 0
