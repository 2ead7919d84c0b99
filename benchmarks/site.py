"""Waiting times of a visitor of `ecinn site`, in Chromium on this machine.

    python benchmarks/site.py

Needs the extra `test` (Playwright), Chromium, and npm or a cached onnxruntime-web.
"""

import functools
import http.server
import os
import shutil
import tempfile
import threading
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from ecinn.web.site import build_site

DRAWINGS = {
    "zero": [(0.5, 0.15), (0.3, 0.3), (0.3, 0.65), (0.5, 0.85), (0.7, 0.65), (0.5, 0.15)],
    "seven": [(0.25, 0.2), (0.5, 0.22), (0.75, 0.2), (0.6, 0.5), (0.45, 0.85)],
}
OPENING = """
  const opened = (window.opened = {});
  const look = () => {
    const [stage, verdict] = ["stage", "verdict"].map((id) => document.getElementById(id));
    const seen = {
      drawable: document.documentElement.dataset.kind,
      predicted: verdict?.textContent.includes("%"),
      counterfactual: ["nearly", "ready"].includes(stage?.dataset.state),
      path: stage?.dataset.state === "ready",
    };
    for (const name of Object.keys(seen)) if (seen[name]) opened[name] ??= performance.now();
  };
  const all = { subtree: true, childList: true, attributes: true, characterData: true };
  new MutationObserver(look).observe(document, all);
"""
"""What a visitor can do or see, and when, in milliseconds after the navigation began."""
WATCH = """() => {
  const [start, stage] = [performance.now(), document.getElementById("stage")];
  const waited = (window.waited = {});
  new MutationObserver(() => {
    waited[stage.dataset.state] ??= performance.now() - start;
  }).observe(stage, { attributeFilter: ["data-state"] });
}"""


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """A static host without a log."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def draw(page: Page, points: list[tuple[float, float]]) -> None:
    """Draw on an empty pad, and start the clock before the pen is lifted."""
    page.click("#clear")
    page.wait_for_selector("#stage[data-state=empty]")
    box = page.locator("#pad").bounding_box()
    assert box is not None
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=4)
    page.evaluate(WATCH)
    page.mouse.up()


def seconds(milliseconds: dict[str, float]) -> str:
    """Return times in words."""
    return ", ".join(f"{name} {value / 1000:.2f} s" for name, value in milliseconds.items())


def measure(address: str) -> None:
    """Open the page twice, then draw; print seconds and the load of the machine."""
    print("load average before", ", ".join(f"{load:.2f}" for load in os.getloadavg()))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        context = browser.new_context()
        context.add_init_script(OPENING)
        page = context.new_page()
        for visit in ("first visit", "second visit"):
            page.goto(address)
            page.wait_for_selector("#stage[data-state=ready]", timeout=60_000)
            print(f"{visit}, page opened to {seconds(page.evaluate('opened'))}")
            page.evaluate("navigator.serviceWorker.ready.then(() => true)")
            page.goto("about:blank")
        page.goto(address)
        page.wait_for_selector("#stage[data-state=ready]", timeout=60_000)
        for name, points in DRAWINGS.items():
            draw(page, points)
            page.wait_for_selector("#stage[data-state=ready]", timeout=60_000)
            print(f"{name}, pen lifted to {seconds(page.evaluate('waited'))}")
        browser.close()


def main() -> None:
    """Build the site into a temporary folder and visit it."""
    with tempfile.TemporaryDirectory() as folder:
        build_site(Path(folder) / "site", ("mnist", "fakemnist"))
        handler = functools.partial(QuietHandler, directory=f"{folder}/site")
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            measure(f"http://127.0.0.1:{server.server_port}/")
            server.shutdown()


if __name__ == "__main__":
    main()
