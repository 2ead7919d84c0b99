"""Judges of faces: both networks written out, mirror images, figures of the stored weights."""

import copy
import dataclasses
import json
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ecinn.classifier.tensor_files import find_file, read_tensors
from ecinn.cli import networks as commands
from ecinn.data.augmentation import Augmentation
from ecinn.data.celeba import ATTRIBUTES, load_celeba
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.progress import Progress
from ecinn.studies import face_judges
from ecinn.studies.face_judges import (
    LABELS,
    FaceJudges,
    FaceJudgeSettings,
    JudgeNetwork,
    attribute_weights,
    load_face_judges,
    separable_network,
    train_face_judges,
)
from ecinn.studies.judges import SHIPPED, load_judges, shipped_judges
from ecinn.training import augmented
from ecinn.training.networks import seeded
from helpers.command_line import fails, run
from helpers.face_judges import SMALL_FACE_JUDGES, random_face_judges
from helpers.paths import SHARED

CPU = torch.device("cpu")
TINY = SMALL_FACE_JUDGES


def tinted(count: int, seed: int = 0) -> Dataset:
    """Noise of three colours; attribute i says whether there is more of colour i modulo 3."""
    generator = torch.Generator().manual_seed(seed)
    known = torch.randint(2, (count, 3), generator=generator)
    images = 100 * torch.rand((count, 3, 16, 16), generator=generator)
    images += 100 * known[:, :, None, None]
    attributes = known[:, torch.arange(len(ATTRIBUTES)) % 3].to(torch.uint8)
    return Dataset(images.to(torch.uint8), known[:, 0], ("a", "b"), attributes)


