"""The page in a real browser, against the real service with the shipped digits."""

import base64
import io
import json
import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from ecinn.data.mnist import load_mnist
from ecinn.model import Model
from helpers.axe import violations, violations_by_state
from helpers.builders import with_default
from helpers.students import student_folder
from helpers.visitor import (
    FADED_WORDS,
    THREE,
    Page,
    Visitor,
    alpha,
    box_of,
    choose,
    colour,
    contrast,
    draw,
    drawn_three,
    expect,
    give,
    linked,
    linked_digit,
    pixels,
    press,
    serving,
    settled,
    tabbed,
)

pytest.importorskip("fastapi", reason="the page is served with FastAPI")
pytestmark = pytest.mark.browser

EDGE = 11
STOP_NAMES = """() => {
  const named = [...document.querySelectorAll(".stop-button:not([data-lean=bare])")];
  return named.map((button) => {
    const range = document.createRange();
    range.selectNodeContents(button);
    const { left, right } = range.getBoundingClientRect();
    return [left, right];
  });
}"""
"""Left and right edges of the names of the slider's stops."""


@pytest.fixture(scope="module")
def service(mnist: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Digits, dots, digits with a default confidence of 90 %, and the student of a classifier."""
    folder = tmp_path_factory.mktemp("models")
    with_default(mnist, 0.9).save(folder / "sure.safetensors")
    own = folder / "sure.safetensors", student_folder(mnist, folder / "student", never=8)
    with serving("mnist", "fakemnist", *map(str, own)) as address:
        yield address


@pytest.fixture(scope="module")
def home(browser, service: str) -> Iterator[object]:
    """One page of it stays open, so that Chromium keeps the process that others open in."""
    keeper = Visitor(browser, service)
    yield keeper.open("/health", state=None).context
    keeper.leave()


@pytest.fixture
def visitor(browser, service: str, home) -> Iterator[Visitor]:
    visitor = Visitor(browser, service, home)
    yield visitor
    visitor.leave()
    assert not visitor.faults


def test_first_visit_shows_an_explained_test_picture(visitor: Visitor) -> None:
    page = visitor.open()
    expect(page.locator("#question")).to_have_text("Why is this a 3 and not an 8?")
    expect(page.locator("#sentences li").first).to_contain_text("classified as an 8")
    expect(page.locator("#grid .card")).to_have_count(9)
    digit = load_mnist("test").images[90, 0].numpy()
    assert np.array_equal(pixels(page, "input")[..., 0], digit)
    assert not np.array_equal(pixels(page, "answer")[..., 0], digit)


def test_a_drawn_three_is_framed_classified_and_explained(visitor: Visitor, mnist: Model) -> None:
    page = drawn_three(visitor)
    expect(page.locator("#verdict")).to_contain_text("a 3")
    expect(page.locator("#caution")).to_be_hidden()
    digit = linked_digit(page)
    assert int(linked(page)["target"]) == int(mnist.predict(digit)[0].argsort()[-2])
    assert np.array_equal(pixels(page, "input")[..., 0], digit[0, 0].numpy())
    rows, columns = digit[0, 0].nonzero().T
    assert 20 <= max(int(rows.max() - rows.min()), int(columns.max() - columns.min())) + 1 <= 21
    ink, places = digit[0, 0].double(), torch.arange(28.0, dtype=torch.float64)
    centre = [float((ink.sum(side) * places).sum() / ink.sum()) for side in (0, 1)]
    assert centre == pytest.approx([13.5, 13.5], abs=0.6)

    choose(page, "8")
    expected = mnist.explain(digit, 8)
    assert float(linked(page)["alpha"]) == pytest.approx(float(expected.alpha_1[0, 0]), abs=1e-3)
    convincing = expected.stored_convincing[0, 0, 0].int().numpy()
    assert np.abs(pixels(page, "answer")[..., 0] - convincing).max() <= 1
    press(page, "PageDown")
    assert alpha(page) == pytest.approx(float(expected.alpha_0[0, 0]), abs=1e-3)
    tie = expected.stored_tipping_point[0, 0, 0].int().numpy()
    assert np.abs(pixels(page, "answer")[..., 0] - tie).max() <= 1


def test_scrubbing_moves_picture_plot_and_text(visitor: Visitor) -> None:
    page = visitor.open("/#model=mnist&sample=90&target=8")
    box = box_of(page, "#plot")
    end = float(page.locator("#slider").get_attribute("max") or 0)
    seen = []
    for key in ("Home", "ArrowRight", "PageUp", "PageUp", "End"):
        press(page, key)
        where = EDGE + alpha(page) / end * (box["width"] - 2 * EDGE)
        cursor = page.locator("#plot .now").get_attribute("x1")
        assert float(cursor or 0) == pytest.approx(where, abs=0.6)
        label = page.locator("#answer").get_attribute("aria-label")
        spoken = page.locator("#slider").get_attribute("aria-valuetext")
        seen.append((alpha(page), pixels(page, "answer"), str(label), str(spoken)))
    assert seen[0][0] == 0
    assert np.abs(seen[0][1] - pixels(page, "input")).max() <= 1
    for before, after in pairwise(seen):
        assert after[0] > before[0]
        assert not np.array_equal(after[1], before[1])
        assert after[2:] != before[2:]
    assert "tipping point" in seen[2][3]
    assert "convincing" in seen[3][3]
    assert "classified as 8" in seen[4][2]
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert alpha(page) == pytest.approx(end / 2, rel=0.05)


def test_overlay_is_the_services_own(visitor: Visitor) -> None:
    page = visitor.open("/#model=mnist&sample=7&target=8")
    bare = pixels(page, "change")
    page.click("#overlay")
    body = {"model": "mnist", "images": [{"sample": 7}], "targets": [8]}
    [target] = visitor.post("explain", body)["images"][0]["targets"]
    file = io.BytesIO(base64.b64decode(target["heatmap"]["overlay"].split(",")[1]))
    expected = np.asarray(Image.open(file).convert("RGB"), dtype=np.int64)
    shown = pixels(page, "change")
    assert np.abs(shown - expected).max() <= 3
    assert np.abs(shown - bare).max() > 50
    page.keyboard.press("o")
    assert np.array_equal(pixels(page, "change"), bare)


def test_downloads(visitor: Visitor) -> None:
    context = visitor.context(frames=41)
    page = visitor.open("/#model=mnist&sample=90&target=8", context=context)
    files = {}
    for kind in ("png", "gif", "json"):
        with page.expect_download() as download:
            page.click(f"#save-{kind}")
        assert download.value.suggested_filename == f"ecinn-mnist-3-to-8.{kind}"
        files[kind] = download.value.path().read_bytes()
    with Image.open(io.BytesIO(files["png"])) as sheet:
        assert (sheet.format, sheet.width > 9 * 100) == ("PNG", True)
    with Image.open(io.BytesIO(files["gif"])) as film:
        assert (film.format, film.n_frames > 20) == ("GIF", True)
    report = json.loads(files["json"])
    [image] = report["images"]
    [target] = image["targets"]
    assert (report["version"], report["model"]) == (1, "mnist")
    assert (image["predicted"], target["target"]) == ("3", "8")
    assert target["alpha"] == target["alpha_1"] == pytest.approx(0.8 + target["alpha_0"] / 2)
    assert len(target["path"]["alphas"]) == len(target["path"]["posterior"]["8"]) == 43
    assert "images" not in target["path"]


def test_a_link_restores_a_drawing_its_target_and_alpha(visitor: Visitor) -> None:
    page = drawn_three(visitor)
    choose(page, "8")
    press(page, "PageDown", "ArrowLeft", "ArrowLeft")
    state = linked(page)
    other = visitor.open(page.url)
    for name in ("#question", "#verdict", "#answer-words"):
        expect(other.locator(name)).to_have_text(page.inner_text(name))
    assert alpha(other) == pytest.approx(alpha(page), abs=1e-6)
    for name in ("input", "answer", "change"):
        assert np.abs(pixels(other, name) - pixels(page, name)).max() <= 1
    assert linked(other) == state


@pytest.mark.parametrize("asked", [0.6, 0.99])
def test_the_requested_confidence(visitor: Visitor, mnist: Model, asked: float) -> None:
    page = visitor.open("/#model=mnist&sample=90&target=8")
    page.select_option("#confidence", str(asked))
    expect(page.locator("#stops")).to_contain_text(f"{100 * asked:.0f} %")
    settled(page)
    digit = load_mnist("test").images[90:91]
    expected = mnist.explain(digit, 8, confidence=asked, correct=True)
    assert alpha(page) == pytest.approx(float(expected.alpha[0, 0]), abs=1e-3)
    [posterior] = mnist.predict(torch.tensor(pixels(page, "answer")[None, None, ..., 0]).byte())
    obtained = expected.convincing_certificate.verdict[0, 0, 8]
    assert float(posterior[8]) == pytest.approx(float(obtained), abs=2e-3)
    text = f"You requested {100 * asked:.0f} % and got {100 * float(posterior[8]):.1f} %"
    expect(page.locator("#sentences")).to_contain_text(text)
    assert float(linked(page)["confidence"]) == asked
    other = visitor.open(page.url)
    expect(other.locator("#confidence")).to_have_value(str(asked))
    assert alpha(other) == pytest.approx(alpha(page), abs=1e-6)
    other.select_option("#confidence", "")
    expect(other.locator("#stops")).to_contain_text("convincing")


def test_the_default_confidence_of_a_network(visitor: Visitor, mnist: Model) -> None:
    """Visitors get it first, and can choose the paper's α₁ instead; a link keeps the choice."""
    digit = load_mnist("test").images[90:91]
    page = visitor.open("/#model=sure&sample=90&target=8")
    choices = page.locator("#confidence option").all_inner_texts()
    assert choices[:2] == ["90 % (the default)", "as in the paper"]
    asked = mnist.explain(digit, 8, confidence=0.9, correct=True)
    assert alpha(page) == pytest.approx(float(asked.alpha), abs=1e-3)
    expect(page.locator("#sentences")).to_contain_text("This network's default of 90 % gives")
    assert "confidence" not in linked(page)
    page.select_option("#confidence", "alpha_1")
    expect(page.locator("#stops")).to_contain_text("convincing")
    settled(page)
    paper = float(asked.alpha_1)
    assert alpha(page) == pytest.approx(paper, abs=1e-3)
    expect(page.locator("#sentences")).to_contain_text(f"moved by {paper:.2f} times")
    assert linked(page)["confidence"] == "alpha_1"
    other = visitor.open(page.url)
    expect(other.locator("#confidence")).to_have_value("alpha_1")
    assert alpha(other) == pytest.approx(paper, abs=1e-3)
    other.locator("#models").get_by_text("Digits", exact=True).click()
    expect(other.locator("#confidence")).to_have_value("")
    assert other.locator("#confidence option").all_inner_texts()[:2] == [
        "as in the paper",
        "50 %",
    ]
    settled(other)


def test_the_skip_link_keeps_what_was_drawn(visitor: Visitor) -> None:
    page = drawn_three(visitor)
    before, state = pixels(page, "input"), linked(page)
    page.focus("#skip")
    page.keyboard.press("Enter")
    expect(page.locator("#slider")).to_be_focused()
    page.evaluate("location.hash = 'slider'")
    assert page.locator("#stage").get_attribute("data-state") == "ready"
    assert np.array_equal(pixels(page, "input"), before)
    press(page, "ArrowLeft", "ArrowRight")
    assert linked(page) == state


def test_keys_are_harmless_while_a_target_loads(visitor: Visitor) -> None:
    context = visitor.context(reduced_motion="no-preference")
    page = visitor.open(context=context, state=None)
    press(page, "ArrowRight", "PageUp", " ", "5")
    settled(page)
    press(page, "5")  # the first one is ignored if it comes before the picture
    expect(page.locator("#question")).to_have_text("Why is this a 3 and not a 5?")
    settled(page)
    held: list = []
    context.route("**/api/v1/explain", lambda route: held.append(route))
    page.keyboard.press("7")
    settled(page, "loading")
    press(page, "ArrowRight", "End", "PageDown", " ")
    page.wait_for_timeout(300)
    for route in held:
        route.continue_()
    context.unroute_all()
    settled(page)
    expect(page.locator("#question")).to_have_text("Why is this a 3 and not a 7?")


@pytest.mark.parametrize(
    "broken", ["model=none", "model=mnist&sample=x&alpha=nan&target=77&pixels=%%%"]
)
def test_a_broken_link_shows_something(visitor: Visitor, broken: str) -> None:
    page = visitor.open(f"/#{broken}")
    expect(page.locator("#question")).to_contain_text("Why is this a 3 and not a")
    expect(page.locator("#notice")).to_contain_text("This link is damaged")
    page.click("#next")
    expect(page.locator("#notice")).to_be_hidden()


def test_the_tipping_point_is_stated_as_stored_and_the_heatmap_has_a_scale(
    visitor: Visitor, mnist: Model
) -> None:
    page = visitor.open("/#model=mnist&sample=90&target=8")
    e = mnist.explain(load_mnist("test").images[90:91], 8)
    stored = mnist.predict(e.stored_tipping_point[0])[0]
    assert abs(float(stored[3]) - float(stored[8])) > 0.05
    shares = [f"{100 * float(stored[label]):.1f} %" for label in (3, 8)]
    expect(page.locator("#sentences")).to_contain_text(f"{shares[0]} and an 8 with {shares[1]}")
    press(page, "PageDown")
    expect(page.locator("#answer-words")).to_have_text(f"3 · {shares[0]}")
    limit = np.percentile(e.heatmap[0, 0].mean(0).abs(), 99.5)
    expect(page.locator("#scale-low")).to_have_text(f"−{100 * limit:.0f} %")
    expect(page.locator("#scale-high")).to_have_text(f"+{100 * limit:.0f} %")
    links = page.locator(".terms a").evaluate_all("all => all.map((each) => each.hostname)")
    assert links == ["github.com", "arxiv.org", "github.com", "github.com"]


def test_planted_labels_have_a_fixed_scale_and_are_not_digits(visitor: Visitor) -> None:
    page = visitor.open("/#model=fakemnist&sample=4&target=0")
    expect(page.locator("#scale-high")).to_have_text("+100 %")
    expect(page.locator("#answer-words")).to_contain_text("label 0 · ")
    expect(page.locator("#input-words")).to_contain_text("label 3 · ")
    words = page.inner_text("#sentences")
    assert "classified as label 0" in words
    assert not re.search(r"\ban? \d\b", page.inner_text("main"))
    # The dot of a label changes by nearly 1, the strokes by much less: they stay pale.
    shown = 255 - pixels(page, "change").min(2)
    assert shown[:, 0].max() > 200
    assert shown[:, 4:].max() < 80


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (1024, 768), (390, 844)])
def test_the_surface_stays_where_it_is_while_somebody_draws(
    visitor: Visitor, width: int, height: int
) -> None:
    page = visitor.open(context=visitor.context(viewport={"width": width, "height": height}))
    places = [box_of(page, "#pad")]
    draw(page, THREE, lift=False)
    expect(page.locator("#question")).to_contain_text("This looks like")
    places.append(box_of(page, "#pad"))
    page.mouse.up()
    settled(page)
    expect(page.locator("#question")).to_contain_text("Why is this a 3")
    places.append(box_of(page, "#pad"))
    assert places[1:] == places[:1] * 2
    # On a phone, the answer is in view without scrolling.
    expect(page.locator("#peek")).to_be_visible(visible=width < 900)
    if width < 900:
        shown = page.locator("#peek").bounding_box()
        assert shown is not None
        assert shown["y"] + shown["height"] <= height
        assert np.array_equal(pixels(page, "peek-answer"), pixels(page, "answer"))
        assert page.inner_text("#peek-words").endswith(page.inner_text("#answer-words"))
        page.click("#peek")
        expect(page.locator("#answer")).to_be_in_viewport(ratio=0.6)
        expect(page.locator("#peek")).to_be_hidden()


