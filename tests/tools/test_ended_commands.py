"""A command that is ended by SIGTERM leaves nothing behind."""

import subprocess
import sys

CODE = """
import sys
from weft.tools import cli
cli.COMMANDS["slow"] = ("tests.tools.slow_command", "")
sys.argv = ["weft", "slow", sys.argv[1]]
sys.exit(cli.main())
"""


def test_a_command_that_is_ended_removes_its_temporary_folders(tmp_path):
    command = subprocess.Popen([sys.executable, "-c", CODE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert command.stdout.readline().startswith(str(tmp_path))
    command.terminate()
    assert command.wait(30) == 143
    assert list(tmp_path.iterdir()) == []