class ByHand:
    """The layers of a network, written out with functions of its stored weights."""

    def __init__(self, network: JudgeNetwork) -> None:
        self.weights = network.double().state_dict()

    def convolve(self, name: str, h: Tensor, **options: int) -> Tensor:
        """Apply a convolution and the norm after it."""
        before, _, number = name.rpartition(".")
        norm = f"{before}.{int(number) + 1}"
        mean, var, scale, shift = (
            self.weights[f"{norm}.{part}"][:, None, None]
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        h = F.conv2d(h, self.weights[f"{name}.weight"], **options)
        return (h - mean) / (var + 1e-5).sqrt() * scale + shift

    def check(self, network: JudgeNetwork, x: Tensor, h: Tensor) -> None:
        features = h.mean((2, 3))
        torch.testing.assert_close(network.features(x), features)
        assert features.std(0).max() > 1e-2
        logits = features @ self.weights["head.weight"].T + self.weights["head.bias"]
        torch.testing.assert_close(network(x), logits)


def test_the_separable_network_is_what_it_says(uniform) -> None:
    """Of widths 4, 6, 8, 10 and depths 1, 2, 1."""
    network = random_face_judges().networks["separable"]
    hand, x = ByHand(network), uniform(3, 3, 20, 24)
    places = iter(range(0, 27, 3))

    def layer(h: Tensor, **options: int) -> Tensor:
        h = hand.convolve(f"layers.{next(places)}", h, **options)
        return h * h.sigmoid()

    h = layer(4 * x - 2, padding=1)
    for stride in (2, 2, 1, 2):
        h = layer(layer(h, padding=2, stride=stride, groups=h.shape[1]))
    assert (h.shape, next(places, None)) == ((3, 10, 3, 3), None)
    hand.check(network, x, h)


def test_the_residual_network_is_what_it_says(uniform) -> None:
    """Two blocks in each stage; the first of a later stage halves the image."""
    network = random_face_judges().networks["residual"]
    hand, x = ByHand(network), uniform(3, 3, 20, 24)
    h = hand.convolve("layers.0", 4 * x - 2, padding=1).clamp(min=0)
    for block in range(8):
        name, stride = f"layers.{block + 3}", 2 if block in (2, 4, 6) else 1
        inner = hand.convolve(f"{name}.residual.0", h, padding=1, stride=stride).clamp(min=0)
        inner = hand.convolve(f"{name}.residual.3", inner, padding=1)
        if stride == 2:
            h = hand.convolve(f"{name}.shortcut.0", h, stride=2)
        h = (h + inner).clamp(min=0)
    assert h.shape == (3, 6, 3, 3)
    hand.check(network, x, h)


def test_answers_are_means_over_face_and_mirror_image() -> None:
    """One face at a time, from each network's own output."""
    judges, data = random_face_judges(), tinted(9)
    scores, features = judges.scores(data.images), judges.features(data.images)
    smile = judges.probabilities(data.images, "Smiling")
    assert set(scores) == set(features) == set(smile) == {"residual", "separable"}
    for family, network in judges.networks.items():
        for row, image in enumerate(data.images):
            x = (image[None].float() + 0.5) / 256
            both = [network(picture)[0].sigmoid() for picture in (x, x.flip(3))]
            assert (both[0] - both[1]).abs().max() > 1e-4
            mean = (both[0] + both[1]) / 2
            torch.testing.assert_close(scores[family][row].sigmoid(), mean)
            torch.testing.assert_close(smile[family][row], mean[ATTRIBUTES.index("Smiling")])
            hidden = (network.features(x) + network.features(x.flip(3)))[0] / 2
            torch.testing.assert_close(features[family][row], hidden)


def test_batches_do_not_change_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    judges, images = random_face_judges(), tinted(23).images
    whole = judges.features(images)
    monkeypatch.setattr(face_judges, "_BATCH", 5)
    for family, features in judges.features(images).items():
        torch.testing.assert_close(features, whole[family])


def test_shipped_sizes_fit_in_two_mebibytes_and_a_fifth(tmp_path: Path) -> None:
    judges = FaceJudges(len(ATTRIBUTES), FaceJudgeSettings())
    point = {"epoch": 80, "loss": 0.123456789012345, "error": 0.123456789012345, "seconds": 99.9}
    judges.record = {"curves": {family: 80 * [point] for family in judges.networks}}
    judges.save(tmp_path / "file.safetensors")
    assert 2 * 2**20 < (tmp_path / "file.safetensors").stat().st_size <= 2.2 * 2**20
    tensors, _ = read_tensors(tmp_path / "file.safetensors")
    sizes = dict.fromkeys(judges.networks, 0)
    for name, value in tensors.items():
        sizes[name.split(".")[1]] += value.nbytes
        assert (value.dtype == torch.int8) == (value.ndim > 1)
    assert min(sizes.values()) > 0.4 * sum(sizes.values())


@pytest.mark.parametrize("bits", [16, 8])
def test_storing_rounds_kernels_and_matrices_only(bits: int, tmp_path: Path) -> None:
    """Each row to steps of its own; norms and biases come back as they were."""
    judges = random_face_judges(seed=3)
    judges.settings = dataclasses.replace(judges.settings, stored_bits=bits)
    judges.save(tmp_path / "file.safetensors")
    loaded = load_face_judges(tmp_path / "file.safetensors")
    kernels = 0
    for name, value in judges.state_dict().items():
        kept = loaded.state_dict()[name]
        assert kept.dtype == value.dtype
        if value.ndim < 2:
            assert torch.equal(kept, value), name
            continue
        kernels += 1
        for row, row_kept in zip(value, kept, strict=True):
            largest = float(row.abs().max())
            # Half a step; with 8 bits also the eight digits of the scale.
            step = largest * (2**-11 if bits == 16 else 0.5 / 127 + 1 / 256)
            assert 0 < float((row - row_kept).abs().max()) <= step
            assert len(row_kept.unique()) <= 2**bits - 1
    assert kernels > 20
    images = tinted(40).images
    for family, scores in judges.scores(images).items():
        error = (loaded.scores(images)[family] - scores).abs().mean()
        assert error < (0.002 if bits == 16 else 0.1) * scores.std()


@pytest.fixture(scope="module")
def trained() -> FaceJudges:
    training = dataclasses.replace(TINY.training, epochs=12, learning_rate=1e-2)
    settings = dataclasses.replace(TINY, residual_widths=(4, 8, 12, 12), training=training)
    held_out = {"validation": tinted(60, seed=1), "test": tinted(90, seed=2)}
    return train_face_judges(tinted(320), held_out, settings, device=CPU)


@pytest.mark.slow
def test_planted_cues_are_learned(trained: FaceJudges) -> None:
    for split in ("validation", "test"):
        for errors in trained.record["errors"][split].values():
            assert max(errors[label] for label in LABELS) < 0.1
    assert trained.record["images"] == {"validation": 60, "test": 90}
    assert set(trained.record["curves"]) == {"residual", "separable"}


def test_errors_are_those_of_the_stored_weights(tmp_path: Path) -> None:
    """Counted face by face on what was read from the file, after a short training."""
    held_out = {"validation": tinted(60, seed=1), "test": tinted(90, seed=2)}
    judges = train_face_judges(tinted(48), held_out, TINY, device=CPU)
    path = tmp_path / "file.safetensors"
    judges.save(path)
    loaded = load_face_judges(path)
    assert loaded.record == json.loads(json.dumps(judges.record))
    assert loaded.settings == judges.settings
    for split, data in held_out.items():
        for family, scores in loaded.scores(data.images).items():
            rates = loaded.record["errors"][split][family]
            assert 0.2 < sum(rates.values()) / 40 < 0.8
            for name, score, known in zip(ATTRIBUTES, scores.T, data.attributes.T, strict=True):
                wrong = sum((s > 0) != bool(k) for s, k in zip(score.tolist(), known, strict=True))
                assert rates[name] == pytest.approx(wrong / len(data))


def test_labels_of_the_paper_have_their_share_of_the_loss(monkeypatch) -> None:
    weights = attribute_weights(0.3)
    assert float(weights.mean()) == pytest.approx(1)
    own = [float(weights[ATTRIBUTES.index(label)]) for label in LABELS]
    others = [float(w) for w, name in zip(weights, ATTRIBUTES, strict=True) if name not in LABELS]
    assert others == pytest.approx([0.7] * 36)
    assert (sum(own) - 4 * 0.7) / 40 == pytest.approx(0.3)
    assert own == pytest.approx([own[0]] * 4)
    # The first loss of the training: pictures and targets as they are, no dropout.
    still = {"augmentation": Augmentation(), "cut_out_share": 0.0, "jitter": 0.0, "mixup": 0.0}
    training = dataclasses.replace(TINY.training, **still, label_smoothing=0.0)
    settings = dataclasses.replace(TINY, label_weight=0.3, training=training)
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, h: h)
    data, networks = tinted(16), []

    def build(attributes: int, *widths: object) -> JudgeNetwork:
        network = separable_network(attributes, *widths)
        networks.append(copy.deepcopy(network))
        return network

    monkeypatch.setattr(face_judges, "separable_network", build)
    judges = train_face_judges(data, {}, settings, device=CPU)
    network = next(n for n in networks if not n.head.weight.is_meta)
    with torch.no_grad():
        p = network.train()((data.images.float() + 0.5) / 256).sigmoid()
    each = -torch.where(data.attributes > 0, p, 1 - p).log().mean(0)
    expected = float((weights * each).sum() / 40)
    first = judges.record["curves"]["separable"][0]["loss"]
    assert first == pytest.approx(expected, rel=1e-4)
    assert first != pytest.approx(float(each.mean()), rel=1e-3)


