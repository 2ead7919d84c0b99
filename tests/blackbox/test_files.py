"""One small network in each format, and classifiers that are kept beside a model."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ecinn.blackbox import files
from ecinn.blackbox.files import load_classifier, open_classifier, read_options, save_classifier
from ecinn.blackbox.networks import Network, load_network
from ecinn.errors import InputError

NAMES = ("no", "maybe", "yes")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.weight = nn.Parameter(torch.randn((48, 3), generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifiers")
    x = torch.zeros((2, 3, 4, 4))
    batch = ({0: torch.export.Dim("batch")},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(Small(), x).save(folder / "small.pt")
        torch.export.save(
            torch.export.export(Small(), (x,), dynamic_shapes=batch), folder / "small.pt2"
        )
        torch.export.save(torch.export.export(Small(), (x,)), folder / "fixed.pt2")
    torch.save(Small().state_dict(), folder / "weights.pt")
    (folder / "broken.pt2").write_bytes(b"no archive")
    return folder


@pytest.fixture(scope="module")
def onnx_file(folder: Path) -> Path:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    float32 = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Flatten", ["image"], ["flat"]),
            onnx.helper.make_node("MatMul", ["flat", "weight"], ["logits"]),
        ],
        "small",
        [onnx.helper.make_tensor_value_info("image", float32, ["n", 3, 4, 4])],
        [onnx.helper.make_tensor_value_info("logits", float32, ["n", 3])],
        [onnx.numpy_helper.from_array(Small().weight.detach().numpy(), "weight")],
    )
    opsets = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    about = {"mean": "[0.5, 0.4, 0.3]", "std": "0.2", "names": "{0: 'yes', 1: 'no', 2: 'maybe'}"}
    onnx.helper.set_model_props(model, about)
    onnx.save(model, folder / "small.onnx")
    return folder / "small.onnx"


def pictures(n: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (n, 3, 4, 4), generator=generator).byte()


@pytest.mark.parametrize("name", ["small.pt", "small.pt2", "fixed.pt2"])
def test_torch_files_answer_as_the_network(folder: Path, name: str) -> None:
    box = open_classifier(folder / name, NAMES)
    assert box.batch == (2 if name == "fixed.pt2" else None)
    expected = Small()(pictures().float() / 255).softmax(1).detach()
    torch.testing.assert_close(box.predict(pictures()), expected)
    assert box.queries == 5


def test_onnx_answers_as_the_network_fed_as_its_metadata_says(onnx_file: Path) -> None:
    box = open_classifier(onnx_file, NAMES)
    mean = torch.tensor([0.5, 0.4, 0.3])[:, None, None]
    expected = Small()((pictures().float() / 255 - mean) / 0.2).softmax(1).detach()
    # Output 0 is "yes", the last of these classes.
    torch.testing.assert_close(box.predict(pictures()), expected[:, [1, 2, 0]])
    given = open_classifier(onnx_file, NAMES, {"mean": (0.0,), "std": (1.0,), "classes": NAMES})
    plain = Small()(pictures().float() / 255).softmax(1).detach()
    torch.testing.assert_close(given.predict(pictures()), plain)


def test_wrong_sizes_are_one_line(folder: Path) -> None:
    box = open_classifier(folder / "small.pt", NAMES, {"size": (5, 5)})
    with pytest.raises(Exception, match="3×3×5×5") as error:
        box.predict(pictures(3))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("shape", "guess"),
    [
        ((None, 3, 32, 24), {"layout": "NCHW", "channels": "RGB", "size": (32, 24)}),
        ((1, 20, 30, 1), {"layout": "NHWC", "channels": "grey", "size": (20, 30)}),
        ((None, 1, None, None), {"layout": "NCHW", "channels": "grey"}),
        ((None, 784), {}),
        (None, {}),
    ],
)
def test_preprocessing_is_guessed_from_the_shape(shape, guess: dict) -> None:
    assert Network(lambda x: x, shape).preprocessing() == guess


@pytest.mark.parametrize("names", ['["a", "b"]', "a, b", "{1: 'b', 0: 'a'}"])
def test_class_names_are_read_from_metadata(names: str) -> None:
    assert Network(lambda x: x, None, {"classes": names}).classes == ("a", "b")
    assert Network(lambda x: x, None, {"author": names}).classes == ()


@pytest.mark.parametrize("name", ["weights.pt", "broken.pt2", "absent.onnx", "network.h5"])
def test_files_that_are_no_classifiers_are_refused(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "network.h5").touch()
    with pytest.raises(InputError) as error:
        load_network(folder / name)
    assert name in str(error.value)
    assert "\n" not in str(error.value)
    assert not caplog.records


@pytest.mark.parametrize("copied", [True, False])
def test_a_kept_classifier_answers_alike(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, copied: bool
) -> None:
    if not copied:
        monkeypatch.setattr(files, "LARGEST_COPY", 10)
    options = {"channels": "BGR", "mean": (0.1, 0.2, 0.3), "classes": ("yes", "no", "maybe")}
    box = open_classifier(folder / "small.pt2", NAMES, options)
    answers = box.predict(pictures())
    save_classifier(box, folder / "small.pt2", tmp_path)
    assert (tmp_path / "classifier.pt2").exists() == copied
    again = load_classifier(tmp_path, NAMES)
    assert again.name == "small.pt2"
    assert again.output == "logits"
    assert torch.equal(again.predict(pictures()), answers)
    if copied:
        (tmp_path / "classifier.pt2").write_bytes((folder / "fixed.pt2").read_bytes())
        with pytest.raises(InputError, match="hash differs"):
            load_classifier(tmp_path, NAMES)
        (tmp_path / "classifier.pt2").unlink()
        with pytest.raises(InputError, match="is gone"):
            load_classifier(tmp_path, NAMES)


@pytest.mark.parametrize("text", ["colour = 1", "size = 3", 'mean = ["a"]', "scale = ["])
def test_wrong_settings_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"settings\.toml"):
        read_options(path)
    path.write_text(f"size = [4, 5]\nclasses = {json.dumps(NAMES)}\nscale = 1")
    assert read_options(path) == {"size": (4, 5), "classes": NAMES, "scale": 1}
