"""The command line as people use it: what it writes, prints, and says when something is wrong."""

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

from ecinn import cli
from ecinn.cli import app
from ecinn.cli.explain import _describe as describe
from ecinn.data.mnist import load_mnist
from ecinn.errors import EcinnError
from helpers.command_line import fails, run

THREE = 18  # the first three among the test images


@pytest.fixture
def three(tmp_path: Path) -> Path:
    path = tmp_path / "three.png"
    Image.fromarray(load_mnist("test").images[THREE][0].numpy()).save(path)
    return path


def test_models_lists_what_ships() -> None:
    code, stdout, _ = run("models")
    assert code == 0
    assert "mnist" in stdout
    code, stdout, _ = run("models", "--json")
    row = next(row for row in json.loads(stdout) if row["name"] == "mnist")
    assert row["classes"] == list("0123456789")
    assert 0 < row["metrics"]["error"] < 0.01


def test_explain_writes_a_picture_and_the_raw_counterfactuals(three: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, stdout, stderr = run("explain", three, "--target", "all", "--out", out)
    assert code == 0, stderr
    assert f"{out / 'three-explanation.png'}" in stdout
    files = {path.name for path in out.iterdir()}
    expected = {
        f"three-to-{digit}-{kind}.png"
        for digit in "012456789"
        for kind in ("tipping-point", "convincing")
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
    report = json.loads(stdout)["explanations"][0]
    assert report["predicted"] == "3"
    assert report["passes"] == 3
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
    first, second = json.loads(stdout)["explanations"]
    assert (first["input"], first["predicted"], first["notes"]) == ("sample-18", "3", ["label 3"])
    assert second["predicted"] == "7"
    assert first["passes"] == 2
    assert first["targets"][0]["convincing"]["stored_posterior"] is None


def test_a_photographed_digit_is_read_and_the_inversion_is_said(tmp_path: Path) -> None:
    page = Image.new("RGB", (500, 700), (243, 240, 232))
    ImageDraw.Draw(page).line([(250, 120), (240, 600)], fill=(30, 30, 80), width=40)
    page.save(tmp_path / "one.jpg")
    code, stdout, _ = run("explain", tmp_path / "one.jpg", "--target", 7, "--out", tmp_path / "o")
    assert code == 0
    assert "one: 1" in stdout
    assert "inverted" in stdout


def test_a_picture_unlike_the_training_data_is_called_so(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    code, stdout, _ = run("explain", tmp_path / "noise.png", "--out", tmp_path / "o", "--json")
    assert code == 0
    assert json.loads(stdout)["explanations"][0]["typical"] is False
    code, stdout, _ = run("explain", tmp_path / "noise.png", "--out", tmp_path / "o")
    assert "unlike the training images" in stdout


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
    assert "three: the image is already predicted as 3" in fails(
        "explain", three, "--target", 3, "--out", out
    )
    assert "out of range" in fails("explain", three, "--target", 10, "--out", out)
    assert "out of range" in fails("explain", three, "--target", "-1", "--out", out)
    assert "no class is called" in fails("explain", three, "--target", "cat", "--out", out)
    assert not out.exists()


def test_bad_models(three: Path, tmp_path: Path) -> None:
    assert "mnist" in fails("explain", three, "--model", "resnet")
    (tmp_path / "bad.safetensors").write_bytes(b"junk")
    assert "damaged" in fails("explain", three, "--model", tmp_path / "bad.safetensors")
    assert "mnist" in fails("evaluate", "resnet")
    assert "mnist" in fails("train", "resnet", "--out", tmp_path)


def test_output_that_cannot_be_written(three: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = fails("explain", three, "--target", 8, "--out", tmp_path / "file" / "sub")
    assert "cannot write to the folder" in message
    assert "cannot write" in fails("train", "mnist", "--out", tmp_path / "file" / "sub")


def test_no_gpu_is_said(three: Path) -> None:
    if not torch.cuda.is_available():
        assert "no usable GPU" in fails("explain", three, "--device", "cuda")
    assert "--device" in fails("explain", three, "--device", "abacus")


def test_disk_full_is_one_line_and_leaves_no_partial_file(three: Path, tmp_path: Path) -> None:
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


def test_what_fails_inside_is_one_line_too(three: Path, monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("not enough\nmemory")

    monkeypatch.setattr(cli.explain, "load", broken)
    assert "not enough memory" in fails("explain", three, code=1)
    monkeypatch.setenv("ECINN_DEBUG", "1")
    with pytest.raises(RuntimeError):
        run("explain", three)


def test_interrupt_is_no_traceback(three, monkeypatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.explain, "load", interrupted)
    code, _, stderr = run("explain", three)
    assert code == 130
    assert "Traceback" not in stderr


def test_asked_confidence_is_given_or_refused_in_words(three: Path, tmp_path: Path) -> None:
    code, stdout, stderr = run(
        "explain", three, "--target", 8, "--out", tmp_path, "--json",
        "--confidence", 0.8, "--correct",
    )  # fmt: skip
    assert code == 0, stderr
    report = json.loads(stdout)["explanations"][0]
    target = report["targets"][0]
    assert report["confidence"] == 0.8
    assert target["reachable"]
    assert abs(target["convincing"]["stored_posterior"]["8"] - 0.8) <= 0.05
    assert target["passes"] == 3 + 2 * target["corrections"]
    assert target["film"] is None
    for wrong in (0, 1, 1.5, "nan"):
        assert "above 0 and below 1" in fails("explain", three, "--confidence", wrong)


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
    code, stdout, _ = run("explain", text, three, "--target", 3, "--out", tmp_path / "none")
    assert code == 2
    assert not (tmp_path / "none").exists()


def test_several_targets_and_flags_that_contradict(three: Path, tmp_path: Path) -> None:
    code, stdout, _ = run(
        "explain", three, "--target", 8, "--target", 5, "--out", tmp_path, "--json"
    )
    assert code == 0
    targets = json.loads(stdout)["explanations"][0]["targets"]
    assert [target["target"] for target in targets] == ["8", "5"]
    assert "leave the others out" in fails("explain", three, "--target", "all", "--target", 1)
    assert "leave one out" in fails("explain", three, "--correct", "--no-check")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("explain", "--film", "mp4"), "'gif', 'webp'"),
        (("explain", "--nothing"), "--nothing"),
        (("nobody",), "nobody"),
        (("audit", "mnist", "--n", "few"), "--n"),
        (("train",), "EXPERIMENT"),
    ],
)
def test_what_cannot_be_parsed_is_one_line_with_the_way_to_help(
    arguments: tuple[str, ...], says: str
) -> None:
    line = fails(*arguments)
    assert says.lower() in line.lower()
    assert "--help`)" in line


def test_without_a_command_there_is_help() -> None:
    for arguments in ((), ("benchmark",)):
        code, stdout, stderr = run(*arguments)
        assert code == 2
        assert "Usage" in stdout + stderr
        assert "error:" not in stderr
    assert run("--help")[0] == 0


def test_an_interruption_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.explain, "load", interrupt)
    assert fails("explain", "--sample", 1, code=130) == "error: interrupted"


def test_sentences_are_not_broken_where_nobody_reads_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app.out, "_width", 40)
    words = "a sentence that is longer than forty letters, as most are"
    app.out.print(words)
    assert capsys.readouterr().out == words + "\n"


