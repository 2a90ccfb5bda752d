"""A TCP proxy on loopback that can lose, damage, hold back and record what passes."""

import contextlib
import selectors
import socket
import threading


class Proxy:
    """Forwards every connection to ``target``; faults are set as attributes while it runs."""

    def __init__(self, target):
        self.target = target
        self.frozen = False  # forwards nothing, closes nothing
        self.freeze_after = None  # freezes once so many bytes have passed
        self.refusing = False  # closes what comes
        self.flip_after = None  # flips a byte once so many bytes have passed
        self.recorded = []  # per connection: what the connecting side has said
        self.passed = 0
        self._pairs = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._running = True
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._running = False
        self._thread.join()
        self.kill(len(self._pairs))
        self._listener.close()

    def kill(self, count):
        """Reset that many connections."""
        with self._lock:
            for pair in self._pairs[:count]:
                self._end(pair)
            del self._pairs[:count]

    def thaw(self):
        """Forward again, and freeze no more."""
        with self._lock:
            self.freeze_after, self.frozen = None, False

    def _end(self, pair):
        for end in pair:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(end)
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            end.close()

    def _run(self):
        while self._running:
            if self.frozen:
                threading.Event().wait(0.01)
                continue
            for key, _ in self._selector.select(0.02):
                if self.frozen:
                    break
                with self._lock:
                    self._accept() if key.fileobj is self._listener else self._forward(key)

    def _accept(self):
        near, _ = self._listener.accept()
        if self.refusing:
            near.close()
            return
        try:
            far = socket.create_connection(self.target)
        except OSError:
            near.close()
            return
        pair = (near, far)
        self._pairs.append(pair)
        self.recorded.append(bytearray())
        record = self.recorded[-1]
        self._selector.register(near, selectors.EVENT_READ, (far, pair, record))
        self._selector.register(far, selectors.EVENT_READ, (near, pair, None))

    def _forward(self, key):
        other, pair, record = key.data
        if pair not in self._pairs:
            return
        try:
            data = bytearray(key.fileobj.recv(1 << 16))
            if not data:
                raise OSError
            if record is not None and len(record) < 4096:
                record += data
            self.passed += len(data)
            if self.freeze_after is not None and self.passed >= self.freeze_after:
                self.frozen, self.freeze_after = True, None
            if self.flip_after is not None and self.passed >= self.flip_after:
                data[len(data) // 2] ^= 4
                self.flip_after = None
            other.sendall(data)
        except OSError:
            self._end(pair)
            self._pairs.remove(pair)
