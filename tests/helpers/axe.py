"""axe-core finds what keeps people out who do not see well, or use no mouse."""

import functools

import pytest

from ecinn.errors import EcinnError
from ecinn.web.npm import npm_files
from helpers.visitor import THREE, Page, draw, expect, give, settled

VERSION = "4.14.0"
RUN = """async () => {
  const { violations } = await axe.run({ resultTypes: ["violations"] });
  return violations.flatMap(({ id, nodes }) => nodes.map(({ target }) => `${id}: ${target}`));
}"""
SCREENS = (("light", {"width": 1280, "height": 900}), ("dark", {"width": 390, "height": 844}))


@functools.cache
def axe_core() -> str:
    """Return the script of axe-core; skip the test where npm cannot fetch it."""
    try:
        (script,) = npm_files("axe-core", VERSION, ["axe.min.js"]).values()
    except EcinnError as error:
        pytest.skip(str(error))
    return script.decode()


def violations(page: Page) -> list[str]:
    """Run all rules on the page as it is: light on a wide screen, dark on a phone."""
    page.evaluate(f"{axe_core()}; true")
    found = []
    for scheme, size in SCREENS:
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size(size)
        found += [f"{scheme}: {each}" for each in page.evaluate(RUN)]
    page.set_viewport_size(SCREENS[0][1])
    return found


def violations_by_state(page: Page) -> dict[str, list[str]]:
    """Lead the page of digits through all its states."""
    expect(page.locator("#wall")).to_be_visible()
    for each in page.locator("summary").all():
        each.click()
    found = {"explained": violations(page)}
    page.evaluate("scrollTo(0, 0)")
    draw(page, THREE, lift=False)
    expect(page.locator("#question")).to_contain_text("This looks like")
    found["drawn"] = violations(page)
    page.mouse.up()
    settled(page)
    page.click("#clear")
    settled(page, "empty")
    found["empty"] = violations(page)
    give(page, b"no picture")
    expect(page.locator("#notice")).to_be_visible()
    return found | {"notice": violations(page)}
