"""The page without a server, in a real browser: the network runs there, and nothing is sent."""

import base64
import functools
import http.server
import io
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from ecinn.data import pen
from ecinn.data.mnist import load_mnist
from ecinn.errors import EcinnError, InputError
from helpers.axe import violations_by_state
from helpers.visitor import THREE, Page, Visitor, draw, expect, linked, pixels, settled

pytest.importorskip("fastapi", reason="the numbers are compared with the service's")
pytest.importorskip("onnxruntime", reason="the site has ONNX files")
from ecinn.web import site as site_module
from ecinn.web.catalogue import Catalogue, load_catalogue
from ecinn.web.site import build_site
from helpers.server import running

pytestmark = pytest.mark.browser

MODELS = ("mnist", "fakemnist")
SEVEN = [(0.25, 0.2), (0.5, 0.22), (0.75, 0.2), (0.6, 0.5), (0.45, 0.85)]
ZERO = [(0.5, 0.15), (0.3, 0.3), (0.3, 0.65), (0.5, 0.85), (0.7, 0.65), (0.68, 0.3), (0.5, 0.15)]
ASK = """async ([path, body]) => {
  const { request } = await import("./static/service.js");
  return (await request(path, { body: JSON.stringify(body) })).json();
}"""
ONLY_THE_SERVICE = {
    "images.index", "images.source", "images.notes", "images.round_trip_error", "passes",
    "images.targets.passes", "images.targets.heatmap.overlay",
}  # fmt: skip


class StaticFiles(http.server.SimpleHTTPRequestHandler):
    """A static host that can go away, or be slow with some files."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def send_head(self):
        for ending, gate in self.server.slow.items():
            assert not self.path.endswith(ending) or gate.wait(60)
        if not self.server.away:
            return super().send_head()
        self.close_connection = True
        return None


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site of digits and dots below a path prefix."""
    host = tmp_path_factory.mktemp("host")
    try:
        build_site(host / "some" / "where", MODELS, url="https://example.org/digits")
    except EcinnError as error:
        pytest.skip(f"the site cannot be built here: {error}")
    return host / "some" / "where"


