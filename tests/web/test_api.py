"""The API over a real server, against the library asked directly."""

import base64
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from ecinn.model import Model
from ecinn.pixels import to_pixels
from ecinn.web import schemas
from ecinn.web.catalogue import Catalogue, Served, load_catalogue
from ecinn.web.settings import Settings
from helpers.server import ask, held, metric, running, wait_until


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue(["mnist"])


@pytest.fixture(scope="module")
def address(catalogue: Catalogue) -> Iterator[str]:
    with running(catalogue) as address:
        yield address


@pytest.fixture(scope="module")
def served(catalogue: Catalogue) -> Served:
    return catalogue["mnist"]


def picture(url: str) -> Image.Image:
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def pixels(url: str) -> np.ndarray:
    return np.asarray(picture(url))


def post(address: str, what: str, body: Any) -> httpx.Response:
    return httpx.post(f"{address}/api/v1/{what}", json=body, timeout=30)


def test_models_and_samples(address: str, served: Served) -> None:
    (model,) = httpx.get(f"{address}/api/v1/models").json()["models"]
    assert model["name"] == "mnist"
    assert model["kind"] == "digits"
    assert model["classes"] == [str(digit) for digit in range(10)]
    assert (model["channels"], model["height"], model["width"]) == (1, 28, 28)
    assert served.samples is not None
    assert model["samples"] == len(served.samples)
    answer = httpx.get(f"{address}/api/v1/models/mnist/samples/18")
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["x-label"] == str(int(served.samples.labels[18]))
    stored = np.asarray(Image.open(io.BytesIO(answer.content)))
    assert np.array_equal(stored, served.samples.images[18, 0].numpy())
    for path in ("mnist/samples/10000", "nobody/samples/0", "..%2f..%2fetc/samples/0"):
        gone = httpx.get(f"{address}/api/v1/models/{path}")
        assert gone.status_code == 404
        assert list(gone.json()) == ["error"]


