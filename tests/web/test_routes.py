"""The API over a real server, compared with the library."""

import base64
import dataclasses
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
from ecinn.web.catalogue import Catalogue, ServedModel, load_catalogue
from ecinn.web.settings import Settings
from helpers.builders import with_default
from helpers.server import ask, held, metric, running, wait_until


@pytest.fixture(scope="module")
def address(catalogue: Catalogue) -> Iterator[str]:
    with running(catalogue) as address:
        yield address


def picture(url: str) -> Image.Image:
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def pixels(url: str) -> np.ndarray:
    return np.asarray(picture(url))


def post(address: str, what: str, body: Any) -> httpx.Response:
    return httpx.post(f"{address}/api/v1/{what}", json=body, timeout=30)


def test_models_and_samples(address: str, served: ServedModel) -> None:
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


def test_predictions_are_the_models_for_every_kind_of_input(
    address: str, mnist: Model, served: ServedModel
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
    for prediction in answer.json()["images"]:
        assert prediction["predicted"] == str(int(expected.argmax()))
        values = list(prediction["posterior"].values())
        assert values == pytest.approx(expected.tolist(), abs=1e-4)
        assert prediction["typical"] is True
        assert prediction["caution"] is None
    noise = np.random.default_rng(0).integers(0, 256, (28, 28)).tolist()
    odd = post(address, "predict", {"model": "mnist", "images": [{"pixels": noise}]}).json()
    assert odd["images"][0]["typical"] is False
    assert odd["images"][0]["out_of_distribution"]
    assert "does not look like a training image" in odd["images"][0]["caution"]


def test_explain_is_the_librarys_explanation(
    address: str, mnist: Model, served: ServedModel
) -> None:
    assert served.samples is not None
    body = ask(targets=[8, 5], confidence=0.8, correct=True, path=[0.0, 0.4])
    answer = post(address, "explain", body).json()
    schemas.ExplainAnswer.model_validate(answer)
    (given,) = answer["images"]
    x = served.samples.images[18:19]
    e = mnist.explain(to_pixels(x), [8, 5], confidence=0.8, correct=True, path=[0.0, 0.4])
    assert np.array_equal(pixels(given["image"]), x[0, 0])
    assert given["predicted"] == mnist.class_names[int(e.p[0])]
    for column, target in enumerate(given["targets"]):
        assert target["target"] == "85"[column]
        assert target["alpha_0"] == pytest.approx(float(e.alpha_0[0, column]), abs=1e-4)
        assert target["alpha_1"] == pytest.approx(float(e.alpha_1[0, column]), abs=1e-4)
        assert target["alpha"] == pytest.approx(float(e.alpha[0, column]), abs=1e-2)
        for name, stored in (
            ("tipping_point", e.stored_tipping_point),
            ("convincing", e.stored_convincing),
        ):
            difference = pixels(target[name]["image"]).astype(int) - stored[0, column, 0].numpy()
            assert np.abs(difference).max() <= 4
        verdict = e.convincing_certificate.verdict[0, column].tolist()
        posterior = list(target["convincing"]["stored_posterior"].values())
        assert posterior == pytest.approx(verdict, abs=0.02)
        assert target["path"]["alphas"] == pytest.approx([0.0, 0.4])
        assert np.array_equal(pixels(target["path"]["images"][0]), x[0, 0])
        at_zero = picture(target["path"]["heatmaps"][0]).convert("RGB")
        assert np.asarray(at_zero).min() > 245
        for kind in ("image", "overlay"):
            assert picture(target["heatmap"][kind]).size == (28, 28)
        assert target["sentences"]


@pytest.mark.slow
def test_the_models_default_confidence(
    mnist: Model, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is used without a request, and named; films and sheets are corrected to it."""
    monkeypatch.setattr("ecinn.web.service.FILM_FRAMES", 2)
    sure = dataclasses.replace(served, name="sure", model=with_default(mnist, 0.8))
    body = {"model": "sure", "images": [{"sample": 18}], "targets": [8]}
    one = {"model": "sure", "image": {"sample": 18}}
    with running({"mnist": served, "sure": sure}) as address:
        models = httpx.get(f"{address}/api/v1/models").json()["models"]
        assert [each["default_confidence"] for each in models] == ["alpha_1", 0.8]
        for request, confidence, words in (
            ({}, 0.8, "80 % requested (this model's default)"),
            ({"confidence": None}, 0.8, "80 % requested (this model's default)"),
            ({"confidence": 0.8}, 0.8, "80 % requested"),
            ({"confidence": "alpha_1"}, "alpha_1", "α₁ (the paper's)"),
        ):
            answer = post(address, "explain", body | request).json()
            schemas.ExplainAnswer.model_validate(answer)
            assert (answer["confidence"], answer["requested"]) == (confidence, words)
            (target,) = answer["images"][0]["targets"]
            if confidence == "alpha_1":
                assert target["alpha"] == target["alpha_1"]
            else:
                assert target["convincing"]["posterior"]["8"] == pytest.approx(0.8, abs=1e-3)
        png = httpx.get(f"{address}/api/v1/models/sure/samples/18").content
        uncorrected = {}
        for given, words in ((None, "80 % requested (this"), ("0.6", "60 %"), ("alpha_1", "α₁")):
            data = {"model": "sure", "targets": "8"} | ({"confidence": given} if given else {})
            files = [("files", ("a.png", png))]
            zipped = httpx.post(f"{address}/api/v1/explain/files", files=files, data=data)
            with zipfile.ZipFile(io.BytesIO(zipped.content)) as archive:
                report = json.loads(archive.read("explanation.json"))
                uncorrected[given] = archive.read("a-explanation.png")
            assert report["requested"].startswith(words)
        for what, extra in (("film", {"target": 8}), ("sheet", {"targets": [8]})):
            default, same, plain = (
                post(address, what, one | extra | request).content
                for request in ({}, {"confidence": 0.8}, {"confidence": "alpha_1"})
            )
            assert (default == same) == (what == "film")  # a sheet names the request
            assert default != plain
            assert plain == post(address, what, one | extra | {"model": "mnist"}).content
        assert plain == uncorrected["alpha_1"]
        assert default != uncorrected[None]
        wrong = post(address, "explain", body | {"confidence": "alpha"})
        assert wrong.status_code == 422
        assert "confidence" in wrong.json()["error"]


def test_the_answer_has_the_keys_of_to_dict(
    address: str, mnist: Model, served: ServedModel
) -> None:
    assert served.samples is not None
    answer = post(address, "explain", ask(targets=["8"], path=2)).json()
    expected = mnist.explain(served.samples.images[18:19], 8, path=2).to_dict()
    assert answer.keys() == expected.keys()
    image, expected_image = answer["images"][0], expected["images"][0]
    assert image.keys() == expected_image.keys() | {"image", "caution"}
    target, expected_target = image["targets"][0], expected_image["targets"][0]
    assert target.keys() == expected_target.keys() | {"heatmap", "sentences"}
    for kind, pictures in (("convincing", {"image"}), ("path", {"images", "heatmaps"})):
        assert target[kind].keys() == expected_target[kind].keys() | pictures


def test_changes_made_to_an_uploaded_file_are_noted(address: str) -> None:
    buffer = io.BytesIO()
    Image.linear_gradient("L").save(buffer, "PNG")
    given = {"png": base64.b64encode(buffer.getvalue()).decode()}
    body = ask(targets=None) | {"images": [{"sample": 18}, given]}
    sample, file = post(address, "explain", body).json()["images"]
    assert not any("256×256" in note for note in sample["notes"])
    assert any("256×256" in note for note in file["notes"])


def test_images_already_predicted_as_the_target_are_reported(address: str) -> None:
    body = ask(targets=["3"], path=2) | {"images": [{"sample": 0}, {"sample": 18}, {"sample": 1}]}
    answer = post(address, "explain", body).json()
    schemas.ExplainAnswer.model_validate(answer)
    assert [image["index"] for image in answer["images"]] == [0, 2]
    assert [image["predicted"] for image in answer["images"]] == ["7", "2"]
    (failure,) = answer["failures"]
    assert failure["index"] == 1
    assert "already predicted as 3" in failure["reason"]


def test_heatmaps_are_red_where_light_is_added(address: str) -> None:
    (given,) = post(address, "explain", ask(targets=[8])).json()["images"]
    target = given["targets"][0]
    change = pixels(target["convincing"]["image"]).astype(int) - pixels(given["image"]).astype(int)
    red, _, blue = np.moveaxis(
        np.asarray(picture(target["heatmap"]["image"]).convert("RGB"), int), -1, 0
    )
    assert ((red - blue)[change > 60] > 0).all()
    assert ((red - blue)[change < -60] < 0).all()


def test_paths_and_targets(address: str) -> None:
    (given,) = post(address, "explain", ask(targets="all", path=3)).json()["images"]
    assert [t["target"] for t in given["targets"]] == list("012456789")
    for target in given["targets"]:
        path = target["path"]
        assert len(path["alphas"]) == len(path["images"]) == len(path["posterior"]["0"]) == 5
        assert target["alpha_0"] in path["alphas"]
        place = path["alphas"].index(target["alpha"])
        assert path["images"][place] == target["convincing"]["image"]
        assert path["alphas"][-1] == pytest.approx(1.3 * target["alpha"], rel=1e-4)
    twice = post(address, "explain", ask(targets=[8, "8"])).json()["images"][0]
    assert [t["target"] for t in twice["targets"]] == ["8"]
    (second,) = post(address, "explain", ask()).json()["images"]
    order = sorted(second["posterior"], key=second["posterior"].get)
    assert [t["target"] for t in second["targets"]] == [order[-2]]
    assert second["targets"][0]["path"] is None


@pytest.mark.slow
def test_film_and_sheet(address: str) -> None:
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


def sample(address: str, index: int) -> bytes:
    return httpx.get(f"{address}/api/v1/models/mnist/samples/{index}").content


def upload(address: str, *files: tuple[str, bytes], **fields: Any) -> httpx.Response:
    return httpx.post(
        f"{address}/api/v1/explain/files",
        files=[("files", file) for file in files],
        data={"model": "mnist", "targets": "8"} | fields,
        timeout=30,
    )


def png_of(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def unzip(answer: httpx.Response) -> tuple[dict[str, bytes], Any]:
    """Return the files of a zip, and its report."""
    assert answer.headers["content-type"] == "application/zip", answer.text
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    return files, json.loads(files["explanation.json"])


@pytest.mark.slow
def test_files_are_named_after_the_uploads(address: str) -> None:
    png, eight = sample(address, 18), sample(address, 61)
    given = ["../../evil.png", r"C:\x\evil.png", "eight.png", "Ünï (1).png", "漢" * 300]
    uploads = [(name, eight if name == "eight.png" else png) for name in given]
    files, report = unzip(upload(address, *uploads, targets="8, 9"))
    assert all("/" not in name for name in files)
    sources = ["evil.png", "evil.png", "Ünï (1).png", "漢" * 255]
    assert [image["source"] for image in report["images"]] == sources
    assert [image["index"] for image in report["images"]] == [0, 1, 3, 4]
    assert [failure["source"] for failure in report["failures"]] == ["eight.png"]
    assert [image["picture"].removesuffix("-explanation.png") for image in report["images"]] == [
        "evil",
        "evil-2",
        "Ünï_1_",
        "漢" * 40,
    ]
    named = {"explanation.json"}
    for image in report["images"]:
        assert image["predicted"] == "3"
        shown = [image["picture"]]
        for target in image["targets"]:
            shown += [target[kind]["file"] for kind in ("tipping_point", "convincing", "heatmap")]
        for name in shown:
            Image.open(io.BytesIO(files[name])).verify()
        named |= set(shown)
    assert named == set(files)


def test_fields_of_an_upload_are_the_options_of_explain(
    address: str, mnist: Model, served: ServedModel
) -> None:
    png = sample(address, 18)
    x = to_pixels(served.samples.images[18:19]) if served.samples else None
    _, report = unzip(upload(address, ("a.png", png), targets=["8", "9", "5,7"]))
    assert [t["target"] for t in report["images"][0]["targets"]] == list("8957")
    _, every = unzip(upload(address, ("a.png", png), targets="all"))
    assert len(every["images"][0]["targets"]) == 9
    alphas = []
    for correct in (True, False):
        fields = {"correct": str(correct).lower(), "confidence": "0.6"}
        _, report = unzip(upload(address, ("a.png", png), **fields))
        (target,) = report["images"][0]["targets"]
        e = mnist.explain(x, [8], confidence=0.6, correct=correct)
        assert target["alpha"] == pytest.approx(float(e.alpha[0, 0]), abs=1e-3)
        alphas.append((target["alpha_0"], target["alpha"]))
    assert alphas[0] != alphas[1]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"confidense": "0.9"}, "body: leave out confidense"),
        ({"path": "5"}, "body: leave out path: the zip has none"),
        ({"confidence": ["0.8", "0.9"]}, "body: give confidence only once"),
        ({"confidence": "90"}, "confidence: a number above 0 and below 1"),
        ({"correct": "yes"}, "correct: true or false"),
        ({"correct": "True"}, "correct: true or false"),
        ({"targets": ["8", "ten"]}, "no class is called 'ten'"),
        ({"model": ""}, "model is missing: the name of one of /api/v1/models"),
    ],
)
def test_other_fields_of_an_upload_are_refused(address: str, fields: Any, line: str) -> None:
    answer = upload(address, ("a.png", sample(address, 18)), **fields)
    assert answer.status_code == 422
    assert answer.json()["error"].startswith(line)


@pytest.mark.parametrize(
    ("file", "status", "words"),
    [
        (b"<svg/>", 415, "images must be"),
        (b"\x89PNG\r\n\x1a\n12345", 422, "damaged"),
        (png_of(900, 9), 413, "too narrow"),
    ],
)
def test_the_file_that_cannot_be_read_is_named(
    address: str, file: bytes, status: int, words: str
) -> None:
    png = sample(address, 18)
    answer = upload(address, ("a.png", png), ("folder/bad one.png", file), ("c.png", png))
    assert answer.status_code == status
    assert answer.json()["error"].startswith("bad one.png: ")
    assert words in answer.json()["error"]
    already = upload(address, ("a.png", png), targets="3")
    assert already.status_code == 422
    assert "a.png" not in already.json()["error"]


@pytest.mark.parametrize(
    ("what", "body", "status", "words"),
    [
        ("predict", ask(sample=10_000), 404, "test images are 0 to 9999"),
        ("predict", ask() | {"model": "../mnist"}, 404, "no model"),
        ("predict", ask() | {"images": []}, 422, "images"),
        ("predict", ask() | {"images": [{"sample": 0}] * 33}, 422, "images"),
        ("predict", ask() | {"images": [{"pixels": 3}]}, 422, "0 to 255"),
        ("predict", ask() | {"images": [{"pixels": [[300] * 28] * 28}]}, 422, "0 to 255"),
        ("predict", ask() | {"images": [{"pixels": [[1] * 28] * 257}]}, 422, "256 rows"),
        ("predict", ask() | {"images": [{"pixels": [[3]]}]}, 422, "28"),
        ("predict", ask() | {"images": [{"png": "PHN2Zy8+"}]}, 415, "PNG"),
        ("predict", ask() | {"images": [{"png": "not base64"}]}, 422, "base64"),
        ("predict", ask() | {"more": 1}, 422, "more"),
        ("predict", [], 422, ""),
        ("explain", ask(targets=[3]), 422, "already predicted"),
        ("explain", ask(targets=[10]), 422, "out of range"),
        ("explain", ask(targets=["ten"]), 422, "no class is called 'ten'"),
        ("explain", ask(targets=[]), 422, "targets"),
        ("explain", ask(targets="none"), 422, "targets"),
        ("explain", ask(confidence=1.0), 422, "confidence"),
        ("explain", ask(path=62), 422, "path"),
        ("explain", ask(frames=2), 422, "leave out frames"),
        ("explain", ask(path=[99.0]), 422, "path"),
        (
            "explain",
            {"model": "mnist", "images": [{"sample": 1}] * 4, "targets": "all", "path": 61},
            413,
            "fewer",
        ),
        ("film", {"model": "mnist", "image": {"sample": 0}}, 422, "target"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(
    address: str, what: str, body: Any, status: int, words: str
) -> None:
    answer = post(address, what, body)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert words in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


def test_concurrent_requests_are_batched_and_keep_their_answers(served: ServedModel) -> None:
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
        given = pixels(answer["images"][0]["image"])
        assert np.array_equal(given, served.samples.images[sample, 0])


def test_predictions_of_files_do_not_wait_for_drawing(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, drawing = threading.Event(), threading.Event()

    def blocked(_: object) -> bytes:
        drawing.set()
        assert gate.wait(20)
        return b"{}"

    monkeypatch.setattr("ecinn.web.answers.explanation", blocked)
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


def test_predictions_do_not_wait_for_explanations(served: ServedModel) -> None:
    catalogue, classifier = held(served)
    classifier.gate.clear()
    with running(catalogue) as address, ThreadPoolExecutor(2) as clients:
        slow = clients.submit(post, address, "explain", ask())
        wait_until(lambda: classifier.decoded)
        assert post(address, "predict", ask()).status_code == 200
        assert not slow.done()
        classifier.gate.set()
        assert slow.result().status_code == 200


def test_a_full_queue_says_when_to_try_again(served: ServedModel) -> None:
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


def test_faces_are_generated_if_their_folder_is_not_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ECINN_CELEBA", raising=False)
    monkeypatch.chdir(tmp_path)
    faces = load_catalogue(["celeba-smile", "celeba-makeup"])
    # One face can be compared across labels.
    assert faces["celeba-makeup"].samples is faces["celeba-smile"].samples
    with running(faces) as address:
        model, _ = httpx.get(f"{address}/api/v1/models").json()["models"]
        assert model["kind"] == "faces"
        assert (model["generated"], model["fine_tuned"]) == (True, True)
        served = faces["celeba-smile"]
        assert served.samples is not None
        assert model["samples"] == len(served.samples) == 8
        face = httpx.get(f"{address}/api/v1/models/celeba-smile/samples/3")
        assert "X-Label" not in face.headers
        shown = np.asarray(Image.open(io.BytesIO(face.content)).convert("RGB"))
        assert np.array_equal(shown, served.samples.images[3].permute(1, 2, 0).numpy())
        gone = httpx.get(f"{address}/api/v1/models/celeba-smile/samples/8")
        assert gone.status_code == 404
        grey = [[[120, 120, 120]] * 64] * 64
        body = {"model": "celeba-smile", "images": [{"pixels": grey}]}
        assert post(address, "predict", body).json()["images"][0]["typical"] is False
