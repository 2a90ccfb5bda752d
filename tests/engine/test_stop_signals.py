"""The first SIGTERM or SIGINT is a request, the second one ends the process, and children get none of it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from weft.engine.stop_signals import STOP, StopSignals

PREFIX = """
import os, signal, sys, time
from weft.engine.stop_signals import StopSignals
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
signals = StopSignals({deadline}).open()
print("open", flush=True)
"""


def process(body, deadline=60.0):
    code = PREFIX.format(deadline=deadline) + body
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout.readline() == "open\n"
    return running


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_training_ends_the_process_at_once(number):
    running = process("time.sleep(60)")
    running.send_signal(number)
    assert running.wait(30) == 128 + number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_a_request_and_the_second_kills(number):
    """Although the main thread is in a call that no signal interrupts."""
    body = """
import ctypes, threading
def tell():
    while not signals.number:
        time.sleep(0.01)
    print(signals.number, flush=True)
threading.Thread(target=tell, daemon=True).start()
signals.defer()
print("deferred", flush=True)
while True:
    ctypes.CDLL(None).pause()
"""
    running = process(body)
    assert running.stdout.readline() == "deferred\n"
    running.send_signal(number)
    assert running.stdout.readline() == f"{int(number)}\n"
    time.sleep(1.2)
    running.send_signal(number)
    assert running.wait(30) == 128 + number


def test_a_signal_that_a_launcher_sends_twice_counts_once():
    running = process("signals.defer(); print('deferred', flush=True); time.sleep(3); sys.exit(7)")
    assert running.stdout.readline() == "deferred\n"
    running.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 7


def test_the_deadline_ends_the_process():
    running = process("signals.defer(); print('deferred', flush=True); time.sleep(60)", deadline=0.2)
    assert running.stdout.readline() == "deferred\n"
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 143 and "checkpoint.signal_deadline_s=0.2" in errors


def test_a_forked_child_takes_its_own_signals():
    """DataLoader's workers are ended by SIGTERM; their parent goes on."""
    body = """
signals.defer()
pid = os.fork()
if not pid:
    time.sleep(60)
os.kill(pid, signal.SIGTERM)
_, status = os.waitpid(pid, 0)
time.sleep(0.2)
print(os.waitstatus_to_exitcode(status), signals.number, flush=True)
"""
    output, errors = process(body).communicate(timeout=30)
    assert output == f"{-signal.SIGTERM} 0\n", errors


def test_close_does_not_wait_for_forked_children():
    """DataLoader's persistent workers outlive training."""
    body = """
pid = os.fork()
if not pid:
    time.sleep(60)
signals.close()
os.kill(pid, signal.SIGKILL)
sys.exit(7)
"""
    running = process(body)
    try:
        assert running.wait(20) == 7
    finally:
        running.kill()


def test_handlers_of_the_program_and_ignored_signals_are_left_alone():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        signals = StopSignals(60.0).open()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        signals.close()
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_rank_that_starts_while_its_run_is_stopped_knows(monkeypatch):
    monkeypatch.setenv(STOP, str(int(signal.SIGTERM)))
    assert StopSignals(60.0).number == signal.SIGTERM
    monkeypatch.delenv(STOP)
    assert StopSignals(60.0).number == 0 and os.environ.get(STOP) is None
