"""Waiting times of a visitor of `ecinn site` and of `ecinn serve`, in Chromium on this machine.

    python benchmarks/site.py                # both
    python benchmarks/site.py --compare 300  # numbers of the site beside those of the service

Needs the extra `test` (Playwright), Chromium, and npm or a cached onnxruntime-web.
"""

import argparse
import base64
import contextlib
import functools
import http.server
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

import ecinn
from ecinn.drawing.pictures import enlarge, image_array, png_bytes
from ecinn.web.site import build_site

DRAWINGS = {
    "zero": [(0.5, 0.15), (0.3, 0.3), (0.3, 0.65), (0.5, 0.85), (0.7, 0.65), (0.5, 0.15)],
    "seven": [(0.25, 0.2), (0.5, 0.22), (0.75, 0.2), (0.6, 0.5), (0.45, 0.85)],
}
FACES = "celeba-smile"
PHOTO_SIDE = 1200
"""Side of the uploaded portrait, in pixels."""
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
ASK = """async ([path, body]) => {
  const { request } = await import("./static/service.js");
  return (await request(path, { body: JSON.stringify(body) })).json();
}"""


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """A static host without a log."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def static_site() -> Iterator[str]:
    """Build the site into a temporary folder, serve its files, and yield the address."""
    with tempfile.TemporaryDirectory() as folder:
        build_site(Path(folder) / "site", ("mnist", "fakemnist"))
        handler = functools.partial(QuietHandler, directory=f"{folder}/site")
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}/"
            server.shutdown()


@contextlib.contextmanager
def service(*models: str) -> Iterator[str]:
    """Run `ecinn serve` and yield its address."""
    chosen = [word for model in models for word in ("--model", model)]
    command = [sys.executable, "-m", "ecinn", "serve", "--port", "0", *chosen]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        address = re.search(r"http://\S+:\d+", process.stdout.readline())
        assert address is not None
        yield f"{address.group()}/"
    finally:
        process.terminate()
        process.wait()


def ready(page: Page) -> None:
    """Wait until the picture is explained."""
    page.wait_for_selector("#stage[data-state=ready]", timeout=60_000)


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
    ready(page)


def upload_face(page: Page) -> None:
    """Open a portrait in place of the first face, and start the clock before."""
    page.locator("#models").get_by_label(re.compile("smile")).check(force=True)
    page.wait_for_selector("html[data-kind=faces]")
    ready(page)
    face = ecinn.load(FACES, "cpu").sample(torch.tensor([1]), temperature=0.5, seed=7)[0]
    photo = png_bytes(enlarge(image_array(face), 64).resize((PHOTO_SIDE, PHOTO_SIDE)))
    page.evaluate(WATCH)
    page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": photo})
    page.wait_for_selector("#stage:not([data-state=ready])")
    ready(page)


def seconds(milliseconds: dict[str, float]) -> str:
    """Return times in words."""
    return ", ".join(f"{name} {value / 1000:.2f} s" for name, value in milliseconds.items())


def measure(browser: Browser, address: str, *, faces: bool) -> None:
    """Open the page twice, then draw; print seconds and the load of the machine."""
    print("load average before", ", ".join(f"{load:.2f}" for load in os.getloadavg()))
    context = browser.new_context()
    context.add_init_script(OPENING)
    page = context.new_page()
    for visit in ("first visit", "second visit"):
        page.goto(address)
        ready(page)
        print(f"{visit}, page opened to {seconds(page.evaluate('opened'))}")
        if not faces:
            page.evaluate("navigator.serviceWorker.ready.then(() => true)")
        page.goto("about:blank")
    page.goto(address)
    ready(page)
    for name, points in DRAWINGS.items():
        draw(page, points)
        print(f"{name}, pen lifted to {seconds(page.evaluate('waited'))}")
    if faces:
        upload_face(page)
        print(f"face uploaded to {seconds(page.evaluate('waited'))}")
    context.close()


def picture(url: str) -> np.ndarray:
    """Decode a data URL."""
    file = io.BytesIO(base64.b64decode(url.partition(",")[2]))
    return np.asarray(Image.open(file).convert("L")).astype(int)


def post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask the service."""
    request = urllib.request.Request(
        f"{address}api/v1/explain", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def compare(browser: Browser, site: str, served: str, count: int) -> None:
    """Explain test digits with both; print how far their numbers are apart."""
    page = browser.new_context(service_workers="block").new_page()
    page.goto(site)
    ready(page)
    apart: dict[str, list[float]] = {"before rounding": [], "same picture": [], "other pixels": []}
    pixels, levels = [], []
    for sample in range(count):
        body = {"model": "mnist", "images": [{"sample": sample}]}
        pair = page.evaluate(ASK, ["/api/v1/explain", body]), post(served, body)
        (one,), (other,) = (answer["images"][0]["targets"] for answer in pair)
        for kind in ("tipping_point", "convincing"):
            images = [picture(each[kind]["image"]) for each in (one, other)]
            differ = int((images[0] != images[1]).sum())
            pixels.append(differ)
            levels.append(int(np.abs(images[0] - images[1]).max()))
            for reading in ("posterior", "stored_posterior"):
                ours, theirs = (each[kind][reading] for each in (one, other))
                far = max(abs(ours[name] - theirs[name]) for name in theirs)
                stored = "other pixels" if differ else "same picture"
                apart["before rounding" if reading == "posterior" else stored].append(far)
    print(
        f"{len(pixels)} pictures of {count} digits, {sum(map(bool, pixels))} stored differently:"
    )
    print(f"at most {max(pixels)} pixels, by at most {max(levels)} levels")
    for name, values in apart.items():
        if values:
            above = sum(value > 1e-3 for value in values)
            print(
                f"posteriors, {name}: {len(values)} pictures, above 1e-3: {above}, "
                f"median {statistics.median(values):.1e}, largest {max(values):.1e}"
            )


def main() -> None:
    """Measure, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compare", type=int, default=0, metavar="DIGITS")
    digits = parser.parse_args().compare
    with sync_playwright() as playwright, contextlib.ExitStack() as stack:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        if digits:
            addresses = stack.enter_context(static_site()), stack.enter_context(service("mnist"))
            compare(browser, *addresses, digits)
        else:
            with static_site() as address:
                print("ecinn site")
                measure(browser, address, faces=False)
            with service() as address:
                print("ecinn serve")
                measure(browser, address, faces=True)
        browser.close()


if __name__ == "__main__":
    main()
