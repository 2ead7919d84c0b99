"""Write a model as ONNX files, after comparing them with torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from ecinn.classifier.out_of_distribution import IN_WORDS
from ecinn.errors import EcinnError, InputError, first_line
from ecinn.explanation.result import ALPHA_1, Explanation
from ecinn.export.flow import FlowWriter
from ecinn.export.graph import BOOL, FLOAT, INT64, Graph, Name, Port
from ecinn.export.method import MethodWriter
from ecinn.files import atomic_folder, output_folder
from ecinn.model import Model
from ecinn.pixels import to_pixels

DESCRIPTION = "model.json"
TOLERANCE = 1e-4
"""Largest accepted difference from torch, relative to values above 1."""
_CONFIDENCE = 0.9
"""The requested confidence of the comparison, if the model has no default."""
_NUMBER, _WHOLE, _FLAG = Port(FLOAT), Port(INT64), Port(BOOL)


@dataclass(frozen=True)
class OnnxFile:
    """A graph with its ports, and its largest difference from torch."""

    content: bytes
    inputs: Mapping[Name, Port]
    outputs: Mapping[Name, Port]
    difference: float = 0.0


def export_onnx(model: Model, folder: str | Path) -> dict[str, OnnxFile]:
    """Write encode.onnx, decode.onnx, explain.onnx and model.json into a new folder.

    The files take batches of any size. Nothing is written unless ONNX Runtime and torch agree to
    `TOLERANCE` on all outputs.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists already: give a new folder, or remove it first")
    output_folder(folder)
    files = onnx_files(model)
    contents = {f"{name}.onnx": file.content for name, file in files.items()}
    contents[DESCRIPTION] = json.dumps(describe(model), indent=1, ensure_ascii=False).encode()
    atomic_folder(folder, contents)
    return files


def onnx_files(
    model: Model, names: Sequence[str] = ("encode", "decode", "explain")
) -> dict[str, OnnxFile]:
    """Return these graphs, after comparing them with torch."""
    model = Model(model.checkpoint, "cpu")
    writers = {"encode": _encode, "decode": _decode, "explain": _explain}
    with torch.inference_mode():
        cases = _cases(model)
    return {name: _compared(name, writers[name](model), cases) for name in names}


def describe(model: Model) -> dict[str, Any]:
    """Return what a program without this package has to know about the model."""
    channels, height, width = model.image_shape
    default = model.default_confidence
    return {
        "format": "ecinn-onnx-1",
        "name": model.name,
        "dataset": model.recipe.dataset,
        "classes": list(model.class_names),
        "channels": channels,
        "height": height,
        "width": width,
        "framing": _framing(model),
        "default_confidence": None if default == ALPHA_1 else default,
        "out_of_distribution": {
            "reasons": IN_WORDS,
            "log_p": list(model.ood.log_p),
            "texture": model.ood.texture is not None,
            "pose": model.ood.pose is not None,
            "distance": model.ood.distance,
            "shape": model.ood.shape is not None,
        },
    }


def _framing(model: Model) -> dict[str, Any]:
    """Describe how pictures of any size become images, as `read_photograph` does."""
    recipe = model.recipe
    if recipe.mnist_framing:
        return {"kind": "digit"}
    if recipe.face_crop is not None:
        return {"kind": "face", **asdict(recipe.face_crop)}
    if recipe.framing is not None:
        return {"kind": "picture", **asdict(recipe.framing)}
    return {"kind": "picture", "fit": "stretch", "intensity": None}


def _encode(model: Model) -> OnnxFile:
    graph = Graph()
    z, log_det = _flow(graph, model).encode("pixels")
    reading = MethodWriter(graph, model).read(z, log_det)
    inputs = {"pixels": Port(FLOAT, model.image_shape)}
    outputs = {
        "z": (z, Port(FLOAT, (model.mu.shape[1],))),
        "posterior": (reading.posterior, Port(FLOAT, (len(model.class_names),))),
        "log_p": (reading.log_p, _NUMBER),
        "out_of_distribution": (reading.out_of_distribution, Port(BOOL, (len(IN_WORDS),))),
    }
    return _file(graph, inputs, outputs, f"f of {model.name}: pixels to latents")


def _decode(model: Model) -> OnnxFile:
    graph = Graph()
    inputs = {"z": Port(FLOAT, (model.mu.shape[1],))}
    outputs = {"pixels": (_flow(graph, model).decode("z"), Port(FLOAT, model.image_shape))}
    return _file(graph, inputs, outputs, f"Inverse of f of {model.name}: latents to pixels")