@pytest.fixture(scope="module")
def host(folder: Path) -> Iterator[http.server.HTTPServer]:
    handler = functools.partial(StaticFiles, directory=str(folder.parent.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.away, server.slow = False, {}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def both() -> Catalogue:
    return load_catalogue(MODELS)


@pytest.fixture(scope="module")
def service(both: Catalogue) -> Iterator[str]:
    with running(both) as address:
        yield address


@pytest.fixture(scope="module")
def visitor(browser, host: http.server.HTTPServer) -> Iterator[Visitor]:
    """One visitor for all tests: loading the network takes longest."""
    visitor = Visitor(browser, f"http://127.0.0.1:{host.server_port}/some/where")
    yield visitor
    visitor.leave()
    assert not visitor.faults


@pytest.fixture(scope="module")
def opened(visitor: Visitor) -> Page:
    context = visitor.context()
    context.unroute_all()
    requests: list[str] = []
    context.on("request", lambda request: requests.append(request.url))
    page = visitor.open("/", context=context)
    page.requests = requests  # type: ignore[attr-defined]
    return page


def ask(page: Page, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return page.evaluate(ASK, [f"/api/v1/{path}", body])


def compare(ours: Any, theirs: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Compare two answers; yield every number's place and difference."""
    if isinstance(theirs, dict):
        assert {f"{place}{key}" for key in set(theirs) - set(ours)} <= ONLY_THE_SERVICE
        for key in ours:
            yield from compare(ours[key], theirs[key], f"{place}{key}.")
    elif isinstance(theirs, list):
        for one, other in zip(ours, theirs, strict=True):
            yield from compare(one, other, place)
    elif isinstance(theirs, str) and theirs.startswith("data:"):
        yield f"{place}levels", np.abs(decoded(ours) - decoded(theirs)).max()
    elif isinstance(theirs, str):  # percentages are compared as numbers; they may round otherwise
        assert re.sub(r"[\d.]+ %", "%", ours) == re.sub(r"[\d.]+ %", "%", theirs)
    elif isinstance(theirs, float):
        yield place, abs(ours - theirs) / max(1.0, abs(theirs))  # log p(x) is in the hundreds
    else:
        assert ours == theirs, place


def decoded(url: str) -> np.ndarray:
    file = io.BytesIO(base64.b64decode(url.partition(",")[2]))
    return np.asarray(Image.open(file).convert("RGB")).astype(int)


def check_explanation(page: Page, service: str, body: dict[str, Any]) -> None:
    """Compare every number with the service's.

    A pixel on the border of two levels may be stored one level higher or lower, which changes
    what is read from that picture. So readings of stored pictures are also compared with what the
    service reads from the very same picture.
    """
    ours = ask(page, "explain", body)
    theirs = httpx.post(f"{service}/api/v1/explain", json=body, timeout=60).json()
    targets = [answer["images"][0].pop("targets") for answer in (ours, theirs)]
    assert max(difference for _, difference in compare(ours, theirs)) < 1e-3
    pictures, readings = [], []
    for one, other in zip(*targets, strict=True):
        differences = list(compare(one, other, "images.targets."))
        levels = [difference for place, difference in differences if place.endswith("levels")]
        assert max(levels) <= 3
        numbers = [difference for place, difference in differences if place.endswith(".")]
        assert max(numbers) < (1e-3 if not any(levels) else 0.03)
        for kind in ("tipping_point", "convincing"):
            pictures.append({"pixels": decoded(one[kind]["image"])[..., 0].tolist()})
            readings.append(one[kind]["stored_posterior"])
    again = {"model": body["model"], "images": pictures}
    read = httpx.post(f"{service}/api/v1/predict", json=again, timeout=60).json()["images"]
    same_pictures = compare(readings, [image["posterior"] for image in read])
    assert max(difference for _, difference in same_pictures) < 1e-3


def test_drawing_does_not_wait_for_the_network(
    host: http.server.HTTPServer, visitor: Visitor
) -> None:
    """What is drawn before anything is loaded stays, and is explained as soon as it can be."""
    host.slow = {ending: threading.Event() for ending in ("models.json", ".wasm")}
    page = visitor.open(context=visitor.context(service_workers="block"), state=None)
    draw(page, THREE)
    surface = page.locator("#pad").evaluate("each => each.toDataURL()")
    assert 0.02 < (decoded(surface) > 200).mean() < 0.3
    host.slow["models.json"].set()
    expect(page.locator("#verdict")).to_contain_text(re.compile(r"^Loading \d+ MB"))
    settled(page, "loading")
    host.slow[".wasm"].set()
    settled(page)
    expect(page.locator("#question")).to_contain_text("Why is this a 3 and not")
    assert page.locator("#pad").evaluate("each => each.toDataURL()") == surface
    host.slow = {}


@pytest.mark.parametrize(("points", "targets"), [(THREE, "all"), (SEVEN, None), (ZERO, None)])
def test_a_drawn_digit_has_the_numbers_of_the_service(
    opened: Page, service: str, points: list[tuple[float, float]], targets: str | None
) -> None:
    opened.click("#clear")
    draw(opened, points)
    settled(opened)
    image = {"pixels": pixels(opened, "input")[..., 0].tolist()}
    text = linked(opened)["pixels"]
    drawn = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    assert np.array_equal(np.frombuffer(drawn, np.uint8), np.ravel(image["pixels"]))
    asked = {"model": "mnist", "images": [image]}
    predicted = httpx.post(f"{service}/api/v1/predict", json=asked).json()
    differences = [
        difference for _, difference in compare(ask(opened, "predict", asked), predicted)
    ]
    assert len(differences) > 10
    assert max(differences) < 1e-3
    usual = {"targets": targets, "confidence": None, "correct": False}
    check_explanation(opened, service, asked | usual)
    other = {"targets": None, "confidence": 0.8, "correct": True, "path": 3}
    check_explanation(opened, service, asked | other)


def test_a_letter_gets_the_services_caution(opened: Page, service: str) -> None:
    """It is drawn in straight lines, as `data/pen.py` draws it for the detector to learn from."""
    strokes = [[(0.2, 0.85), (0.5, 0.12)], [(0.5, 0.12), (0.8, 0.86)], [(0.31, 0.6), (0.7, 0.61)]]
    opened.click("#clear")
    for stroke in strokes:
        draw(opened, stroke)
    settled(opened)
    caution = opened.locator("#caution")
    expect(caution).to_be_visible()
    expect(caution).to_contain_text("not shaped like a digit")
    found = pixels(opened, "input")[..., 0]
    asked = {"model": "mnist", "images": [{"pixels": found.tolist()}]}
    theirs = httpx.post(f"{service}/api/v1/predict", json=asked).json()["images"][0]
    assert theirs["caution"] == caution.inner_text()
    assert ask(opened, "predict", asked)["images"][0]["out_of_distribution"] == ["shape"]
    share = torch.linspace(0, 1, 80)[:, None]
    ends = torch.tensor(strokes)
    line = torch.cat([start + share * (end - start) for start, end in ends])
    difference = np.abs(pen.draw([line], pen.page_pens(1))[0, 0].numpy() - found)
    assert difference.mean() < 2.5
    assert difference.max() < 80


def test_dots_have_the_numbers_of_the_service(opened: Page, service: str) -> None:
    asked = {"model": "fakemnist", "images": [{"sample": 999}]}
    answer = httpx.post(f"{service}/api/v1/predict", json=asked).json()
    predicted = int(answer["images"][0]["predicted"])
    targets = [label for label in (0, 5, 9) if label != predicted]
    options = {"targets": targets, "confidence": None, "correct": False}
    check_explanation(opened, service, asked | options)


@pytest.mark.parametrize("colour", [(250, 245, 235), (10, 20, 5)])
def test_a_photographed_digit_is_framed_as_by_the_service(
    opened: Page, service: str, colour: tuple[int, int, int]
) -> None:
    paper = Image.new("RGB", (300, 220), colour)
    digit = Image.fromarray(load_mnist("test").images[18, 0].numpy()).rotate(8, expand=True)
    ink = ImageOps.invert(digit) if colour[0] > 127 else digit
    paper.paste(ink.convert("RGB").resize((130, 150)), (91, 23))
    file = io.BytesIO()
    paper.save(file, "PNG")
    image = {"png": base64.b64encode(file.getvalue()).decode()}
    body = {"model": "mnist", "images": [image], "targets": None}
    ours = ask(opened, "explain", body)["images"][0]
    theirs = httpx.post(f"{service}/api/v1/explain", json=body).json()["images"][0]
    assert decoded(theirs["image"]).max() > 200
    assert np.abs(decoded(ours["image"]) - decoded(theirs["image"])).max() <= 1
    assert ours["predicted"] == theirs["predicted"]


def test_the_film_shows_the_path_and_the_sheet_every_target(opened: Page, service: str) -> None:
    """Pillow reads the GIF that the page writes; its frames are the service's counterfactuals."""
    opened.goto(f"{opened.url.partition('#')[0]}#model=mnist&sample=90&target=8")
    question = "Why is this a 3 and not an 8?"
    expect(opened.locator("#question")).to_have_text(question, timeout=30_000)
    settled(opened)
    kept = {}
    for kind in ("gif", "png"):
        with opened.expect_download() as download:
            opened.click(f"#save-{kind}")
        assert download.value.suggested_filename == f"ecinn-mnist-3-to-8.{kind}"
        kept[kind] = Image.open(io.BytesIO(download.value.path().read_bytes()))
    asked = {"model": "mnist", "images": [{"sample": 90}], "targets": ["8"]}
    theirs = httpx.post(f"{service}/api/v1/explain", json=asked).json()["images"][0]
    end = theirs["targets"][0]["convincing"]
    film, tile = kept["gif"], 336 // 28
    assert film.info["loop"] == 0
    for frame, url in ((0, theirs["image"]), (film.n_frames // 2, end["image"])):
        film.seek(frame)
        shown = np.asarray(film.convert("L"))[48 : 48 + 336, 16 : 16 + 336]
        middles = shown[tile // 2 :: tile, tile // 2 :: tile].astype(int)
        assert np.abs(middles - decoded(url)[..., 0]).max() <= 1
    sheet = np.asarray(kept["png"].convert("RGB")).astype(int)
    third_row = sheet[72 + 128 : 72 + 240, 240 + 7 * 128 : 240 + 7 * 128 + 112]
    assert np.abs(third_row[2::4, 2::4] - decoded(end["image"])).max() <= 1


def test_axe_finds_nothing_in_any_state(opened: Page) -> None:
    found = violations_by_state(opened)
    assert not any(found.values()), found


def test_nothing_is_sent_anywhere(opened: Page, visitor: Visitor, folder: Path) -> None:
    """All requests load a file of the site, and the page allows no others."""
    files = {
        f"{visitor.service}/{name}"
        for name in json.loads((folder / "site.json").read_text())["files"]
    }
    asked = {url.partition("#")[0] for url in opened.requests if url.startswith("http")}
    assert len(asked) > 20
    assert asked <= files | {f"{visitor.service}/"}
    policy = opened.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content")
    assert policy is not None
    assert "connect-src 'self'" in policy
    expect(opened.locator(".colophon")).to_contain_text("no picture leaves your machine")
    expect(opened.locator(".colophon")).to_contain_text("need ecinn serve")


def test_a_copied_link_opens_the_same_also_offline(
    opened: Page, visitor: Visitor, host: http.server.HTTPServer
) -> None:
    opened.click("#clear")
    draw(opened, THREE)
    settled(opened)
    state, picture = linked(opened), pixels(opened, "answer")
    opened.evaluate("navigator.serviceWorker.ready.then(() => true)")
    host.away = True
    opened.context.set_offline(True)
    page = opened.context.new_page()
    assert page.goto(f"{visitor.service}/").from_service_worker
    page.goto(opened.url.replace("/#", "/index.html#"))
    settled(page)
    assert np.array_equal(pixels(page, "answer"), picture)
    assert linked(page) == state
    page.close()
    opened.context.set_offline(False)
    host.away = False


def test_the_link_preview(folder: Path) -> None:
    page = (folder / "index.html").read_text()
    tags = dict(re.findall(r'<meta property="(og:[\w:]+)" content="([^"]*)">', page))
    assert tags["og:image"] == "https://example.org/digits/preview.png"
    assert tags["og:url"] == "https://example.org/digits/"
    assert tags["og:title"]
    assert tags["og:description"]
    with Image.open(folder / "preview.png") as picture:
        assert picture.size == (int(tags["og:image:width"]), int(tags["og:image:height"]))
        assert len(picture.convert("L").getcolors()) > 50
    assert not re.findall(r'(?:src|href)="/', page)


def test_a_folder_with_other_files_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "site")
    site_module._check_folder(copy)
    (copy / "static" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"static/notes\.txt"):
        build_site(copy)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("mine")
    with pytest.raises(InputError, match=r"a\.txt"):
        build_site(tmp_path / "other")
    assert (tmp_path / "other" / "a.txt").read_text() == "mine"


def test_what_is_missing_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECINN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(InputError, match="not installed: install it, or unpack"):
        build_site(tmp_path / "site")
    incomplete = tmp_path / "cache" / f"{site_module.RUNTIME}-{site_module.RUNTIME_VERSION}"
    incomplete.mkdir(parents=True)
    failed = subprocess.CompletedProcess([], 1, "", "network\ndown")
    monkeypatch.setattr(shutil, "which", lambda _: "npm")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(EcinnError, match="check the network, or unpack"):
        build_site(tmp_path / "site")
    with pytest.raises(InputError, match=r"ort\.wasm\.min\.mjs"):
        build_site(tmp_path / "site", ort=tmp_path)
    with pytest.raises(InputError, match="such as https"):
        build_site(tmp_path / "site", url="example.org")
    assert not (tmp_path / "site").exists()