def test_a_picture_stays_when_the_network_changes(visitor: Visitor) -> None:
    page = drawn_three(visitor)
    choose(page, "8")
    before = pixels(page, "input")
    page.locator("#models").get_by_text("sure", exact=True).click()
    expect(page.locator("#stops")).to_contain_text("90 %")
    settled(page)
    assert np.array_equal(pixels(page, "input"), before)
    assert (linked(page)["model"], linked(page)["target"]) == ("sure", "8")
    page.locator("#models").get_by_text("Digits labelled by dots").click()
    expect(page.locator("#input-words")).to_contain_text("label")
    assert not np.array_equal(pixels(page, "input"), before)


@pytest.mark.parametrize("target", [0, 5, 8])
def test_names_of_stops_do_not_cover_each_other_on_a_phone(visitor: Visitor, target: int) -> None:
    phone = visitor.context(viewport={"width": 390, "height": 844})
    page = visitor.open(f"/#model=mnist&sample=90&target={target}", context=phone)
    edges = page.evaluate(STOP_NAMES)
    assert len(edges) == 4
    assert all(left - right >= 7 for (_, right), (left, _) in pairwise(edges))
    assert 0 <= edges[0][0] < edges[-1][1] <= 390


def test_notices_stay_in_view_cover_no_control_and_can_be_closed(visitor: Visitor) -> None:
    page = visitor.open()
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    give(page, b"no picture")
    expect(page.locator("#notice")).to_be_in_viewport(ratio=1)
    expect(page.locator("#notice-retry")).to_be_hidden()  # it would fail again
    page.evaluate("scrollTo(0, 0)")
    page.locator("#models").get_by_text("Digits labelled by dots").click(trial=True, timeout=3000)
    page.click("#notice-close")
    expect(page.locator("#notice")).to_be_hidden()