def test_training_is_a_function_of_the_seed(monkeypatch) -> None:
    seeds: list[int | None] = []

    def spy(device: torch.device, seed: int | None = None) -> AbstractContextManager[None]:
        seeds.append(seed)
        return seeded(device, seed)

    monkeypatch.setattr(augmented, "seeded", spy)

    def train(seed: int) -> dict[str, Tensor]:
        training = dataclasses.replace(TINY.training, seed=seed)
        settings = dataclasses.replace(TINY, training=training)
        seen: list[Progress] = []
        judges = train_face_judges(tinted(32), {}, settings, device=CPU, observe=seen.append)
        assert [p.task for p in seen] == ["residual", "separable"]
        return judges.state_dict()

    first, second, other = train(5), train(5), train(6)
    assert all(torch.equal(first[name], second[name]) for name in first)
    head = "networks.separable.head.weight"
    assert not torch.allclose(first[head], other[head], atol=0.01)
    assert seeds[:2] == seeds[2:4]
    assert len(set(seeds)) == 4


def test_unsuitable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds 'judges', not 'face judges'"):
        load_face_judges("mnist")
    random_face_judges().save(tmp_path / "faces.safetensors")
    with pytest.raises(InputError, match="holds 'face judges', not 'judges'"):
        load_judges(tmp_path / "faces.safetensors")


