"""`ecinn explain`: the files it writes, the lines it prints, and its errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from ecinn.cli.explain import _describe as describe
from helpers.builders import with_default
from helpers.command_line import fails, run

THREE = 18  # the first three among the test images


def test_explain_writes_a_picture_and_the_raw_counterfactuals(three: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, stdout, stderr = run("explain", three, "--target", "all", "--out", out)
    assert code == 0, stderr
    assert f"{out / 'three-explanation.png'}" in stdout
    files = {path.name for path in out.iterdir()}
    expected = {
        f"three-to-{digit}-{kind}.png"
        for digit in "012456789"
        for kind in ("tipping-point", "convincing", "heatmap")
    }
    assert files == expected | {"three-explanation.png"}
    with Image.open(out / "three-to-8-convincing.png") as raw:
        assert (raw.size, raw.mode) == ((28, 28), "L")
    with Image.open(out / "three-explanation.png") as picture:
        assert picture.width > 1000


def test_json_is_all_of_stdout_and_agrees_with_the_files(
    three: Path, tmp_path: Path, mnist
) -> None:
    code, stdout, _ = run("explain", three, "--target", "8", "--out", tmp_path / "o", "--json")
    assert code == 0
    whole = json.loads(stdout)
    assert (whole["version"], whole["model"], whole["passes"]) == (1, "mnist", 3)
    assert whole["failures"] == []
    report = whole["images"][0]
    assert report["source"] == str(three)
    assert report["predicted"] == "3"
    assert report["typical"] is True
    assert report["round_trip_error"] < 1e-4
    convincing = report["targets"][0]["convincing"]
    assert convincing["winner"] == "8"
    assert convincing["reached"] is True
    with Image.open(convincing["file"]) as raw:
        posterior = mnist.predict(raw)[0]
    assert posterior[8].item() == pytest.approx(convincing["stored_posterior"]["8"], abs=1e-4)
    assert sum(convincing["posterior"].values()) == pytest.approx(1, abs=1e-4)
    tipping = report["targets"][0]["tipping_point"]["posterior"]
    assert tipping["3"] == pytest.approx(tipping["8"], abs=1e-3)


def test_samples_of_the_test_set(tmp_path: Path) -> None:
    code, stdout, _ = run(
        "explain", "--sample", THREE, "--sample", 0, "--target", 1, "--out", tmp_path, "--json",
        "--no-check",
    )  # fmt: skip
    assert code == 0
    first, second = json.loads(stdout)["images"]
    assert (first["source"], first["predicted"]) == ("sample-18", "3")
    assert first["notes"][0] == "label 3"
    assert second["predicted"] == "7"
    assert first["targets"][0]["passes"] == 2
    assert first["targets"][0]["convincing"]["stored_posterior"] is None


def test_a_photographed_digit_is_inverted_and_noted(tmp_path: Path) -> None:
    page = Image.new("RGB", (500, 700), (243, 240, 232))
    ImageDraw.Draw(page).line([(250, 120), (240, 600)], fill=(30, 30, 80), width=40)
    page.save(tmp_path / "one.jpg")
    code, stdout, _ = run("explain", tmp_path / "one.jpg", "--target", 7, "--out", tmp_path / "o")
    assert code == 0
    assert "one.jpg: 1" in stdout
    assert "inverted" in stdout


def test_an_out_of_distribution_image_is_reported(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    arguments = ("explain", tmp_path / "noise.png", "--target", 1, "--out", tmp_path / "o")
    code, stdout, _ = run(*arguments, "--json")
    assert code == 0
    assert json.loads(stdout)["images"][0]["typical"] is False
    assert "out of distribution" in run(*arguments)[1]


def test_two_files_of_the_same_name_do_not_overwrite_each_other(three: Path, tmp_path) -> None:
    other = tmp_path / "other" / "three.png"
    other.parent.mkdir()
    other.write_bytes(three.read_bytes())
    third = tmp_path / "sample-0.png"
    third.write_bytes(three.read_bytes())
    run("explain", three, other, third, "--sample", 0, "--target", 8, "--out", tmp_path / "o")
    names = {path.name for path in (tmp_path / "o").glob("*-explanation.png")}
    stems = ("three", "three-2", "sample-0", "sample-0-2")
    assert names == {f"{stem}-explanation.png" for stem in stems}


def test_bad_images(three: Path, tmp_path: Path) -> None:
    assert "no such file" in fails("explain", tmp_path / "gone.png")
    (tmp_path / "notes.txt").write_text("hello")
    assert "not an image" in fails("explain", tmp_path / "notes.txt")
    cut = tmp_path / "cut.png"
    cut.write_bytes(three.read_bytes()[:150])
    assert "damaged" in fails("explain", cut)
    (tmp_path / "empty.png").touch()
    assert "empty.png" in fails("explain", tmp_path / "empty.png")
    assert "--sample" in fails("explain")
    assert "0 to 9999" in fails("explain", "--sample", 10000)


def test_bad_targets_write_nothing(three: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "already predicted as 3" in fails("explain", three, "--target", 3, "--out", out)
    assert "out of range" in fails("explain", three, "--target", 10, "--out", out)
    assert "out of range" in fails("explain", three, "--target", "-1", "--out", out)
    assert "no class is called" in fails("explain", three, "--target", "cat", "--out", out)
    assert not out.exists()


def test_bad_models(three: Path, tmp_path: Path) -> None:
    assert "mnist" in fails("explain", three, "--model", "resnet")
    (tmp_path / "bad.safetensors").write_bytes(b"junk")
    assert "damaged" in fails("explain", three, "--model", tmp_path / "bad.safetensors")


def test_output_that_cannot_be_written(three: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = fails("explain", three, "--target", 8, "--out", tmp_path / "file" / "sub")
    assert "cannot write to the folder" in message


def test_unusable_devices_are_refused(three: Path) -> None:
    if not torch.cuda.is_available():
        assert "no usable GPU" in fails("explain", three, "--device", "cuda")
    assert "'auto'" in fails("explain", three, "--device", "abacus")


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_no_partial_file(three: Path, tmp_path: Path) -> None:
    """A real failed write: the process may not write files of more than 700 bytes."""
    out = tmp_path / "out"
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700));"
        "from ecinn.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "explain", three, "--target", "8", "--out", out],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "300"},
    )
    assert done.returncode == 1, done.stderr
    assert re.fullmatch(r"error: cannot write .*free some space.*\n", done.stderr)
    for path in out.iterdir():
        with Image.open(path) as whole:
            whole.load()
    assert not list(out.glob(".*"))


def test_the_requested_confidence_is_reached_or_refused(three: Path, tmp_path: Path) -> None:
    code, stdout, stderr = run(
        "explain", three, "--target", 8, "--out", tmp_path, "--json",
        "--confidence", 0.8, "--correct",
    )  # fmt: skip
    assert code == 0, stderr
    report = json.loads(stdout)
    target = report["images"][0]["targets"][0]
    assert report["confidence"] == 0.8
    assert target["reachable"]
    assert abs(target["convincing"]["stored_posterior"]["8"] - 0.8) <= 0.05
    assert target["passes"] == 3 + 2 * target["corrections"]
    assert target["path"] is None
    for wrong in (0, 1, 1.5, "nan", "alpha"):
        assert "above 0 and below 1" in fails("explain", three, "--confidence", wrong)


def test_the_models_default_is_used_and_named(three: Path, tmp_path: Path, mnist) -> None:
    """A request by number or by name replaces it."""
    with_default(mnist, 0.9).save(tmp_path / "sure.safetensors")
    arguments = ["explain", three, "--target", 8, "--out", tmp_path, "--model"]
    for model, request, confidence, words in (
        (tmp_path / "sure.safetensors", None, 0.9, "90 % requested (this model's default)"),
        (tmp_path / "sure.safetensors", 0.6, 0.6, "60 % requested"),
        (tmp_path / "sure.safetensors", "alpha_1", "alpha_1", "α₁ (the paper's)"),
        ("mnist", None, "alpha_1", "α₁ (the paper's)"),
    ):
        options = [] if request is None else ["--confidence", request]
        code, stdout, stderr = run(*arguments, model, *options)
        assert code == 0, stderr
        assert stdout.startswith(f"Counterfactuals: {words}\n")
        report = json.loads(run(*arguments, model, *options, "--json")[1])
        assert (report["confidence"], report["requested"]) == (confidence, words)
        (target,) = report["images"][0]["targets"]
        if confidence == "alpha_1":
            assert target["alpha"] == target["alpha_1"]
        else:
            assert target["convincing"]["posterior"]["8"] == pytest.approx(confidence, abs=1e-3)


def test_one_bad_image_does_not_stop_the_others(three: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("no picture")
    out = tmp_path / "out"
    code, stdout, stderr = run("explain", text, three, "--target", 8, "--out", out)
    assert code == 2
    assert "left out 1 of 2 images: " in stderr
    assert "text.png" in stderr
    assert len(list(out.glob("*-explanation.png"))) == 1
    assert "to 8:" in stdout
    _, stdout, stderr = run("explain", text, three, "--target", 8, "--out", out, "--json")
    (failure,) = json.loads(stdout)["failures"]
    assert failure["source"] == str(text)
    assert failure["reason"] in stderr
    code, stdout, _ = run("explain", text, three, "--target", 3, "--out", tmp_path / "none")
    assert code == 2
    assert not (tmp_path / "none").exists()


def test_several_targets_and_contradictory_flags(three: Path, tmp_path: Path) -> None:
    code, stdout, _ = run(
        "explain", three, "--target", 8, "--target", 5, "--out", tmp_path, "--json"
    )
    assert code == 0
    targets = json.loads(stdout)["images"][0]["targets"]
    assert [target["target"] for target in targets] == ["8", "5"]
    assert "leave the others out" in fails("explain", three, "--target", "all", "--target", 1)
    assert "leave out --no-check" in fails("explain", three, "--correct", "--no-check")


def test_options_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    three = str(tmp_path / "three.png")
    assert "add --film gif" in fails("explain", three, "--frames", "5")
    for option in ("--celeba", "--data"):
        assert "leave them out" in fails("explain", three, option, tmp_path)
    message = fails("explain", "--sample", "0", "--data", tmp_path)
    assert "--data is for models of your own pictures" in message


def test_a_target_that_is_named_twice_is_explained_once(tmp_path: Path) -> None:
    arguments = ["explain", "--sample", 18, "--target", 8, "--target", 8, "--json"]
    (image,) = json.loads(run(*arguments, "--out", tmp_path)[1])["images"]
    assert [target["target"] for target in image["targets"]] == ["8"]


@pytest.mark.slow
def test_a_missed_confidence_suggests_the_correction(tmp_path: Path) -> None:
    """Rounding to 8 bits moves the tipping point of sample 12 away from one half."""
    arguments = ["explain", "--sample", 12, "--target", 1, "--confidence", 0.5]
    code, stdout, _ = run(*arguments, "--out", tmp_path)
    assert code == 0
    assert "requested 50 %" in stdout
    assert "try --correct" in stdout


@pytest.mark.parametrize("corrections", [0, 8])
def test_a_missed_target_suggests_the_correction_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], corrections: int
) -> None:
    arguments = ["explain", "--sample", 18, "--target", 8, "--out", tmp_path, "--json"]
    (report,) = json.loads(run(*arguments)[1])["images"]
    describe(report, "alpha_1")
    assert "try --correct" not in capsys.readouterr().out
    (target,) = report["targets"]
    target |= {"as_requested": False, "corrections": corrections}
    describe(report, "alpha_1")
    printed = capsys.readouterr().out
    assert ("try --correct" in printed) == (corrections == 0)
    assert ("corrections: 8" in printed) == (corrections == 8)


@pytest.mark.parametrize("kind", ["gif", "webp"])
def test_the_film_plays_the_path_forwards_and_backwards(
    three: Path, tmp_path: Path, kind: str
) -> None:
    code, stdout, stderr = run(
        "explain", three, "--target", 8, "--out", tmp_path, "--json",
        "--film", kind, "--frames", 6,
    )  # fmt: skip
    assert code == 0, stderr
    film = json.loads(stdout)["images"][0]["targets"][0]["path"]
    with Image.open(film["film"]) as frames:
        assert frames.format == kind.upper()
        assert frames.n_frames == 10
    assert len(film["alphas"]) == 6
    assert len(film["posterior"]["8"]) == 6
    assert film["posterior"]["8"][-1] > 0.9 > film["posterior"]["8"][0]
    with Image.open(film["plot"]) as plot:
        assert plot.size == (448, 240)
    assert "gif" in run("explain", three, "--film", "mp4")[2]


def test_a_folder_stands_for_its_images(three: Path, tmp_path: Path) -> None:
    (three.parent / "notes.txt").write_text("not a picture")
    code, stdout, stderr = run("explain", three.parent, "--out", tmp_path / "o", "--json")
    assert code == 0, stderr
    assert [image["source"] for image in json.loads(stdout)["images"]] == [str(three)]


def test_images_of_the_target_class_are_skipped_and_reported(three: Path, tmp_path: Path) -> None:
    code, stdout, stderr = run(
        "explain", three, "--sample", 0, "--target", 3, "--out", tmp_path / "o", "--json"
    )
    assert code == 2
    report = json.loads(stdout)
    assert [image["source"] for image in report["images"]] == ["sample-0"]
    (failure,) = report["failures"]
    assert (failure["index"], failure["source"]) == (0, str(three))
    assert "three.png: already predicted as 3" in stderr


def test_images_keep_their_numbers_where_some_cannot_be_read(three: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not a picture")
    code, stdout, _ = run(
        "explain", broken, three, "--sample", 0, "--target", 3, "--out", tmp_path / "o", "--json"
    )
    assert code == 2
    report = json.loads(stdout)
    left_out = {failure["source"]: failure["index"] for failure in report["failures"]}
    assert left_out == {str(broken): 0, str(three): 1}
    assert [image["index"] for image in report["images"]] == [2]
