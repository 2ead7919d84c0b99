"""A visitor of the page, who opens it, draws, moves the slider, and records errors."""

import base64
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
import torch

sync_api = pytest.importorskip("playwright.sync_api", reason="the page is driven by playwright")
expect, Page = sync_api.expect, sync_api.Page
expect.set_options(timeout=30_000)  # as of everything else that waits, also on a busy machine

THREE = [
    (0.32, 0.25), (0.42, 0.17), (0.56, 0.17), (0.64, 0.27), (0.60, 0.38), (0.46, 0.45),
    (0.60, 0.50), (0.68, 0.60), (0.64, 0.74), (0.52, 0.82), (0.38, 0.80), (0.30, 0.72),
]  # fmt: skip
FEW_FRAMES = 11
PIXELS = """id => {
  const canvas = document.getElementById(id);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return Array.from(data);
}"""

NUMBER_CONTROLS = """() => {
  const all = [...document.querySelectorAll("button, input, select, a, summary")];
  const shown = all.filter((each) => each.checkVisibility() && !each.disabled);
  const needed = shown.filter((each) => each.type === "radio" ? each.checked : each.tabIndex >= 0);
  needed.forEach((each, i) => (each.dataset.number = i));
  return needed.length;
}"""
FOCUS = """() => {
  const here = document.activeElement;
  const styled = here.type === "radio" ? here.nextElementSibling : here;
  return [Number(here.dataset.number), getComputedStyle(styled).outlineStyle];
}"""

FADED_WORDS = """() => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const faded = [];
  while (walk.nextNode()) {
    const parent = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || parent.closest("[disabled], script, noscript")) continue;
    if (!parent.checkVisibility({ visibilityProperty: true })) continue;
    for (let each = parent; each; each = each.parentElement) {
      const { opacity } = getComputedStyle(each);
      if (Number(opacity) < 1) faded.push(`${walk.currentNode.data.trim()}: ${opacity}`);
    }
  }
  return faded;
}"""


@contextmanager
def serving(*models: str) -> Iterator[str]:
    """Run `ecinn serve` and yield its address."""
    chosen = [word for model in models for word in ("--model", model)]
    process = subprocess.Popen(
        [sys.executable, "-m", "ecinn", "serve", *chosen, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "ECINN_TOKEN"},
    )
    assert process.stdout is not None
    address = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
    assert address is not None, "ecinn serve did not print its address"
    try:
        yield address.group()
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


class Visitor:
    """Opens pages and records their errors and their requests to other hosts."""

    answers: ClassVar[dict[tuple[str, str], bytes]] = {}

    def __init__(self, browser, service: str, home=None) -> None:
        """Prepare.

        Args:
            home: a context for pages without settings of their own; by default each has its own.
        """
        self.browser, self.service, self.home = browser, service, home
        self.contexts: list = []
        self.pages: list[Page] = []
        self.faults: list[str] = []

    def context(self, *, frames: int = FEW_FRAMES, **settings: object):
        """Open a context.

        Args:
            frames: most frames of a path, which take the service longest.
        """
        usual = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"}
        context = self.browser.new_context(**usual | settings)
        context.route("**/api/v1/explain", lambda route: self._answer(route, frames))
        self.contexts.append(context)
        return context

    def leave(self) -> None:
        """Close all pages."""
        for page in self.pages:
            page.close()
        for context in self.contexts:
            context.unroute_all(behavior="ignoreErrors")
            context.close()

    def open(self, address: str = "/", *, context=None, state: str | None = "ready") -> Page:
        """Open a page and wait until it is in that state."""
        page = (context or self.home or self.context()).new_page()
        self.pages.append(page)
        page.on("console", lambda said: said.type == "error" and self._record_error(said.text))
        page.on("pageerror", lambda error: self._record_error(str(error)))
        page.on("request", self._check_address)
        page.goto(address if "://" in address else self.service + address)
        if state is not None:
            settled(page, state)
        return page

    def post(self, path: str, body: object) -> dict:
        """Ask the service directly."""
        address, kind = f"{self.service}/api/v1/{path}", {"Content-Type": "application/json"}
        request = urllib.request.Request(address, json.dumps(body).encode(), kind)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def _answer(self, route, frames: int) -> None:
        """Let the service answer each question once, however many visits repeat it."""
        body = json.loads(route.request.post_data)
        if body.get("path"):
            body["path"] = min(body["path"], frames)
        question = (route.request.url, json.dumps(body))
        if question not in self.answers:
            answer = route.fetch(post_data=question[1])
            if answer.status != 200:
                route.fulfill(response=answer)
                return
            self.answers[question] = answer.body()
        route.fulfill(body=self.answers[question], content_type="application/json")

    def _record_error(self, words: str) -> None:
        if not re.search(r"status of (401|429)", words):
            self.faults.append(words)

    def _check_address(self, request) -> None:
        if not request.url.startswith((f"{self.service}/", "data:", f"blob:{self.service}/")):
            self.faults.append(f"asked {request.url}")


