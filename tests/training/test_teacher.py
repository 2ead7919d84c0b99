"""The teacher: the ensemble's prediction, augmentation, training and file."""

import dataclasses
import json
import math
import random
import subprocess
import sys
from functools import partial
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
from ecinn.data.celeba import ATTRIBUTES
from ecinn.data.dataset import Dataset
from ecinn.errors import EcinnError, InputError
from ecinn.progress import Progress
from ecinn.training import teacher as teacher_module
from ecinn.training.augmented import (
    TeacherSettings,
    cut_out,
    jitter,
    mixup_weight,
    teacher_optimiser,
    training_batch,
)
from ecinn.training.networks import cosine, train_network
from ecinn.training.step import cosine_schedule
from ecinn.training.teacher import (
    CLASS_TEACHER,
    Ensemble,
    ResidualNetwork,
    Teacher,
    load_teacher,
    logit_of_mean,
    teacher_errors,
    train_teacher,
)
from helpers.builders import randomise

CPU = torch.device("cpu")
TINY = TeacherSettings(width=4, epochs=1, batch_size=16, augmentation=Augmentation(1.0, flip=True))
STILL = dataclasses.replace(
    TINY, augmentation=Augmentation(), cut_out=0.0, jitter=0.0, mixup=0.0, label_smoothing=0.0
)
"""Pictures as they are, targets as they are."""


def tinted(count: int, seed: int = 0, side: int = 16, attributes: int = 3) -> Dataset:
    """Noise of three colours; attribute i says whether there is more of colour i (modulo 3)."""
    generator = torch.Generator().manual_seed(seed)
    known = torch.randint(2, (count, 3), generator=generator)
    images = 100 * torch.rand((count, 3, side, side), generator=generator)
    images += 100 * known[:, :, None, None]
    repeated = known[:, torch.arange(attributes) % 3].to(torch.uint8)
    return Dataset(images.to(torch.uint8), known[:, 0], ("a", "b"), repeated)