def test_predict_says_what_the_model_says_however_the_picture_is_given(
    address: str, mnist: Model, served: Served
) -> None:
    assert served.samples is not None
    image = served.samples.images[18]
    buffer = io.BytesIO()
    Image.fromarray(image[0].numpy()).save(buffer, "PNG")
    given = [
        {"sample": 18},
        {"pixels": image[0].tolist()},
        {"png": base64.b64encode(buffer.getvalue()).decode()},
    ]
    answer = post(address, "predict", {"model": "mnist", "images": given})
    assert answer.status_code == 200
    schemas.PredictAnswer.model_validate(answer.json())
    expected = mnist.predict(to_pixels(image[None]))[0]
    for prediction in answer.json()["predictions"]:
        assert prediction["predicted"] == int(expected.argmax())
        assert prediction["posterior"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert prediction["typical"] is True
    noise = np.random.default_rng(0).integers(0, 256, (28, 28)).tolist()
    odd = post(address, "predict", {"model": "mnist", "images": [{"pixels": noise}]}).json()
    assert odd["predictions"][0]["typical"] is False
    assert odd["predictions"][0]["reasons"]


def test_explain_is_the_librarys_explanation(address: str, mnist: Model, served: Served) -> None:
    assert served.samples is not None
    body = ask(targets=[8, 5], confidence=0.8, correct=True, alphas=[0.0, 0.4])
    answer = post(address, "explain", body).json()
    schemas.ExplainAnswer.model_validate(answer)
    (given,) = answer["explanations"]
    x = served.samples.images[18:19]
    e = mnist.explain(to_pixels(x), [8, 5], confidence=0.8, correct=True, path=[0.0, 0.4])
    assert np.array_equal(pixels(given["input"]), x[0, 0])
    assert given["predicted"] == int(e.p[0])
    for column, target in enumerate(given["targets"]):
        assert target["target"] == [8, 5][column]
        assert target["alpha_0"] == pytest.approx(float(e.alpha_0[0, column]), abs=1e-4)
        assert target["alpha_1"] == pytest.approx(float(e.alpha[0, column]), abs=1e-2)
        for name, stored in (
            ("tipping_point", e.stored_tipping_point),
            ("convincing", e.stored_convincing),
        ):
            difference = pixels(target[name]).astype(int) - stored[0, column, 0].numpy()
            assert np.abs(difference).max() <= 4
        verdict = e.convincing_certificate.verdict[0, column].tolist()
        assert target["convincing_posterior"] == pytest.approx(verdict, abs=0.02)
        assert target["path"]["alphas"] == pytest.approx([0.0, 0.4])
        assert np.array_equal(pixels(target["path"]["images"][0]), x[0, 0])
        at_zero = picture(target["path"]["heatmaps"][0]).convert("RGB")
        assert np.asarray(at_zero).min() > 245
        assert picture(target["overlay"]).size == picture(target["heatmap"]).size == (28, 28)
        assert target["words"]


def test_heatmaps_are_red_where_light_is_added(address: str) -> None:
    (given,) = post(address, "explain", ask(targets=[8])).json()["explanations"]
    target = given["targets"][0]
    change = pixels(target["convincing"]).astype(int) - pixels(given["input"]).astype(int)
    red, _, blue = np.moveaxis(np.asarray(picture(target["heatmap"]).convert("RGB"), int), -1, 0)
    assert ((red - blue)[change > 60] > 0).all()
    assert ((red - blue)[change < -60] < 0).all()


def test_frames_and_targets(address: str) -> None:
    (given,) = post(address, "explain", ask(targets="all", frames=3)).json()["explanations"]
    assert [t["target"] for t in given["targets"]] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    for target in given["targets"]:
        path = target["path"]
        assert len(path["alphas"]) == len(path["images"]) == len(path["posteriors"]) == 5
        assert target["alpha_0"] in path["alphas"]
        place = path["alphas"].index(target["alpha_1"])
        assert path["images"][place] == target["convincing"]
        assert path["alphas"][-1] == pytest.approx(1.3 * target["alpha_1"], rel=1e-4)
    twice = post(address, "explain", ask(targets=[8, 8])).json()["explanations"][0]
    assert [t["target"] for t in twice["targets"]] == [8]
    (second,) = post(address, "explain", ask()).json()["explanations"]
    order = np.argsort(second["posterior"])[::-1]
    assert [t["target"] for t in second["targets"]] == [order[1]]
    assert second["targets"][0]["path"] is None


def test_film_sheet_and_files(address: str, served: Served) -> None:
    body = {"model": "mnist", "image": {"sample": 18}}
    film = post(address, "film", body | {"target": 8})
    assert film.headers["content-type"] == "image/gif"
    assert Image.open(io.BytesIO(film.content)).n_frames > 20  # type: ignore[attr-defined]
    less = post(address, "film", body | {"target": 8, "confidence": 0.6})
    assert less.content != film.content
    sheet = post(address, "sheet", body | {"targets": [8, 9]})
    asked = post(address, "sheet", body | {"targets": [8, 9], "confidence": 0.6})
    assert asked.content != sheet.content
    assert sheet.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(sheet.content)).width > 200
    png = httpx.get(f"{address}/api/v1/models/mnist/samples/18").content
    answer = httpx.post(
        f"{address}/api/v1/explain/files",
        files=[("files", ("../../evil.png", png)), ("files", ("b.png", png))],
        data={"model": "mnist", "targets": "8, 9"},
        timeout=30,
    )
    assert answer.headers["content-type"] == "application/zip"
    files = zipfile.ZipFile(io.BytesIO(answer.content))
    names = set(files.namelist())
    assert all("/" not in name and "evil" not in name for name in names)
    for number in (1, 2):
        assert f"picture-{number}-explanation.png" in names
        certificate = json.loads(files.read(f"picture-{number}-certificate.json"))
        assert certificate["predicted"] == "3"
        for target in certificate["targets"]:
            for kind in ("tipping_point", "convincing", "heatmap"):
                Image.open(io.BytesIO(files.read(target[kind]["file"]))).verify()


@pytest.mark.parametrize(
    ("what", "body", "status", "words"),
    [
        ("predict", ask(sample=10_000), 404, "test images are 0 to 9999"),
        ("predict", ask() | {"model": "../mnist"}, 404, "no model"),
        ("predict", ask() | {"images": []}, 422, "images"),
        ("predict", ask() | {"images": [{"sample": 0}] * 33}, 422, "images"),
        ("predict", ask() | {"images": [{"pixels": 3}]}, 422, "an image is"),
        ("predict", ask() | {"images": [{"pixels": [[300] * 28] * 28}]}, 422, "0 to 255"),
        ("predict", ask() | {"images": [{"pixels": [[1] * 28] * 257}]}, 422, "an image is"),
        ("predict", ask() | {"images": [{"pixels": [[3]]}]}, 422, "28"),
        ("predict", ask() | {"images": [{"png": "PHN2Zy8+"}]}, 415, "PNG"),
        ("predict", ask() | {"images": [{"png": "not base64"}]}, 422, "base64"),
        ("predict", ask() | {"more": 1}, 422, "more"),
        ("predict", [], 422, ""),
        ("explain", ask(targets=[3]), 422, "already predicted"),
        ("explain", ask(targets=[10]), 422, "out of range"),
        ("explain", ask(targets=[]), 422, "targets"),
        ("explain", ask(targets="none"), 422, "targets"),
        ("explain", ask(confidence=1.0), 422, "confidence"),
        ("explain", ask(frames=62), 422, "frames"),
        ("explain", ask(frames=2, path=[1.0]), 422, "leave one out"),
        ("explain", ask(path=[99.0]), 422, "alphas"),
        (
            "explain",
            {"model": "mnist", "images": [{"sample": 1}] * 4, "targets": "all", "frames": 61},
            413,
            "fewer",
        ),
        ("film", {"model": "mnist", "image": {"sample": 0}}, 422, "target"),
    ],
)
def test_wrong_requests_are_told_in_one_line(
    address: str, what: str, body: Any, status: int, words: str
) -> None:
    answer = post(address, what, body)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert words in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


