"""A real browser for tests: headless Chromium, spoken to through a pipe in its own protocol (DevTools)."""

from __future__ import annotations

import atexit
import base64
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

PATIENCE = 120.0  # seconds until something is there
NAMES = ("chromium", "chromium-browser", "google-chrome")

# Relative luminance and contrast as WCAG 2.2 has them, of every element with text of its own.
CONTRAST = """(() => {
  const light = (color) => {
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map((each) => each / 255);
    const [r, g, b] = parts.map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (!/, 0\\)$|transparent/.test(color)) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  return [...document.querySelectorAll('body *')]
    .filter((each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
    .filter((each) => !each.disabled && !each.closest('title'))
    .map((each) => {
      const ink = getComputedStyle(each)[each.matches('svg text') ? 'fill' : 'color'];
      const [a, b] = [light(ink), light(ground(each))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), each.id || each.getAttribute('class') || each.tagName];
    });
})()"""


# What the browser answers about an expression whose page was left, or reloaded itself, meanwhile.
_LEFT = ("navigated or closed", "context was destroyed", "Promise was collected", "Cannot find context",
         "Not attached to an active page")  # fmt: skip


class LeftError(AssertionError):
    """The page that was asked is there no more."""


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. Commands and events are lines of JSON that end in NUL."""

    def __init__(self, write: int, read: int) -> None:
        self._out, self._in = os.fdopen(write, "wb"), os.fdopen(read, "rb")
        self._number, self._buffer = 0, b""
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    _session = None

    def ask(self, method: str, **parameters: Any) -> Any:
        """The answer to a command; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            said = self._next()
            if said.get("id") == self._number:
                if "error" in said and any(each in said["error"]["message"] for each in _LEFT):
                    raise LeftError(said)
                assert "error" not in said, said
                return said["result"]

    def wait(self, event: str) -> None:
        while not any(each["method"] == event for each in self.events):
            self._next()

    def visit(self, url: str) -> None:
        """Go to an address, until its page has been loaded, perhaps again by itself. The page before is left first: it
        may still complain, and a load that it began may come over the page that is visited."""
        while True:
            self.ask("Emulation.setScriptExecutionDisabled", value=True)
            self._stop_loading()
            self._go("about:blank")
            self.ask("Emulation.setScriptExecutionDisabled", value=False)
            if len(self._go(url)) == 1:
                return

    def _stop_loading(self) -> None:
        while True:
            with suppress(LeftError):  # it is just being replaced by its next load
                self.ask("Page.stopLoading")
                return

    def _go(self, url: str) -> set[str]:
        """The addresses that were loaded from this navigation on."""
        self.events.clear()
        loader = self.ask("Page.navigate", url=url)["loaderId"]
        while True:
            addresses = set()
            for event in self.events:
                if event["method"] == "Page.frameNavigated" and "parentId" not in (frame := event["params"]["frame"]):
                    if addresses or frame["loaderId"] == loader:
                        addresses.add(frame["url"])
                elif event["method"] == "Page.loadEventFired" and addresses:
                    return addresses
            self._next()

    def value(self, script: str) -> Any:
        """The value of an expression of JavaScript, awaited."""
        done = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """All of the page, as PNG."""
        taken = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        self._out.close()
        self._in.close()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._in.fileno(), 1 << 16)
            assert more, "the browser is gone"
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\0")
        said: dict[str, Any] = json.loads(line)
        if "method" in said:
            self.events.append(said)
        return said


# What a browser does besides, a quarter of its time.
_WITHOUT = (
    "--no-first-run", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions",
    "--allow-pre-commit-input",  # else keys before the first frame, late on a slow machine, are lost
    "--disable-component-update", "--disable-sync", "--disable-default-apps",
    "--disable-features=Translate,OptimizationHints,MediaRouter,DialMediaRouteProvider",
)  # fmt: skip

# WebGPU on the CPU: SwiftShader comes with the browser.
WEBGPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan")


@contextmanager
def browser(chromium: str, folder: Path, flags: Sequence[str] = ("--disable-gpu",)) -> Iterator[Page]:
    """folder: for its profile, which is thrown away by the caller."""
    to_child, from_us = os.pipe()
    to_us, from_child = os.pipe()

    def place() -> None:  # the pipe's ends are expected at 3 and 4
        ours = os.dup(to_child), os.dup(from_child)
        os.dup2(ours[0], 3)
        os.dup2(ours[1], 4)

    child = subprocess.Popen(
        [chromium, "--headless=new", "--no-sandbox", "--remote-debugging-pipe", *flags, *_WITHOUT,
         f"--user-data-dir={folder}", "about:blank"],
        pass_fds=(3, 4, to_child, from_child), preexec_fn=place, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    os.close(to_child)
    os.close(from_child)
    page = None
    try:
        page = Page(from_us, to_us)
        yield page
    finally:
        if page:
            page.close()
        os.killpg(child.pid, 9)
        child.wait()


def show(page: Page, url: str, width: int, *, dark: bool = False) -> None:
    page.ask("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 600)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    page.ask("Emulation.setEmulatedMedia", features=[scheme])
    page.visit(url)


def until(page: Page, condition: str) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        with suppress(LeftError):  # a page may load itself again
            if page.value(f"(async () => Boolean({condition}))()"):
                return
        assert time.monotonic() < end, (condition, page.value("document.body.innerText"))
        time.sleep(0.1)


def press(page: Page, key: str, *, shift: bool = False, text: str = "") -> None:
    """Press a key in the element that has the focus."""
    codes = {"Enter": 13, "Escape": 27, "Tab": 9}
    for kind in ("keyDown", "keyUp"):
        page.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key],
                 modifiers=8 * shift, **({"text": text} if kind == "keyDown" and text else {}))  # fmt: skip


def type_in(page: Page, text: str) -> None:
    """Type into the field that has the focus, and press Enter."""
    page.ask("Input.insertText", text=text)
    press(page, "Enter")


def requests(page: Page) -> list[str]:
    """The addresses that a page asked for since it was visited."""
    method = "Network.requestWillBeSent"
    return [each["params"]["request"]["url"] for each in page.events if each["method"] == method]


_ENDED = ExitStack()
atexit.register(_ENDED.close)


def keep_port(port: int) -> None:
    """Keep the port of a server that has ended from others, whose pages would have its storage in the browser."""
    held = _ENDED.enter_context(socket.socket())
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # also while connections end
    with suppress(OSError):  # another process was faster
        held.bind(("127.0.0.1", port))


def complaints(page: Page) -> list[Any]:
    bad = "Runtime.exceptionThrown", "Log.entryAdded"
    return [each["params"] for each in page.events if each["method"] in bad]
