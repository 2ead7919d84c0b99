"""Inception-V3: equal to torchvision's, suitable for DeepLift, and trainable."""

import contextlib
import copy
import dataclasses
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

from ecinn.classifier.tensor_files import read_tensors, write_tensors
from ecinn.cli import app
from ecinn.cli import networks as commands
from ecinn.data.augmentation import Augmentation
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.progress import Progress
from ecinn.studies.inception import network as inception
from ecinn.studies.inception.network import InceptionClassifier, MaxPool, with_relu_modules
from ecinn.studies.inception.training import (
    InceptionResult,
    InceptionSettings,
    error_rate,
    fit,
    load_inception,
    train_inception,
)

CPU = torch.device("cpu")
TINY = InceptionSettings("tinted", epochs=1, batch_size=16, side=75)
PLAIN = dataclasses.replace(TINY, augmentation=Augmentation())


def tinted(count: int, seed: int = 0, side: int = 16) -> Dataset:
    """Noise of three colours in which one class has more red, the other more blue."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    images = 150 * torch.rand((count, 3, side, side), generator=generator)
    images[labels == 0, 0] += 100
    images[labels == 1, 2] += 100
    return Dataset(images.to(torch.uint8), labels, ("red", "blue"))


def small() -> nn.Sequential:
    """A stand-in that trains in no time, with what differs between training and evaluation."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        convolution = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        pool = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3)
        return nn.Sequential(*convolution, *pool, nn.Linear(8, 2))


class Recorder(nn.Module):
    """Remembers every image it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        return self.bias.expand(len(x), 2)


@pytest.fixture(scope="module")
def original() -> nn.Module:
    """torchvision's own network in float64, its norms' statistics and weights randomised."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        network = inception.torchvision_models().inception_v3(
            weights=None, aux_logits=False, num_classes=2, init_weights=True, dropout=0.0
        )
        network.double().train()
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None
                nn.init.normal_(module.bias, std=0.3)
                nn.init.normal_(module.weight, mean=1.0, std=0.3)
        with torch.no_grad():
            network(torch.rand((8, 3, 75, 75), dtype=torch.float64))
    return network.eval().requires_grad_(requires_grad=False)


@pytest.fixture(scope="module")
def rebuilt(original: nn.Module) -> nn.Module:
    return with_relu_modules(copy.deepcopy(original))


@pytest.fixture
def images(uniform: Callable[..., Tensor]) -> Tensor:
    return uniform(2, 3, 75, 75)


def test_relu_modules_change_nothing_that_is_computed(original, rebuilt, images) -> None:
    assert not any(module.training for module in rebuilt.modules())
    torch.testing.assert_close(rebuilt(images), original(images), atol=1e-9, rtol=1e-9)
    assert list(rebuilt.state_dict()) == list(original.state_dict())
    ours, theirs = (copy.deepcopy(network).train() for network in (rebuilt, original))
    assert torch.equal(ours(images), theirs(images))


def test_every_nonlinearity_is_a_module_that_is_used_once(rebuilt, images) -> None:
    network = copy.deepcopy(rebuilt)
    calls = {module: 0 for module in network.modules() if isinstance(module, nn.ReLU)}
    for relu in calls:
        relu.register_forward_hook(lambda relu, *_: calls.update({relu: calls[relu] + 1}))
    network(images[:1])
    # 94 convolutions and four pools of four.
    assert list(calls.values()) == [1] * (94 + 4 * 4)
    assert not any(isinstance(module, nn.MaxPool2d) for module in network.modules())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_deep_lift_explains_the_whole_change_of_the_output(original, rebuilt, images) -> None:
    """Its contributions add up to f(x) − f(baseline); without the modules they do not."""
    captum = pytest.importorskip("captum.attr")
    baseline = images.flip(0).contiguous()
    for target in (0, 1):
        change = (rebuilt(images) - rebuilt(baseline))[:, target]
        assert change.abs().min() > 1e-3
        explained = captum.DeepLift(rebuilt).attribute(images, baseline, target=target)
        torch.testing.assert_close(explained.sum((1, 2, 3)), change, rtol=1e-6, atol=1e-8)
    blind = captum.DeepLift(original).attribute(images, baseline, target=1).sum((1, 2, 3))
    assert ((blind - change).abs() / change.abs()).max() > 0.1