def test_command_writes_the_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    reseeded = dataclasses.replace(FaceJudgeSettings().training, seed=7)

    def load(name: str, split: str, folder: Path | None = None) -> Dataset:
        asked.append((name, split, folder))
        return tinted({"train": 40, "validation": 30, "test": 20}[split])

    def train_small(data: Dataset, held_out, settings: FaceJudgeSettings, **options) -> FaceJudges:
        assert settings == dataclasses.replace(FaceJudgeSettings(), training=reseeded)
        assert len(data) == 24
        return train_face_judges(data, held_out, TINY, **options)

    monkeypatch.setattr(commands, "load_images", load)
    monkeypatch.setattr(face_judges, "train_face_judges", train_small)
    path = tmp_path / "new" / "own.safetensors"
    options = ("--seed", 7, "--limit", 24, "--device", "cpu", "--celeba", tmp_path)
    code, stdout, stderr = run("judges", "celeba", "--out", path, *options)
    assert code == 0, stderr
    splits = ("train", "validation", "test")
    assert asked == [("celeba/Smiling", split, tmp_path) for split in splits]
    errors = load_face_judges(path).record["errors"]["test"]
    for family in ("residual", "separable"):
        for name in LABELS:
            right = f"{100 * (1 - errors[family][name]):.2f} % correct"
            assert any(f"{family}, {name}" in x and right in x for x in stdout.splitlines())
    assert "is a folder" in fails("judges", "celeba", "--out", tmp_path)


@pytest.mark.celeba
@pytest.mark.skipif("celeba" not in shipped_judges(), reason="not trained yet")
def test_shipped_judges_are_as_good_as_they_say() -> None:
    judges = load_face_judges()
    assert find_file("celeba", SHIPPED, "judges").stat().st_size <= 2.3 * 2**20
    assert judges.settings == FaceJudgeSettings()
    test = load_celeba("Smiling", "test", SHARED / "celeba").first(64)
    scores = judges.scores(test.images)
    wrong = []
    for name, most in zip(LABELS, (0.12, 0.19, 0.11, 0.14), strict=True):
        known = test.attributes[:, ATTRIBUTES.index(name)] > 0
        for family, score in scores.items():
            error = judges.record["errors"]["test"][family][name]
            missed = (score[:, ATTRIBUTES.index(name)] > 0) != known
            # Three standard deviations of the mean of so few faces.
            spread = 3 * (error * (1 - error) / len(test)) ** 0.5
            assert abs(float(missed.double().mean()) - error) <= spread
            assert error < most
            wrong.append(missed)
    first, second = torch.stack(wrong[::2]), torch.stack(wrong[1::2])
    # Different networks make different mistakes, as far as labels allow.
    assert (first & second).sum() < 0.8 * (first | second).sum()
