"""Chromium without a window, driven over its DevTools protocol as by a hand."""

import base64
import io
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from websockets.sync.client import connect

BROWSER = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None
)
WAIT_S = 60
_CODES = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32, "ArrowDown": 40}
_SHIFT = 8


class Tab:
    """A page in a tab.

    Attributes:
        problems: what the console of the page that is open has to say.
    """

    def __init__(self, socket: Any):
        self._socket, self._ids, self.problems = socket, itertools.count(), []
        self._has_loaded = False
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        sent = {"id": next(self._ids), "method": method, "params": params}
        self._socket.send(json.dumps(sent))
        while "id" not in (got := self._heard()):
            pass
        assert "result" in got, got
        return got["result"]

    def _heard(self) -> dict[str, Any]:
        """An answer, or an event, of which some are noted."""
        got = json.loads(self._socket.recv(WAIT_S))
        self._has_loaded |= got.get("method") == "Page.loadEventFired"
        if got.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(json.dumps(got["params"]))
        return got

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        """The text of an element, seen or not."""
        return self.run(f"document.querySelector({selector!r}).textContent")

    def wait(self, script: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + WAIT_S
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, (script, self.run("document.body.innerText"))
            time.sleep(0.02)

    def open(self, address: str, width: int, height: int, *, is_phone: bool = False) -> None:
        """Go to an address, with a window of this size or as a phone with one."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.problems, self._has_loaded = [], False
        self.call("Page.navigate", url=address)
        while not self._has_loaded:
            self._heard()

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        held = {"key": key, "code": key, "modifiers": _SHIFT * shift}
        held["windowsVirtualKeyCode"] = _CODES[key]
        text = {"Enter": "\r", " ": " "}.get(key)
        down = {"type": "rawKeyDown"} if text is None else {"type": "keyDown", "text": text}
        self.call("Input.dispatchKeyEvent", **held, **down)
        self.call("Input.dispatchKeyEvent", **held, type="keyUp")

    def drop(self, files: Sequence[Path]) -> None:
        """Drag files into the page's upper half, and let them go."""
        data = {"items": [], "files": [*map(str, files)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=100, y=150, data=data)

    def choose(self, selector: str, files: Sequence[Path]) -> None:
        """Choose files where an input asks for some."""
        script = f"document.querySelector({selector!r})"
        found = self.call("Runtime.evaluate", expression=script)["result"]["objectId"]
        self.call("DOM.setFileInputFiles", files=[*map(str, files)], objectId=found)

    def picture(self) -> Image.Image:
        """What is seen."""
        data = self.call("Page.captureScreenshot")["data"]
        return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")


@contextmanager
def browser(profile: Path, *flags: str) -> Iterator[Tab]:
    """The tab of a browser that ends with the block."""
    usual = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command = [str(BROWSER), *usual, *quiet, *flags, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port, end = profile / "DevToolsActivePort", time.monotonic() + WAIT_S
        while not (port.exists() and "\n" in port.read_text()):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        root = f"http://127.0.0.1:{port.read_text().split()[0]}/json"
        with urllib.request.urlopen(root, timeout=WAIT_S) as answer:
            found = next(each for each in json.load(answer) if each["type"] == "page")
        with connect(found["webSocketDebuggerUrl"], max_size=None) as socket:
            yield Tab(socket)
    finally:
        process.terminate()
        process.wait(WAIT_S)
