"""The `weft` command: a table from sub-command to the module that runs it."""

from __future__ import annotations

import atexit
import difflib
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import EDQUOT, ENOSPC
from importlib import import_module
from pathlib import Path

from weft.conf.features import FEATURES, require
from weft.conf.host.processes import Terminated, open_standard_streams, unwind_on_termination
from weft.conf.host.terminal import print_error

COMMANDS = {
    "launch": ("weft.tools.launch_command", "check a configuration, start a run and supervise it"),
    "train": ("weft.recipes.train", "train as one rank (`weft launch` starts them all)"),
    "config": ("weft.tools.config", "print the resolved configuration, with a comment on every field"),
    "check": ("weft.tools.check", "compare a model's stages with Hugging Face's own forward"),
    "profile": ("weft.tools.profile", "time a model's layers on this machine"),
    "schedule": ("weft.tools.schedule", "generate a pipeline schedule; print, draw or export it"),
    "simulate": ("weft.tools.simulate", "predict the step time of a schedule, without a GPU"),
    "doctor": ("weft.tools.doctor", "check hosts, connections between ranks, and links between sites"),
} | {name: command for feature in FEATURES.values() for name, command in feature.commands.items()}
OWNERS = {command: name for name, feature in FEATURES.items() for command in feature.commands}
"""The feature of each command that the core does not have."""
LIGHT_HELP = ("train", "check", "profile", "emulate")
"""Commands whose modules take seconds to import; `weft.tools.parsers` has their options."""
OWN_SIGNALS = ("serve", "controller", "train")
"""Commands that handle signals themselves; the others unwind, so that no temporary folder or process stays."""
BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``weft COMMAND ...`` and return the exit code (2 for bad input)."""
    if argv is None:
        open_standard_streams()
        atexit.register(gc.freeze)  # with torch imported, a last search for garbage takes more than a second
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print("usage: weft COMMAND ...\n")
        for name, (_, summary) in COMMANDS.items():
            print(f"  {name:<10} {summary}")
        print("\n`weft COMMAND --help` lists the options of a command.")
        return 0
    command, *rest = args
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(COMMANDS)}"
        print(f"weft: there is no command {command!r}; {hint}", file=sys.stderr)
        return BAD_INPUT
    if argv is None and command not in OWN_SIGNALS:
        unwind_on_termination()
    return report_bad_input(f"weft {command}", lambda: _run(command, rest))


def _run(command: str, rest: Sequence[str]) -> int:
    if command in LIGHT_HELP and {"-h", "--help"} & set(rest):
        getattr(import_module("weft.tools.parsers"), command)().parse_known_args(rest)  # prints it, and ends
    if command in OWNERS:
        require(OWNERS[command], f"weft {command}")
    status: int = import_module(COMMANDS[command][0]).main(rest)
    return status


def report_bad_input(name: str, command: Callable[[], int]) -> int:
    """Run a command and return its exit code.

    A ValueError is printed after the command's name, and the code is 2. Signals and a full disk end the command in one
    line, too. An output that cannot be written hides no failure of the command.
    """
    status = 0
    try:
        _require_folders()
        status = command()
        print(end="", flush=True)  # the reader may have closed it before the last of the output
        return status
    except ValueError as error:
        print_error(name, error)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Terminated as end:
        assert isinstance(end.code, int)
        with suppress(OSError):  # the terminal may have gone
            print(f"{name}: ended by {signal.Signals(end.code - 128).name}", file=sys.stderr, flush=True)
        return end.code
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        _discard_output()
        return status
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT):
            raise
        with suppress(OSError):  # the error may go to the same disk
            print_error(name, error)
        _discard_output()
        return status or 1


def _discard_output() -> None:
    """Send what is still to be printed to the null device, so that the interpreter does not fail with it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _require_folders() -> None:
    try:
        Path.home()
    except RuntimeError as error:  # a container's user without a name
        raise ValueError(f"HOME is not set, and user {os.getuid()} has no home folder; set HOME") from error
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise ValueError("the current folder has been removed; change to another one") from error


if __name__ == "__main__":
    sys.exit(main())
