"""Judges: stored weights match the measured ones, and the shipped judges their record."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ecinn.classifier.tensor_files import find_file, read_tensors, write_tensors
from ecinn.data.dataset import Dataset
from ecinn.data.mnist import load_mnist
from ecinn.errors import InputError
from ecinn.progress import Progress
from ecinn.studies import judges as judges_module
from ecinn.studies.judges import (
    SHIPPED,
    Autoencoder,
    Judges,
    JudgeSettings,
    load_judges,
    scaled,
    shipped_judges,
    train_judges,
)
from ecinn.training.networks import ConvolutionalNetwork
from helpers.command_line import fails, run

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TINY = JudgeSettings(
    convolution_width=4,
    dense_width=16,
    autoencoder_width=4,
    convolution_epochs=8,
    dense_epochs=8,
    autoencoder_epochs=8,
    batch_size=25,
    learning_rate=0.01,
    shift=1.0,
)


def stripes(count: int, channels: int, seed: int) -> Dataset:
    """Noisy pictures, 8×12, of three classes: bright at the left, in the middle, at the right."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    images = 100 * torch.rand((count, channels, 8, 12), generator=generator)
    bright = torch.arange(12) // 4 == labels[:, None]
    images += 100 * bright[:, None, None]
    return Dataset(images.to(torch.uint8), labels, ("left", "middle", "right"))


def trained(channels: int = 1, seed: int = 3, **changes) -> Judges:
    train, test = stripes(300, channels, 0), stripes(200, channels, 1)
    settings = dataclasses.replace(TINY, **changes)
    return train_judges(train, test, seed=seed, device=CPU, settings=settings)


@pytest.fixture(scope="module", params=[(1, 16), (3, 8)], ids=["grey", "colour, 8 bits"])
def judges(request: pytest.FixtureRequest) -> Judges:
    channels, bits = request.param
    return trained(channels, stored_bits=bits)


def test_a_small_training_learns(judges: Judges) -> None:
    assert set(judges.record["accuracy"]) == {"convolutional", "fully connected", "features"}
    assert min(judges.record["accuracy"].values()) > 0.8
    test = stripes(200, judges.shape[0], 1)
    error = judges.record["reconstruction_error"]
    spread = float(scaled(test.images).var())
    assert max(error["of all classes"], error["of the image's class"]) < spread
    assert error["of the image's class"] < error["of another class"]


def test_figures_are_those_of_the_stored_weights(judges: Judges, tmp_path: Path) -> None:
    """Counted again, image by image, on what was read from the file."""
    judges.save(tmp_path / "judges.safetensors")
    loaded = load_judges(tmp_path / "judges.safetensors")
    test = stripes(200, judges.shape[0], 1)
    for name, network in {
        "convolutional": loaded.convolutional,
        "fully connected": loaded.fully_connected,
        "features": loaded.feature_network,
    }.items():
        right = sum(
            int(network(scaled(image[None])).argmax()) == int(label)
            for image, label in zip(test.images, test.labels, strict=True)
        )
        assert judges.record["accuracy"][name] == pytest.approx(right / 200, abs=0.006)
    own = [
        F.mse_loss(loaded.autoencoders[int(label)](scaled(image[None])), scaled(image[None]))
        for image, label in zip(test.images, test.labels, strict=True)
    ]
    assert judges.record["reconstruction_error"]["of the image's class"] == pytest.approx(
        float(torch.stack(own).mean()), rel=1e-4
    )


def test_saved_and_loaded_judges_answer_alike(judges: Judges, tmp_path: Path) -> None:
    path = tmp_path / "judges.safetensors"
    judges.save(path)
    loaded = load_judges(path)
    images = stripes(50, judges.shape[0], 2).images
    labels = torch.arange(50) % 3
    assert torch.equal(loaded.features(images), judges.features(images))
    assert torch.equal(loaded.reconstruct(images), judges.reconstruct(images))
    assert torch.equal(loaded.reconstruct(images, labels), judges.reconstruct(images, labels))
    for family, verdict in judges.verdicts(images).items():
        assert torch.equal(loaded.verdicts(images)[family], verdict)
    assert loaded.record == json.loads(json.dumps(judges.record))
    assert (loaded.shape, loaded.class_names) == (judges.shape, judges.class_names)
    tensors, _ = read_tensors(path)
    used = {16: set(), 8: {torch.int8, torch.bfloat16}}[judges.settings.stored_bits]
    assert {value.dtype for value in tensors.values()} == {torch.float16, torch.int64} | used


