"""Checkpoints: complete round trips, atomic writes, and errors for files that do not fit."""

import dataclasses
import json
import lzma
import math
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from ecinn.classifier.checkpoint import (
    SHIPPED,
    Checkpoint,
    load_checkpoint,
    model_name,
    save_checkpoint,
    shipped_models,
)
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import OODDetector
from ecinn.classifier.quantisation import stored_precision
from ecinn.classifier.recipes import MNIST, RECIPES
from ecinn.classifier.tensor_files import find_file, shipped_names
from ecinn.data.face_crop import FaceCrop
from ecinn.errors import EcinnError, InputError
from ecinn.files import ASSETS, atomic_write, output_folder
from ecinn.flow.network import Architecture
from helpers.builders import randomise


@pytest.fixture
def checkpoint(small_architecture: Architecture) -> Checkpoint:
    classifier = GenerativeClassifier(small_architecture).eval()
    randomise(classifier)
    return Checkpoint(
        recipe=dataclasses.replace(MNIST, architecture=small_architecture, beta=0.7),
        classifier=classifier.requires_grad_(requires_grad=False),
        mu_bar=torch.randn(3, 64, generator=torch.Generator().manual_seed(1)),
        ood=OODDetector((-3.5, 12.25), distance=7.5),
        class_names=("a", "b", "ç"),
        metrics={"error": 0.25},
        training={"seconds": 1.5, "curve": [{"epoch": 1}]},
    )


