"""Pictures of the page in the first minute of a visitor, into docs/ and a folder for looking.

    python benchmarks/page_pictures.py [FOLDER]

Writes docs/page-drawn.webp and docs/page-phone.webp, and with FOLDER a PNG of every state on a
desktop, on a phone, and dark. Needs the extra `test` (Playwright) and Chromium.
"""

import io
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

DOCS = Path(__file__).parents[1] / "docs"
THREE = [
    (0.32, 0.25), (0.42, 0.17), (0.56, 0.17), (0.64, 0.27), (0.60, 0.38), (0.46, 0.45),
    (0.60, 0.50), (0.68, 0.60), (0.64, 0.74), (0.52, 0.82), (0.38, 0.80), (0.30, 0.72),
]  # fmt: skip
SCREENS = {
    "desktop": {"viewport": {"width": 1280, "height": 900}, "device_scale_factor": 1.25},
    "phone": {
        "viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True,
    },
}  # fmt: skip
WEBP = {"quality": 82, "method": 6}


def rounded(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Cut the corners of a line, as Chaikin does, so that it looks drawn by hand."""
    for _ in range(3):
        cut = [
            tuple((1 - share) * a + share * b for a, b in zip(one, other, strict=True))
            for one, other in itertools.pairwise(points)
            for share in (0.25, 0.75)
        ]
        points = [points[0], *cut, points[-1]]
    return points


def settled(page: Page, state: str = "ready") -> None:
    """Wait for a state of the page, and for everything that moves."""
    page.wait_for_selector(f"#stage[data-state={state}]", timeout=60_000)
    page.wait_for_timeout(500)


def draw(page: Page) -> None:
    """Draw a three, without lifting the pen."""
    page.locator("#pad").scroll_into_view_if_needed()
    box = page.locator("#pad").bounding_box()
    assert box is not None
    places = [
        (box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in rounded(THREE)
    ]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place)


def visit(browser: Browser, address: str, screen: str, scheme: str) -> dict[str, bytes]:
    """Open the page, draw, choose a five; return a picture of every state."""
    settings = SCREENS[screen] | {"color_scheme": scheme, "reduced_motion": "reduce"}
    context = browser.new_context(**settings)
    page = context.new_page()
    page.goto(address)
    settled(page)
    page.wait_for_selector("#wall:not([hidden])")
    taken = {"1-opened": page.screenshot()}
    draw(page)
    settled(page, "stale")
    taken["2-drawing"] = page.screenshot()
    page.mouse.up()
    settled(page)
    taken["3-explained"] = page.screenshot()
    page.locator("#targets").get_by_role("button", name=re.compile(" 5$")).click()
    settled(page)
    page.wait_for_selector("#wall[data-fresh=true]")
    taken["4-five"] = page.screenshot(full_page=True)
    page.locator(".ask").evaluate("each => scrollBy(0, each.getBoundingClientRect().top - 16)")
    page.wait_for_timeout(300)
    taken["5-stage"] = page.screenshot()
    page.evaluate("scrollTo(0, 0)")
    page.click("#clear")
    settled(page, "empty")
    taken["6-empty"] = page.screenshot()
    context.close()
    return taken


def keep(picture: bytes, path: Path) -> None:
    """Write a screenshot as WebP."""
    with Image.open(io.BytesIO(picture)) as image:
        image.convert("RGB").save(path, **WEBP)


def main(folder: Path | None) -> None:
    """Serve the digits and take the pictures."""
    command = [sys.executable, "-m", "ecinn", "serve", "--port", "0"]
    models = [word for name in ("mnist", "fakemnist") for word in ("--model", name)]
    service = subprocess.Popen(
        [*command, *models], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert service.stdout is not None
        address = re.search(r"http://\S+:\d+", service.stdout.readline())
        assert address is not None
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
            visits = {
                f"{screen}-{scheme}": visit(browser, address.group(), screen, scheme)
                for screen, scheme in itertools.product(SCREENS, ("light", "dark"))
            }
            browser.close()
    finally:
        service.terminate()
        service.wait()
    keep(visits["desktop-light"]["4-five"], DOCS / "page-drawn.webp")
    keep(visits["phone-dark"]["5-stage"], DOCS / "page-phone.webp")
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for screen, taken in visits.items():
        for name, picture in taken.items():
            (folder / f"{screen}-{name}.png").write_bytes(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
