"""A headless Chromium, controlled over a pipe by the Chrome DevTools protocol, without a driver or a port."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
SECONDS = 60.0

SMALLEST = """(() => { let least = 99; for (const one of document.querySelectorAll('body *')) {
  if (one.closest('script, style, title, details:not([open])')) continue;
  if (![...one.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
  const svg = one.closest('svg'), size = parseFloat(getComputedStyle(one).fontSize);
  least = Math.min(least, svg ? size * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : size); } return least; })()"""
"""The size of the smallest text on the page, in pixels as they are shown."""


class Browser:
    """One page. `said`: errors and warnings in its console; `asked`: the addresses that it requested."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM, "make browser installs it"
        ours, theirs = os.pipe(), os.pipe()
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
            f"--user-data-dir={profile}", "--no-first-run", "--disable-extensions", "about:blank",
        ]  # fmt: skip

        script = f'exec "$@" 3<&{ours[0]} 4>&{theirs[1]}'  # the file descriptors at which the browser expects its pipes
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._out, self._in, self._half = ours[1], theirs[0], b""
        self._numbers = itertools.count(1)
        self.said: list[str] = []
        self.asked: list[str] = []
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for what in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{what}.enable")

    def call(self, method: str, **give: Any) -> dict[str, Any]:
        """Send a command to the browser, and return its reply."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": give} | ({"sessionId": self._session} if self._session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            for found in self._hear(0.2):
                if found.get("id") == number:
                    assert "error" not in found, found
                    return found["result"]
        raise TimeoutError(method)

    def _hear(self, seconds: float) -> Iterator[dict[str, Any]]:
        if select.select([self._in], [], [], seconds)[0]:
            *whole, self._half = (self._half + os.read(self._in, 1 << 20)).split(b"\0")
            for one in whole:
                found = json.loads(one)
                self._note(found.get("method", ""), found.get("params", {}))
                yield found

    def _note(self, method: str, what: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(what["exceptionDetails"])[:600])
        elif method == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning"):
            self.said.append(json.dumps(what["args"])[:600])
        elif method == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.said.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(what["request"]["url"])

    def open(self, address: str, *, width: int = 1400, height: int = 1000, dark: bool = False, wait: float = 1.5) -> None:
        """Open an address in a window of this size, and wait until it is drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=address)
        self.rest(wait)

    def until(self, script: str, seconds: float = SECONDS) -> bool:
        """Wait until an expression in the page is true. Return False if it does not become true in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.run(script):
                return True
            self.rest(0.3)
        return False

    def leave(self) -> None:
        """Leave the page, and clear its messages and requests."""
        self.call("Page.navigate", url="about:blank")
        self.rest(0.3)
        self.said.clear()
        self.asked.clear()

    def rest(self, seconds: float) -> None:
        """Let the page run for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for _ in self._hear(left):
                pass

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)["result"].get("value")

    def picture(self, path: Path, *, height: int | None = None) -> None:
        """Write a picture of the page, all of it or its upper `height` pixels."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.terminate()
            self._process.wait(10)
        os.close(self._out)
        os.close(self._in)
