"""ONNX files against torch: every layer, every output, and what happens when something fails."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import OODDetector, Pose, Shape, Texture
from ecinn.classifier.quantisation import pack, unpack
from ecinn.data.face_crop import FaceCrop
from ecinn.data.framing import Framing, Intensity
from ecinn.errors import EcinnError, InputError
from ecinn.export import onnx_files
from ecinn.export.onnx_files import describe, export_onnx
from ecinn.export.shared_weights import share_weights
from ecinn.flow.network import Architecture, Stage, latent_frequencies
from ecinn.model import Model, load
from ecinn.pixels import to_pixels
from helpers.builders import random_images, randomise, small_model
from helpers.paths import REPOSITORY

OUTPUTS = {
    "p": "p",
    "posterior": "posterior",
    "log_p": "log_p",
    "out_of_distribution": "out_of_distribution",
    "alpha_0": "alpha_0",
    "alpha_1": "alpha_1",
    "alpha": "alpha",
    "reachable": "reachable",
    "tipping_point": "tipping_point",
    "counterfactual": "convincing",
}
"""Outputs of explain.onnx and the same fields of an `Explanation`."""


class Folder:
    """An exported folder in use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        names = ("encode", "decode", "explain")
        self._sessions = {n: onnxruntime.InferenceSession(path / f"{n}.onnx") for n in names}

    def __call__(self, name: str, **inputs: Any) -> dict[str, np.ndarray]:
        session = self._sessions[name]
        given = {key: np.asarray(value) for key, value in inputs.items()}
        outputs = [output.name for output in session.get_outputs()]
        return dict(zip(outputs, session.run(None, given), strict=True))


def random_model(classes: int, bits: int = 8, **changes: Any) -> Model:
    """A model of random weights, stored and read again, whose class means share an offset."""
    settings = {"stages": (Stage(1, 8), Stage(1, 8)), "dense_width": 0, "pixel_margin": 0.02}
    net = Architecture(1, 8, 8, classes, **(settings | changes))
    classifier = randomise(GenerativeClassifier(net)).eval().requires_grad_(requires_grad=False)
    images = to_pixels(random_images(64, 1, 2, 5).images)
    z = classifier.encode(images)
    generator = torch.Generator().manual_seed(classes)
    noise = torch.randn((classes, net.dim), generator=generator)
    classifier.mu.copy_(z.mean(0) + 0.3 * noise)
    classifier.tau.fill_(0.6)
    mu_bar = classifier.mu + 0.05 * torch.randn(noise.shape, generator=generator)
    frequency = latent_frequencies(net)
    low, high = classifier.log_marginal(images).quantile(torch.tensor([0.25, 0.75])).tolist()
    far = (z - mu_bar[classifier.predict(images)]).square().sum(1).median()
    weight, out = (torch.randn(s, generator=generator) for s in ((5, net.dim), (5,)))
    shape = Shape(*unpack(pack({"w": weight, "b": out, "o": out}, 8, rounded="")).values(), 0.0)
    shape = shape._replace(limit=float(shape.score(z).median()) + 1e-3)
    ood = OODDetector((low, high), distance=float(far), shape=shape)
    if frequency is not None:
        bands = int(frequency.max()) + 1
        whitening = torch.randn((bands, bands), generator=generator)
        texture = Texture(frequency, torch.zeros(bands), whitening, 0.0)
        p = classifier.predict(images)
        # Limits that half of the images exceed.
        texture = texture._replace(limit=float(texture.distance(z - mu_bar[p]).median()))
        pose = Pose(torch.linspace(-1, 1, net.dim), 0.0)
        pose = pose._replace(limit=float(pose.score(z).median()))
        ood = replace(ood, texture=texture, pose=pose)
    tiny = small_model(classes=2).checkpoint
    recipe = replace(tiny.recipe, architecture=net, stored_bits=bits, tied=False)
    names = tuple(str(label) for label in range(classes))
    return Model(replace(
        tiny, recipe=recipe, classifier=classifier, mu_bar=mu_bar, ood=ood, class_names=names,
    ))  # fmt: skip


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "as for digits": {"classes": 4, "dense_width": 6},
    "as for faces": {"classes": 2, "mixing": "cosine", "dropout": 0.1},
    "as in the paper": {
        "classes": 3, "norm": "batch", "channel_scale": 0.8, "pixel_margin": 0.0, "bits": 32,
        "dense_width": 6, "dense_couplings": 2,
    },
    "haar, no norm": {"classes": 2, "downsampling": "haar", "norm": "none", "bits": 16},
    "squeeze": {"classes": 5, "downsampling": "squeeze"},
}  # fmt: skip


