"""Models in Hugging Face's convention, with the hub's own package as far as it works offline."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ecinn.classifier.card import card
from ecinn.classifier.checkpoint import load_checkpoint
from ecinn.classifier.recipes import Recipe
from ecinn.errors import InputError
from ecinn.files import rebuild
from ecinn.model import Model
from helpers.builders import small_model


@pytest.fixture
def model() -> Model:
    made = small_model(channels=3)
    checkpoint = replace(made.checkpoint, metrics={"error": 0.125, "n": 8})
    return Model(replace(checkpoint, recipe=replace(made.recipe, stored_bits=32)))


def test_a_saved_folder_is_the_same_model(model: Model, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "tiny-model"
    model.save_pretrained(folder)
    names = ["README.md", "config.json", "model.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in (folder, str(folder), folder / "model.safetensors"):
        again = Model.from_pretrained(name, "cpu")
        assert again.recipe == model.recipe
        images = torch.rand((3, 3, 8, 8), generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(again.predict(images), model.predict(images))
        assert torch.equal(again.mu_bar, model.mu_bar)


def test_the_config_names_classes_and_size_as_hugging_face_does(
    model: Model, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "ecinn"
    assert config["id2label"] == {"0": "a", "1": "b", "2": "c"}
    assert config["label2id"] == {"a": 0, "b": 1, "c": 2}
    assert (config["num_channels"], config["image_size"]) == (3, [8, 8])
    assert rebuild(Recipe, config["recipe"]) == model.recipe


def test_the_readme_is_the_card_of_the_checkpoint(model: Model, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    folder = tmp_path / "tiny-model"
    model.save_pretrained(folder)
    found = hub.ModelCard.load(folder / "README.md")
    assert found.data.library_name == "ecinn"
    assert "counterfactual-explanations" in found.data.tags
    size = (folder / "model.safetensors").stat().st_size
    expected = card(load_checkpoint(folder), size, "tiny-model").markdown()
    assert found.text.strip() == expected.strip()
    assert "12.50 %" in found.text
    assert str(tmp_path) not in (folder / "README.md").read_text()


def test_saving_again_replaces_the_files_and_keeps_others(model: Model, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    small_model(classes=2).save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    assert Model.from_pretrained(tmp_path, "cpu").class_names == ("a", "b", "c")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(InputError, match="is a file"):
        model.save_pretrained(tmp_path / "notes.txt")


@pytest.mark.parametrize("name", ["README.md", "config.json"])
def test_files_of_somebody_else_are_not_replaced(model: Model, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=f"holds a {name} but no model"):
        model.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_a_repository_of_the_hub_is_found_in_its_cache(model: Model, tmp_path: Path) -> None:
    """The cache is laid out by hand as the hub's package documents it, and read by the package."""
    pytest.importorskip("huggingface_hub")
    repository, commit = (
        tmp_path / "models--somebody--tiny",
        "0123456789abcdef0123456789abcdef01234567",
    )
    model.save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    offline = {"cache_dir": tmp_path, "local_files_only": True}
    found = Model.from_pretrained("somebody/tiny", "cpu", **offline)
    assert torch.equal(found.mu_bar, model.mu_bar)
    assert Model.from_pretrained("somebody/tiny", "cpu", revision=commit, **offline).recipe
    for name in ("somebody/else", "somebody/-tiny-"):
        with pytest.raises(InputError, match=f"no folder {name}, and it was not found") as error:
            Model.from_pretrained(name, "cpu", **offline)
        assert "\n" not in str(error.value)


def test_without_the_hubs_package_folders_still_load(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    model.save_pretrained(tmp_path)
    assert Model.from_pretrained(tmp_path, "cpu").name == "tiny"
    assert Model.from_pretrained("fakemnist", "cpu").name == "fakemnist"
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("somebody/folder")
    assert Model.from_pretrained("somebody/folder", "cpu").name == "tiny"
    with pytest.raises(InputError, match=r"pip install 'ecinn\[hub\]'"):
        Model.from_pretrained("somebody/tiny")
    with pytest.raises(InputError, match="no model 'nobody'"):
        Model.from_pretrained("nobody")