def network(seed: int, attributes: int = 5) -> ResidualNetwork:
    """In float64, every parameter and statistic randomised."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        member = randomise(ResidualNetwork(3, attributes, 8).double(), seed)
        for name, value in member.named_buffers():
            if "running" in name:
                value.copy_(torch.rand(value.shape) + (0.3 if name.endswith("var") else -0.5))
    return member


@pytest.fixture
def ensemble() -> Ensemble:
    return Ensemble([network(seed) for seed in (1, 2, 3)], exclusive=False)


class Linear(ResidualNetwork):
    """σ⁻¹(p) = W x̄ + b, x̄ the mean colour of the left half; counts how often it is requested."""

    def __init__(self, bias: float = 0.1) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 9).reshape(3, 3) + 3 * torch.eye(3))
        self.bias = nn.Parameter(torch.linspace(bias, bias + 0.2, 3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x[..., :8].mean((2, 3)) @ self.weight.T + self.bias


def test_the_network_is_the_residual_network_it_says(uniform) -> None:
    """Written out with functions of the stored weights, in evaluation mode."""
    member = network(7).eval()
    weights = member.state_dict()

    def norm(name: str, h: Tensor) -> Tensor:
        mean, var, scale, shift = (
            weights[f"{name}.{part}"][:, None, None]
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return ((h - mean) / (var + 1e-5).sqrt() * scale + shift).clamp(min=0)

    x = uniform(3, 3, 20, 24)
    h = F.conv2d(4 * x - 2, weights["stem.weight"], padding=1)
    for index in range(8):
        name = f"blocks.{index}"
        stride = 2 if index in (2, 4, 6) else 1
        active = norm(f"{name}.norm1", h)
        kernels = weights[f"{name}.convolution1.weight"]
        inner = norm(f"{name}.norm2", F.conv2d(active, kernels, stride=stride, padding=1))
        if stride == 2:
            h = F.conv2d(active, weights[f"{name}.shortcut.weight"], stride=2)
        h = h + F.conv2d(inner, weights[f"{name}.convolution2.weight"], padding=1)
    assert h.shape == (3, 64, 3, 3)
    pooled = norm("norm", h).mean((2, 3))
    expected = pooled @ weights["head.weight"].T + weights["head.bias"]
    assert expected.std(0).min() > 1e-3
    torch.testing.assert_close(member(x), expected)


def test_the_ensemble_returns_the_logit_of_the_mean_probability(ensemble, uniform) -> None:
    x = uniform(4, 3, 16, 16)
    answers = [m(picture).sigmoid() for m in ensemble.members for picture in (x, x.flip(3))]
    mean = sum(answers) / 6
    assert torch.stack(answers).std(0).min() > 1e-4
    torch.testing.assert_close(ensemble(x), (mean / (1 - mean)).log())


def test_mean_of_probabilities_is_exact_where_they_round_to_one() -> None:
    """Of −a and a it is ½, of a and a it is a; e⁻¹⁰⁰ and e⁻¹⁰² have the mean of a formula."""
    logits = torch.tensor([[[-200.0, 150.0, 100.0, -100.0]], [[200.0, 150.0, 102.0, -102.0]]])
    far = 100 - math.log((1 + math.exp(-2)) / 2)
    torch.testing.assert_close(logit_of_mean(logits), torch.tensor([[0.0, 150.0, far, -far]]))


def test_mirror_images_have_the_same_prediction(ensemble, uniform) -> None:
    x = uniform(4, 3, 16, 20)
    torch.testing.assert_close(ensemble(x.flip(3)), ensemble(x))


def test_the_ensemble_stays_frozen_inside_a_network_in_training(ensemble, uniform) -> None:
    x = uniform(4, 3, 16, 16).requires_grad_()
    first = ensemble(x)
    assert nn.ModuleList([ensemble]).train().training
    assert not any(module.training for module in ensemble.modules())
    assert torch.equal(ensemble(x), first)
    assert not first.requires_grad
    assert not any(parameter.requires_grad for parameter in ensemble.parameters())


def test_cut_out_covers_a_window_in_a_share_of_the_images(generator) -> None:
    x = 0.6 + 0.4 * torch.rand((400, 3, 20, 40), generator=generator)
    covered = cut_out(x, 0.35, 0.5, generator)
    changed = covered != x
    assert (covered[changed] == 0.5).all()
    assert torch.equal(changed.all(1), changed.any(1))
    areas = changed[:, 0].sum((1, 2))
    assert set(areas.tolist()) == {0, 7 * 14}
    assert 0.4 < (areas > 0).float().mean() < 0.6
    rows, columns = changed.any(3)[:, 0], changed.any(2)[:, 0]
    assert [set(side.sum(1).tolist()) for side in (rows, columns)] == [{0, 7}, {0, 14}]
    # Up to the edges.
    assert all(side.any(0).all() for side in (rows, columns))
    assert torch.equal(cut_out(x, 0.35, 0.0, generator), x)


def test_colours_change_by_the_drawn_factors(generator) -> None:
    """The mean shows brightness, the spread of greys contrast too, that of colours all three."""
    x = 0.4 + 0.2 * torch.rand((500, 3, 4, 4), generator=generator)
    y = jitter(x, 0.25, generator)
    mean = y.mean((1, 2, 3)) / x.mean((1, 2, 3))
    greys = y.mean(1).flatten(1).std(1) / x.mean(1).flatten(1).std(1)
    colours = y.std(1).mean((1, 2)) / x.std(1).mean((1, 2))
    factors = torch.stack([mean, greys / mean, colours / greys])
    torch.testing.assert_close(factors.amin(1), torch.full((3,), 0.75), atol=0.01, rtol=0.0)
    torch.testing.assert_close(factors.amax(1), torch.full((3,), 1.25), atol=0.01, rtol=0.0)
    assert torch.corrcoef(factors).triu(1).abs().max() < 0.2
    assert jitter(1.6 * x, 0.25, generator).max() == 1


def test_mixup_weights_of_half_of_the_batches_follow_a_beta_distribution() -> None:
    generator = random.Random(0)
    weights = torch.tensor([mixup_weight(TINY, generator) for _ in range(4000)])
    drawn = weights[weights < 1]
    assert abs(len(drawn) / 4000 - 0.5) < 0.05
    # Beta(a, a) has mean ½ and variance 1 / (4 (2a + 1)).
    assert abs(drawn.mean() - 0.5) < 0.03
    assert abs(drawn.var() - 1 / (4 * 1.4)) < 0.01
    assert {mixup_weight(STILL, generator) for _ in range(20)} == {1.0}


def test_images_and_targets_are_mixed_with_the_same_weight(generator) -> None:
    data = tinted(10)
    batch = partial(training_batch, data.images, data.attributes)
    still, exact = batch(STILL, 1.0, generator)
    torch.testing.assert_close(still, (data.images.float() + 0.5) / 256)
    assert torch.equal(exact, data.attributes.float())
    x, targets = batch(TINY, 1.0, generator)
    torch.testing.assert_close(targets, torch.where(data.attributes > 0, 0.975, 0.025))
    assert (x != still).flatten(1).any(1).all()
    covered = (x == 0.5).all(1).flatten(1).sum(1)
    assert set(covered.tolist()) == {0, 6 * 6}
    mixed, soft = batch(STILL, 0.25, generator)
    for i in range(10):
        torch.testing.assert_close(mixed[i], 0.25 * still[i] + 0.75 * still[i - 1])
        torch.testing.assert_close(soft[i], 0.25 * exact[i] + 0.75 * exact[i - 1])


def test_members_are_trained_with_adamw_a_cosine_and_an_average() -> None:
    """Against AdamW and the moving average written out, on a linear network."""
    data = tinted(12)
    settings = dataclasses.replace(STILL, learning_rate=0.1, weight_decay=0.3)
    network = Linear()
    x, targets = (data.images.float() + 0.5) / 256, data.attributes.float()
    inputs = torch.cat([x[..., :8].double().mean((2, 3)), torch.ones(12, 1)], 1)
    theta = torch.cat([network.weight, network.bias[:, None]], 1).detach().double()
    decayed = torch.tensor([1.0, 1.0, 1.0, 0.0]) * 0.3
    average, first, second = theta, torch.zeros_like(theta), torch.zeros_like(theta)
    expected = []
    for t in range(15):
        rate = 0.1 * cosine_schedule(t / 40, 0.05)
        probability = (inputs @ theta.T).sigmoid()
        loss = -(targets * probability.log() + (1 - targets) * (1 - probability).log()).mean()
        wrong = ((probability > 0.5) != (targets > 0.5)).double().mean()
        expected.append((float(loss), float(wrong)))
        gradient = (probability - targets).T @ inputs / (12 * 3)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient.square()
        size = (second / (1 - 0.999 ** (t + 1))).sqrt() + 1e-8
        theta = theta - rate * decayed * theta - rate * first / (1 - 0.9 ** (t + 1)) / size
        decay = min(0.6, (1 + t) / (10 + t))
        average = decay * average + (1 - decay) * theta

    def batch_loss(batch: Tensor) -> tuple[Tensor, Tensor]:
        logits = network(x[batch])
        wrong = ((logits > 0) != (targets[batch] > 0.5)).float().mean()
        return F.binary_cross_entropy_with_logits(logits, targets[batch]), wrong

    trained = train_network(
        network,
        batch_loss,
        teacher_optimiser(network, settings),
        images=12,
        batch_size=12,
        epochs=15,
        generator=torch.Generator(),
        schedule=lambda optimiser, steps: cosine(0.05)(optimiser, 40),  # only the first 15
        ema_decay=0.6,
    )
    for epoch, figures in zip(trained.curve, expected, strict=True):
        assert (epoch["loss"], epoch["error"]) == pytest.approx(figures, rel=1e-3)
    assert trained.network.count == 15
    fitted = torch.cat([trained.network.weight, trained.network.bias[:, None]], 1).double()
    torch.testing.assert_close(fitted, average, atol=1e-3, rtol=1e-3)
    assert (network.weight - trained.network.weight).abs().max() > 0.05


@pytest.fixture(scope="module")
def trained() -> Teacher:
    """Six epochs on 240 pictures with every kind of change."""
    settings = dataclasses.replace(TINY, epochs=6, learning_rate=1e-2)
    return train_teacher(tinted(240), tinted(120, seed=1), settings, device=CPU)


@pytest.mark.slow
def test_planted_cues_are_learned(trained) -> None:
    assert max(trained.record["errors"]["ensemble"]) < 0.05
    for curve in trained.record["curves"].values():
        assert curve[-1]["loss"] < 0.8 * curve[0]["loss"]
        assert curve[-1]["error"] < curve[0]["error"]
    assert not torch.allclose(*(m.head.weight for m in trained.ensemble.members), atol=0.01)


def test_errors_are_counted_for_every_attribute() -> None:
    """Networks of low accuracy, image by image against batches."""
    data = tinted(200)
    members = [Linear(-1.9), Linear(-1.5)]
    single, ensemble = torch.zeros(3), torch.zeros(3)
    for image, known in zip(data.images, data.attributes, strict=True):
        x = (image[None].float() + 0.5) / 256
        ensemble += (Ensemble(members, exclusive=False)(x)[0] > 0) != (known == 1)
        for member in members:
            single += ((member(x)[0] > 0) != (known == 1)) / 2
    errors = teacher_errors(Ensemble(members, exclusive=False), data, batch_size=70)
    assert errors["single"] == pytest.approx((single / 200).tolist())
    assert errors["ensemble"] == pytest.approx((ensemble / 200).tolist())
    assert len({*errors["single"], *errors["ensemble"]}) >= 4


def test_an_ensemble_of_classes_answers_the_mean_softmax(generator) -> None:
    """Without mirroring, which changes digits; errors are those of its highest probability."""
    members = [Linear(-1.9), Linear(2.5)]
    members[1].weight.data.mul_(-2)
    ensemble = Ensemble(members, exclusive=True)
    images = torch.randint(256, (40, 3, 16, 16), generator=generator, dtype=torch.uint8)
    labels = torch.randint(3, (40,), generator=generator)
    x = (images.float() + 0.5) / 256
    with torch.no_grad():
        odds = [member(x).exp() for member in members]
        mean = sum(each / each.sum(1, keepdim=True) for each in odds) / 2
    torch.testing.assert_close(ensemble(x).exp(), mean)
    errors = teacher_errors(ensemble, Dataset(images, labels, ("a", "b", "c")), batch_size=15)
    single = [(each.argmax(1) != labels).float().mean() for each in odds]
    assert errors["single"] == pytest.approx([float(sum(single)) / 2])
    assert errors["ensemble"] == pytest.approx([float((mean.argmax(1) != labels).float().mean())])


@pytest.mark.slow
def test_classes_are_learned_and_saved(tmp_path: Path) -> None:
    """Grey images whose class is the brightest quarter; the answer is the mean softmax."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(3, (240,), generator=generator)
    images = 80 * torch.rand((240, 1, 16, 16), generator=generator)
    for number, label in enumerate(labels.tolist()):
        images[number, 0, 5 * label : 5 * label + 5] += 90
    data = Dataset(images.to(torch.uint8), labels, ("a", "b", "c"))
    settings = dataclasses.replace(CLASS_TEACHER, width=8, epochs=6, batch_size=24, members=2)
    settings = dataclasses.replace(settings, augmentation=Augmentation(1.0))
    teacher = train_teacher(data, data.first(60), settings, device=CPU)
    assert teacher.record["errors"]["ensemble"][0] < 0.05
    path = tmp_path / "teacher.safetensors"
    teacher.save(path)
    loaded = load_teacher(path, CPU)
    x = (data.images[:20].float() + 0.5) / 256
    assert torch.equal(loaded.ensemble(x), teacher.ensemble(x))
    mean = sum(member(x).softmax(1) for member in loaded.ensemble.members) / 2
    torch.testing.assert_close(loaded.ensemble(x), mean.log())
    wrong = [
        float((m(x).argmax(1) != labels[:20]).float().mean()) for m in loaded.ensemble.members
    ]
    errors = teacher_errors(loaded.ensemble, data.first(20), batch_size=7)
    assert errors["single"] == pytest.approx([sum(wrong) / 2])