@pytest.mark.parametrize(
    ("state", "scheme"),
    [("ready", "dark"), ("stale", "light"), ("empty", "dark"), ("loading", "light")],
)
def test_words_have_contrast_in_every_state(visitor: Visitor, state: str, scheme: str) -> None:
    """No text that is visible is faded: neither it nor what contains it is translucent."""
    page = visitor.open(context=visitor.context(color_scheme=scheme))
    if state == "stale":
        draw(page, THREE[:4], lift=False)
    elif state == "empty":
        page.click("#clear")
    elif state == "loading":
        page.evaluate("document.getElementById('stage').dataset.state = 'loading'")
    settled(page, state)
    page.wait_for_timeout(300)
    faded = page.evaluate(FADED_WORDS)
    assert faded == []


def test_clear_undo_and_drawing_on_top(visitor: Visitor) -> None:
    page = visitor.open()
    whole = pixels(page, "input")
    page.click("#keep")
    draw(page, [(0.1, 0.1), (0.1, 0.2)])
    settled(page)
    added = pixels(page, "input")
    assert (added >= whole).all()
    assert added[2:6, 1:5].max() > 200
    page.click("#undo")
    settled(page)
    assert np.array_equal(pixels(page, "input"), whole)
    page.click("#clear")
    settled(page, "empty")
    expect(page.locator("#empty")).to_have_text("Draw a digit here")
    expect(page.locator("#save-png")).to_be_disabled()