@pytest.mark.parametrize("size", [(3, 3), (5, 9), (6, 8), (7, 12)])
def test_max_pool_through_relus_is_max_pool(size: tuple[int, int], generator) -> None:
    x = torch.randn((2, 4, *size), generator=generator, dtype=torch.float64)
    expected = F.max_pool2d(x, kernel_size=3, stride=2)
    torch.testing.assert_close(MaxPool().eval()(x), expected)
    assert torch.equal(MaxPool().train()(x), expected)


def test_pixels_are_enlarged_to_the_side_without_a_shift() -> None:
    """A slope stays one: pixel i of the large image lies at (i + ½)·16/80 − ½ of the small."""
    classifier = InceptionClassifier(2, 80).eval()
    classifier.network = Recorder()
    x = torch.arange(16.0).expand(1, 3, 16, 16) / 16
    classifier(x)
    (enlarged,) = classifier.network.seen
    assert enlarged.shape == (1, 3, 80, 80)
    assert torch.equal(enlarged, classifier.enlarge(x))  # the null of heatmaps needs this step
    place = ((torch.arange(80) + 0.5) * 16 / 80 - 0.5).clamp(0, 15)
    torch.testing.assert_close(enlarged, (place / 16).expand_as(enlarged))


def test_training_is_adam_at_a_constant_rate_on_the_cross_entropy() -> None:
    """Five steps on all images against Adam written out, with its default parameters."""
    data = tinted(12)
    network = nn.Sequential(nn.Flatten(), nn.Linear(768, 2))
    theta = torch.cat([network[1].weight, network[1].bias[:, None]], 1).detach().double()
    x = ((data.images.double() + 0.5) / 256).flatten(1)
    inputs = torch.cat([x, torch.ones(12, 1)], 1)
    first, second = torch.zeros_like(theta), torch.zeros_like(theta)
    losses = []
    for t in range(1, 6):
        probability = (inputs @ theta.T).softmax(1)
        losses.append(-probability[torch.arange(12), data.labels].log().mean().item())
        gradient = (probability - F.one_hot(data.labels, 2)).T @ inputs / 12
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient.square()
        unbiased = first / (1 - 0.9**t), second / (1 - 0.999**t)
        theta = theta - 0.01 * unbiased[0] / (unbiased[1].sqrt() + 1e-8)
    settings = dataclasses.replace(PLAIN, epochs=5, batch_size=12, learning_rate=0.01)
    curve = fit(network, data, settings).curve
    assert [p["loss"] for p in curve] == pytest.approx(losses, rel=1e-4)
    fitted = torch.cat([network[1].weight, network[1].bias[:, None]], 1).detach().double()
    torch.testing.assert_close(fitted, theta, atol=1e-4, rtol=1e-3)


def test_a_planted_cue_is_learned_and_the_error_is_that_of_unseen_images() -> None:
    network = small()
    settings = dataclasses.replace(TINY, epochs=15, batch_size=20, learning_rate=0.02)
    test = tinted(60, seed=1)
    curve = fit(network, tinted(200), settings).curve
    assert curve[-1]["loss"] < 0.3 * curve[0]["loss"]
    network.train()
    assert error_rate(network, test) < 0.05
    assert network.training
    swapped = dataclasses.replace(test, labels=1 - test.labels)
    assert error_rate(network, swapped) > 0.95


def test_error_is_counted_in_evaluation_mode_over_all_batches() -> None:
    network, data = small(), tinted(230)
    fit(network, data, TINY)
    network.eval()
    wrong = sum(
        int(network((image[None].float() + 0.5) / 256).argmax()) != int(label)
        for image, label in zip(data.images, data.labels, strict=True)
    )
    assert error_rate(network.train(), data) == wrong / 230
    assert network.training
    assert error_rate(network.eval(), data) == wrong / 230
    assert not network.training
    assert 0 < wrong < 230


def test_images_are_mirrored_half_of_the_time_and_each_is_seen_once_an_epoch() -> None:
    data = tinted(60)
    recorder = Recorder()
    fit(recorder, data, dataclasses.replace(TINY, batch_size=20, epochs=2))
    x = (data.images.float() + 0.5) / 256
    orders = []
    for epoch in (recorder.seen[:3], recorder.seen[3:]):
        seen = torch.cat(epoch)[:, None]
        same = (seen == x).flatten(2).all(2)
        mirrored = (seen == x.flip(3)).flatten(2).all(2)
        assert (same | mirrored).sum(0).tolist() == [1] * 60
        assert 15 < int(mirrored.sum()) < 45
        orders.append((same | mirrored).int().argmax(1).tolist())
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == list(range(60)) != orders[0]


