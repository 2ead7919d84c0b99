"""Two methods of alibi 0.9.6 on our classifier, with the settings of alibi's MNIST examples.

alibi differentiates Keras models only: of anything else it takes 1,568 evaluations per gradient.
So our posterior becomes a Keras model whose gradient torch computes. What is computed once for all
digits is not timed: graphs, the autoencoder and the prototypes of CounterfactualProto.
"""

import os
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ecinn import equations
from ecinn.data.mnist import load_mnist
from ecinn.model import Model
from ecinn.pixels import to_pixels

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.compat.v1.disable_v2_behavior()  # alibi's explainers are graphs of TensorFlow 1

from alibi.explainers import Counterfactual, CounterfactualProto  # noqa: E402

SHAPE = (1, 28, 28, 1)
RANGE = (-0.5, 0.5)
TRAINING_DIGITS = 10_000
"""Of the autoencoder and the prototypes, instead of the 60,000 in alibi's example."""

Explain = Callable[[Model, Tensor, Tensor], Tensor]
"""From a model, the pixels of one digit and its target to pixels; nan if nothing is found."""


def to_array(pixels: Tensor) -> np.ndarray:
    """Pixels of [0, 1] as alibi's examples have them: channels last, of [−½, ½]."""
    return pixels.permute(0, 2, 3, 1).numpy() - np.float32(0.5)


def from_array(array: np.ndarray) -> Tensor:
    """Invert `to_array`."""
    return torch.from_numpy(np.asarray(array, np.float32)).permute(0, 3, 1, 2) + 0.5


class Posterior(tf.keras.Model):  # type: ignore[misc]
    """p(y|x) of our model as a Keras model."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._flow = model
        self._last: tuple[Tensor, Tensor] | None = None

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """p(y|x) in alibi's graph."""

        @tf.custom_gradient
        def posterior(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            y = tf.numpy_function(self._forward, [x], tf.float32)
            y.set_shape((None, len(self._flow.mu)))

            def gradient(given: tf.Tensor) -> tf.Tensor:
                slope = tf.numpy_function(self._backward, [given], tf.float32)
                slope.set_shape(x.shape)
                return slope

            return y, gradient

        return posterior(x)

    def predict(self, x: np.ndarray, **options: object) -> np.ndarray:
        """p(y|x) of an array."""
        with torch.no_grad():
            return np.concatenate([self._read(part).numpy() for part in from_array(x).split(64)])

    def _read(self, pixels: Tensor) -> Tensor:
        z, _ = self._flow.encode_with_log_det(pixels)
        return equations.log_posterior(z, self._flow.mu, self._flow.tau).exp()

    def _forward(self, x: np.ndarray) -> np.ndarray:
        with torch.enable_grad():
            pixels = from_array(x).requires_grad_()
            y = self._read(pixels)
        self._last = pixels, y
        return y.detach().numpy()

    def _backward(self, given: np.ndarray) -> np.ndarray:
        # TensorFlow asks for the gradient right after the value that it belongs to.
        assert self._last is not None
        pixels, y = self._last
        (slope,) = torch.autograd.grad(y, pixels, torch.from_numpy(given))
        return slope.permute(0, 2, 3, 1).numpy()


def answer(found: dict[str, np.ndarray] | None) -> Tensor:
    """Return the pixels of alibi's counterfactual, "1 1 1 28 28"."""
    return from_array(found["X"] if found else np.full(SHAPE, np.nan))[None]


def wachter(model: Model) -> Callable[[int], Explain]:
    """Prepare `Counterfactual`, whose graph holds the target: one explainer for every target."""

    def prepare(target: int) -> Explain:
        tf.keras.backend.clear_session()
        explainer = Counterfactual(
            Posterior(model), shape=SHAPE, target_proba=1.0, tol=0.01, target_class=target,
            max_iter=1000, lam_init=0.1, max_lam_steps=10, learning_rate_init=0.1,
            feature_range=RANGE,
        )  # fmt: skip
        return lambda model, x, q: answer(explainer.explain(to_array(x)).cf)

    return prepare


def prototypes(model: Model) -> Callable[[int], Explain]:
    """Prepare `CounterfactualProto` with an autoencoder that is trained here."""
    tf.keras.backend.clear_session()
    tf.compat.v1.set_random_seed(0)
    np.random.seed(0)  # noqa: NPY002 (Keras shuffles with it)
    training = to_array(to_pixels(load_mnist("train").images[:TRAINING_DIGITS]))
    autoencoder, encoder = autoencoders()
    autoencoder.fit(training, training, batch_size=128, epochs=4, verbose=0)
    explainer = CounterfactualProto(
        Posterior(model), SHAPE, gamma=100.0, theta=100.0, ae_model=autoencoder,
        enc_model=encoder, max_iterations=1000, feature_range=RANGE, c_init=1.0, c_steps=2,
    )  # fmt: skip
    explainer.fit(training)
    return lambda target: (
        lambda model, x, q: answer(explainer.explain(to_array(x), target_class=[target]).cf)
    )


def autoencoders() -> tuple[tf.keras.Model, tf.keras.Model]:
    """Build the autoencoder of alibi's example and its encoder."""
    layers = tf.keras.layers

    def convolution(filters: int, activation: str | None = "relu") -> tf.keras.layers.Layer:
        return layers.Conv2D(filters, 3, activation=activation, padding="same")

    x = layers.Input(SHAPE[1:])
    half = layers.MaxPooling2D(2)(convolution(16)(convolution(16)(x)))
    code = convolution(1, None)(half)
    whole = convolution(16)(layers.UpSampling2D(2)(convolution(16)(code)))
    autoencoder = tf.keras.Model(x, convolution(1, None)(whole))
    autoencoder.compile(optimizer="adam", loss="mse")
    return autoencoder, tf.keras.Model(x, code)