def test_what_is_not_as_asked_is_said_in_words(tmp_path: Path) -> None:
    """Sample 18, an untidy three, has no 8-bit image on its way to 1 that is that sure."""
    arguments = ["explain", "--sample", 18, "--target", 1, "--confidence", 0.999]
    code, stdout, _ = run(*arguments, "--out", tmp_path)
    assert code == 0
    assert "of 99.9 % asked" in stdout
    assert "not as asked (try --correct)" in stdout


@pytest.mark.parametrize("corrections", [0, 8])
def test_what_is_not_reached_is_said_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], corrections: int
) -> None:
    arguments = ["explain", "--sample", 18, "--target", 8, "--out", tmp_path, "--json"]
    (report,) = json.loads(run(*arguments)[1])["explanations"]
    describe(report)
    assert "not reached" not in capsys.readouterr().out
    (target,) = report["targets"]
    target |= {"as_asked": False, "corrections": corrections}
    target["convincing"]["winner"] = "3"
    describe(report)
    said = capsys.readouterr().out
    assert "(stored image), not reached" in said
    assert ("(try --correct)" in said) == (corrections == 0)


@pytest.mark.parametrize("kind", ["gif", "webp"])
def test_film_shows_the_way_there_and_back(three: Path, tmp_path: Path, kind: str) -> None:
    code, stdout, stderr = run(
        "explain", three, "--target", 8, "--out", tmp_path, "--json",
        "--film", kind, "--frames", 6,
    )  # fmt: skip
    assert code == 0, stderr
    film = json.loads(stdout)["explanations"][0]["targets"][0]["film"]
    with Image.open(film["file"]) as frames:
        assert frames.format == kind.upper()
        assert frames.n_frames == 10
    assert len(film["alphas"]) == 6
    assert len(film["posterior"]["8"]) == 6
    assert film["posterior"]["8"][-1] > 0.9 > film["posterior"]["8"][0]
    with Image.open(film["plot"]) as plot:
        assert plot.size == (448, 240)
    assert "gif" in run("explain", three, "--film", "mp4")[2]


def test_evaluate_prints_one_object(mnist) -> None:
    code, stdout, _ = run("evaluate", "mnist", "--limit", 100, "--json")
    assert code == 0
    result = json.loads(stdout)
    assert result["n"] == 100
    for key in ("model", "error", "bits_per_dim", "bits_per_dim_paper", "reached_q"):
        assert key in result
    code, stdout, _ = run("evaluate", "mnist", "--limit", 100)
    assert "bits per dim" in stdout
    assert "--limit" in run("evaluate", "mnist", "--limit", 0)[2]


def test_errors_carry_their_exit_code() -> None:
    assert EcinnError.exit_code == 1


def test_help_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ecinn", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    for command in ("models", "explain", "train", "evaluate"):
        assert command in done.stdout
