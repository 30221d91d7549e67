"""A headless Chromium driven over its DevTools pipe: real clicks and keys, screenshots, printing."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WHY_NOT = "needs a Chromium browser (Debian: apt-get install chromium)"


class Browser:
    """One page. Use as a context manager."""

    def __init__(self, width: int = 1600, height: int = 1000) -> None:
        self._size = (width, height)
        self._number = 0
        self._buffer = b""
        self.requests: list[str] = []
        """URLs of everything the page asked for."""
        self.problems: list[str] = []
        """Exceptions and console errors of the page."""

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(
            prefix="quantize-browser-", ignore_cleanup_errors=True  # chromium writes for a moment after its end
        )
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def place() -> None:  # the browser reads commands from descriptor 3 and answers on 4
            first, second = os.dup(to_browser), os.dup(from_browser)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            [
                CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--hide-scrollbars", "--no-first-run",
                "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "about:blank",
            ],
            preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        target = next(t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        width, height = self._size
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def _call(self, method: str, session: str | None = None, /, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._in, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._call(method, self._session, **params)

    def open(self, page: Path, ready: str = "document.body && document.body.dataset.ready === 'true'") -> None:
        self.send("Page.navigate", url=page.resolve().as_uri())
        for _ in range(400):
            if self.value(ready):
                return
        raise RuntimeError(f"{page} did not get ready: {self.problems}")

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        wrapped = f"new Promise((done) => setTimeout(() => done({expression}), 25))"
        answer = self.send("Runtime.evaluate", expression=wrapped, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """A real mouse click in the middle of the first element that matches."""
        box = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'});"
            " const b = e.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def write(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.send("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])
