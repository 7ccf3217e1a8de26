"""A real Chromium for tests, driven over the DevTools protocol through a pipe: no port, no package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
WITHIN_S = 60.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Failed(AssertionError):
    """The page, or the browser, said no."""


class Browser:
    """One process, one page. `complaints` holds what the console and the network said went wrong."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # the browser reads its commands at descriptor 3 and answers at 4
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", command, program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requested: list[str] = []

    def __enter__(self) -> Self:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        try:
            self.call("Browser.close")
        except (OSError, Failed):
            self._process.kill()
        self._process.wait(WITHIN_S)
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result; what the page does meanwhile is noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise Failed(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        mobile = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'", "the page is loaded")

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise Failed(f"{script}: {answer['exceptionDetails']['exception'].get('description')}")
        return answer["result"].get("value")

    def until(
        self, script: str, what: str, within_s: float = WITHIN_S, press: tuple[str, int] | None = None
    ) -> Any:
        """The first true value of an expression, also across a reload; a key is pressed before each look."""
        deadline_s = time.monotonic() + within_s
        if press:
            self.key(*press)
        while not (value := self._try(script)):
            if time.monotonic() > deadline_s:
                raise Failed(f"not within {within_s:.0f} s: {what}")
            self._try("new Promise((done) => setTimeout(done, 50))")
            if press:
                self.key(*press)
        return value

    def _try(self, script: str) -> Any:
        try:
            return self.run(script)
        except Failed as failure:
            if "navigated" in str(failure) or "context was destroyed" in str(failure):
                return None
            raise

    def text(self, selector: str) -> str:
        found = self.run(f"document.querySelector({json.dumps(selector)})?.innerText")
        return str(found or "")

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, selector: str, text: str) -> None:
        """As a keyboard would, into what has the focus."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def key(self, name: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                code=name,
                windowsVirtualKeyCode=code,
                **({"text": "\r"} if name == "Enter" and kind == "keyDown" else {}),
            )

    def picture(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 65_536)
            if not piece:
                raise Failed("the browser ended")
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, message: dict[str, Any]) -> None:
        note = _NOTES.get(message.get("method", ""))
        if note is not None:
            note(self, message["params"])


def _console(browser: Browser, params: dict[str, Any]) -> None:
    if params["type"] in ("error", "warning", "assert"):
        browser.complaints.append(" ".join(str(arg.get("value")) for arg in params["args"]))


def _exception(browser: Browser, params: dict[str, Any]) -> None:
    details = params["exceptionDetails"]
    browser.complaints.append(details.get("exception", {}).get("description", details["text"]))


def _log(browser: Browser, params: dict[str, Any]) -> None:
    entry = params["entry"]
    if entry["level"] in ("error", "warning"):
        browser.complaints.append(f"{entry['text']} {entry.get('url', '')}".strip())


def _request(browser: Browser, params: dict[str, Any]) -> None:
    browser.requested.append(params["request"]["url"])


_NOTES: dict[str, Callable[[Browser, dict[str, Any]], None]] = {
    "Runtime.consoleAPICalled": _console,
    "Runtime.exceptionThrown": _exception,
    "Log.entryAdded": _log,
    "Network.requestWillBeSent": _request,
}
