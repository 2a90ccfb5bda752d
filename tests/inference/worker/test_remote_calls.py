"""Calls of an object in another process: results, exceptions and lost peers."""

import queue
import threading

import pytest

from weft.comm.message_stream import Listener, connect
from weft.inference.worker.remote_calls import RemoteCalls, serve_calls


class NotPortable(Exception):
    """An exception that cannot be unpickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Target:
    """Methods that return, and that raise."""

    def add(self, *terms, scale=1):
        return scale * sum(terms)

    def divide(self, one, other):
        return one / other

    def fail(self):
        raise NotPortable("one", "other")

    def give_lock(self):
        return threading.Lock()


@pytest.fixture
def ends(monkeypatch):
    """The caller, its connection, and the thread that executes its calls."""
    monkeypatch.setenv("WEFT_KEY", "k" * 32)
    found, ended = queue.Queue(), queue.Queue()
    listener = Listener("127.0.0.1", 0, "test", found.put)
    stream = connect("127.0.0.1", listener.address[1], "test", limit_s=5.0)
    target, served = Target(), found.get(timeout=5.0)

    def serve():
        try:
            serve_calls(served, lambda name, args, kwargs: getattr(target, name)(*args, **kwargs))
        except OSError as error:
            ended.put(error)

    threading.Thread(target=serve, daemon=True).start()
    return RemoteCalls(stream, "the stage"), stream, served, ended


def test_calls_return_what_the_method_returns(ends):
    calls, *_ = ends
    assert calls.call("add", 1, 2, scale=3) == 9


def test_an_exception_comes_back_with_its_traceback_and_further_calls_work(ends):
    calls, *_ = ends
    with pytest.raises(ZeroDivisionError) as caught:
        calls.call("divide", 1, 0)
    assert "return one / other" in "".join(caught.value.__notes__)
    with pytest.raises(AttributeError):
        calls.call("absent")
    with pytest.raises(RuntimeError, match="NotPortable: one and other"):
        calls.call("fail")
    with pytest.raises(TypeError, match="pickle"):
        calls.call("give_lock")
    assert calls.call("add", 1) == 1


def test_the_loss_of_either_end_is_an_error_at_the_other(ends):
    calls, _stream, served, ended = ends
    served.close()
    with pytest.raises(ConnectionError, match="lost the stage: "):
        calls.call("add", 1)
    assert isinstance(ended.get(timeout=5.0), OSError)


def test_serving_ends_with_the_connection(ends):
    _, stream, _, ended = ends
    stream.close()
    assert isinstance(ended.get(timeout=5.0), OSError)
