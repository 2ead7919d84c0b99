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


def conv(name: str, filters: int, activation: str, before: str) -> dict:
    config = {
        "name": name, "filters": filters, "kernel_size": [3, 3], "strides": [1, 1],
        "padding": "same", "data_format": "channels_last", "dilation_rate": [1, 1],
        "groups": 1, "activation": activation, "use_bias": True,
    }  # fmt: skip
    return layer("Conv2D", config, before)


def layer(kind: str, config: dict, *before: str) -> dict:
    nodes = [[[name, 0, 0, {}]] for name in before]
    return {"class_name": kind, "config": config, "name": config["name"], "inbound_nodes": nodes}


def keras_config() -> dict:
    last = {"data_format": "channels_last"}
    entry = layer("InputLayer", {"name": "in", "batch_input_shape": [None, 6, 8, 1]})
    pool = {"name": "pool", "pool_size": [2, 2], "strides": [2, 2], "padding": "same", **last}
    up = {"name": "up", "size": [2, 2], "interpolation": "nearest", **last}
    encoder = [entry, conv("a", 3, "relu", "in"), layer("MaxPooling2D", pool, "a")]
    decoder = [
        layer("InputLayer", {"name": "code"}),
        layer("UpSampling2D", up, "code"),
        conv("b", 1, "linear", "up"),
    ]
    layers = [
        entry,
        layer("Functional", {"name": "encoder", "layers": encoder}, "in"),
        layer("Functional", {"name": "decoder", "layers": decoder}, "encoder"),
    ]
    return {"config": {"layers": layers}}


def write_keras(path: Path, seed: int, config: dict | None = None, **weights: np.ndarray) -> dict:
    """An autoencoder with random weights as Keras lays it out in HDF5."""
    h5py = pytest.importorskip("h5py")
    random = np.random.default_rng(seed)
    arrays = {
        "encoder/a/kernel:0": random.normal(size=(3, 3, 1, 3)).astype(np.float32),
        "encoder/a/bias:0": random.normal(size=3).astype(np.float32),
        "decoder/b/kernel:0": random.normal(size=(3, 3, 3, 1)).astype(np.float32),
        "decoder/b/bias:0": random.normal(size=1).astype(np.float32),
    } | {name.replace("__", "/") + ":0": value for name, value in weights.items()}
    with h5py.File(path, "w") as file:
        file.attrs["model_config"] = json.dumps(config or keras_config())
        for name, value in arrays.items():
            file[f"model_weights/{name}"] = value
    return arrays


def by_hand(weights: dict, image: np.ndarray) -> np.ndarray:
    """The same autoencoder, one channel and one window at a time."""
    kernel, bias = weights["encoder/a/kernel:0"], weights["encoder/a/bias:0"]
    answer = np.zeros((6, 8)) + weights["decoder/b/bias:0"][0]
    for channel in range(3):
        hidden = scipy.signal.correlate2d(image, kernel[:, :, 0, channel], "same")
        hidden = np.maximum(hidden + bias[channel], 0)
        pooled = hidden.reshape(3, 2, 4, 2).max((1, 3)).repeat(2, 0).repeat(2, 1)
        kernel_out = weights["decoder/b/kernel:0"][:, :, channel, 0]
        answer += scipy.signal.correlate2d(pooled, kernel_out, "same")
    return answer


def test_keras_autoencoders_compute_what_their_files_say(tmp_path: Path, generator) -> None:
    names = ["0", "1", "2", "all"]
    weights = {
        name: write_keras(tmp_path / f"ae_{name}.h5", seed) for seed, name in enumerate(names)
    }
    state = torch.get_rng_state()
    autoencoders = load_autoencoders(tmp_path, 3, (1, 6, 8))
    assert torch.equal(torch.get_rng_state(), state)
    images = torch.randint(256, (7, 1, 6, 8), generator=generator, dtype=torch.uint8)
    p, q = torch.tensor([0, 1, 2, 0, 1, 2, 0]), torch.tensor([1, 2, 0, 2, 0, 1, 1])
    autoencoders = replace(autoencoders, batch_size=2)
    by_p, by_q, by_all = (autoencoders.reconstruct(images, labels) for labels in (p, q, None))
    for i in range(7):
        pixels = images[i, 0].double().numpy() / 255 - 0.5
        for answer, name in ((by_p, f"{p[i]}"), (by_q, f"{q[i]}"), (by_all, "all")):
            expected = by_hand(weights[name], pixels)
            np.testing.assert_allclose(answer[i, 0].numpy(), expected, rtol=1e-4, atol=1e-5)


def broken_config(change: str) -> dict:
    config = keras_config()
    _, encoder, decoder = config["config"]["layers"]
    first, last = encoder["config"]["layers"][1], decoder["config"]["layers"][2]
    if change == "kind":
        first["class_name"] = "BatchNormalization"
    elif change == "activation":
        first["config"]["activation"] = "swish"
    elif change == "padding":
        last["config"]["padding"] = "valid"
    elif change == "branch":
        decoder["inbound_nodes"] = [[["in", 0, 0, {}]]]
    else:
        del decoder["config"]["layers"][1]
        last["inbound_nodes"] = [[["code", 0, 0, {}]]]
    return config


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("kind", "BatchNormalization"),
        ("activation", "swish"),
        ("padding", "valid"),
        ("branch", "layer decoder is not connected to encoder"),
        ("no upsampling", r"\(1, 6, 8\) to \(1, 3, 4\)"),
    ],
)
def test_networks_of_another_kind_are_refused(change: str, says: str, tmp_path: Path) -> None:
    write_keras(tmp_path / "ae_0.h5", 0, broken_config(change))
    with pytest.raises(InputError, match=says):
        load_autoencoders(tmp_path, 1, (1, 6, 8))