def test_a_photographed_digit_is_framed(visitor: Visitor) -> None:
    page = visitor.open()
    paper = Image.new("L", (400, 300), 255)
    digit = Image.fromarray(load_mnist("test").images[0, 0].numpy())
    paper.paste(ImageOps.invert(digit).resize((200, 200)), (30, 60))
    file = io.BytesIO()
    paper.save(file, "PNG")
    give(page, file.getvalue())
    expect(page.locator("#verdict")).to_contain_text("a 7")
    settled(page)
    page.click("#share")
    expect(page.locator("#share-note")).to_contain_text("contains the 28×28 picture")
    give(page, b"no picture")
    expect(page.locator("#notice")).to_contain_text("use a PNG, JPEG or WebP")


def test_moving_fake_mnists_dot_changes_the_label(visitor: Visitor) -> None:
    page = visitor.open("/#model=fakemnist")
    for row in (7, 2):
        draw(page, [(0.5 / 28, (row + 0.5) / 28)])
        expect(page.locator("#verdict")).to_contain_text(f"label {row}")
    page.get_by_role("application", name="the arrow keys move the dot").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#verdict")).to_contain_text("label 3")
    settled(page)


def test_photographs_are_moved_and_enlarged_and_stay_out_of_links(visitor: Visitor) -> None:
    """Uses digits as pictures of another kind, because faces are much slower."""
    context = visitor.context()
    shape = {"channels": 1, "height": 28, "width": 28, "samples": 10}
    model = {"name": "mnist", "title": "Any", "kind": "images", "classes": list("0123456789")}
    context.route(
        "**/api/v1/models", lambda route: route.fulfill(json={"models": [model | shape]})
    )
    page = visitor.open(context=context)
    expect(page.locator("#empty")).to_be_hidden()
    file = io.BytesIO()
    ramp = np.add.outer(np.arange(80), np.arange(120)).astype(np.uint8)
    Image.fromarray(ramp).save(file, "PNG")
    give(page, file.getvalue())
    settled(page, "loading")
    settled(page)
    before = pixels(page, "input")
    assert abs(before.mean() - 99) < 2
    assert set(linked(page)) == {"model", "target", "alpha"}
    page.fill("#zoom", "4")
    draw(page, [(0.5, 0.5), (0.9, 0.5)])
    settled(page)
    assert np.ptp(pixels(page, "input")) < 0.4 * np.ptp(before)
    assert pixels(page, "input").mean() < before.mean() - 5


