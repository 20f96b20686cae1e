"""A headless Chromium that tests control through its debugging pipe.

Needs only the browser itself (``apt-get install chromium``), no driver and no network. The protocol
is JSON documents that end in a zero byte, on the browser's descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.programs import LIMIT_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run", "--mute-audio"),
    "--disable-background-networking",
)


def find() -> str | None:
    """Return the browser's path; None if none is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._held = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.requests: list[str] = []
        self.call("Page.enable")
        self.call("Network.enable")

    def call(self, method: str, **params):
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self):
        while b"\0" not in self._held:
            more = os.read(self._read, 1 << 20)
            assert more, "the browser has ended"
            self._held += more
        text, _, self._held = self._held.partition(b"\0")
        return json.loads(text)

    def show(self, path: Path, *, width=1240, height=900, dark=False, scale=1, phone=False):
        """Open a file in a window of that size, and wait until its script has drawn it."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.requests.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + LIMIT_S
        while not self.js("document.documentElement?.dataset.ready === 'yes'"):
            assert time.monotonic() < deadline, self.js("document.documentElement.dataset.error")
            time.sleep(0.05)
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def js(self, expression: str):
        """Evaluate an expression on the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more):
        """Move, press or release the mouse; positions are CSS pixels of the window."""
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def click(self, x: float, y: float):
        """Press and release the left button at a position."""
        self.mouse("Moved", x, y)
        for kind in ("Pressed", "Released"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def picture(self, path: Path):
        """Write a PNG of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextlib.contextmanager
def tab() -> Iterator[Tab]:
    """Open a browser with one page, and close it afterwards."""
    browser = find()
    assert browser is not None
    to_read, write = os.pipe()
    read, to_write = os.pipe()

    shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", browser, *_FLAGS, f"--user-data-dir={profile}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(to_read, to_write),
        )
        os.close(to_read)
        os.close(to_write)
        try:
            yield Tab(write, read)
        finally:
            os.close(write)
            os.close(read)
            process.terminate()
            process.wait(30)