def test_damaged_autoencoders_say_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "ae_0.h5"
    with pytest.raises(InputError, match=r"ae_0\.h5 is missing"):
        load_autoencoders(tmp_path, 1, (1, 6, 8))
    path.write_bytes(b"<html>404</html>")
    with pytest.raises(InputError, match=r"ae_0\.h5 is not a Keras autoencoder") as caught:
        load_autoencoders(tmp_path, 1, (1, 6, 8))
    assert "\n" not in str(caught.value)
    write_keras(path, 0, encoder__a__kernel=np.zeros((3, 3, 1, 5), np.float32))
    with pytest.raises(InputError, match="size mismatch for weight"):
        load_autoencoders(tmp_path, 1, (1, 6, 8))
    write_keras(path, 0, {"config": {}})
    with pytest.raises(InputError, match="layers"):
        load_autoencoders(tmp_path, 1, (1, 6, 8))
    write_keras(path, 0)
    with pytest.raises(InputError, match=r"maps \(1, 6, 8\) to \(1, 6, 8\), not \(1, 28, 28\)"):
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
    "key": ("GB", {"q": None}, "should hold cfs, orig_pred, q, cf_pred but holds"),
    "shape": ("GB", {"cfs": np.zeros((N, 32, 32), np.uint8)}, r"not uint8 of shape \(6, 32, 32\)"),
    "type": ("GB", {"cfs": np.zeros((N, 28, 28))}, "not float64"),
    "length": ("GEN", {"q": np.zeros(N + 1, int)}, r"q should be int64 of shape \(6,\)"),
    "label": ("GL", {"orig_pred": np.full(N, 10)}, "orig_pred should lie in 0…9, not 10…10"),
    "no p": ("GL", {"orig_pred": np.full(N, -1)}, "not -1…-1"),
    "no q": ("GL", {"q": np.full(N, -1)}, "without a target"),
    "pickle": ("GB", {"cfs": np.array([None] * N)}, "plain numpy arrays"),
    "one-hot": ("Real", {"y": np.full((N, 10), 0.1, np.float32)}, "one-hot"),
    "two ones": ("Real", {"y": np.ones((N, 10), np.float32)}, "one-hot"),
    "fewer": ("Real", {"x": np.zeros((2, 28, 28, 1), np.uint8)}, r"of shape \(2, 10\)"),
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
def test_damaged_archives_are_named(damage: str, tmp_path: Path) -> None:
    write_folder(tmp_path)
    path = tmp_path / "data" / "GEN" / "mnist.npz"
    data = path.read_bytes()
    path.unlink()
    if damage == "html":
        path.write_bytes(b"<html>404</html>")
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "npy":
        np.save(path.with_suffix(".npy"), np.zeros(3))
        path.with_suffix(".npy").rename(path)
    with pytest.raises(InputError, match=r"GEN.mnist\.npz is (missing|not an archive)"):
        load_authors(tmp_path, "mnist")


def test_missing_folder_and_wrong_scores_say_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give a whole copy of EvaluatingCounterfactuals"):
        load_authors(tmp_path / "nowhere", "mnist")
    write_folder(tmp_path)
    scores = tmp_path / "output" / "mnist_[0]" / "results.json"
    short = '{"FID": [{"method": "GB", "scores": [1]}]}'
    for text in ("<html>", "[]", '{"FID": [{"method": "GB"}]}', short):
        scores.write_text(text)
        with pytest.raises(InputError, match=r"results\.json should hold"):
            load_authors(tmp_path, "mnist")
    scores.unlink()
    with pytest.raises(InputError, match=r"results\.json is missing"):
        load_authors(tmp_path, "mnist")


def test_row_skips_failed_and_black_but_counts_them_for_validity(tmp_path: Path) -> None:
    write_folder(tmp_path)
    benchmark = load_authors(tmp_path, "mnist")
    factors = [0.1 * label for label in range(10)]
    autoencoders = ClassAutoencoders([scaling(factor) for factor in factors], scaling(2.0))
    gen = benchmark.counterfactuals["GEN"]
    row = score(benchmark.originals.images, gen, autoencoders)
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
    row = score(benchmark.originals.images, benchmark.counterfactuals["GB"])
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
    row = score(originals, StoredCounterfactuals("ours", originals, gen.p, gen.q, gen.q))
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
    rows = [score(originals, made) for made in benchmark.counterfactuals.values()]
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
        score(benchmark.originals.images, benchmark.counterfactuals[method], autoencoders)
        for method in methods
    ]
    comparisons = compare(benchmark, rows)
    assert len(comparisons) == 4 * len(methods)
    for comparison in comparisons:
        assert comparison.digits > 6, str(comparison)


@needs_the_authors
def test_ecinn_of_the_authors_reaches_q_in_999_of_1000() -> None:
    benchmark = load_authors(PUBLISHED, "mnist")
    row = score(benchmark.originals.images, benchmark.counterfactuals["GEN"])
    assert (row.reached.mean, row.failed, row.black) == (0.999, 0, 9)