def test_smoothed_targets_of_classes_sum_to_one(generator) -> None:
    labels = F.one_hot(torch.tensor([0, 2, 1]), 3).to(torch.uint8)
    settings = dataclasses.replace(STILL, label_smoothing=0.3)
    images = torch.zeros((3, 1, 16, 16), dtype=torch.uint8)
    _, targets = training_batch(images, labels, settings, 1.0, generator, exclusive=True)
    torch.testing.assert_close(targets, torch.where(labels > 0, 0.8, 0.1))


@pytest.mark.slow
def test_saved_networks_have_the_measured_errors(trained, tmp_path: Path) -> None:
    path = tmp_path / "teacher.safetensors"
    trained.save(path)
    loaded = load_teacher(path, CPU)
    validation = tinted(120, seed=1)
    x = (validation.images.float() + 0.5) / 256
    assert torch.equal(loaded.ensemble(x), trained.ensemble(x))
    assert teacher_errors(loaded.ensemble, validation) == loaded.record["errors"]
    assert (loaded.settings, loaded.record) == (trained.settings, trained.record)
    assert not any(parameter.requires_grad for parameter in loaded.ensemble.parameters())
    tensors, _ = read_tensors(path)
    assert {value.dtype for value in tensors.values() if value.ndim > 1} == {torch.float16}
    assert tensors["members.1.norm.running_var"].dtype == torch.float32
    assert (loaded.record["device"], loaded.record["torch"]) == ("CPU", torch.__version__)