def test_results_do_not_depend_on_the_other_images(judges: Judges) -> None:
    images = stripes(1_100, judges.shape[0], 4).images
    labels = torch.arange(1_100) % 3
    many, one = judges.features(images), judges.features(images[700:701])
    torch.testing.assert_close(many[700:701], one)
    own = judges.reconstruct(images, labels)[700:701]
    torch.testing.assert_close(own, judges.reconstruct(images[700:701], labels[700:701]))
    assert not torch.allclose(own, judges.reconstruct(images[700:701], labels[701:702]))


def test_training_is_a_function_of_the_seed_and_leaves_the_global_generator_alone() -> None:
    short = {"convolution_epochs": 1, "dense_epochs": 1, "autoencoder_epochs": 1}
    state = torch.random.get_rng_state()
    first = trained(**short).state_dict()
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(1)
    again = trained(**short).state_dict()
    other = trained(seed=4, **short).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    weights = [name for name in first if name.endswith("weight") and first[name].ndim > 1]
    assert not any(torch.equal(first[name], other[name]) for name in weights)


def test_families_differ_and_no_two_networks_share_weights(judges: Judges) -> None:
    convolutional, fully_connected = judges.convolutional, judges.fully_connected
    assert any(isinstance(module, nn.Conv2d) for module in convolutional.modules())
    assert not any(isinstance(module, nn.Conv2d) for module in fully_connected.modules())
    features = judges.feature_network
    assert isinstance(features, ConvolutionalNetwork)
    assert not torch.equal(features.head.weight, judges.convolutional.head.weight)
    images = stripes(20, judges.shape[0], 5).images
    pictures = [judges.reconstruct(images, torch.full((20,), label)) for label in range(3)]
    assert not torch.equal(pictures[0], pictures[1])
    assert not torch.equal(pictures[1], pictures[2])


def test_judges_read_black_as_minus_a_half_and_white_as_a_half() -> None:
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(1, 1, 1, 3)
    torch.testing.assert_close(scaled(images).flatten(), torch.tensor([-0.5, -0.3, 0.5]))


def test_features_are_what_the_last_layer_reads(judges: Judges) -> None:
    images = stripes(20, judges.shape[0], 5).images
    network = judges.feature_network
    logits = judges.features(images) @ network.head.weight.T + network.head.bias
    torch.testing.assert_close(logits, network(scaled(images)))


def test_autoencoder_has_the_authors_shape() -> None:
    kinds = [type(layer).__name__ for layer in Autoencoder(1, 16)]
    assert kinds == [
        "Conv2d", "ReLU", "Conv2d", "ReLU", "MaxPool2d", "Conv2d",
        "Conv2d", "ReLU", "Upsample", "Conv2d", "ReLU", "Conv2d",
    ]  # fmt: skip
    sizes = [tuple(p.shape) for p in Autoencoder(1, 16).parameters() if p.ndim == 4]
    assert sizes == 2 * [(16, 1, 3, 3), (16, 16, 3, 3), (1, 16, 3, 3)]


def test_every_network_reports_its_progress_and_curve() -> None:
    seen: list[Progress] = []
    data = stripes(60, 1, 0)
    settings = dataclasses.replace(
        TINY, convolution_epochs=2, dense_epochs=1, autoencoder_epochs=1
    )
    judges = train_judges(data, data, seed=0, device=CPU, observe=seen.append, settings=settings)
    tasks = [
        "convolutional", "fully connected", "features", "autoencoder",
        "autoencoder of left", "autoencoder of middle", "autoencoder of right",
    ]  # fmt: skip
    assert [p.task for p in seen if p.done == p.total] == tasks
    assert len(seen) == 9
    assert {"error" in p.figures for p in seen if p.task.startswith("autoencoder")} == {False}
    curves = judges.record["curves"]
    assert {task: len(curve) for task, curve in curves.items()} == {
        task: 2 if task in ("convolutional", "features") else 1 for task in tasks
    }
    assert (judges.record["device"], judges.record["torch"]) == ("CPU", torch.__version__)


def test_unsuitable_data_is_refused() -> None:
    data = stripes(30, 1, 0)
    no_left = Dataset(data.images[data.labels > 0], data.labels[data.labels > 0], data.class_names)
    with pytest.raises(InputError, match="training images of each"):
        train_judges(no_left, data, seed=0, device=CPU, settings=TINY)


