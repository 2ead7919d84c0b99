"""The authors' published counterfactuals, autoencoders and scores."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.signal
import torch

from ecinn.errors import InputError
from ecinn.studies.benchmark.authors_files import (
    ClassAutoencoders,
    StoredCounterfactuals,
    load_authors,
    load_autoencoders,
)
from ecinn.studies.benchmark.authors_scores import compare, score
from helpers.authors import PUBLISHED, needs_the_authors, write_folder

N = 6


def write_keras(path: Path, seed: int) -> list[np.ndarray]:
    """Random weights of the authors' autoencoder, as Keras lays them out in HDF5."""
    h5py = pytest.importorskip("h5py")
    random, arrays = np.random.default_rng(seed), []
    with h5py.File(path, "w") as file:
        layers = file.create_group("model_weights")
        layers.attrs["layer_names"] = ["in", "encoder", "decoder"]
        layers.create_group("in").attrs["weight_names"] = []
        for half, name in enumerate(("encoder", "decoder")):
            names, group = [], layers.create_group(name)
            for number, shape in enumerate(((1, 16), (16, 16), (16, 1)), 3 * half):
                arrays += [random.normal(size=(3, 3, *shape)) / 4, random.normal(size=shape[1])]
                for kind, array in zip(("kernel", "bias"), arrays[-2:], strict=True):
                    names.append(f"conv_{number}/{kind}:0")
                    group[names[-1]] = array.astype(np.float32)
            group.attrs["weight_names"] = names
    return arrays