@pytest.fixture(scope="module", params=ARCHITECTURES)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Model, Folder]:
    folder = tmp_path_factory.mktemp("onnx") / "new" / "folder"
    model = random_model(**ARCHITECTURES[request.param])
    model.save(folder.parent / "model.safetensors")  # weights are rounded as the recipe says
    model = load(folder.parent)
    files = export_onnx(model, folder)
    assert all(file.difference <= 1e-4 for file in files.values())
    return model, Folder(folder)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return to_pixels(random_images(7, 1, 2, 8).images)


def close(value: np.ndarray, expected: torch.Tensor) -> None:
    torch.testing.assert_close(
        torch.from_numpy(value), expected.to(torch.from_numpy(value).dtype), atol=1e-4, rtol=1e-4
    )


def test_f_and_its_inverse(exported: tuple[Model, Folder], images: torch.Tensor) -> None:
    model, run = exported
    z, log_det = model.classifier.double().encode_with_log_det(images.double())
    model.classifier.float()
    found = run("encode", pixels=images)
    close(found["z"], z)
    log_p = torch.distributions.Normal(model.mu.double(), 1).log_prob(z[:, None]).sum(2)
    close(found["log_p"], log_p.logsumexp(1) + log_det - np.log(len(model.mu)))
    distance = torch.cdist(z, model.mu.double()).square()
    close(found["posterior"], (-0.5 * model.tau * distance).softmax(1))
    close(run("decode", z=found["z"])["pixels"], images)
    close(run("decode", z=found["z"][:1])["pixels"], images[:1])


@pytest.mark.parametrize("confidence", [0.2, 0.7, 0.99999, "alpha_1"])
def test_explanations(
    exported: tuple[Model, Folder], images: torch.Tensor, confidence: float | str
) -> None:
    model, run = exported
    p = model.predict(images).argmax(1)
    target = (p + 1 + torch.arange(len(p)) % (len(model.mu) - 1)) % len(model.mu)
    number = 0.0 if confidence == "alpha_1" else float(np.float32(confidence))
    expected = model.explain(images, target[:, None], confidence=number or "alpha_1", check=False)
    given = torch.full((len(p),), number)
    found = run("explain", pixels=images, target=target, confidence=given)
    assert found.keys() == OUTPUTS.keys()
    for name, field in OUTPUTS.items():
        value = getattr(expected, field)
        close(found[name], value if value.shape == found[name].shape else value[:, 0])
    assert 0 < found["out_of_distribution"][:, 0].sum() < len(p)
    # By definition: the posterior of the target is what was asked for, and p and q tie at α₀.
    rows = np.arange(len(p))
    there = run("encode", pixels=found["counterfactual"])["posterior"][rows, target]
    if confidence != "alpha_1":
        reached = found["reachable"]
        np.testing.assert_allclose(there[reached], number, atol=2e-3)
    tipped = run("encode", pixels=found["tipping_point"])["posterior"]
    np.testing.assert_allclose(tipped[rows, p], tipped[rows, target], atol=2e-3)


def test_each_image_has_its_own_request(
    exported: tuple[Model, Folder], images: torch.Tensor
) -> None:
    model, run = exported
    p = model.predict(images).argmax(1)
    target = (p + 1) % len(model.mu)
    target[6] = p[6]
    confidence = np.array([np.nan, 0, -1, 0.6, 0.8, 0.6, 0.6], np.float32)
    found = run("explain", pixels=images, target=target, confidence=confidence)
    np.testing.assert_array_equal(found["alpha"][:3], found["alpha_1"][:3])
    np.testing.assert_allclose(found["alpha_1"], 0.8 + 0.5 * found["alpha_0"], atol=1e-6)
    assert found["reachable"][:3].all()
    alone = run("explain", pixels=images[4:5], target=target[4:5], confidence=confidence[4:5])
    np.testing.assert_allclose(alone["alpha"], found["alpha"][4:5], atol=1e-5)
    # The image already is its target: nothing changes, and nothing is NaN.
    close(found["counterfactual"][6], images[6])
    close(found["tipping_point"][6], images[6])
    assert all(np.isfinite(value.astype(float)).all() for value in found.values())