def test_the_seed_draws_the_order_and_the_mirrored() -> None:
    seen = {}
    for name, seed in (("one", 3), ("again", 3), ("other", 4)):
        recorder = Recorder()
        fit(recorder, tinted(60), dataclasses.replace(TINY, batch_size=20, seed=seed))
        seen[name] = torch.cat(recorder.seen)
    assert torch.equal(seen["one"], seen["again"])
    assert not torch.equal(seen["one"], seen["other"])


def test_progress_counts_steps_and_images() -> None:
    seen: list[Progress] = []
    settings = dataclasses.replace(PLAIN, epochs=3, batch_size=2)
    trained = fit(Recorder(), tinted(121, side=4), settings, seen.append)
    # 60 complete batches per epoch; a report after 50 of them and at the end.
    assert [p.done for p in seen] == [50, 60, 110, 120, 170, 180]
    assert [p.figures["epoch"] for p in seen] == [1, 1, 2, 2, 3, 3]
    assert {(p.task, p.total, p.figures["epochs"]) for p in seen} == {("training", 180, 3)}
    assert trained.images == 360
    for report, epoch in zip(seen[1::2], trained.curve, strict=True):
        figures = report.figures
        assert all(figures[name] == epoch[name] for name in ("epoch", "loss", "error"))
        assert epoch["loss"] == pytest.approx(math.log(2), abs=0.05)
    rates = [p.figures["images_per_second"] for p in seen]
    assert rates[-1] * trained.seconds == pytest.approx(360)
    assert trained.seconds > 2 * 50 / rates[0]


@pytest.fixture(scope="module")
def trained() -> InceptionResult:
    held_out = {"test": tinted(30, 1), "validation": tinted(20, 2)}
    return train_inception(tinted(32), held_out, TINY, device=CPU)


