"""The autoencoders behind IM1 and IM2, read from Keras' HDF5 files without TensorFlow."""

import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ecinn.errors import InputError
from ecinn.metrics.counterfactuals import Images, Labels, Pixels


@dataclass(frozen=True)
class Reconstructions:
    """A counterfactual c as the autoencoders take it, and what three of them make of it."""

    pixels: Pixels
    by_p: Pixels
    by_q: Pixels
    by_all: Pixels


class Autoencoder(nn.Sequential):
    """Layers that give back images of one shape: channels, height, width."""

    def __init__(self, layers: Sequence[nn.Module], image_shape: tuple[int, int, int]) -> None:
        super().__init__(*layers)
        self.image_shape = image_shape


class ClassAutoencoders(nn.Module):
    """One autoencoder per class, trained on that class only, and one trained on all."""

    def __init__(self, by_class: Sequence[Autoencoder], by_all: Autoencoder) -> None:
        super().__init__()
        shapes = {autoencoder.image_shape for autoencoder in (*by_class, by_all)}
        if len(shapes) > 1:
            raise InputError(f"autoencoders of one kind take one image shape, not {shapes}")
        self.by_class = nn.ModuleList(by_class)
        self.by_all = by_all

    @torch.inference_mode()
    def reconstruct(
        self, images: Images, p: Labels, q: Labels, batch_size: int = 32
    ) -> Reconstructions:
        """AE_p(c), AE_q(c) and AE_all(c) of c = k/255 − ½.

        Args:
            batch_size: small ones stay in a processor's cache and are faster there.
        """
        if tuple(images.shape[1:]) != self.by_all.image_shape:
            raise InputError(
                f"the autoencoders take images of shape {self.by_all.image_shape}, "
                f"not {tuple(images.shape[1:])}"
            )
        pixels = (images.float() / 255 - 0.5).to(memory_format=torch.channels_last)
        return Reconstructions(
            pixels=pixels,
            by_p=self._of_class(pixels, p, batch_size),
            by_q=self._of_class(pixels, q, batch_size),
            by_all=_in_batches(self.by_all, pixels, batch_size),
        )

    def _of_class(self, pixels: Pixels, label: Labels, batch_size: int) -> Pixels:
        wrong = label[(label < 0) | (label >= len(self.by_class))]
        if len(wrong):
            raise InputError(
                f"no autoencoder of class {int(wrong[0])}: there are 0 to {len(self.by_class) - 1}"
            )
        answer = torch.empty_like(pixels)
        for one, autoencoder in enumerate(self.by_class):
            if bool((label == one).any()):
                answer[label == one] = _in_batches(autoencoder, pixels[label == one], batch_size)
        return answer


def load_autoencoders(folder: Path, classes: int = 10) -> ClassAutoencoders:
    """Read ae_0.h5, ae_1.h5, … and ae_all.h5."""
    by_class = [read_keras(folder / f"ae_{label}.h5") for label in range(classes)]
    return ClassAutoencoders(by_class, read_keras(folder / "ae_all.h5"))


def read_keras(path: Path) -> Autoencoder:
    """A chain of convolutions, poolings and upsamplings, as the file describes it."""
    try:
        h5py = importlib.import_module("h5py")
    except ImportError:
        raise InputError(
            f"reading {path.name} needs h5py: pip install 'ecinn[benchmark]'"
        ) from None
    if not path.is_file():
        raise InputError(
            f"{path} is missing: give the folder with ae_0.h5, ae_1.h5, … and ae_all.h5"
        )
    try:
        with h5py.File(path, "r") as file:
            layers = json.loads(file.attrs["model_config"])["config"]["layers"]
            modules = [
                module
                for group, layer in _chain(layers)
                for module in _modules(layer, file["model_weights"][group])
            ]
        _, height, width, channels = layers[0]["config"]["batch_input_shape"]
        autoencoder = Autoencoder(modules, (channels, height, width))
        answer = autoencoder(torch.zeros(1, channels, height, width))
        if tuple(answer.shape[1:]) != autoencoder.image_shape:
            raise ValueError(f"it turns {autoencoder.image_shape} into {tuple(answer.shape[1:])}")
    except (OSError, LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{path} is not a Keras file of an autoencoder that can be read here ({reason}): "
            "give the authors' ae_*.h5"
        ) from error
    return autoencoder.eval().requires_grad_(requires_grad=False)


def _chain(layers: list[Any], group: str | None = None) -> Iterator[tuple[str, Any]]:
    """Every layer in order, with the outermost name it stands under, which holds its weights."""
    for before, layer in zip([None, *layers[:-1]], layers, strict=True):
        came_from = [node[0][0] for node in layer["inbound_nodes"] if len(node) == 1]
        if before is not None and before["name"] not in came_from:
            raise ValueError(f"{layer['name']} does not follow {before['name']}")
        name = group or layer["name"]
        if layer["class_name"] == "Functional":
            yield from _chain(layer["config"]["layers"], name)
        elif layer["class_name"] != "InputLayer":
            yield name, layer


def _modules(layer: Any, weights: Any) -> list[nn.Module]:  # noqa: ANN401
    """What the layer is in torch."""
    kind, config = layer["class_name"], layer["config"]
    if kind == "Conv2D":
        _expect(config, padding="same", strides=[1, 1], dilation_rate=[1, 1])
        _expect(config, groups=1, data_format="channels_last", use_bias=True)
        return _convolution(config, weights[layer["name"]])
    if kind == "MaxPooling2D":
        _expect(config, pool_size=[2, 2], strides=[2, 2], data_format="channels_last")
        return [nn.MaxPool2d(2, ceil_mode=config["padding"] == "same")]
    if kind == "UpSampling2D":
        _expect(config, size=[2, 2], interpolation="nearest", data_format="channels_last")
        return [nn.Upsample(scale_factor=2, mode="nearest")]
    raise ValueError(f"{layer['name']} is a {kind}")


def _convolution(config: Any, weights: Any) -> list[nn.Module]:  # noqa: ANN401
    kernel = torch.from_numpy(weights["kernel:0"][()])
    bias = torch.from_numpy(weights["bias:0"][()])
    height, width, channels, filters = kernel.shape
    if [height, width, filters] != [*config["kernel_size"], config["filters"]] or bias.shape != (
        filters,
    ):
        raise ValueError(
            f"{config['name']} should have {config['filters']} filters of {config['kernel_size']}"
            f" but holds {tuple(kernel.shape)} and {tuple(bias.shape)}"
        )
    # Without skip_init, torch would draw weights from the global generator.
    convolution = nn.utils.skip_init(nn.Conv2d, channels, filters, (height, width), padding="same")
    convolution.load_state_dict({"weight": kernel.permute(3, 2, 0, 1), "bias": bias})
    if config["activation"] == "linear":
        return [convolution]
    _expect(config, activation="relu")
    return [convolution, nn.ReLU()]


def _expect(config: Any, **settings: object) -> None:  # noqa: ANN401
    for name, value in settings.items():
        if config[name] != value:
            raise ValueError(f"{config['name']} has {name} {config[name]!r}, not {value!r}")


def _in_batches(autoencoder: nn.Module, pixels: Pixels, batch_size: int) -> Pixels:
    return torch.cat([autoencoder(some) for some in pixels.split(batch_size)])