def by_hand(weights: list[np.ndarray], image: np.ndarray) -> np.ndarray:
    """The same autoencoder, one window at a time; ReLUs after all but the third and the last."""
    maps = image[None]
    for layer, (kernel, bias) in enumerate(zip(weights[::2], weights[1::2], strict=True)):
        if layer == 4:
            maps = maps.repeat(2, 1).repeat(2, 2)
        maps = np.stack(
            [
                sum(
                    scipy.signal.correlate2d(channel, kernel[:, :, i, out], "same")
                    for i, channel in enumerate(maps)
                )
                + bias[out]
                for out in range(kernel.shape[3])
            ]
        )
        maps = maps if layer in (2, 5) else np.maximum(maps, 0)
        if layer == 1:
            maps = maps.reshape(len(maps), len(image) // 2, 2, -1, 2).max((2, 4))
    return maps[0]


def test_keras_autoencoders_compute_what_their_files_say(tmp_path: Path, generator) -> None:
    names = [*map(str, range(10)), "all"]
    weights = {
        name: write_keras(tmp_path / f"ae_{name}.h5", seed) for seed, name in enumerate(names)
    }
    state = torch.get_rng_state()
    autoencoders = load_autoencoders(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    images = torch.randint(256, (3, 1, 6, 8), generator=generator, dtype=torch.uint8)
    p, q = torch.tensor([0, 1, 7]), torch.tensor([1, 9, 0])
    autoencoders = replace(autoencoders, batch_size=2)
    by_p, by_q, by_all = (autoencoders.reconstruct(images, labels) for labels in (p, q, None))
    for i in range(3):
        pixels = images[i, 0].double().numpy() / 255 - 0.5
        for answer, name in ((by_p, f"{p[i]}"), (by_q, f"{q[i]}"), (by_all, "all")):
            expected = by_hand(weights[name], pixels)
            np.testing.assert_allclose(answer[i, 0].numpy(), expected, rtol=1e-3, atol=1e-4)


def test_damaged_autoencoders_are_named(tmp_path: Path) -> None:
    path = tmp_path / "ae_0.h5"
    with pytest.raises(InputError, match=r"ae_0\.h5 is missing"):
        load_autoencoders(tmp_path)
    path.write_bytes(b"<html>404</html>")
    with pytest.raises(InputError, match=r"ae_0\.h5 is not as the authors"):
        load_autoencoders(tmp_path)


def scaling(factor: float) -> torch.nn.Module:
    """AE(c) = factor · c."""
    convolution = torch.nn.Conv2d(1, 1, 1, bias=False).requires_grad_(requires_grad=False)
    convolution.weight.fill_(factor)
    return convolution


def test_published_files_are_read_as_they_are(tmp_path: Path) -> None:
    write_folder(tmp_path)
    benchmark = load_authors(tmp_path, "mnist")
    with np.load(tmp_path / "data" / "Real" / "mnist.npz") as real:
        assert np.array_equal(benchmark.originals.images[:, 0].numpy(), real["x"][..., 0])
        assert np.array_equal(np.eye(10)[benchmark.originals.labels.numpy()], real["y"])
    assert list(benchmark.counterfactuals) == ["GB", "GL", "GEN"]
    gl = benchmark.counterfactuals["GL"]
    with np.load(tmp_path / "data" / "GL" / "mnist.npz") as stored:
        assert np.array_equal(gl.images[:, 0].numpy(), stored["cfs"])
        assert gl.p.tolist() == stored["orig_pred"].tolist()
        assert gl.q.tolist() == stored["q"].tolist()
        assert gl.predicted.tolist() == stored["cf_pred"].tolist()
    assert gl.failed.tolist() == [False, False, False, True, False, False]
    assert gl.kept.tolist() == [True, True, True, False, False, True]
    score = benchmark.published["ElasticNet"]["GB"]
    assert (score.mean, score.half_width, score.n) == (0.5, 0.25, 6)
    assert benchmark.published["FID"]["GEN"].n is None
    assert benchmark.published["LabelVariationScore MNIST"]["GEN"].mean == 0.25


def replace_arrays(path: Path, **arrays: np.ndarray | None) -> None:
    with np.load(path) as stored:
        every = dict(stored) | arrays
    np.savez(path, **{name: value for name, value in every.items() if value is not None})


WRONG = {
    "key": ("GB", {"q": None}, "q is not a file in the archive"),
    "shape": ("GB", {"cfs": np.zeros((N, 32, 32), np.uint8)}, r"uint8 of shape \(6, 32, 32\)"),
    "type": ("GB", {"cfs": np.zeros((N, 28, 28))}, "cfs is float64"),
    "length": ("GEN", {"q": np.zeros(N + 1, int)}, r"q is int64 of shape \(7,\)"),
    "pickle": ("GB", {"cfs": np.array([None] * N)}, "allow_pickle=False"),
    "fewer": ("Real", {"x": np.zeros((2, 28, 28, 1), np.uint8)}, r"of shape \(6, 10\)"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arrays_are_refused(wrong: str, tmp_path: Path) -> None:
    write_folder(tmp_path)
    who, arrays, says = WRONG[wrong]
    replace_arrays(tmp_path / "data" / who / "mnist.npz", **arrays)
    with pytest.raises(InputError, match=says):
        load_authors(tmp_path, "mnist")
    load_authors(tmp_path, "fake_mnist")


@pytest.mark.parametrize("damage", ["missing", "html", "truncated", "npy"])
@pytest.mark.parametrize("name", ["data/GEN/mnist.npz", "output/mnist_[0]/results.json"])
def test_damaged_files_are_named(damage: str, name: str, tmp_path: Path) -> None:
    write_folder(tmp_path)
    path = tmp_path / name
    data = path.read_bytes()
    path.unlink()
    if damage == "html":
        path.write_bytes(b"<html>404</html>")
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "npy":
        np.save(tmp_path / "array.npy", np.zeros(3))
        (tmp_path / "array.npy").rename(path)
    what = "missing" if damage == "missing" else "not as the authors published it"
    with pytest.raises(InputError, match=rf"{path.name} is {what}: give a whole copy"):
        load_authors(tmp_path, "mnist")


def test_row_skips_failed_and_black_but_counts_them_for_validity(tmp_path: Path) -> None:
    write_folder(tmp_path)
    benchmark = load_authors(tmp_path, "mnist")
    factors = [0.1 * label for label in range(10)]
    autoencoders = ClassAutoencoders([scaling(factor) for factor in factors], scaling(2.0))
    gen = benchmark.counterfactuals["GEN"]
    row = score(benchmark.originals.images, gen, autoencoders).row
    assert (row.failed, row.black) == (1, 1)
    assert (row.class_changed.mean, row.class_changed.n) == (pytest.approx(4 / 6), 6)
    assert (row.reached.mean, row.reached.n) == (pytest.approx(3 / 6), 6)
    en, im1, im2 = [], [], []
    for i in (0, 1, 2, 5):
        c = gen.images[i].double().numpy() / 255 - 0.5
        delta = c - (benchmark.originals.images[i].double().numpy() / 255 - 0.5)
        en.append(np.abs(delta).sum() + np.sqrt((delta**2).sum()))
        squared, p, q = (c**2).sum(), factors[int(gen.p[i])], factors[int(gen.q[i])]
        im1.append((1 - q) ** 2 * squared / ((1 - p) ** 2 * squared + 1e-5))
        im2.append((2 - q) ** 2 * squared / (np.abs(c).sum() + 1e-5))
    for interval, name, expected in (
        (row.elastic_net, "ElasticNet", en), (row.im1, "IM1", im1), (row.im2, "IM2", im2),
    ):  # fmt: skip
        for here in (interval, row.as_published[name]):
            assert here.mean == pytest.approx(np.mean(expected), rel=1e-5)
            assert here.half_width == pytest.approx(1.96 * np.std(expected) / 2, rel=1e-4)
            assert here.n == 4


def test_comparison_sees_a_difference_in_the_seventh_digit(tmp_path: Path) -> None:
    write_folder(tmp_path)
    benchmark = load_authors(tmp_path, "mnist")
    row = score(benchmark.originals.images, benchmark.counterfactuals["GB"]).row
    assert row.im1 is None
    en, path = row.as_published["ElasticNet"], tmp_path / "output" / "mnist_[0]" / "results.json"
    for scores, low, high in (
        ([en.mean, en.half_width, en.n], float("inf"), float("inf")),
        ([en.mean * (1 + 1e-7), en.half_width, en.n], 6.9, 7.1),
        ([en.mean, en.half_width * (1 - 1e-3), en.n], 2.9, 3.1),
        ([en.mean, en.half_width, en.n + 1], float("-inf"), float("-inf")),
    ):
        path.write_text(json.dumps({"ElasticNet": [{"method": "GB", "scores": scores}]}))
        (comparison,) = compare(load_authors(tmp_path, "mnist"), [row])
        assert low <= comparison.digits <= high
        assert repr(en.mean) in str(comparison)


def test_any_method_can_be_scored(tmp_path: Path) -> None:
    write_folder(tmp_path)
    benchmark = load_authors(tmp_path, "mnist")
    gen, originals = benchmark.counterfactuals["GEN"], benchmark.originals.images
    row = score(originals, StoredCounterfactuals("ours", originals, gen.p, gen.q, gen.q)).row
    assert (row.method, row.elastic_net.mean) == ("ours", 0)
    assert row.reached.mean == pytest.approx(5 / 6)


def test_first_images_keep_their_counterfactuals(tmp_path: Path) -> None:
    write_folder(tmp_path)
    benchmark = load_authors(tmp_path, "mnist")
    few = benchmark.first(2)
    assert benchmark.first(None) is benchmark.first(N) is benchmark
    assert torch.equal(few.originals.images, benchmark.originals.images[:2])
    for name, made in few.counterfactuals.items():
        whole = benchmark.counterfactuals[name]
        for field in ("images", "p", "q", "predicted"):
            assert torch.equal(getattr(made, field), getattr(whole, field)[:2])


@needs_the_authors
@pytest.mark.parametrize("name", ["mnist", "fake_mnist"])
def test_published_validity_and_elastic_net_come_out_again(name) -> None:
    benchmark = load_authors(PUBLISHED, name)
    originals = benchmark.originals.images
    rows = [score(originals, made).row for made in benchmark.counterfactuals.values()]
    comparisons = compare(benchmark, rows)
    assert len(comparisons) == 6
    for comparison in comparisons:
        assert comparison.digits > 14, str(comparison)
    for made in benchmark.counterfactuals.values():
        assert (made.images.min(), made.images.max()) == (0, 255)  # so scaled whole is k/255 − ½


@pytest.mark.slow
@needs_the_authors
@pytest.mark.parametrize("name", ["mnist", "fake_mnist"])
def test_published_im1_and_im2_come_out_again(name) -> None:
    """Of ECINN, 5 s each; with ECINN_FULL_TABLE=1 in the environment of all methods, 32 s."""
    pytest.importorskip("h5py")
    benchmark = load_authors(PUBLISHED, name)
    methods = list(benchmark.counterfactuals) if os.environ.get("ECINN_FULL_TABLE") else ["GEN"]
    autoencoders = load_autoencoders(benchmark.autoencoders)
    rows = [
        score(benchmark.originals.images, benchmark.counterfactuals[method], autoencoders).row
        for method in methods
    ]
    comparisons = compare(benchmark, rows)
    assert len(comparisons) == 4 * len(methods)
    for comparison in comparisons:
        assert comparison.digits > 6, str(comparison)


@needs_the_authors
def test_ecinn_of_the_authors_reaches_q_in_999_of_1000() -> None:
    benchmark = load_authors(PUBLISHED, "mnist")
    row = score(benchmark.originals.images, benchmark.counterfactuals["GEN"]).row
    assert (row.reached.mean, row.failed, row.black) == (0.999, 0, 9)