@pytest.mark.slow
def test_the_real_network_learns_the_planted_cue() -> None:
    """Six steps on the same sixteen images, in the network's own training mode."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        network = InceptionClassifier(2, 75)
        curve = fit(network, tinted(16), dataclasses.replace(PLAIN, epochs=6)).curve
    assert min(p["loss"] for p in curve[3:]) < 0.7 * curve[0]["loss"]


@pytest.mark.slow
def test_figures_are_those_of_the_stored_weights(trained: InceptionResult, tmp_path: Path) -> None:
    path = tmp_path / "network.safetensors"
    trained.save(path)
    loaded = load_inception(path, CPU, trained.class_names)
    with pytest.raises(InputError, match="the model has x, y: use a network of the model's"):
        load_inception(path, CPU, ("x", "y"))
    x = (tinted(30, 1).images.float() + 0.5) / 256
    with torch.no_grad():
        logits = loaded.classifier(x)
        assert torch.equal(logits, trained.classifier(x))
    wrong = int((logits.argmax(1) != tinted(30, 1).labels).sum())
    assert trained.errors["test"] == wrong / 30
    assert set(trained.errors) == {"test", "validation"}
    assert dataclasses.replace(loaded, classifier=trained.classifier) == trained
    assert loaded.settings == TINY
    tensors, about = read_tensors(path)
    assert about["settings"]["dataset"] == "tinted"
    assert {value.dtype for value in tensors.values() if value.ndim > 1} == {torch.float16}
    assert tensors["network.Mixed_7c.branch1x1.bn.running_var"].dtype == torch.float32
    assert path.stat().st_size < 50e6
    settings = dataclasses.replace(TINY, stored_bits=8)
    dataclasses.replace(trained, settings=settings).save(path)
    assert path.stat().st_size < 23e6
    small = load_inception(path, CPU)
    assert small.settings == settings
    weights, kept = trained.classifier.state_dict(), small.classifier.state_dict()
    for name, value in weights.items():
        largest = value.abs().amax() if value.ndim > 1 else torch.zeros(())
        assert (value - kept[name]).abs().max() <= (0.5 / 127 + 1 / 256) * largest, name


@pytest.mark.slow
def test_training_is_a_function_of_the_seed_and_leaves_global_state_alone(trained) -> None:
    with torch.random.fork_rng([]):
        torch.rand(1)
        before = torch.random.get_rng_state(), torch.backends.cudnn.benchmark
        again = train_inception(tinted(32), {"test": tinted(4, 1)}, TINY, device=CPU)
        assert torch.equal(torch.random.get_rng_state(), before[0])
        assert torch.backends.cudnn.benchmark == before[1]
    assert set(again.errors) == {"test"}
    first, second = trained.classifier.state_dict(), again.classifier.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    settings = dataclasses.replace(TINY, seed=1, stored_bits=8)
    other = train_inception(
        tinted(2), {"test": tinted(4, 1)}, settings, device=CPU
    ).classifier.network.fc.weight
    assert not torch.allclose(first["network.fc.weight"], other, atol=0.05)
    assert other.shape[1] > 255 >= len(other[0].unique())


@pytest.mark.slow
def test_files_that_hold_no_inception_are_refused(trained, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write_tensors(path, {"x": torch.zeros(1)}, {"kind": "judges"})
    with pytest.raises(InputError, match="holds 'judges', not 'inception'"):
        load_inception(path, CPU)
    trained.save(path)
    tensors, about = read_tensors(path)
    del tensors["network.fc.bias"]
    write_tensors(path, tensors, about)
    with pytest.raises(InputError, match="train it again"):
        load_inception(path, CPU)


def test_torchvision_that_is_missing_is_named_with_the_remedy(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision.models", raising=False)
    with pytest.raises(InputError, match=r"pip install 'ecinn\[inception\]'"):
        InceptionClassifier(2)


@pytest.mark.parametrize(
    ("failure", "asks"), [(None, False), ("torchvision::nms", True), ("torchvision::x", False)]
)
def test_operators_are_declared_only_where_torchvision_asks(monkeypatch, failure, asks) -> None:
    declared: list[bool] = []

    def import_module(name: str) -> str:
        if failure and not declared:
            raise RuntimeError(f"operator {failure} does not exist")
        return name

    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(inception, "_declare_missing_operators", lambda: declared.append(True))
    with contextlib.nullcontext() if asks or not failure else pytest.raises(RuntimeError):
        assert inception.torchvision_models() == "torchvision.models"
    assert declared == [True] * asks


def run(*arguments: object) -> object:
    return CliRunner().invoke(app.app, ["inception", *map(str, arguments)])


@pytest.fixture
def faces(monkeypatch) -> list[tuple[object, ...]]:
    """Tinted noise instead of CelebA; the requested splits."""
    asked: list[tuple[object, ...]] = []

    def load(name: str, split: str, folder: Path | None = None) -> Dataset:
        asked.append((name, split, folder))
        return tinted({"train": 9, "validation": 3, "test": 4}[split])

    monkeypatch.setattr(commands, "load_images", load)
    return asked


@pytest.mark.slow
def test_command_writes_the_network_and_its_record(faces, tmp_path: Path) -> None:
    file = tmp_path / "new" / "smiling.safetensors"
    where = ("--device", "cpu", "--celeba", tmp_path)
    options = ("--epochs", 1, "--seed", 5, "--bits", 8, "--limit", 4, *where)
    result = run("celeba/Smiling", "--out", file, *options)
    assert result.exit_code == 0, result.output
    assert faces == [("celeba/Smiling", s, tmp_path) for s in ("train", "validation", "test")]
    record = json.loads(file.with_suffix(".json").read_text())
    loaded = load_inception(file, CPU)
    moved = Augmentation(shift=3.0, whole_pixels=True, flip=True)
    expected = InceptionSettings(
        "celeba/Smiling", epochs=1, seed=5, augmentation=moved, stored_bits=8
    )
    assert loaded.settings == expected
    assert record["settings"] == dataclasses.asdict(expected)
    assert record["errors"] == loaded.errors
    assert loaded.errors["test"] == error_rate(loaded.classifier, tinted(4))
    assert (record["training_images"], record["images"]) == (4, {"test": 4, "validation": 3})
    assert record["command"].endswith("--epochs 1 --seed 5 --bits 8 --limit 4")
    assert f"{100 * record['errors']['test']:.2f} % wrong on 4 test images" in result.stdout
    assert str(file) in result.stdout.replace("\n", "")
    assert "training" in result.stderr


def test_command_needs_an_attribute_of_celeba(faces, tmp_path: Path) -> None:
    assert "not on mnist" in str(run("mnist", "--out", tmp_path / "file").exception)
    assert faces == []


@pytest.mark.slow
def test_command_is_imported_without_the_optional_packages() -> None:
    absent = ["captum", "h5py", "torchvision", "matplotlib"]
    program = f"import sys; sys.modules.update(dict.fromkeys({absent})); import ecinn.cli.networks"
    subprocess.run([sys.executable, "-c", program], check=True)
