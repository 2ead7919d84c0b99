"""Classifiers from files: ONNX, `torch.export` and TorchScript, with guesses at their input."""

import ast
import json
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecinn.blackbox.preprocessing import CHANNELS
from ecinn.errors import InputError, first_line

SUFFIXES = (".onnx", ".pt2", ".pt")
_ONNX_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(uint8)": np.uint8,
}


@dataclass(frozen=True)
class Network:
    """A callable from its input to its output, and what its file says about the input."""

    call: Callable[[Tensor], Any]
    shape: tuple[int | None, ...] | None = None
    """Shape of the input, None where any number fits; None if the file does not say it."""
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def batch(self) -> int | None:
        """The only number of pictures that it takes at once, or None for any."""
        return self.shape[0] if self.shape else None

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of its outputs, if the file says them as `names`, `classes` or `labels`."""
        for key in ("names", "classes", "labels", "class_names"):
            value = _parsed(self.metadata.get(key, ""))
            if isinstance(value, dict):
                value = [value[k] for k in sorted(value, key=int)]
            if isinstance(value, list | tuple) and value:
                return tuple(str(name) for name in value)
        return ()

    def preprocessing(self) -> dict[str, Any]:
        """Guess settings of `Preprocessing` from the input's shape and the metadata."""
        guess: dict[str, Any] = {}
        if self.shape is not None and len(self.shape) == 4:
            last = self.shape[3] in (1, 3) and self.shape[1] not in (1, 3)
            guess["layout"] = "NHWC" if last else "NCHW"
            channels = self.shape[3] if last else self.shape[1]
            height, width = self.shape[1:3] if last else self.shape[2:]
            if channels in (1, 3):
                guess["channels"] = "grey" if channels == 1 else "RGB"
            if height is not None and width is not None:
                guess["size"] = (height, width)
        for key in ("scale", "mean", "std"):
            value = _parsed(self.metadata.get(key, ""))
            if isinstance(value, int | float):
                guess[key] = float(value) if key == "scale" else (float(value),)
            elif isinstance(value, list | tuple) and key != "scale":
                guess[key] = tuple(float(v) for v in value)
        if self.metadata.get("channels") in CHANNELS:
            guess["channels"] = self.metadata["channels"]
        return guess


def load_network(path: Path, device: torch.device | None = None) -> Network:
    """Load a classifier from a file; .pt and .pt2 files contain code: load only trusted ones.

    ONNX files contain no code, only a graph.

    Args:
        device: where torch's networks run; by default the CPU.
    """
    if not path.is_file():
        raise InputError(f"there is no file {path}: give a classifier ({', '.join(SUFFIXES)})")
    loaders = dict(zip(SUFFIXES, (_load_onnx, _load_exported, _load_script), strict=True))
    loader = loaders.get(path.suffix.lower())
    if loader is None:
        raise InputError(
            f"{path.name} is not a classifier that can be loaded: export it to ONNX (.onnx), "
            "with torch.export (.pt2) or as TorchScript (.pt)"
        )
    try:
        return loader(path, device or torch.device("cpu"))
    except (ImportError, InputError):
        raise
    except Exception as error:
        hint = (
            "; .pt must be TorchScript: export a module with torch.export.save into a .pt2 file"
            if path.suffix.lower() == ".pt"
            else "; export it again"
        )
        reason = first_line(error).partition(". ")[0]
        raise InputError(f"cannot load {path.name}: {reason}{hint}") from error


def _load_onnx(path: Path, device: torch.device) -> Network:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # errors are raised as well
    providers = ["CPUExecutionProvider"]
    if device.type == "cuda" and "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        providers.insert(0, "CUDAExecutionProvider")
    session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    inputs = session.get_inputs()
    if len(inputs) != 1:
        names = ", ".join(i.name for i in inputs)
        raise InputError(f"{path.name} has {len(inputs)} inputs ({names}); a classifier has one")
    name, kind = inputs[0].name, _ONNX_TYPES.get(inputs[0].type)
    if kind is None:
        raise InputError(f"{path.name} takes {inputs[0].type}, not pictures")
    output = session.get_outputs()[0].name
    shape = tuple(size if isinstance(size, int) else None for size in inputs[0].shape)

    def call(x: Tensor) -> Any:  # noqa: ANN401
        return session.run([output], {name: x.cpu().numpy().astype(kind)})[0]

    return Network(call, shape or None, dict(session.get_modelmeta().custom_metadata_map))


def _load_exported(path: Path, device: torch.device) -> Network:
    with zipfile.ZipFile(path):  # of another file, torch would log a traceback
        program = torch.export.load(path)
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    module = program.module()
    first = program.graph_signature.user_inputs[0]
    node = next(n for n in program.graph.nodes if n.name == first)
    shape = tuple(s if isinstance(s, int) else None for s in node.meta["val"].shape)
    return Network(lambda x: module(x.to(device)), shape)


def _load_script(path: Path, device: torch.device) -> Network:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the format, which people have
        module = torch.jit.load(path, map_location=device).eval()
    return Network(lambda x: module(x.to(device)))


def _parsed(text: str) -> Any:  # noqa: ANN401
    """Read a value of the metadata: JSON, a Python literal, or names with commas."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return [name.strip() for name in text.split(",")] if "," in text else None