def test_files_that_hold_no_judges_are_refused(judges: Judges, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    with pytest.raises(InputError, match="no judges"):
        load_judges(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match="damaged"):
        load_judges(path)
    write_tensors(path, {}, {"recipe": {}})
    with pytest.raises(InputError, match="holds 'model', not 'judges'"):
        load_judges(path)
    judges.save(path)
    tensors, about = read_tensors(path)
    for change in (
        {"settings": about["settings"] | {"dense_width": 20}},
        {"settings": about["settings"] | {"depth": 1}},
        {"settings": about["settings"] | {"dense_width": "16"}},
        {"shape": [1, 8]},
        {"class_names": ["left", "right"]},
    ):
        write_tensors(path, tensors, about | change)
        with pytest.raises(InputError, match="does not fit"):
            load_judges(path)
    write_tensors(path, tensors, {k: v for k, v in about.items() if k != "record"})
    with pytest.raises(InputError, match="record"):
        load_judges(path)


def test_images_of_another_shape_are_refused(judges: Judges) -> None:
    images = torch.zeros((2, judges.shape[0], 8, 8), dtype=torch.uint8)
    with pytest.raises(InputError, match="8, 12"):
        judges.verdicts(images)


@pytest.fixture(scope="module")
def shipped() -> Judges:
    assert "mnist" in shipped_judges()
    return load_judges("mnist")


def test_shipped_judges_are_as_good_as_they_say(shipped: Judges) -> None:
    test = load_mnist("test")
    some = slice(3_000, 5_000)
    said = shipped.verdicts(test.images[some])
    for family, labels in said.items():
        accuracy = shipped.record["accuracy"][family]
        assert accuracy >= 0.988
        measured = float((labels == test.labels[some]).double().mean())
        assert abs(measured - accuracy) < 4 * (accuracy * (1 - accuracy) / 2_000) ** 0.5
    assert shipped.record["seed"] == 100
    assert shipped.record["training_images"] == 60_000
    assert find_file("mnist", SHIPPED, "judges").stat().st_size <= 1_600_000
    assert 64 <= shipped.features(test.images[:2]).shape[1] <= 128


def test_8_bits_keep_the_verdicts_on_real_digits(shipped: Judges, tmp_path: Path) -> None:
    """A copy of the shipped judges, half as large."""
    path = tmp_path / "small.safetensors"
    copied = load_judges("mnist")
    copied.settings = dataclasses.replace(copied.settings, stored_bits=8)
    copied.save(path)
    assert path.stat().st_size < 0.55 * find_file("mnist", SHIPPED, "judges").stat().st_size
    small = load_judges(path)
    for name, value in shipped.state_dict().items():
        kept = small.state_dict()[name]
        if value.ndim < 2:
            assert torch.equal(value, kept), name
            continue
        # Half a step, and the eight digits of the scale: 1/256 of the largest weight.
        largest = value.flatten(1).abs().amax(1)
        error = (value - kept).flatten(1).abs().amax(1)
        assert bool((error <= (0.5 / 127 + 1 / 256) * largest).all()), name
        assert error.max() > 0, name
    test = load_mnist("test").first(3_000)
    said = small.verdicts(test.images)
    for family, labels in shipped.verdicts(test.images).items():
        assert float((labels != said[family]).double().mean()) < 0.003
    before, after = (
        F.mse_loss(each.reconstruct(test.images, test.labels), scaled(test.images))
        for each in (shipped, small)
    )
    assert float(after) == pytest.approx(float(before), rel=0.03)


def test_shipped_oracles_err_on_different_images(shipped: Judges) -> None:
    """Networks of one family share their mistakes; these must not."""
    test = load_mnist("test").first(3_000)
    wrong = [labels != test.labels for labels in shipped.verdicts(test.images).values()]
    both, either = (wrong[0] & wrong[1]).sum(), (wrong[0] | wrong[1]).sum()
    assert both < 0.5 * either


def test_shipped_autoencoders_know_their_class(shipped: Judges) -> None:
    """IM1 of real images of q, seen as coming from another class, is below one."""
    test = load_mnist("test").first(2_000)
    x = scaled(test.images)

    def error(labels: torch.Tensor) -> torch.Tensor:
        return (shipped.reconstruct(test.images, labels) - x).square().sum((1, 2, 3))

    own = error(test.labels)
    for step in (1, 3, 7):
        assert float((own / (error((test.labels + step) % 10) + 1e-5)).mean()) < 1


def test_command_writes_the_judges(tmp_path: Path, shipped: Judges, monkeypatch) -> None:
    arguments: dict = {}

    def train(data, test, *, seed, device, observe) -> Judges:
        arguments.update(n=len(data), seed=seed, device=device)
        return shipped

    monkeypatch.setattr(judges_module, "train_judges", train)
    path = tmp_path / "new" / "own.safetensors"
    code, stdout, stderr = run(
        "judges", "mnist", "--out", path, "--limit", 50, "--seed", 7, "--device", "cpu"
    )
    assert code == 0, stderr
    assert arguments == {"n": 50, "seed": 7, "device": "cpu"}
    assert "99.47 % correct" in stdout
    assert load_judges(path).record == shipped.record
    assert "'cats'" in fails("judges", "cats", "--out", path)
    assert "is a folder" in fails("judges", "mnist", "--out", tmp_path)
