"""Marks of a GPU reach the board with the device's times, all of them, in order."""

import threading
import time

from weft.inference.board.observer import DeviceMarks


class LateDevice:
    """Passes events when it is let go, at times of its own."""

    def __init__(self, error=None):
        self.go, self.count, self.error = threading.Event(), 0, error

    def mark(self):
        self.count += 1
        return self.count

    def passed_ns(self, event):
        self.go.wait(10)
        if self.error:
            raise self.error
        return 1000 * event


class Board:
    def __init__(self):
        self.said = []

    def begin(self, kind, at_ns):
        self.said.append(("begin", kind, at_ns))

    def busy(self, at_ns):
        self.said.append(("busy", at_ns))

    def idle(self, at_ns):
        self.said.append(("idle", at_ns))

    def close(self):
        self.said.append("closed")


def test_the_board_closes_after_the_last_mark():
    device, board = LateDevice(), Board()
    marks = DeviceMarks(board, device)
    marks.begin(8)
    marks.busy()
    marks.idle()
    assert board.said == []  # the host has run ahead
    threading.Timer(0.2, device.go.set).start()
    marks.close()
    assert board.said == [("begin", 8, 1000), ("busy", 2000), ("idle", 3000), "closed"]


def test_a_device_that_fails_leaves_no_board(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    device, board = LateDevice(RuntimeError("CUDA error")), Board()
    device.go.set()
    marks = DeviceMarks(board, device)
    marks.busy()
    limit = time.monotonic() + 10
    while not board.said and time.monotonic() < limit:
        time.sleep(0.01)
    assert board.said == ["closed"]


def test_a_hanging_device_does_not_block_close(monkeypatch):
    monkeypatch.setattr("weft.inference.board.observer.CLOSE_S", 0.1)
    marks = DeviceMarks(board := Board(), LateDevice())
    marks.busy()
    marks.close()
    assert board.said == ["closed"]
