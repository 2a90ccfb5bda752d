"""The WAN transport's own tests on builds with sanitizers: no bad access, undefined behaviour, leak or race.

Python, torch and OpenSSL are not built with them: what is found there alone does not count.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = [f"tests/comm/wan/test_{part}.py" for part in ("endpoint", "frames", "unauthenticated", "cell", "fork")]
BUILDS = {
    "address,undefined": (
        "libasan.so",
        {
            "ASAN_OPTIONS": "abort_on_error=1:detect_leaks=1:exitcode=0:symbolize=0:log_path={log}",
            "UBSAN_OPTIONS": "halt_on_error=1:abort_on_error=1:print_stacktrace=1:log_path={log}",
            "PYTHONMALLOC": "malloc",  # so that leaks show, and overruns by the transport of Python's memory, too
        },
    ),
    "thread": (
        "libtsan.so",
        {"TSAN_OPTIONS": "exitcode=0:die_after_fork=0:ignore_noninstrumented_modules=1:log_path={log}"},
    ),
}


def library(name):
    """Where the compiler has a library that must be loaded before Python; empty where it has none."""
    done = subprocess.run(["c++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip() if os.sep in done.stdout else ""


def missing(name):
    if shutil.which("c++") is None:
        return "no c++"
    return "" if library(name) else f"the compiler has no {name}"


def reports(texts):
    """Return the sanitizers' reports about the transport: the parts that name its library."""
    parts = [part for text in texts for part in re.split(r"(?m)^(?=.*(?:WARNING:|ERROR:|leak of|runtime error))", text)]
    return [part for part in parts if re.search(r"transport-[0-9a-f]{16}|comm/wan/|weft::", part)]


def sanitized(kind, tests, tmp_path, *options, **more):
    """Run tests on a build with sanitizers; how they ended, and what the sanitizers said."""
    name, settings = BUILDS[kind]
    if reason := missing(name):
        pytest.skip(f"sanitizers: {reason}")
    logs = tmp_path / "logs"
    logs.mkdir()
    environment = {key: value.format(log=logs / "report") for key, value in settings.items()} | more
    environment |= {"WEFT_SANITIZE": kind, "LD_PRELOAD": f"{library(name)} {library('libstdc++.so')}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.comm.wan.sanitized", "-p", "no:cacheprovider", *tests]
    command.append("--capture=sys")  # errors that end the process are on its standard error, not in the log
    if kind == "thread":
        command = ["setarch", "-R", *command]  # its shadow memory lies at fixed addresses
    done = subprocess.run(
        [*command, *options], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=850
    )
    return done, reports([done.stderr, *(path.read_text(errors="replace") for path in logs.iterdir())])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", BUILDS)
def test_the_transport_is_clean(kind, tmp_path):
    options = ["--timeout=600"]  # the first test compiles
    if kind == "thread":  # it knows no threads in the child of a process with threads
        options.append("--deselect=tests/comm/wan/test_fork.py::test_a_child_may_have_endpoints_of_its_own")
    done, found = sanitized(kind, TESTS, tmp_path, *options)
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + "\n".join(found)
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fault", "said"),
    [
        ("address,undefined", "leak", "leak of 4321 byte"),
        ("address,undefined", "overrun", "heap-buffer-overflow"),
        ("address,undefined", "undefined", "signed integer overflow"),
        ("thread", "race", "data race"),
    ],
)
def test_what_is_wrong_on_purpose_is_found(kind, fault, said, tmp_path):
    """A sanitizer that says nothing at all does not pass for a clean transport."""
    done, found = sanitized(kind, ["tests/comm/wan/commit_fault.py"], tmp_path, WEFT_FAULT=fault)
    text = "\n".join(found)
    assert said in text, text + done.stdout[-2000:] + done.stderr[-2000:]
    # Errors in the middle of a run end it; leaks and races are reported at its end.
    assert (done.returncode == 0) is (fault in ("leak", "race"))