def test_weights_are_stored_once_and_with_the_bits_of_the_checkpoint(
    exported: tuple[Model, Folder],
) -> None:
    model, run = exported
    graph = onnx.load(run.path / "explain.onnx").graph
    kinds = {8: onnx.TensorProto.INT8, 16: onnx.TensorProto.FLOAT16, 32: onnx.TensorProto.FLOAT}
    stored = [tensor for tensor in graph.initializer if len(tensor.dims) > 1]
    kernels = [p for name, p in model.classifier.inn.named_parameters() if p.ndim > 1]
    for kernel in kernels:
        same = [t for t in stored if list(t.dims) == list(kernel.shape)]
        assert {t.data_type for t in same} >= {kinds[model.recipe.stored_bits]}
    casts = [node.input[0] for node in graph.node if node.op_type == "Cast"]
    casts = [name for name in casts if name.startswith("constant")]
    assert len(casts) == len(set(casts))
    # The shape score has one kernel, always with 8 bits.
    assert len(casts) == 1 + (0 if model.recipe.stored_bits == 32 else len(kernels))
    count = sum(np.prod(t.dims) for t in stored if t.data_type == kinds[model.recipe.stored_bits])
    own = sum(p.numel() for p in kernels) + model.ood.shape.weight.numel()
    assert model.recipe.stored_bits != 8 or count == own


def test_graphs_that_share_their_weights_compute_the_same(
    exported: tuple[Model, Folder], images: torch.Tensor, tmp_path: Path
) -> None:
    model, run = exported
    names = ("encode", "decode")
    shared = share_weights({name: (run.path / f"{name}.onnx").read_bytes() for name in names})
    kernels = [p for _, p in model.classifier.inn.named_parameters() if p.ndim > 1]
    kernels = kernels if model.recipe.stored_bits == 8 else []
    sizes = [(len(kernel), kernel[0].numel()) for kernel in (*kernels, model.ood.shape.weight)]
    assert sorted(shared.shapes) == sorted(sizes)
    rows = sum(count for count, _ in shared.shapes)
    columns = np.repeat([each for _, each in shared.shapes], [n for n, _ in shared.shapes])
    scale = np.repeat(np.frombuffer(shared.content, "<f4", rows), columns.astype(int))
    values = np.frombuffer(shared.content, np.int8, offset=4 * rows) * scale
    (tmp_path / "weights").write_bytes(values.astype("<f4").tobytes())
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    given = {"pixels": images.numpy(), "z": model.encode(images).numpy()}
    for name, port in zip(names, given, strict=True):
        (tmp_path / f"{name}.onnx").write_bytes(shared.graphs[name])
        graph = onnx.load(tmp_path / f"{name}.onnx", load_external_data=False).graph
        assert not any(node.op_type == "Cast" for node in graph.node)
        session = onnxruntime.InferenceSession(tmp_path / f"{name}.onnx", options)
        expected = run(name, **{port: given[port]})
        found = session.run(list(expected), {port: given[port]})
        for value, other in zip(found, expected.values(), strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-4)


def test_files_use_standard_operators_in_single_precision(
    exported: tuple[Model, Folder],
) -> None:
    for path in exported[1].path.glob("*.onnx"):
        model = onnx.load(path)
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 18)]
        inferred = onnx.shape_inference.infer_shapes(model).graph
        kinds = {tensor.data_type for tensor in model.graph.initializer}
        kinds |= {value.type.tensor_type.elem_type for value in inferred.value_info}
        assert onnx.TensorProto.DOUBLE not in kinds
        assert onnx.TensorProto.FLOAT in kinds