def _explain(model: Model) -> OnnxFile:
    """Encode once, and decode both points of every line in one batch, with the same weights."""
    graph = Graph()
    flow, method = _flow(graph, model), MethodWriter(graph, model)
    z, log_det = flow.encode("pixels")
    reading = method.read(z, log_det)
    line = method.line(reading, "target", "confidence")
    decoded = flow.decode(method.points(z, line))
    tipping, convincing = graph.ops("Split", decoded, outputs=2, axis=0, num_outputs=2)
    image = Port(FLOAT, model.image_shape)
    inputs = {"pixels": image, "target": _WHOLE, "confidence": _NUMBER}
    outputs = {
        "p": (reading.p, _WHOLE),
        "posterior": (reading.posterior, Port(FLOAT, (len(model.class_names),))),
        "log_p": (reading.log_p, _NUMBER),
        "out_of_distribution": (reading.out_of_distribution, Port(BOOL, (len(IN_WORDS),))),
        "alpha_0": (line.alpha_0, _NUMBER),
        "alpha_1": (line.alpha_1, _NUMBER),
        "alpha": (line.alpha, _NUMBER),
        "reachable": (line.reachable, _FLAG),
        "tipping_point": (tipping, image),
        "counterfactual": (convincing, image),
    }
    return _file(graph, inputs, outputs, f"Counterfactuals of {model.name}")


def _flow(graph: Graph, model: Model) -> FlowWriter:
    return FlowWriter(graph, model.classifier, model.recipe.stored_bits)


def _file(
    graph: Graph,
    inputs: Mapping[Name, Port],
    outputs: Mapping[Name, tuple[Name, Port]],
    about: str,
) -> OnnxFile:
    ports = {name: port for name, (_, port) in outputs.items()}
    return OnnxFile(graph.serialise(inputs, outputs, about), inputs, ports)


Case = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Inputs of a file, and the outputs that torch computes for them."""


def _compared(name: str, file: OnnxFile, cases: Sequence[Case]) -> OnnxFile:
    """Run a file in ONNX Runtime and compare all of its outputs with torch's."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    differences = []
    try:
        session = onnxruntime.InferenceSession(
            file.content, options, providers=["CPUExecutionProvider"]
        )
        for given, expected in cases:
            inputs = {port: given[port].numpy() for port in file.inputs}
            values = session.run(list(file.outputs), inputs)
            for port, value in zip(file.outputs, values, strict=True):
                differences.append(_difference(value, expected[port].numpy()))
    except Exception as error:  # ONNX Runtime's exceptions have no class of their own
        raise EcinnError(
            f"ONNX Runtime {onnxruntime.__version__} cannot run {name}.onnx, so nothing was "
            f"written ({first_line(error)}): pip install --upgrade onnxruntime"
        ) from error
    worst = float(np.max(differences))
    if not worst <= TOLERANCE:  # also if it is not a number
        raise EcinnError(
            f"{name}.onnx differs from torch by {worst:.1e}, more than {TOLERANCE:g}, so nothing "
            "was written: install another version of onnxruntime, or train the model again"
        )
    return replace(file, difference=worst)


def _difference(value: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, relative to expected values above 1."""
    right = expected.astype(np.float64)
    distance = np.abs(value.astype(np.float64) - right)
    return float((distance / np.maximum(np.abs(right), 1)).max())


def _cases(model: Model) -> list[Case]:
    """Explain samples of the model at α₁ and with a requested confidence."""
    classes = len(model.class_names)
    label = torch.arange(4) % classes
    pixels = to_pixels(model.sample(label, temperature=0.7))
    # The next class, or the one before it.
    target = (model.predict(pixels).argmax(1) + torch.tensor([1, -1, 1, -1])) % classes
    z = model.encode(pixels)
    default = model.default_confidence
    cases = []
    for confidence in (ALPHA_1, _CONFIDENCE if default == ALPHA_1 else default):
        e = model.explain(pixels, target[:, None], confidence=confidence, check=False)
        number = torch.full((4,), 0.0 if confidence == ALPHA_1 else float(confidence))
        given = {"pixels": pixels, "target": target, "confidence": number, "z": z}
        cases.append((given, _outputs(e) | {"z": z, "pixels": model.decode(z)}))
    return cases


def _outputs(e: Explanation) -> dict[str, Tensor]:
    assert e.log_p is not None
    assert e.out_of_distribution is not None
    return {
        "p": e.p,
        "posterior": e.posterior,
        "log_p": e.log_p,
        "out_of_distribution": e.out_of_distribution,
        "alpha_0": e.alpha_0[:, 0],
        "alpha_1": e.alpha_1[:, 0],
        "alpha": e.alpha[:, 0],
        "reachable": e.reachable[:, 0],
        "tipping_point": e.tipping_point[:, 0],
        "counterfactual": e.convincing[:, 0],
    }
