"""Model cards: counts, texts about the data, and what is said when nothing is known."""

import dataclasses
import json
import math

import pytest
import torch
from scipy.stats import binomtest

from ecinn.classifier.card import TEXTS, ModelCard, card
from ecinn.classifier.checkpoint import (
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
    shipped_models,
)
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import OODDetector
from ecinn.classifier.recipes import CELEBA, MNIST, RECIPES, FineTuning, Recipe
from ecinn.data.augmentation import Augmentation
from ecinn.data.celeba import ATTRIBUTES
from ecinn.drawing.table import Table
from ecinn.flow.network import Architecture, Stage
from helpers.builders import randomise
from helpers.command_line import fails, run

STAGE = {"seconds": 82.4, "images_per_second": 6028, "device": "a GPU", "torch": "2.9"}


@pytest.fixture
def make(small_architecture: Architecture):
    classifier = randomise(GenerativeClassifier(small_architecture)).eval()

    def make(recipe: Recipe = MNIST, **changes: object) -> Checkpoint:
        return dataclasses.replace(
            Checkpoint(
                recipe=dataclasses.replace(recipe, architecture=small_architecture),
                classifier=classifier,
                mu_bar=torch.zeros(3, 64),
                ood=OODDetector((0.0, 1.0)),
                class_names=("a", "b", "c"),
            ),
            **changes,
        )

    return make


def value(table: Table, name: str) -> str:
    return next(row[1] for row in table.rows if row[0] == name)


def test_the_default_counterfactual_is_named(make) -> None:
    """Also where it is the paper's."""
    name, plain = "default counterfactual", make()
    assert value(card(plain, 1).settings, name) == "at α₁ (the paper's)"
    recipe = dataclasses.replace(plain.recipe, default_confidence=0.985)
    said = value(card(make(recipe=recipe), 1).settings, name)
    assert said == "98.5 % requested (`--confidence alpha_1` for the paper's α₁)"


def test_proportions_are_reported_as_numbers_of_test_images(make) -> None:
    metrics = {
        "n": 989, "error": 86 / 989, "calibration_error": 0.0213,
        "reached_q": 985 / 989, "reached_q_corrected": 1.0,
        "tipping_third_class": 3 / 989, "typical": 980 / 989, "round_trip_error": 1e-5,
    }  # fmt: skip
    about = card(make(metrics=metrics), 2**20)
    text = "\n".join(about.failures.sentences)
    low, high = binomtest(86, 989).proportion_ci(0.95, method="wilson")
    assert "misclassifies 86 of 989 test images" in text
    assert f"{100 * low:.2f} % to {100 * high:.2f} %" in text
    assert "±1.8 points" in text
    assert "4 of 989 counterfactuals at α₁ are not classified" in text
    assert "3 of 989 tipping points" in text
    assert "9 of 989 test images are flagged" in text
    assert "corrected" not in text
    assert "inexact" not in text
    assert "989 for testing" in "\n".join(about.data.sentences)
    assert value(about.metrics, "test error") == "8.70 %"
    assert value(about.metrics, "calibration error") == "2.13 %"
    assert value(about.metrics, "round trip") == "1.0e-05"
    assert about.measured == metrics


def test_an_inverse_that_changes_8_bit_values_is_a_failure(make) -> None:
    metrics = {"n": 10, "error": 0.0, "round_trip_error": 1 / 256}
    assert any("inexact" in s for s in card(make(metrics=metrics), 1).failures.sentences)


def test_missing_measurements_are_reported(make) -> None:
    about = card(make(), 1)
    assert {row[1] for row in about.metrics.rows} == {"not measured"}
    assert len(about.metrics.rows) == len(TEXTS["measures"])
    assert "unknown: it was not measured" in about.failures.sentences[0]
    assert about.training.sentences == ("Not recorded.",)
    assert not any("for testing" in sentence for sentence in about.data.sentences)


