"""Students behind the service: the classifier in a file beside them is asked and named."""

import dataclasses
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ecinn import equations
from ecinn.errors import InputError
from ecinn.explanation.result import Explanation
from ecinn.model import Model, load
from ecinn.pixels import to_pixels, to_uint8
from ecinn.training.agreement import _path_difference
from ecinn.web import schemas
from ecinn.web.answers import sentences
from ecinn.web.catalogue import load_catalogue
from ecinn.web.passes import (
    Question,
    _add_paths,
    explain_jointly,
    predict_jointly,
    split_network,
)
from helpers.command_line import fails
from helpers.server import running
from helpers.students import student_folder

NEVER = 8
SAMPLE = 90


@pytest.fixture(scope="module")
def folder(mnist: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return student_folder(mnist, tmp_path_factory.mktemp("students") / "student", NEVER)


@pytest.fixture(scope="module")
def student(folder: Path) -> Model:
    return load(folder, "cpu")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with running(load_catalogue([str(folder)])) as address:
        yield address


def post(address: str, what: str, **body: Any) -> httpx.Response:
    asked = {"model": "student", "images": [{"sample": SAMPLE}], **body}
    return httpx.post(f"{address}/api/v1/{what}", json=asked, timeout=60)


def test_joint_explanations_are_verified_as_alone_and_ask_nothing_twice(student: Model) -> None:
    x = to_pixels(student.recipe.load("test").images[SAMPLE : SAMPLE + 4])
    questions = [Question(x[:1], (5, NEVER)), Question(x[1:3], None), Question(x[3:], (1, 6))]
    before = student.reader.queries
    answers = explain_jointly(student, split_network(student, 32), questions)
    asked = student.reader.queries - before
    assert asked == len(x) + sum(int(e.verification.queries.sum()) for e in answers)
    for question, e in zip(questions, answers, strict=True):
        assert isinstance(e, Explanation)
        alone = student.explain(question.pixels, e.q)
        assert torch.equal(e.p, alone.p)
        assert torch.equal(e.explained, alone.explained)
        assert torch.equal(e.verification.queries, alone.verification.queries)
        torch.testing.assert_close(e.verification.posterior, alone.verification.posterior)
        torch.testing.assert_close(e.alpha, alone.alpha, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(
            e.convincing_certificate.answer,
            alone.convincing_certificate.answer,
            atol=2e-3,
            rtol=1e-3,
        )
    assert answers[0].explained.tolist() == [[True, False]]
    # Without targets: the classifier's second choice.
    second = student.reader.predict(student.recipe.load("test").images[SAMPLE + 1 : SAMPLE + 3])
    assert answers[1].q[:, 0].tolist() == second.argsort(1)[:, -2].tolist()


def test_paths_follow_the_direction_of_the_explanation(student: Model) -> None:
    """Where it is bent, path and comparison with the classifier are on the bent line."""
    x = to_pixels(student.recipe.load("test").images[SAMPLE : SAMPLE + 1])
    e = student.explain(x, [5])
    instead = torch.nn.functional.one_hot(torch.tensor([[3]]), 10).float()
    e = dataclasses.replace(e, verification=dataclasses.replace(e.verification, instead=instead))
    z, _ = student.encode_with_log_det(x)
    bent = equations.bent_direction(z[:, None], student.mu_bar, e.p[:, None], e.q, instead)
    answers: list[Explanation | InputError] = [e]
    question = Question(x, (5,), path=(0.3, 0.8))
    _add_paths(student, split_network(student, 32), [question], answers, [z])
    for step, alpha in enumerate((0.3, 0.8)):
        expected = student.decode(z + alpha * bent[:, 0])
        torch.testing.assert_close(answers[0].path.images[:, 0, step], expected, atol=1e-4, rtol=0)
    found = _path_difference(student.student, student.reader, e, torch.Generator().manual_seed(6))
    alpha = e.alpha[:, 0] * torch.rand(1, generator=torch.Generator().manual_seed(6))
    stored = to_uint8(student.decode(z + alpha[:, None] * bent[:, 0]))
    own = student.student.predict(stored)
    torch.testing.assert_close(found, (own - student.reader.predict(stored)).abs().mean(1))


def test_predictions_are_the_classifiers(student: Model, address: str) -> None:
    """Among these digits are some that student and classifier read differently."""
    images = student.recipe.load("test").images[:40]
    truth = student.reader.predict(images)
    (prediction,) = predict_jointly(student, split_network(student, 64), [to_pixels(images)])
    assert torch.equal(prediction.p, truth.argmax(1))
    assert not torch.equal(prediction.p, prediction.posterior.argmax(1))
    (given,) = post(address, "predict", images=[{"sample": 8}]).json()["images"]
    schemas.Prediction.model_validate(given)
    assert list(given["answer"].values()) == pytest.approx(truth[8].tolist(), abs=1e-5)
    assert given["predicted"] == str(int(truth[8].argmax()))
    own = student.student.predict(images[8:9])[0]
    assert list(given["posterior"].values()) == pytest.approx(own.tolist(), abs=1e-4)


def test_the_answer_names_both_readers_and_the_queries(student: Model, address: str) -> None:
    (model,) = httpx.get(f"{address}/api/v1/models").json()["models"]
    assert model["classifier"] == "nearest.pt"
    answer = post(address, "explain", targets=["5", str(NEVER)]).json()
    schemas.ExplainAnswer.model_validate(answer)
    e = student.explain(student.recipe.load("test").images[SAMPLE : SAMPLE + 1], [5, NEVER])
    expected = e.to_dict()
    assert answer["classifier"] == expected["classifier"]
    assert answer["classifier"]["not_explained"] == 1
    (image,), (expected_image,) = answer["images"], expected["images"]
    for target, alone in zip(image["targets"], expected_image["targets"], strict=True):
        for key in ("explained", "tied", "bent", "queries"):
            assert target[key] == alone[key], key
        assert target["alpha"] == pytest.approx(alone["alpha"], abs=1e-3)
        for kind in ("tipping_point", "convincing"):
            for key in ("answer", "stored_posterior"):
                values = list(alone[kind][key].values())
                assert list(target[kind][key].values()) == pytest.approx(values, abs=0.02)
    assert [target["explained"] for target in image["targets"]] == [True, False]


def test_sentences_say_who_reads_what(student: Model) -> None:
    e = student.explain(student.recipe.load("test").images[SAMPLE : SAMPLE + 1], [5, NEVER])
    explained, failed = (sentences(e, 0, column) for column in range(2))
    answer = 100 * float(e.convincing_certificate.answer[0, 0, 5])
    own = 100 * float(e.convincing_certificate.stored_posterior[0, 0, 5])
    assert explained[0] == (
        f"nearest.pt classifies the stored image as a 5 ({answer:.1f} %); "
        f"its student as a 5 ({own:.1f} %)."
    )
    assert explained[-1].endswith(f"the input and {int(e.verification.queries[0, 0])} pictures.")
    assert failed[0].startswith("Not explained: nearest.pt never reads an 8.")
    assert "Nearest to a tie" in " ".join(failed)
    instead = torch.nn.functional.one_hot(torch.tensor([[3, 3]]), 10).double()
    verification = dataclasses.replace(e.verification, instead=instead)
    bent = sentences(dataclasses.replace(e, verification=verification), 0, 0)
    assert "The change also leads away from 3, which nearest.pt saw instead." in bent
    far = sentences(dataclasses.replace(e, alpha=e.alpha + 4), 0, 0)
    assert f"only far outside (α = {float(e.alpha[0, 0]) + 4:.1f})" in far[0]


@pytest.mark.slow
def test_sheets_films_and_files_are_about_the_classifier(folder: Path, address: str) -> None:
    """A sheet of the same student without its classifier differs."""
    with running(load_catalogue([str(folder)], ask_classifiers=False)) as alone:
        (model,) = httpx.get(f"{alone}/api/v1/models").json()["models"]
        assert model["classifier"] is None
        assert "classifier" not in post(alone, "explain", targets=["5"]).json()
        body = {"model": "student", "image": {"sample": SAMPLE}}
        for what, extra in (("sheet", {"targets": [NEVER]}), ("film", {"target": NEVER})):
            asked, unasked = (
                httpx.post(f"{where}/api/v1/{what}", json=body | extra, timeout=60)
                for where in (address, alone)
            )
            assert asked.status_code == unasked.status_code == 200
            assert asked.content != unasked.content


def test_a_classifier_that_fails_is_one_line(student: Model, folder: Path) -> None:
    catalogue = load_catalogue([str(folder)])
    box = catalogue["student"].model.reader
    with running(catalogue) as address:
        box.call = lambda x: 1 / 0
        for what in ("predict", "explain"):
            answer = post(address, what)
            assert answer.status_code == 502
            assert "nearest.pt failed with ZeroDivisionError" in answer.json()["error"]
            assert "\n" not in answer.json()["error"]


def test_concurrent_requests_get_their_own_answers(student: Model, address: str) -> None:
    images = student.recipe.load("test").images[:8]
    truth = student.reader.predict(images)

    def ask(index: int) -> tuple[list[float], list[float]]:
        sample = [{"sample": index}]
        given = post(address, "predict", images=sample).json()["images"][0]
        explained = post(address, "explain", images=sample).json()["images"][0]
        return list(given["answer"].values()), list(explained["answer"].values())

    with ThreadPoolExecutor(4) as clients:
        for expected, answers in zip(truth, clients.map(ask, range(8)), strict=True):
            for answer in answers:
                assert answer == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_classifier_that_is_gone_stops_the_service_at_its_start(
    folder: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "classifier.pt").unlink()
    line = fails("serve", "--model", broken, "--port", 0)
    assert "classifier.pt is gone" in line
    assert "--no-classifier" in line
    catalogue = load_catalogue([str(broken)], ask_classifiers=False)
    assert catalogue["broken"].model.reader is None