def test_phone_draws_by_touch_and_never_scrolls_sideways(visitor: Visitor) -> None:
    phone = visitor.context(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page = visitor.open(context=phone)
    expect(page.locator("#wall")).to_be_visible()
    page.locator("summary").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.locator("#pad").scroll_into_view_if_needed()
    box = box_of(page, "#pad")
    touch = phone.new_cdp_session(page)
    for step in range(9):
        height = (0.15 + 0.08 * step) * box["height"]
        point = {"x": box["x"] + 0.5 * box["width"], "y": box["y"] + height}
        event = {"type": "touchMove" if step else "touchStart", "touchPoints": [point]}
        touch.send("Input.dispatchTouchEvent", event)
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    expect(page.locator("#verdict")).to_contain_text("a 1")


def test_every_control_has_a_name_and_is_reached_by_tab(visitor: Visitor) -> None:
    page = visitor.open()
    expect(page.locator("#wall")).to_be_visible()
    wanted, reached = tabbed(page)
    assert [number for number, _ in reached] == list(range(wanted))
    assert {outline for _, outline in reached} == {"solid"}
    for role in ("button", "slider", "radio", "img", "spinbutton", "link", "combobox"):
        for each in page.get_by_role(role).all():
            expect(each).to_have_accessible_name(re.compile(r"\S"))
    expect(page.locator("#spoken")).to_contain_text("Classified as a 3")


def test_axe_finds_nothing_in_any_state(visitor: Visitor) -> None:
    page = visitor.open()
    found = violations_by_state(page)
    page.evaluate("document.getElementById('token-dialog').showModal()")
    found["token"] = violations(page)
    found["dots"] = violations(visitor.open("/#model=fakemnist"))
    found["API"] = violations(visitor.open("/docs", state=None))
    assert not any(found.values()), found


def test_dark_and_light(visitor: Visitor) -> None:
    def brightness(page: Page) -> float:
        return sum(colour(page, "body", "backgroundColor")) / 3

    for scheme, dark in (("dark", True), ("light", False)):
        page = visitor.open(context=visitor.context(color_scheme=scheme))
        assert (brightness(page) < 60) is dark
        others = colour(page, "#plot .other", "stroke")
        assert contrast(others, colour(page, "body", "backgroundColor")) >= 3
        bar = colour(page, ".bar:not([data-most]) .fill", "backgroundColor")
        assert contrast(bar, colour(page, ".track", "backgroundColor")) >= 3
        page.click("#theme")
        assert (brightness(page) < 60) is not dark


def test_a_busy_service_is_asked_again(visitor: Visitor) -> None:
    context = visitor.context()
    refusals = [{"status": 429, "headers": {"Retry-After": "1"}, "json": {"error": "full"}}]
    context.route(
        "**/api/v1/explain",
        lambda route: route.fulfill(**refusals.pop()) if refusals else route.continue_(),
    )
    page = visitor.open(context=context, state=None)
    expect(page.locator("#notice")).to_contain_text("Trying again in 1 s")
    settled(page)
    expect(page.locator("#notice")).to_be_hidden()


def test_the_token_is_asked_for_and_again_when_wrong(visitor: Visitor) -> None:
    context = visitor.context()

    def guard(route) -> None:
        if route.request.headers.get("authorization") == "Bearer right":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": "give the token"})

    context.route("**/api/**", guard)
    page = visitor.open(context=context, state=None)
    for token in ("wrong", "right"):
        page.fill("#token", token)
        page.keyboard.press("Enter")
    settled(page)
    expect(page.locator("#token-dialog")).to_be_hidden()


def test_aligned_faces_are_sent_as_the_square_that_models_know(visitor: Visitor) -> None:
    """Uses digits as faces, because faces are much slower."""
    context = visitor.context()
    shape = {"channels": 3, "height": 64, "width": 64, "samples": 0}
    faces = {"name": "mnist", "title": "Faces", "kind": "faces", "classes": list("0123456789")}
    sent: list[Image.Image] = []

    def keep(route) -> None:
        (image,) = route.request.post_data_json["images"]
        sent.append(Image.open(io.BytesIO(base64.b64decode(image["png"]))).convert("RGB"))
        route.continue_()

    context.route(
        "**/api/v1/models", lambda route: route.fulfill(json={"models": [faces | shape]})
    )
    context.route("**/api/v1/explain", keep)
    page = visitor.open(context=context, state="empty")
    for size, box in {(178, 218): (15, 35, 163, 183), (100, 140): (0, 20, 100, 120)}.items():
        values = np.random.default_rng(3).integers(0, 256, (size[1], size[0], 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(values).save(file, "PNG")
        give(page, file.getvalue())
        settled(page, "loading")
        settled(page)
        left, top, right, bottom = box
        assert np.array_equal(sent[-1], values[top:bottom, left:right])


def test_faces_without_test_pictures_ask_for_a_portrait(visitor: Visitor) -> None:
    context = visitor.context()
    shape = {"channels": 3, "height": 64, "width": 64, "samples": 0}
    faces = {"name": "faces", "title": "Faces", "kind": "faces", "classes": ["sad", "smiling"]}
    context.route(
        "**/api/v1/models", lambda route: route.fulfill(json={"models": [faces | shape]})
    )
    page = visitor.open(context=context, state="empty")
    expect(page.locator("#empty")).to_contain_text("Drop a portrait photo")
    expect(page.locator("#samples")).to_be_hidden()


def test_a_student_shows_what_its_classifier_reads_and_what_is_not_explained(
    visitor: Visitor,
) -> None:
    page = visitor.open("/#model=student&sample=90&target=5")
    asked = {"model": "student", "images": [{"sample": 90}], "targets": ["5", "8"]}
    answer = visitor.post("explain", asked)
    good, failed = answer["images"][0]["targets"]
    expect(page.locator("#readers")).to_contain_text("nearest.pt. Its student reads a 3")
    expect(page.locator("#lead")).to_contain_text("nearest.pt is explained by its student")
    expect(page.locator("#unexplained")).to_be_hidden()
    expect(page.locator("#answer-words")).to_have_text(
        f"5 · {100 * good['convincing']['answer']['5']:.1f} %"
    )
    expect(page.locator("#plot .ring")).to_have_count(6)
    expect(page.locator("#sentences")).to_contain_text(f"{good['queries']} pictures")
    press(page, "ArrowLeft")
    expect(page.locator("#answer-words")).to_contain_text("student: ")
    expect(page.locator(".card[data-missed]")).to_have_count(1)
    expect(page.locator(".card[data-missed]")).to_contain_text("not explained")
    choose(page, "8")
    settled(page)
    expect(page.locator("#unexplained")).to_have_text(failed["sentences"][0])
    expect(page.locator("#stops")).to_contain_text("best found")
    winner = failed["convincing"]["winner"]
    expect(page.locator("#answer-words")).to_contain_text(f"{winner} · ")