def test_training_is_a_function_of_the_seed_and_leaves_global_state_alone() -> None:
    with torch.random.fork_rng([]):
        torch.manual_seed(99)
        before = torch.random.get_rng_state()
        first = train_teacher(tinted(48), tinted(4), TINY, device=CPU)
        assert torch.equal(torch.random.get_rng_state(), before)
        torch.rand(1)
        second = train_teacher(tinted(48), tinted(4), TINY, device=CPU)
    reseeded = dataclasses.replace(TINY, seed=1, members=1)
    other = train_teacher(tinted(48), tinted(4), reseeded, device=CPU)
    weights = [result.ensemble.state_dict() for result in (first, second, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.allclose(*(each["members.0.stem.weight"] for each in weights[1:]), atol=0.01)


def test_every_member_reports_its_progress() -> None:
    seen: list[Progress] = []
    settings = dataclasses.replace(STILL, epochs=2, batch_size=8)
    train_teacher(tinted(20), tinted(4), settings, device=CPU, observe=seen.append)
    assert [(p.task, p.done, p.total) for p in seen] == [
        (f"network {member} of 2", done, 4) for member in (1, 2) for done in (2, 4)
    ]


def test_a_loss_that_is_not_finite_stops_the_training() -> None:
    wild = dataclasses.replace(STILL, learning_rate=math.inf)
    with pytest.raises(EcinnError, match="the loss became nan") as caught:
        train_teacher(tinted(60), tinted(4), wild, device=CPU)
    assert "\n" not in str(caught.value)


def test_unsuitable_data_is_refused() -> None:
    data = tinted(8)

    def refuse(message: str, train: Dataset) -> None:
        with pytest.raises(InputError, match=message):
            train_teacher(train, data, TINY, device=CPU)

    refuse("at least 16 pixels", tinted(8, side=15))


@pytest.mark.slow
def test_files_that_hold_no_teacher_are_refused(trained, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write_tensors(path, {}, {"kind": "inception"})
    with pytest.raises(InputError, match="holds 'inception', not 'teacher'"):
        load_teacher(path, CPU)
    trained.save(path)
    write_tensors(path, {}, read_tensors(path)[1])
    with pytest.raises(InputError, match="train it again"):
        load_teacher(path, CPU)


def run(*arguments: object) -> object:
    return CliRunner().invoke(app.app, ["teacher", "celeba", *map(str, arguments)])


@pytest.fixture
def faces(monkeypatch) -> list[tuple[object, ...]]:
    """Tinted noise instead of CelebA, and tiny networks; the requested splits."""
    requested: list[tuple[object, ...]] = []

    def load(name: str, split: str, folder: Path | None = None) -> Dataset:
        requested.append((name, split, folder))
        return tinted({"train": 9, "validation": 30}[split], attributes=40)

    monkeypatch.setattr(commands, "load_images", load)

    def train_small(
        data: Dataset, validation: Dataset, settings: TeacherSettings, **options: object
    ) -> Teacher:
        return train_teacher(data, validation, dataclasses.replace(settings, width=4), **options)

    monkeypatch.setattr(teacher_module, "train_teacher", train_small)
    return requested


def test_command_writes_the_networks_and_their_record(faces, tmp_path: Path) -> None:
    file = tmp_path / "new" / "x.safetensors"
    options = ("--members", 3, "--epochs", 2, "--seed", 5, "--limit", 4, "--device", "cpu")
    result = run("--out", file, *options, "--celeba", tmp_path)
    assert result.exit_code == 0, result.output
    assert faces == [("celeba/Smiling", split, tmp_path) for split in ("train", "validation")]
    record = json.loads(file.with_suffix(".json").read_text())
    loaded = load_teacher(file, CPU)
    assert loaded.settings == TeacherSettings(members=3, width=4, epochs=2, seed=5)
    assert record["settings"] == dataclasses.asdict(loaded.settings)
    assert record["command"].endswith("--members 3 --epochs 2 --seed 5 --limit 4")
    assert (record["training_images"], record["validation_images"]) == (4, 4)
    errors = teacher_errors(loaded.ensemble, tinted(30, attributes=40).first(4))
    assert {who: list(named.values()) for who, named in record["errors"].items()} == errors
    for name in ("Smiling", "High_Cheekbones", "Wearing_Lipstick", "Heavy_Makeup"):
        both = [100 * errors[who][ATTRIBUTES.index(name)] for who in ("ensemble", "single")]
        assert f"{name:<16} {both[0]:5.2f} %  ({both[1]:.2f} %)" in result.stdout
    assert f"mean of 40       {100 * sum(errors['ensemble']) / 40:5.2f} %" in result.stdout
    assert "network 3 of 3" in result.stderr
    printed = json.loads(run("--out", file, *options, "--json").stdout)
    assert printed == {"file": str(file), **json.loads(file.with_suffix(".json").read_text())}


def test_command_refuses_unsuitable_output_paths(faces, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "teacher.json"):
        assert "--out must name a file" in str(run("--out", path, "--device", "cpu").exception)
    assert faces == []


@pytest.mark.slow
def test_training_needs_none_of_the_optional_packages() -> None:
    absent = ["captum", "h5py", "torchvision", "matplotlib", "typer", "rich"]
    block = f"import sys; sys.modules.update(dict.fromkeys({absent}))"
    subprocess.run([sys.executable, "-c", f"{block}; import ecinn.training.teacher"], check=True)
