"""A headless Chromium, driven over its debugging pipe with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from typing import Any

from tests.hangs import HANGS

# The browser reads from descriptor 3 and writes to descriptor 4.
LAUNCH = """
import fcntl, os, sys
reading, writing = (fcntl.fcntl(int(pipe), fcntl.F_DUPFD, 10) for pipe in sys.argv[1:3])
os.dup2(reading, 3)
os.dup2(writing, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str | None:
    """The browser's program, where there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One tab."""

    def __init__(self, process: subprocess.Popen[bytes], sending: int, receiving: int) -> None:
        self.process, self.sending = process, sending
        self.answers: Queue[dict[str, Any]] = Queue()
        self.events: list[dict[str, Any]] = []
        self.count, self.session = 0, ""
        threading.Thread(target=self._listen, args=(receiving,), daemon=True).start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _listen(self, receiving: int) -> None:
        """Keep answers and events as they come."""
        with os.fdopen(receiving, "rb") as stream:
            rest = b""
            while part := stream.read1(1 << 20):  # type: ignore[attr-defined]
                *whole, rest = (rest + part).split(b"\0")
                for message in map(json.loads, whole):
                    (self.answers.put if "id" in message else self.events.append)(message)

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the browser's protocol."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": arguments}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.sending, json.dumps(message).encode() + b"\0")
        answer = self.answers.get(timeout=HANGS)
        assert answer["id"] == self.count, answer
        assert "error" not in answer, answer
        return answer["result"]

    def run(self, code: str) -> Any:
        """The value of an expression in the page."""
        options = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        answer = self.call("Runtime.evaluate", expression=code, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def show(self, width: int, height: int = 900, scheme: str = "light", medium: str = "screen") -> None:
        """Set the window's size, the color scheme and the medium."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=medium, features=features)

    def open(self, page: Path, script: bool = True) -> None:
        """Open a page, with or without its script."""
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        end = time.monotonic() + HANGS
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            assert time.monotonic() < end, "the page does not load"
            time.sleep(0.01)
        self.call("Emulation.setScriptExecutionDisabled", value=False)

    def press(self, key: str, code: int) -> None:
        """Press a key."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)
            text = {}

    def complaints(self) -> list[str]:
        """What the console and the log say."""
        kept = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in kept]

    def requests(self) -> list[str]:
        """The addresses asked for, but for those inside the page and those that its policy blocks."""
        told = [(event["method"], event["params"]) for event in self.events]
        blocked = {
            params["requestId"]
            for method, params in told
            if method == "Network.loadingFailed" and params.get("blockedReason") == "csp"
        }
        asked = [
            params["request"]["url"]
            for method, params in told
            if method == "Network.requestWillBeSent" and params["requestId"] not in blocked
        ]
        return [address for address in asked if not address.startswith(("data:", "blob:"))]

    def picture(self, path: Path) -> None:
        """Keep a picture of the whole page."""
        made = self.call("Page.captureScreenshot", captureBeyondViewport=True, optimizeForSpeed=True)
        path.write_bytes(base64.b64decode(made["data"]))


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser that ends with the block."""
    program = chromium()
    assert program is not None
    with TemporaryDirectory() as home:
        to_read, sending = os.pipe()
        receiving, to_write = os.pipe()
        process = subprocess.Popen(
            [
                sys.executable, "-c", LAUNCH, str(to_read), str(to_write), program, "--headless",
                "--no-sandbox",
                "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
                f"--user-data-dir={home}", "about:blank",
            ],
            pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        try:
            yield Browser(process, sending, receiving)
        finally:
            process.terminate()
            process.wait(HANGS)
            os.close(sending)