def test_an_unknown_dataset_and_recipe_are_reported(make) -> None:
    odd = dataclasses.replace(MNIST, name="mine", dataset="cats")
    text = card(make(odd), 1).markdown()
    assert "Licence: unknown; ask the author of the model." in text
    assert "cannot train it again" in text
    assert "ecinn train" not in text
    assert "Claims about causes" in text


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_every_recipe_has_known_data_and_limits(make, recipe: Recipe) -> None:
    about = card(make(recipe), 1)
    kind = recipe.dataset.partition("/")[0]
    texts = TEXTS["datasets"][kind]
    assert texts["licence"] in about.markdown()
    assert set(texts["unfit"]) <= set(about.unfit.sentences)
    faces = kind == "celeba"
    assert any("non-commercial research only" in s for s in about.data.sentences) == faces
    assert any("decision about a person" in s for s in about.unfit.sentences) == faces
    assert any("--celeba FOLDER" in line for line in about.usage.code) == faces


def test_correlated_attributes_are_named() -> None:
    assert set(TEXTS["correlated"]) <= set(ATTRIBUTES)
    assert {e.dataset.partition("/")[2] for e in CELEBA} == set(TEXTS["correlated"])


def test_cards_cite_no_files_outside_the_package(make) -> None:
    for recipe in RECIPES.values():
        assert "docs/" not in card(make(recipe), 1).markdown()


def test_settings_are_the_checkpoints(make) -> None:
    recipe = dataclasses.replace(
        CELEBA[0],
        seed=5,
        epochs=11,
        augmentation=Augmentation(shift=2.0, scale=0.07, flip=True, share=0.25),
    )
    checkpoint = make(recipe)
    rows = dict(card(checkpoint, 3 * 2**19).settings.rows)
    shapes = [tuple(p.shape) for p in checkpoint.classifier.parameters()]
    assert rows["parameters"] == f"{sum(math.prod(shape) for shape in shapes):,}"
    assert rows["file"].startswith("1.5 MiB, 8 bits")
    at = "2 couplings of width 4 at"
    assert rows["network"] == f"{at} 4×4; {at} 2×2; 1 fully connected of width 8"
    assert recipe.finetuning is not None
    assert rows["epochs"] == f"{recipe.epochs}, then {recipe.finetuning.epochs}"
    assert rows["distillation"].startswith("targets are 80 % the teacher")
    assert rows["augmentation"] == (
        "25 % of the images shifted by up to 2 pixels, scaled by up to 7 %; half of them mirrored"
    )
    assert (rows["seed"], rows["label smoothing"]) == ("5", "0.02")
    assert rows["other attributes"].endswith("weight 8")
    other = dataclasses.replace(
        recipe,
        learning_rate=0.0021,
        finetuning=FineTuning(
            3,
            1.1,
            2.2,
            learning_rate=0.0004,
            proximity=3.3,
            background=6.6,
            realism=5.5,
            rounds=4,
        ),
        augmentation=Augmentation(rotate=12.0, shear=0.15),
    )
    rows = dict(card(make(other), 1).settings.rows)
    assert (rows["epochs"], rows["learning rate"]) == ("11, then 3", "0.0021, then 0.0004")
    assert rows["fine-tuning for counterfactuals"] == (
        "faithfulness 1.1, distillation 2.2, proximity 3.3 (background 6.6), realism 5.5; "
        "rounds: 4"
    )
    assert rows["class means"].endswith(
        "τ 0.01 in training, 1 after fitting it on held-out images"
    )
    assert (
        rows["augmentation"] == "100 % of the images rotated by up to 12°, sheared by up to 15 %"
    )
    one_stage = dataclasses.replace(recipe, finetuning=None, augmentation=Augmentation())
    rows = dict(card(make(one_stage), 1).settings.rows)
    assert (rows["epochs"], rows["augmentation"]) == ("11", "none")


@pytest.mark.parametrize("part", [0.0, 0.25])
def test_a_common_shift_of_two_means_is_named(make, part) -> None:
    two = GenerativeClassifier(Architecture(1, 4, 4, 2, (Stage(1, 4),), dense_width=0))
    mu_bar = two.mu.detach().clone()
    with torch.no_grad():
        two.mu += part * (mu_bar[1] - mu_bar[0])
    said = dict(card(make(classifier=two, mu_bar=mu_bar), 1).settings.rows)["class means"]
    assert ("; both shifted by 25 % of their distance" in said) == (part > 0)


