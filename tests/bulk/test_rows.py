"""Rows: what `Model.explain` says of each picture by itself, exactly one row per target."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ecinn import equations
from ecinn.bulk.rows import Explainer, Request, Row
from ecinn.errors import EcinnError
from ecinn.model import Model
from ecinn.pixels import to_uint8
from helpers.builders import random_images, small_cnn, small_model, with_default
from helpers.datasets import png


class Reader:
    """A classifier that counts the pictures it is asked about."""

    name = "somebody's"

    def __init__(self) -> None:
        self.network, self.asked = small_cnn(), 0

    def predict(self, images: Tensor) -> Tensor:
        self.asked += len(images)
        return self.network(images.float() / 255).softmax(1)


def items(files: list[bytes]) -> list[tuple[str, object]]:
    return [(str(n), lambda content=content: content) for n, content in enumerate(files)]


def rows_of(model: Model, files: list[bytes], **options: object) -> list[Row]:
    done: list[int] = []
    rows = Explainer(model, Request(**options)).rows(items(files), done.append)
    assert sum(done) == len(files)
    return rows


def decode(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)))


def assert_as_explained(row: Row, model: Model, file: bytes, **options: object) -> None:
    """Compare a row with the explanation of its picture and target alone."""
    target = model.class_names.index(row["target"])
    e = model.explain(file, target, **options)
    (image,) = e.to_dict()["images"]
    (pair,) = image["targets"]
    assert row["predicted"] == image["predicted"]
    for key in ("posterior", "log_p", "round_trip_error"):
        assert row[key] == pytest.approx(image[key], rel=1e-4, abs=1e-5)
    for key in ("alpha", "alpha_0", "alpha_1"):
        assert row[key] == pytest.approx(pair[key], abs=1e-4)
    for key in ("typical", "out_of_distribution"):
        assert row[key] == image[key]
    inverted = [note for note in image["notes"] if note.startswith("inverted")]
    assert [note for note in row["notes"] if note.startswith("inverted")] == inverted
    for key in ("as_requested", "reachable", "corrections", "third_class", "passes"):
        assert row[key] == pair[key]
    for kind, name in (("convincing", "certificate"), ("tipping_point", "tipping_certificate")):
        assert row[name]["winner"] == pair[kind]["winner"]
        for key in ("posterior", "clamped"):
            assert row[name][key] == pytest.approx(pair[kind][key], abs=1e-3)
    for picture, stored, name in (
        ("counterfactual", e.stored_convincing, "certificate"),
        ("tipping_point", e.stored_tipping_point, "tipping_certificate"),
    ):
        # In a batch, a pixel on the border of two grey levels may be rounded to the other one.
        made = decode(row[picture])
        difference = made.astype(int) - stored[0, 0, 0].numpy().astype(int)
        assert np.abs(difference).max() <= 1
        assert np.count_nonzero(difference) <= 1
        (read,) = model.student.predict(torch.tensor(made)[None, None]).tolist()
        said = row[name]["stored_posterior"]
        assert [said[label] for label in model.class_names] == pytest.approx(read, abs=1e-3)


@pytest.mark.parametrize("confidence", [None, 0.8, "alpha_1"])
def test_rows_are_what_explain_says_of_every_picture_and_target(confidence: object) -> None:
    model = with_default(small_model(), 0.7)
    files = [png(image) for image in random_images(7, 1, 3, seed=21).images]
    options = {"confidence": confidence, "correct": confidence == 0.8}
    rows = rows_of(model, files, tipping_point=True, **options)
    predicted = model.predict([*files]).argmax(1).tolist()
    expected = [(str(n), "abc"[q]) for n, p in enumerate(predicted) for q in range(3) if q != p]
    assert [(row["key"], row["target"]) for row in rows] == expected
    for row in rows:
        assert "error" not in row
        assert_as_explained(row, model, files[int(row["key"])], **options)


def test_a_target_that_is_the_prediction_and_a_damaged_file_are_rows_of_their_own() -> None:
    model = small_model()
    files = [png(image) for image in random_images(9, 1, 3, seed=22).images]
    files[4] = b"no picture"
    predicted = [None if n == 4 else int(model.predict(f).argmax()) for n, f in enumerate(files)]
    assert {*predicted} == {None, 0, 1, 2}
    for targets in ((2, 0), (1,), (0, 1, 2)):
        rows = rows_of(model, files, targets=targets, tipping_point=True)
        asked = [(str(n), "abc"[q]) for n in range(9) for q in targets]
        assert [(row["key"], row["target"]) for row in rows] == asked
        for row in rows:
            p = predicted[int(row["key"])]
            if p is None:
                assert {*row} == {"key", "target", "error"}
                assert "not an image" in row["error"]
            elif row["target"] == "abc"[p]:
                assert row["error"] == f"already predicted as {'abc'[p]}"
                assert (row["predicted"], "counterfactual" in row) == (row["target"], False)
                e = model.explain(files[int(row["key"])], (p + 1) % 3)
                (image,) = e.to_dict()["images"]
                for key in ("posterior", "log_p"):
                    assert row[key] == pytest.approx(image[key], rel=1e-4, abs=1e-5)
                for key in ("typical", "out_of_distribution"):
                    assert row[key] == image[key]
                assert row["notes"] == [n for n in image["notes"] if not n.startswith("to ")]
                assert any(note.startswith("out of distribution") for note in row["notes"])
            else:
                assert_as_explained(row, model, files[int(row["key"])])
    (unread,) = (row for row in rows_of(model, files) if row["key"] == "4")
    assert unread["target"] is None


def test_a_student_is_verified_on_its_classifier_which_is_not_asked_twice() -> None:
    checkpoint = replace(small_model().checkpoint, class_names=("a", "b", "c"))
    files = [png(image) for image in random_images(6, 1, 3, seed=23).images]
    reader, other = Reader(), Reader()
    model = Model(checkpoint, "cpu", other)
    rows = rows_of(Model(checkpoint, "cpu", reader), files, targets=(0, 1))
    explained = [row for row in rows if "error" not in row]
    for row in (row for row in rows if "error" in row):
        answer = other.predict(to_uint8(model.pixels(files[int(row["key"])])))[0].tolist()
        assert [*row["answer"].values()] == pytest.approx(answer, abs=1e-4)
    assert reader.asked == len(files) + sum(row["queries"] for row in explained)
    assert len(explained) < len(rows) == 12
    for row in explained:
        e = model.explain(files[int(row["key"])], model.class_names.index(row["target"]))
        (image,) = e.to_dict()["images"]
        (pair,) = image["targets"]
        assert row["predicted"] == image["predicted"]
        assert row["answer"] == pytest.approx(image["answer"], abs=1e-4)
        for key in ("explained", "bent", "queries"):
            assert row[key] == pair[key]
        answer = row["certificate"]["answer"]
        assert answer == pytest.approx(pair["convincing"]["answer"], abs=1e-3)


def test_too_little_memory_makes_smaller_batches_and_loses_nothing(monkeypatch) -> None:
    model = small_model()
    files = [png(image) for image in random_images(11, 1, 3, seed=24).images]
    whole = rows_of(model, files)
    encode, sizes = model.encode_with_log_det, []

    def scarce(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
        if len(x) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append(len(x))
        return encode(x)

    monkeypatch.setattr(model, "encode_with_log_det", lambda x: scarce(x, 6))
    explainer = Explainer(model, Request())
    rows = explainer.rows(items(files), lambda _: None)
    assert [(row["key"], row["target"]) for row in rows] == [
        (row["key"], row["target"]) for row in whole
    ]
    assert [row["alpha"] for row in rows] == pytest.approx([row["alpha"] for row in whole])
    assert len(explainer.notes) == 1
    assert max(sizes) <= 6
    monkeypatch.setattr(model, "encode_with_log_det", lambda x: scarce(x, 0))
    with pytest.raises(EcinnError, match="--device cpu"):
        rows_of(model, files)


def test_a_picture_that_is_its_target_is_encoded_and_nothing_else(monkeypatch) -> None:
    model = small_model()
    files = [png(image) for image in random_images(9, 1, 3, seed=22).images]
    z, p = model.encode(files), model.predict(files).argmax(1)
    files = [file for file, label in zip(files, p.tolist(), strict=True) if label == 1]
    calls = iter([model.encode_with_log_det])
    monkeypatch.setattr(model, "encode_with_log_det", lambda x: next(calls)(x))
    monkeypatch.setattr(model, "decode", lambda _: pytest.fail("it is not needed"))
    rows = rows_of(model, files, targets=(1,))
    assert [row["error"] for row in rows] == ["already predicted as b"] * len(files)
    nan = torch.full_like(z[p == 1], torch.nan)
    monkeypatch.setattr(model, "encode_with_log_det", lambda _: (nan, nan[:, 0]))
    label = int(equations.predicted_class(nan, model.mu)[0])
    for row in rows_of(model, files, targets=(label,)):
        assert {*row} == {"key", "predicted", "target", "error"}
        assert "overflows" in row["error"]


def test_a_network_that_overflows_is_a_row_with_an_error(monkeypatch) -> None:
    model = small_model()
    files = [png(image) for image in random_images(5, 1, 3, seed=25).images]
    strange = model.encode(files[3])
    decode_all = model.decode

    def decode(z: Tensor) -> Tensor:
        x = decode_all(z)
        far = torch.cdist(z, strange)[:, 0] < torch.cdist(z, model.encode(files))[:, :3].amin(1)
        x[far] = torch.nan
        return x

    monkeypatch.setattr(model, "decode", decode)
    rows = rows_of(model, files)
    assert len(rows) == 10
    failed = [row["key"] for row in rows if "error" in row]
    assert "3" in failed
    assert all("counterfactual" in row for row in rows if row["key"] not in failed)
