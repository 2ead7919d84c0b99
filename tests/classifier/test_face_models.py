"""The shipped face models: they load, and they keep their promises on real faces."""

import subprocess
import zipfile

import pytest
import torch

from ecinn.classifier.checkpoint import SHIPPED, load_checkpoint
from ecinn.classifier.recipes import RECIPES
from ecinn.classifier.tensor_files import find_file
from ecinn.data.celeba import class_names, relabelled
from ecinn.data.dataset import Dataset, load_dataset
from ecinn.model import Model, load
from helpers.paths import REPOSITORY, SHARED

FACES = SHARED / "celeba"
ORIGINALS = SHARED / "celeba_originals"
needs_faces = pytest.mark.skipif(not FACES.is_dir(), reason="needs ../shared/data/celeba")
LABELS = ("smile", "cheekbones", "lipstick", "makeup")
NAMES = (*(f"celeba-{label}" for label in LABELS), "celeba-smile-plain")
LARGEST = 52 * 2**20


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Model:
    return load(request.param)


@pytest.fixture(scope="module")
def every_face() -> Dataset:
    return load_dataset("celeba/Smiling", "test", FACES)


@pytest.fixture(scope="module")
def faces(model: Model, every_face: Dataset) -> Dataset:
    """Eight test faces, drawn at random."""
    data = relabelled(every_face, model.checkpoint.recipe.dataset)
    rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(7))[:8]
    return data.select(rows)


def test_load_by_name(model: Model) -> None:
    recipe = model.checkpoint.recipe
    assert recipe == RECIPES[recipe.name]
    assert model.classifier.image_shape == (3, 64, 64)
    assert model.class_names == class_names(recipe.dataset.removeprefix("celeba/"))
    assert find_file(recipe.name, SHIPPED, "model").stat().st_size < 5.5 * 2**20
    assert model.checkpoint.metrics["n"] == 989
    assert model.checkpoint.metrics["bits_per_dim"] < 4.05
    assert model.checkpoint.metrics["reached_q"] > 0.995


def test_a_uniform_image_is_out_of_distribution(model: Model) -> None:
    flat = torch.full((1, 3, 64, 64), 140, dtype=torch.uint8)
    e = model.explain(flat, check=False)
    assert "texture" in e.reasons(0)
    assert not e.typical.any()
    assert float(e.round_trip_error) < 1e-4


@pytest.mark.slow
@pytest.mark.celeba
@needs_faces
def test_real_faces_are_explained_and_reconstructed(model: Model, faces: Dataset) -> None:
    e = model.explain(faces.images)
    assert int((e.p == faces.labels).sum()) >= 5
    assert int(e.convincing_certificate.reached.sum()) >= 7
    assert float(e.round_trip_error.max()) < 1e-4
    assert int(e.typical.sum()) >= 7
    # The middle of a face changes more than the edge.
    change = e.heatmap[:, 0].abs().mean((0, 1))
    ratio = float(change[16:56, 16:48].mean()) / float(change[:, :6].mean())
    assert ratio > 1.2


@pytest.mark.slow
@pytest.mark.celeba
@pytest.mark.skipif(not ORIGINALS.is_dir(), reason="needs ../shared/data/celeba_originals")
def test_faces_as_people_download_them_are_read_as_the_reduced_ones(every_face: Dataset) -> None:
    """Files of 178×218 pixels and the reduced faces of the same people; all models crop alike."""
    model = load("celeba-smile")
    crops = {RECIPES[name].face_crop for name in NAMES}
    assert crops == {model.recipe.face_crop}
    reduced = every_face.images
    rows = torch.randperm(len(reduced), generator=torch.Generator().manual_seed(8))[:8]
    with zipfile.ZipFile(ORIGINALS / "img_align_celeba.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
        files = [archive.read(names[row]) for row in rows.tolist()]
    found, expected = model.predict(files), model.predict(reduced[rows])
    assert int((found.argmax(1) == expected.argmax(1)).sum()) >= 7
    assert float((found - expected).abs().mean()) < 0.02


@pytest.mark.slow
@pytest.mark.celeba
@needs_faces
def test_faces_upside_down_are_out_of_distribution(model: Model, faces: Dataset) -> None:
    e = model.explain(faces.images.flip(2), check=False)
    assert int((~e.typical).sum()) >= 7


def test_the_repository_stays_small() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.decode().split("\0") if name]
    sizes = [(REPOSITORY / name).stat().st_size for name in names if (REPOSITORY / name).exists()]
    assert sum(sizes) < LARGEST


def test_a_card_is_written_for_each(model: Model) -> None:
    from ecinn.classifier.card import card

    text = card(load_checkpoint(model.checkpoint.recipe.name), 5_000_000).markdown()
    assert "non-commercial" in text
    assert "Initialised from the layers of celeba-" in text
    assert "| not measured |" not in text