def test_concurrent_requests_are_joined_and_keep_their_own_answers(served: Served) -> None:
    catalogue, classifier = held(served)
    settings = Settings(threads=1, join_seconds=0.3)
    with running(catalogue, settings) as address, ThreadPoolExecutor(16) as clients:
        asked = [ask(sample=sample, targets=None) for sample in range(16)]
        answers = list(clients.map(lambda body: post(address, "explain", body).json(), asked))
        passes = metric(address, 'ecinn_joined_requests_count{queue="explain"}')
        joined = metric(address, 'ecinn_joined_requests_sum{queue="explain"}')
    assert joined == 16
    assert passes <= 4
    assert sum(classifier.encoded) == 16 + 2 * 16
    assert sum(classifier.decoded) == 3 * 16
    for sample, answer in enumerate(answers):
        assert served.samples is not None
        given = pixels(answer["explanations"][0]["input"])
        assert np.array_equal(given, served.samples.images[sample, 0])


def test_predictions_of_files_do_not_wait_for_drawing(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, drawing = threading.Event(), threading.Event()

    def blocked(_: object) -> list[Any]:
        drawing.set()
        assert gate.wait(20)
        return []

    monkeypatch.setattr("ecinn.web.answers.explanations", blocked)
    with running(catalogue) as address, ThreadPoolExecutor(2) as clients:
        png = httpx.get(f"{address}/api/v1/models/mnist/samples/18").content
        given = {"png": base64.b64encode(png).decode()}
        slow = clients.submit(post, address, "explain", ask())
        try:
            wait_until(drawing.is_set)
            quick = clients.submit(post, address, "predict", ask() | {"images": [given]})
            assert quick.result(10).status_code == 200
            assert not slow.done()
        finally:
            gate.set()


def test_predictions_do_not_wait_for_explanations(served: Served) -> None:
    catalogue, classifier = held(served)
    classifier.gate.clear()
    with running(catalogue) as address, ThreadPoolExecutor(2) as clients:
        slow = clients.submit(post, address, "explain", ask())
        wait_until(lambda: classifier.decoded)
        assert post(address, "predict", ask()).status_code == 200
        assert not slow.done()
        classifier.gate.set()
        assert slow.result().status_code == 200


def test_a_full_queue_says_when_to_come_back(served: Served) -> None:
    catalogue, classifier = held(served)
    classifier.gate.clear()
    settings = Settings(threads=1, queued=2, passes=1, join_seconds=0.0)
    with running(catalogue, settings) as address, ThreadPoolExecutor(4) as clients:
        running_now = clients.submit(post, address, "explain", ask())
        wait_until(lambda: classifier.decoded)
        waiting = [clients.submit(post, address, "explain", ask()) for _ in range(2)]
        wait_until(lambda: httpx.get(f"{address}/health").json()["queue"] == 2)
        refused = post(address, "explain", ask())
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "try again" in refused.json()["error"]
        classifier.gate.set()
        assert {f.result().status_code for f in (running_now, *waiting)} == {200}


def test_faces_have_samples_only_where_their_folder_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ECINN_CELEBA", raising=False)
    monkeypatch.chdir(tmp_path)
    faces = load_catalogue(["celeba-smile"])
    with running(faces) as address:
        (model,) = httpx.get(f"{address}/api/v1/models").json()["models"]
        assert model["kind"] == "faces"
        assert model["samples"] == 0
        gone = httpx.get(f"{address}/api/v1/models/celeba-smile/samples/0")
        assert gone.status_code == 404
        grey = [[[120, 120, 120]] * 64] * 64
        body = {"model": "celeba-smile", "images": [{"pixels": grey}]}
        assert post(address, "predict", body).json()["predictions"][0]["typical"] is False
