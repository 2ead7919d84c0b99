"""Explanations as results people keep: sequences, equality, JSON, files."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ecinn.classifier.out_of_distribution import OODDetector
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import explain
from ecinn.explanation.files import file_names
from ecinn.explanation.result import Explanation, join
from helpers.builders import RotationClassifier


@pytest.fixture
def rotation() -> RotationClassifier:
    return RotationClassifier(shape=(1, 4, 4))


@pytest.fixture
def x(rotation: RotationClassifier) -> Tensor:
    means = rotation.mu[torch.tensor([0, 1, 2, 3, 1])]
    return (means @ rotation.q).reshape(-1, *rotation.shape) + 0.5


@pytest.fixture
def e(rotation: RotationClassifier, x: Tensor) -> Explanation:
    e = explain(
        rotation, rotation.mu_bar, x, "all", path=3, ood=OODDetector((-1e9, 1e9)),
        class_names=("ant", "bee", "cat", "dog"),
    )  # fmt: skip
    sources = tuple(f"photos/{name}.png" for name in ("a", "b", "a", "c d", "!"))
    return dataclasses.replace(e, sources=sources, remarks=(("inverted",),) * 5, model="tiny")


def test_a_sequence_of_single_images(e: Explanation, rotation, x) -> None:
    assert len(e) == len(list(e)) == 5
    for index, one in enumerate(e):
        assert len(one) == 1
        torch.testing.assert_close(one.convincing, e.convincing[index : index + 1])
        torch.testing.assert_close(one.path.images, e.path.images[index : index + 1])
        assert one.sources == (e.sources[index],)
        assert one.path.class_names == e.class_names
        alone = explain(rotation, rotation.mu_bar, x[index : index + 1], "all")
        torch.testing.assert_close(one.alpha, alone.alpha)
    assert e[-1] == e[4]
    assert e[1:3].indices.tolist() == [1, 2]
    assert join([e[:2], e[2:]]) == e
    with pytest.raises(IndexError):
        e[5]


def test_equality_is_by_value(e: Explanation) -> None:
    assert e == dataclasses.replace(e, x=e.x.clone())
    changed = e.convincing.clone()
    changed[3, 1, 0, 2, 2] += 1e-6
    assert e != dataclasses.replace(e, convincing=changed)
    assert e != dataclasses.replace(e, confidence=0.5)
    assert e != e[:4]
    assert e != "an explanation"
    certificate = dataclasses.replace(e.tipping_certificate, stored_posterior=None)
    assert e != dataclasses.replace(e, tipping_certificate=certificate)


def test_repr_is_one_line_per_image(e: Explanation, rotation, x) -> None:
    lines = repr(e).splitlines()
    assert len(lines) == 1 + 5
    assert lines[0] == "Explanation of 5 images by tiny"
    assert lines[1].startswith("  a.png: ant (")
    assert lines[1].count("→") == 1
    some = explain(rotation, rotation.mu_bar, x, 1)
    assert repr(some).splitlines()[-1].startswith("  4: skipped, already predicted as 1")


def test_images_that_are_the_target_already_are_skipped_and_reported(rotation, x) -> None:
    some = explain(rotation, rotation.mu_bar, x, 1)
    assert some.indices.tolist() == [0, 2, 3]
    assert [skipped.index for skipped in some.skipped] == [1, 4]
    assert len(some) == 3
    for row, index in enumerate(some.indices.tolist()):
        alone = explain(rotation, rotation.mu_bar, x[index : index + 1], 1)
        torch.testing.assert_close(some.convincing[row], alone.convincing[0])
        torch.testing.assert_close(some.log_p[row], alone.log_p[0])
    assert [f["index"] for f in some.to_dict()["failures"]] == [1, 4]
    with pytest.raises(InputError, match="the image is already predicted as 1: choose another"):
        explain(rotation, rotation.mu_bar, x[1:2], 1)
    with pytest.raises(InputError, match="every image"):
        explain(rotation, rotation.mu_bar, x[[1, 4]], 1)


def test_dictionary_holds_every_number_and_is_json(e: Explanation) -> None:
    report = json.loads(json.dumps(e.to_dict()))
    assert report["version"] == 1
    assert report["model"] == "tiny"
    image = report["images"][3]
    assert image["source"] == "photos/c d.png"
    assert image["notes"][0] == "inverted"
    assert image["predicted"] == "dog"
    assert sum(image["posterior"].values()) == pytest.approx(1)
    target = image["targets"][1]
    assert target["target"] == "bee"
    assert target["alpha"] == pytest.approx(e.alpha[3, 1].item())
    certificate = e.convincing_certificate
    assert target["convincing"]["posterior"]["cat"] == pytest.approx(
        certificate.posterior[3, 1, 2].item()
    )
    assert target["convincing"]["stored_posterior"]["cat"] == pytest.approx(
        certificate.stored_posterior[3, 1, 2].item()
    )
    assert target["path"]["alphas"] == pytest.approx(e.path.alphas[3, 1].tolist())
    assert target["path"]["posterior"]["ant"] == pytest.approx(e.path.verdict[3, 1, :, 0].tolist())


@pytest.mark.slow
def test_saved_and_loaded_is_equal(e: Explanation, rotation, x, tmp_path) -> None:
    report = e.save(tmp_path / "kept", film="gif")
    assert json.loads((tmp_path / "kept" / "explanation.json").read_text()) == report
    assert Explanation.load(tmp_path / "kept") == e
    assert Explanation.load(str(tmp_path / "kept" / "explanation.safetensors")) == e
    plain = explain(rotation, rotation.mu_bar, x, 1, check=False)
    plain.save(tmp_path / "plain")
    assert Explanation.load(tmp_path / "plain") == plain
    # Without the names of files, the report is the dictionary.
    for image in report["images"]:
        del image["picture"]
        for target in image["targets"]:
            del target["heatmap"], target["path"]["film"], target["path"]["plot"]
            del target["tipping_point"]["file"], target["convincing"]["file"]
    assert report == e.to_dict()


def test_saved_pictures_are_the_stored_images(e: Explanation, tmp_path) -> None:
    report = e.save(tmp_path)
    for index, image in enumerate(report["images"]):
        for column, target in enumerate(image["targets"]):
            for kind, stored in (
                ("tipping_point", e.stored_tipping_point),
                ("convincing", e.stored_convincing),
            ):
                with Image.open(target[kind]["file"]) as picture:
                    shown = np.asarray(picture)
                assert np.array_equal(shown, stored[index, column, 0].numpy())
    assert file_names(e) == ["a", "b", "a-2", "c_d", "_"]


def test_what_cannot_be_loaded_or_filmed_is_refused(e: Explanation, tmp_path) -> None:
    with pytest.raises(InputError, match="holds no explanation"):
        Explanation.load(tmp_path)
    (tmp_path / "explanation.safetensors").write_bytes(b"12345678")
    with pytest.raises(InputError, match="damaged"):
        Explanation.load(tmp_path)
    with pytest.raises(InputError, match="needs a path"):
        dataclasses.replace(e, path=None).save(tmp_path, film="gif")


def test_notes_warn_of_what_a_reader_should_know(e: Explanation) -> None:
    flags = torch.tensor([[True, False, False]] * 5)
    third, reachable = e.third_class.clone(), e.reachable.clone()
    third[:], reachable[:] = -1, True
    third[0, 1], reachable[0, 2] = 3, False
    asked = torch.ones_like(e.as_requested)
    asked[1, 0] = False
    e = dataclasses.replace(
        e, out_of_distribution=flags, third_class=third, reachable=reachable, as_requested=asked
    )
    first, second = e.notes[0], e.notes[1]
    assert first[0] == "inverted"
    assert first[1].startswith("out of distribution: ")
    assert "to cat: dog wins at the tipping point" in first
    assert any("highest reachable confidence" in note and "to dog" in note for note in first)
    assert any(note.startswith("to ant: not reached") for note in second)
    assert len(e.notes[2]) == 2


@pytest.mark.parametrize("confidence", [np.float32(0.75), np.float64(0.75), 0.75])
def test_confidences_of_numpy(rotation, x, confidence) -> None:
    e = explain.__wrapped__(rotation, rotation.mu_bar, x, "all", confidence=confidence)
    assert e.confidence == 0.75
    assert isinstance(e.confidence, float)


def test_the_request_is_told_in_words_and_kept_in_files(rotation, x, tmp_path) -> None:
    means, given = rotation.mu_bar, ("all", "alpha_1", 0.125)
    e = explain(rotation, means, x, given[0])
    assert e == explain(rotation, means, x, given[0], confidence=given[1])
    asked = explain(rotation, means, x, given[0], confidence=given[2])
    default = dataclasses.replace(asked, confidence_by_default=True)
    for each, value, words in (
        (e, "alpha_1", "α₁ (the paper's)"),
        (asked, 0.125, "12.5 % requested"),
        (default, 0.125, "12.5 % requested (this model's default)"),
    ):
        assert (each.confidence, each.requested) == (value, words)
        each.save(tmp_path)
        assert Explanation.load(tmp_path) == each
        report = json.loads((tmp_path / "explanation.json").read_text())
        assert (report["confidence"], report["requested"]) == (value, words)
        assert join([each[:2], each[2:]]).requested == words


@pytest.mark.parametrize("confidence", ["0.9", "alpha_0", None, True, math.inf, 90])
def test_invalid_confidences_are_refused(rotation, x, confidence) -> None:
    with pytest.raises(InputError, match=r"0\.9 is 90 %"):
        explain.__wrapped__(rotation, rotation.mu_bar, x, "all", confidence=confidence)