def test_weights_with_more_bits_than_the_recipe_stores_are_kept(tmp_path: Path) -> None:
    model = random_model(2)  # not yet rounded to its 8 bits
    export_onnx(model, tmp_path / "m")
    found = Folder(tmp_path / "m")("encode", pixels=np.full((1, 1, 8, 8), 0.3, np.float32))
    close(found["z"], model.encode(torch.full((1, 1, 8, 8), 0.3)))


def test_the_description_tells_how_to_frame_pictures() -> None:
    model = small_model()
    about = describe(model)
    assert about["classes"] == ["a", "b", "c"]
    assert (about["channels"], about["height"], about["width"]) == (1, 8, 8)
    assert about["default_confidence"] is None
    assert about["out_of_distribution"]["log_p"] == [0.0, 1.0]
    assert about["framing"] == {"kind": "digit"}

    def framing(**changes: Any) -> Any:
        recipe = replace(model.recipe, mnist_framing=False, **changes)
        described = describe(Model(replace(model.checkpoint, recipe=recipe)))
        return json.loads(json.dumps(described))["framing"]

    assert framing() == {"kind": "picture", "fit": "stretch", "intensity": None}
    crop = FaceCrop(side=120, webp_quality=None)
    assert framing(face_crop=crop) == {"kind": "face", "side": 120, "webp_quality": None}
    own = Framing("pad", Intensity(0.0, 4095.0, "12 bits"))
    intensity = {"low": 0.0, "high": 4095.0, "origin": "12 bits"}
    assert framing(framing=own) == {"kind": "picture", "fit": "pad", "intensity": intensity}


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        export_onnx(small_model(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def _differs(patch: pytest.MonkeyPatch) -> None:
    real = onnx_files._outputs
    patch.setattr(onnx_files, "_outputs", lambda e: real(e) | {"alpha": e.alpha[:, 0] + 2e-4})


def _is_not_a_number(patch: pytest.MonkeyPatch) -> None:
    real = onnx_files._outputs
    patch.setattr(onnx_files, "_outputs", lambda e: real(e) | {"alpha": e.alpha[:, 0] * np.nan})


def _lacks_an_operator(patch: pytest.MonkeyPatch) -> None:
    def decode(self: Any, z: str) -> str:
        return self._graph.op("StringNormalizer", z)

    patch.setattr(onnx_files.FlowWriter, "decode", decode)
    patch.setattr(onnx.checker, "check_model", lambda *_, **__: None)


def _disk_is_full(patch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(file: int) -> None:
        real(file)
        raise OSError(28, "No space left on device")

    patch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (_differs, r"explain.onnx differs from torch by 2\.\de-04"),
        (_is_not_a_number, "explain.onnx differs from torch by nan"),
        (_lacks_an_operator, "ONNX Runtime .* cannot run decode.onnx"),
        (_disk_is_full, "No space left"),
    ],
)
def test_nothing_is_written_if_anything_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: Callable[[pytest.MonkeyPatch], None],
    message: str,
) -> None:
    failure(monkeypatch)
    with pytest.raises(EcinnError, match=message) as error:
        export_onnx(small_model(), tmp_path / "onnx")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


BLOCKED = """
import sys
for name in ("torch", "ecinn", "onnx", "safetensors"):
    sys.modules[name] = None
"""


@pytest.mark.slow
def test_the_example_runs_without_torch_and_this_package(mnist: Model, tmp_path: Path) -> None:
    export_onnx(mnist, tmp_path / "mnist-onnx")
    (tmp_path / "docs").symlink_to(REPOSITORY / "docs")
    page = (REPOSITORY / "docs" / "other-runtimes.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len([line for line in example.splitlines() if line]) <= 20
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + example],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    three, eight = REPOSITORY / "docs" / "images" / "three-input.png", tmp_path / "eight.png"
    e = mnist.explain(three, 8)
    share, alpha = float(e.posterior.max()), float(e.alpha)
    assert done.stdout == f"a 3 with {share:.1%}; an 8 at α = {alpha:.2f}\n"
    assert mnist.predict(eight).argmax(1).item() == 8