def test_both_stages_and_their_initialisation_are_reported(make) -> None:
    first = {**STAGE, "init_from": "celeba-attributes", "training_images": 24_996}
    record = {"first_stage": first, **STAGE, "seconds": 64.3}
    about = card(make(dataclasses.replace(CELEBA[0], distillation_weight=0.0), training=record), 1)
    begun, one, two = about.training.sentences
    assert begun == "Initialised from the layers of celeba-attributes."
    assert one == "First stage: on a GPU, 82 s, 6,028 images/s, torch 2.9."
    assert two.startswith("Fine-tuning for counterfactuals: on a GPU, 64 s")
    assert "24,996 for training" in "\n".join(about.data.sentences)
    assert about.usage.code[-1] == (
        "ecinn train celeba-smile --out DIR --distillation-weight 0 --celeba FOLDER"
    )
    other = dataclasses.replace(
        CELEBA[0], distillation_weight=0.0, epochs=20, learning_rate=1e-3, finetuning=None
    )
    assert card(make(other, training=record), 1).usage.code[-1] == (
        "ecinn train celeba-smile --out DIR --epochs 20 --learning-rate 0.001 "
        "--distillation-weight 0 --finetune-epochs 0 --celeba FOLDER"
    )


def test_settings_that_this_version_would_not_use_are_named(make) -> None:
    def differ(recipe: Recipe) -> str:
        sentences = card(make(recipe), 1).usage.sentences
        return next(s for s in sentences if "another" in s).partition("another ")[2]

    assert differ(MNIST) == "architecture."
    changed = dataclasses.replace(MNIST, beta=0.3, seed=9)
    assert differ(changed) == "architecture, beta, seed."


def test_markdown_keeps_every_cell_and_sentence(make) -> None:
    about = card(make(metrics={"n": 5, "error": 0.2}), 1, "a folder/model.safetensors")
    text = about.markdown()
    assert [s.title for s in about.sections] == [
        line[3:] for line in text.splitlines() if line.startswith("## ")
    ]
    for section in about.sections:
        if isinstance(section, Table):
            assert all(f"| {' | '.join(row)} |" in text for row in (section.head, *section.rows))
        else:
            assert all(line in text for line in (*section.sentences, *section.code))
    assert "ecinn evaluate 'a folder/model.safetensors'" in text


@pytest.mark.parametrize("name", shipped_models())
def test_models_shows_the_card_of_what_ships(name: str) -> None:
    code, text, _ = run("models", name, "--markdown")
    assert code == 0
    checkpoint = load_checkpoint(name)
    assert text.startswith(f"# {checkpoint.recipe.name}\n")
    assert f"{checkpoint.metrics['n']:,} for testing" in text
    code, stdout, _ = run("models", name, "--json")
    record = json.loads(stdout)
    assert record["measured"] == checkpoint.metrics
    assert set(record) == {field.name for field in dataclasses.fields(ModelCard)}
    code, stdout, _ = run("models", name)
    assert code == 0
    for title in ("Data", "Known failures", "What not to use it for"):
        assert title in stdout.splitlines()


def test_models_accepts_paths_and_refuses_in_one_line(make, tmp_path) -> None:
    save_checkpoint(make(), tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    for path in (tmp_path, tmp_path / "model.safetensors"):
        code, stdout, stderr = run("models", path, "--json")
        assert code == 0, stderr
        assert json.loads(stdout)["size_in_bytes"] == size
    assert "give its name" in fails("models", "--markdown")
    assert "leave one out" in fails("models", "mnist", "--markdown", "--json")
    assert "mnist" in fails("models", "resnet")


def test_the_list_shows_a_model_that_was_not_measured(make, tmp_path, monkeypatch) -> None:
    save_checkpoint(make(class_names=("no", "yes", "both")), tmp_path / "faces.safetensors")
    monkeypatch.setattr("ecinn.classifier.checkpoint.SHIPPED", tmp_path)
    code, stdout, stderr = run("models")
    assert code == 0, stderr
    row = next(line for line in stdout.splitlines() if "faces" in line)
    assert row.split()[2:5] == ["–", "–", "–"]
