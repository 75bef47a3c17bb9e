"""Controls a headless Chromium through its debugging pipe: standard library only, no port, no driver."""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find() -> str | None:
    """Returns the browser's path, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page, as a context manager. Every call raises TimeoutError after `timeout_s`."""

    def __init__(self, executable: str, profile: Path, timeout_s: float = 60.0) -> None:
        self.messages: list[dict[str, Any]] = []  # events, in order of arrival
        self._timeout_s, self._ids = timeout_s, itertools.count(1)
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        options = [
            "--headless",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--remote-debugging-pipe",
        ]
        options += [f"--user-data-dir={profile}", "--disable-extensions", "--disable-background-networking"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # Chromium has no sandbox for root
        shell = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'  # the descriptors that Chromium expects
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, executable, *options, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = os.fdopen(ours_out, "wb", buffering=0), os.fdopen(ours_in, "rb", buffering=0)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(10)
        self._out.close()
        self._in.close()

    def _read(self) -> None:
        rest = b""
        while chunk := self._in.read(1 << 20):
            *whole, rest = (rest + chunk).split(b"\0")
            for raw in whole:
                message = json.loads(raw)
                if "id" in message:
                    self._answers.put(message)
                else:
                    self.messages.append(message)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Returns the result of a command of the DevTools protocol. Raises RuntimeError if it is refused."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            try:
                answer = self._answers.get(timeout=self._timeout_s)
            except queue.Empty:
                raise TimeoutError(f"Chromium did not answer {method}.") from None
            if answer["id"] == number:
                break
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression; of a promise, once it is settled."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Waits until the expression is true."""
        end = time.monotonic() + self._timeout_s
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {expression}")
            time.sleep(0.05)

    def open(self, path: Path, width: int = 1440, height: int = 900) -> None:
        """Opens a file and waits until the page says that it is ready."""
        self.size(width, height)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.documentElement?.dataset.state === 'ready'")

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def media(self, kind: str = "", scheme: str = "light") -> None:
        """Emulates a medium. kind: screen or print; scheme: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=kind, features=features)

    def screenshot(self, path: Path, whole: bool = True) -> bytes:
        """Writes a PNG of the whole page, or of the visible part."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        content = base64.b64decode(shot["data"])
        path.write_bytes(content)
        return content

    def complaints(self) -> list[str]:
        """Returns all that the page logged, threw or was refused, and every dialog that it opened."""
        found = []
        for message in self.messages:
            method, p = message["method"], message["params"]
            if method == "Runtime.consoleAPICalled":
                found.append(f"console {p['type']}: {[a.get('value') for a in p['args']]}")
            elif method == "Runtime.exceptionThrown":
                found.append(
                    f"exception: {p['exceptionDetails'].get('text')} {p['exceptionDetails'].get('exception')}"
                )
            elif method == "Log.entryAdded":
                found.append(f"log {p['entry']['level']}: {p['entry']['text']}")
            elif method == "Page.javascriptDialogOpening":
                found.append(f"dialog: {p['message']}")
        return found

    def requests(self) -> list[str]:
        """Returns the address of every request that was made or attempted."""
        sent = (
            m["params"]["request"]["url"] for m in self.messages if m["method"] == "Network.requestWillBeSent"
        )
        return list(sent)
