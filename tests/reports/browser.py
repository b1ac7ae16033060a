"""A headless Chromium, driven through the pipe of its DevTools protocol: no packages, no ports."""

import json
import os
import shutil
import subprocess
import tempfile
from collections import deque
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATH = next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page at a time. ``errors`` are its exceptions and what its console told, ``requests`` its URLs."""

    def __init__(self):
        self.errors, self.requests = [], []
        self._events, self._number, self._rest = deque(), 0, b""
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        theirs, self._to = os.pipe()
        self._from, other = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        options += [f"--user-data-dir={self._profile.name}", "--disable-dev-shm-usage", "about:blank"]
        # The browser reads descriptor 3 and writes descriptor 4; a shell puts ours there.
        script = f'exec "$0" "$@" 3<&{theirs} 4>&{other}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, PATH, *options],
            pass_fds=(theirs, other),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(other)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        """End it."""
        try:
            self._call("Browser.close")
        finally:
            for descriptor in (self._to, self._from):
                os.close(descriptor)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._profile.cleanup()

    def open(self, path, scheme="light", width=1100, height=900, script=True):
        """Show a file, forgetting what the page before told."""
        self.errors.clear()
        self.requests.clear()
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        self._wait("Page.loadEventFired")

    def evaluate(self, expression):
        """The value of an expression of JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key, code=None):
        """A key goes down and up."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            extra = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=code or key, **extra)

    def mouse(self, kind, x, y, **options):
        """ "mouseMoved", "mousePressed" or "mouseReleased" at a place of the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def call(self, method, **parameters):
        """One command to the page, and its answer."""
        return self._call(method, self._session, **parameters)

    def _call(self, method, session=None, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _wait(self, event):
        while event not in self._events:
            self._note(self._read())
        self._events.clear()

    def _note(self, message):
        method, told = message.get("method"), message.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            self.errors.append(told["exceptionDetails"])
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(told["entry"])
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(told["args"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])

    def _read(self):
        while b"\0" not in self._rest:
            more = os.read(self._from, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