def settled(page: Page, state: str = "ready") -> None:
    page.wait_for_selector(f"#stage[data-state={state}]")


def box_of(page: Page, selector: str) -> dict[str, float]:
    box = page.locator(selector).bounding_box()
    assert box is not None
    return box


def draw(page: Page, points: list[tuple[float, float]], *, lift: bool = True) -> None:
    box = box_of(page, "#pad")
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=4)
    if lift:
        page.mouse.up()


def drawn_three(visitor: Visitor) -> Page:
    """Draw a three, which is predicted while drawing and explained at the end."""
    page = visitor.open()
    draw(page, THREE, lift=False)
    expect(page.locator("#question")).to_contain_text("This looks like")
    page.mouse.up()
    settled(page)
    return page


def choose(page: Page, name: str) -> None:
    page.locator("#targets").get_by_role("button", name=re.compile(f" {name}$")).click()
    expect(page.locator("#question")).to_contain_text(f"and not an {name}?")


def pixels(page: Page, name: str) -> np.ndarray:
    """Return height × width × 3 values of a square picture of the page."""
    values = np.array(page.evaluate(PIXELS, name), dtype=np.int64)
    side = round((len(values) / 4) ** 0.5)
    return values.reshape(side, side, 4)[..., :3]


def linked(page: Page) -> dict[str, str]:
    """Return the state in the address, once it is written."""
    page.wait_for_timeout(300)
    page.wait_for_function("() => location.hash.includes('model=')")
    return {key: value[0] for key, value in parse_qs(urlsplit(page.url).fragment).items()}


def linked_digit(page: Page) -> torch.Tensor:
    text = linked(page)["pixels"]
    values = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).reshape(1, 1, 28, 28)


def press(page: Page, *keys: str) -> None:
    page.focus("#slider")
    for key in keys:
        page.keyboard.press(key)


def tabbed(page: Page) -> tuple[int, list[tuple[int, str]]]:
    """Return the number of controls, and the focused one and its outline after every tab."""
    wanted = page.evaluate(NUMBER_CONTROLS)
    reached = []
    for _ in range(wanted):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(FOCUS))
    return wanted, reached


def alpha(page: Page) -> float:
    return float(page.locator("#slider").input_value())


def colour(page: Page, selector: str, kind: str) -> list[int]:
    """Return red, green and blue of the first such element."""
    script = f"each => getComputedStyle(each)[{kind!r}]"
    return [
        int(part) for part in re.findall(r"\d+", page.locator(selector).first.evaluate(script))
    ][:3]


def contrast(one: list[int], other: list[int]) -> float:
    """WCAG 2's (L₁ + 0.05) / (L₂ + 0.05), the lighter above."""

    def luminance(rgb: list[int]) -> float:
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in np.divide(rgb, 255)
        ]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def give(page: Page, content: bytes) -> None:
    page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": content})
