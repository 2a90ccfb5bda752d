"""Chromium, driven through the DevTools protocol over a pipe."""

import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
ANSWER_S = 60.0


class Browser:
    """One tab. Errors of the page's console and exceptions are in ``errors``."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 900):
        ours, theirs = os.pipe(), os.pipe()  # to the browser, from it
        self._writing, self._reading = ours[1], theirs[0]

        def place_pipes():
            for source, target in ((ours[0], 3), (theirs[1], 4)):
                os.dup2(source, target + 50)
            for target in (3, 4):
                os.dup2(target + 50, target)
                os.close(target + 50)

        self._process = subprocess.Popen(
            [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"],
            preexec_fn=place_pipes,
            close_fds=False,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._numbers, self._buffer, self._session, self.errors = itertools.count(1), b"", None, []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        os.close(self._writing)
        os.close(self._reading)

    def call(self, method, **parameters):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + ANSWER_S
        while True:
            answer = self._receive(until)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self, until):
        while b"\0" not in self._buffer:
            assert select.select([self._reading], [], [], max(0.0, until - time.monotonic()))[0], "chromium is silent"
            self._buffer += os.read(self._reading, 1 << 20)
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(message["params"]["exceptionDetails"])
        if message.get("method") == "Runtime.consoleAPICalled" and message["params"]["type"] in ("error", "warning"):
            self.errors.append(message["params"]["args"])
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.errors.append(message["params"]["entry"])
        return message

    def resize(self, width, height=900):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, address, ready):
        """Open an address, and wait until the expression ``ready`` is true."""
        self.call("Page.navigate", url=address)
        self.wait(ready)

    def run(self, expression):
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, expression, seconds=30.0):
        until = time.monotonic() + seconds
        while not self.run(f"!!({expression})"):
            assert time.monotonic() < until, (expression, self.run("document.body.innerText"), self.errors)
            time.sleep(0.1)

    def press(self, key, *, shift=False):
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=CODES.get(key, 0),
                modifiers=8 * shift,
                **text,
            )


CODES = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
