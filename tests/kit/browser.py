"""A headless Chromium for tests, spoken to through two pipes; what it logs and what it asks for is kept.

Source: the Chrome DevTools Protocol (https://chromedevtools.github.io/devtools-protocol).
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
FLAGS += ("--disable-extensions", "--disable-dev-shm-usage", "--remote-debugging-pipe", "--password-store=basic")
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Enter": 13, "Escape": 27, "Tab": 9}
PATIENCE = 60.0


class Browser:
    """One tab.

    Attributes:
        said: what the console was told, errors and warnings of the page, and what it threw.
        requests: addresses that the page asked for, its own included.
    """

    def __init__(self, folder: Path, program: str) -> None:
        here, theirs, self._to, self._from = _pipes()
        shell = f'exec "$0" "$@" 3<&{here} 4>&{theirs}'
        command = ["bash", "-c", shell, program, *FLAGS, f"--user-data-dir={folder}"]
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(command, pass_fds=(here, theirs), stdin=null, stdout=null, stderr=null)
        os.close(here)
        os.close(theirs)
        self._bytes, self._number, self._session = b"", 0, None
        self.said: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Asks for something and waits for the answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {} if self._session is None else {"sessionId": self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while (answer := self._read(end)).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _read(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._bytes:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._from, 1 << 20) if ready else b""
            if not part:
                raise TimeoutError("expected an answer of the browser, got none")
            self._bytes += part
        line, _, self._bytes = self._bytes.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.said.append(" ".join(str(each.get("value", each.get("description"))) for each in parameters["args"]))
        elif method == "Runtime.exceptionThrown":
            self.said.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.said.append(str(parameters["entry"]["text"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def size(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Gives the window another size and theme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path, place: str = "") -> float:
        """Open a report, wait until it is drawn, and return the seconds."""
        begin = time.monotonic()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.resolve().as_uri() + place)
        self.wait("location.protocol === 'file:' && document.documentElement?.dataset.ready")
        return time.monotonic() - begin

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript, awaited."""
        options = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", **options)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Waits until an expression is true, and returns it."""
        end = time.monotonic() + PATIENCE
        while not (value := self.ask(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"expected {expression}; the console says {self.said}")
            time.sleep(0.02)
        return value

    def turn(self) -> int:
        """Return the number of started views."""
        return int(self.ask("document.documentElement.dataset.turn"))

    def settle(self, before: int) -> None:
        """Waits until a view after the one before is drawn, and what it asks for with its first frame."""
        data = "document.documentElement.dataset"
        self.wait(f"{data}.turn > {before} && {data}.ready === {data}.turn")
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def go(self, place: str) -> None:
        """Follows a link within the report, and waits until it is drawn."""
        before = self.turn()
        self.ask(f"location.hash = {json.dumps(place)}; 0")
        self.settle(before)

    def click(self, selector: str, *, drawn: bool = True) -> None:
        """Clicks in the middle of an element; waits until another view is drawn, if ``drawn``."""
        before = self.turn()
        find = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"Boolean({find})")
        box = self.ask(
            f"(async () => {{ const e = {find}; e.scrollIntoView({{ block: 'center' }}); "
            "for (const _ of [1, 2]) await new Promise(requestAnimationFrame); const b = e.getClientRects()[0]; "
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            options = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], **options)
        if drawn:
            self.settle(before)

    def press(self, key: str, *, drawn: bool = False) -> None:
        """Presses and releases a key; waits until another view is drawn, if ``drawn``."""
        before = self.turn()
        code = KEYS.get(key, ord(key[0].upper()))
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        for kind, more in (("keyDown", text), ("keyUp", {})):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)
        if drawn:
            self.settle(before)

    def choose(self, label: str, value: str) -> None:
        """Chooses an option of the list with a label."""
        before = self.turn()
        self.ask(
            f"(() => {{ const label = [...document.querySelectorAll('label.choice')].find((e) => "
            f"e.firstChild.textContent === {json.dumps(label)}); const field = label.lastChild; "
            f"field.value = {json.dumps(value)}; field.dispatchEvent(new Event('change')); }})()"
        )
        self.settle(before)

    def processor_seconds(self) -> float:
        """Return the CPU seconds of the tab since ``Performance.enable``."""
        metrics = self.call("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "ProcessTime")

    def picture(self, path: Path) -> None:
        """Writes what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """Ends the browser."""
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(PATIENCE)
        except (TimeoutError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser with a profile in a folder; the test is skipped where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None or shutil.which("bash") is None:
        pytest.skip("no Chromium on the path: apt-get install chromium")
    browser = Browser(folder / "profile", program)
    try:
        yield browser
    finally:
        browser.close()


def _pipes() -> tuple[int, int, int, int]:
    """Return the pipe ends of the browser and ours."""
    here, to = os.pipe()
    back, theirs = os.pipe()
    return here, theirs, to, back