def test_everything_comes_back(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save_checkpoint(checkpoint, tmp_path / "m.safetensors")
    back = load_checkpoint(tmp_path / "m.safetensors")
    for name in ("recipe", "ood", "class_names", "metrics", "training"):
        assert getattr(back, name) == getattr(checkpoint, name)
    assert torch.equal(back.mu_bar, checkpoint.mu_bar)
    expected = stored_precision(checkpoint.classifier.state_dict(), bits=8)
    for name, value in back.classifier.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert not back.classifier.training


def test_tied_means_are_stored_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Files of earlier versions, which hold both, and models that are not tied keep both."""
    mu = checkpoint.classifier.mu.detach()
    tied = dataclasses.replace(checkpoint, mu_bar=mu.clone())
    assert tied.recipe.tied
    once, twice, untied = (tmp_path / f"{name}.safetensors" for name in ("once", "twice", "un"))
    save_checkpoint(tied, once)
    assert "mu_bar" not in load(once.read_bytes())
    twice.write_bytes(once.read_bytes())
    _rewrite(twice, lambda about, m, t: t.update(mu_bar=mu.clone()))
    assert 3 * 64 * 4 <= twice.stat().st_size - once.stat().st_size < 3 * 64 * 4 + 100
    paper = dataclasses.replace(tied.recipe, tied=False)
    save_checkpoint(dataclasses.replace(tied, recipe=paper), untied)
    assert torch.equal(load(untied.read_bytes())["mu_bar"], mu)
    for path in (once, twice, untied):
        back = load_checkpoint(path)
        assert torch.equal(back.mu_bar, mu)
        assert torch.equal(back.classifier.mu, mu)
        assert not back.mu_bar.requires_grad
        back.mu_bar.zero_()
        assert torch.equal(back.classifier.mu, mu)


def test_a_compressed_file_holds_the_same_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    plain, compressed = tmp_path / "m.safetensors", tmp_path / "m.safetensors.xz"
    for path in (plain, compressed):
        save_checkpoint(checkpoint, path)
    data = lzma.decompress(compressed.read_bytes())
    assert len(data) == plain.stat().st_size
    tensors = load(plain.read_bytes())
    assert all(torch.equal(value, tensors.pop(name)) for name, value in load(data).items())
    assert not tensors
    assert compressed.stat().st_size < 0.8 * plain.stat().st_size
    back, expected = load_checkpoint(compressed), load_checkpoint(plain).classifier.state_dict()
    assert model_name(compressed) == model_name(plain) == "m"
    assert back.metrics == checkpoint.metrics
    for name, value in back.classifier.state_dict().items():
        assert torch.equal(value, expected[name]), name
    for damaged in (compressed.read_bytes()[:-40], plain.read_bytes(), b""):
        compressed.write_bytes(damaged)
        with pytest.raises(InputError, match=r"m\.safetensors\.xz is damaged"):
            load_checkpoint(compressed)


def test_shipped_files_are_found_by_name_compressed_or_not(tmp_path: Path) -> None:
    for file in ("b.safetensors", "a-b.safetensors.xz", "c.json", "d.xz"):
        (tmp_path / file).touch()
    assert shipped_names(tmp_path) == ["a-b", "b"]
    assert find_file("b", tmp_path, "model") == tmp_path / "b.safetensors"
    assert find_file("a-b", tmp_path, "model") == tmp_path / "a-b.safetensors.xz"
    for folder in (SHIPPED, ASSETS / "judges"):
        assert len(list(folder.iterdir())) == len(shipped_names(folder))


def test_the_default_confidence_is_stored_and_checked(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = tmp_path / "m.safetensors"
    recipe = dataclasses.replace(checkpoint.recipe, default_confidence=0.97)
    save_checkpoint(dataclasses.replace(checkpoint, recipe=recipe), path)
    assert load_checkpoint(path).recipe == recipe
    for wrong in (0.5, 1.0, 0.2, math.nan):
        with pytest.raises(InputError, match=r"above 0\.5 and below 1"):
            dataclasses.replace(recipe, default_confidence=wrong)
        about_recipe = {"default_confidence": wrong}
        _rewrite(path, lambda about, m, t, new=about_recipe: about["recipe"].update(new))
        with pytest.raises(InputError, match=r"above 0\.5 and below 1"):
            load_checkpoint(path)


def test_only_the_recipes_of_faces_have_a_default_confidence() -> None:
    """The models of digits have none."""
    own = {name for name, recipe in RECIPES.items() if recipe.default_confidence is not None}
    labels = ("smile", "cheekbones", "lipstick", "makeup", "smile-plain")
    assert own == {f"celeba-{label}" for label in labels}
    assert load_checkpoint("mnist").recipe.default_confidence is None


@pytest.mark.parametrize("crop", [None, FaceCrop(120, webp_quality=None), FaceCrop(99, 70)])
def test_the_crop_of_faces_is_stored(
    checkpoint: Checkpoint, tmp_path: Path, crop: FaceCrop | None
) -> None:
    path = tmp_path / "m.safetensors"
    recipe = dataclasses.replace(checkpoint.recipe, dataset="celeba/Young", face_crop=crop)
    save_checkpoint(dataclasses.replace(checkpoint, recipe=recipe), path)
    assert load_checkpoint(path).recipe.face_crop == crop


def test_half_precision_weights_keep_the_inverse_exact(checkpoint: Checkpoint, tmp_path) -> None:
    save_checkpoint(checkpoint, tmp_path / "m.safetensors")
    classifier = load_checkpoint(tmp_path / "m.safetensors").classifier
    x = torch.rand((4, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    assert (classifier.decode(classifier.encode(x)) - x).abs().max() < 1e-4


def test_a_training_folder_is_a_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save_checkpoint(checkpoint, tmp_path / "model.safetensors")
    assert load_checkpoint(tmp_path).class_names == checkpoint.class_names


@pytest.mark.parametrize("name", shipped_models())
def test_shipped_models_have_their_recipe(name: str) -> None:
    """`ecinn train NAME` repeats what ships."""
    assert load_checkpoint(name).recipe == RECIPES[name]


def test_unknown_model_lists_the_known() -> None:
    with pytest.raises(InputError, match=", ".join(shipped_models())):
        load_checkpoint("resnet")


def _rewrite(path: Path, change) -> None:
    """Change the JSON description inside a checkpoint."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header["__metadata__"]
    about = json.loads(metadata["about"])
    tensors = load(data)
    change(about, metadata, tensors)
    metadata["about"] = json.dumps(about)
    path.write_bytes(save(tensors, metadata))


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a model"),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "truncated header": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "huge header": lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:]),
    "other safetensors": lambda path: path.write_bytes(save({"weight": torch.zeros(2)})),
    "other format": lambda path: _rewrite(path, lambda a, m, t: m.update(format="ecinn-0")),
    "other width": lambda path: _rewrite(
        path, lambda a, m, t: a["recipe"]["architecture"]["stages"][0].update(width=6)
    ),
    "other size": lambda path: _rewrite(
        path, lambda a, m, t: a["recipe"]["architecture"].update(height=30)
    ),
    "wrong type": lambda path: _rewrite(path, lambda a, m, t: a["recipe"].update(beta="high")),
    "unknown setting": lambda path: _rewrite(path, lambda a, m, t: a["recipe"].update(gan=1)),
    "no means": lambda path: _rewrite(
        path, lambda a, m, t: (t.pop("mu_bar"), a["recipe"].update(tied=False))
    ),
    "other means": lambda path: _rewrite(
        path, lambda a, m, t: t.update(mu_bar=torch.zeros(2, 64))
    ),
    "missing weight": lambda path: _rewrite(path, lambda a, m, t: t.pop("classifier.mu")),
    "no settings": lambda path: _rewrite(path, lambda a, m, t: a.pop("recipe")),
    "other kind": lambda path: _rewrite(path, lambda a, m, t: a.update(kind="judges")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_files_that_do_not_fit_are_refused_in_one_line(
    damage: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = tmp_path / "m.safetensors"
    save_checkpoint(checkpoint, path)
    DAMAGE[damage](path)
    with pytest.raises(InputError) as error:
        load_checkpoint(path)
    assert "m.safetensors" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write"):
        output_folder(tmp_path / "file" / "out")


@pytest.mark.slow
def test_a_full_disk_loses_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A real failure of write(2): a process that may not write files larger than 20 kB."""
    path = tmp_path / "m.safetensors"
    save_checkpoint(checkpoint, path)
    before = path.read_bytes()
    assert len(before) > 20_000
    program = (
        "import resource, sys, pathlib\n"
        "from ecinn import load, EcinnError\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "model = load(path)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try:\n"
        "    model.save(path)\n"
        "except EcinnError as error:\n"
        "    sys.exit(str(error))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "cannot write" in done.stderr
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["m.safetensors"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 20_000


def test_a_folder_is_made_with_its_first_file(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "newer"
    assert output_folder(folder) == folder
    assert not any(tmp_path.iterdir())
    atomic_write(folder / "x", b"data")
    assert (folder / "x").read_bytes() == b"data"
    assert output_folder(folder) == folder
    assert [path.name for path in folder.iterdir()] == ["x"]


@pytest.mark.parametrize("below", ["", "new", "new/newer"])
def test_writing_where_a_file_is_in_the_way_is_one_error(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"there before")
    folder = tmp_path / "file" / below
    with pytest.raises(InputError, match="cannot write"):
        output_folder(folder)
    with pytest.raises(EcinnError, match="cannot write"):
        atomic_write(folder / "x", b"data")
    assert (tmp_path / "file").read_bytes() == b"there before"
