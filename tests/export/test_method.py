"""The closed form in ONNX against the equations in double precision, also where α is not found."""

from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

from ecinn import equations
from ecinn.export.graph import BOOL, FLOAT, INT64, Graph, Port
from ecinn.export.method import MethodWriter
from ecinn.model import Model
from helpers.builders import small_model

N, DIM = 40, 64
FIELDS = ("alpha_0", "alpha_1", "alpha", "reachable")


def model_with(mu: Tensor, mu_bar: Tensor, tau: float) -> Model:
    checkpoint = small_model(classes=3).checkpoint
    checkpoint.classifier.mu = torch.nn.Parameter(mu, requires_grad=False)
    checkpoint.classifier.tau.fill_(tau)
    names = tuple(str(label) for label in range(len(mu)))
    return Model(replace(checkpoint, mu_bar=mu_bar, class_names=names))


def run_line(model: Model, z: Tensor, q: Tensor, confidence: Tensor) -> dict[str, np.ndarray]:
    graph = Graph()
    method = MethodWriter(graph, model)
    line = method.line(method.read("z", "log_det"), "q", "confidence")
    kinds = {name: Port(BOOL if name == "reachable" else FLOAT) for name in FIELDS}
    number = Port(FLOAT)
    inputs = {"z": Port(FLOAT, (DIM,)), "log_det": number, "q": Port(INT64), "confidence": number}
    outputs = {name: (getattr(line, name), kind) for name, kind in kinds.items()}
    session = onnxruntime.InferenceSession(graph.serialise(inputs, outputs, "a line"))
    given = {"z": z, "log_det": torch.zeros(len(z)), "q": q, "confidence": confidence}
    values = session.run(None, {name: value.numpy() for name, value in given.items()})
    return dict(zip(outputs, values, strict=True))


@pytest.mark.parametrize("direction", [1.0, -1.0], ids=["towards q", "away from q"])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_requested_alphas_are_those_of_the_equations(classes: int, direction: float) -> None:
    """With means in a row, the classes between others are never certain."""
    g = torch.Generator().manual_seed(classes)
    offset = 20 * torch.randn(DIM, generator=g)
    step = torch.nn.functional.normalize(torch.randn(DIM, generator=g), dim=0)
    sideways = 0.2 * torch.randn((classes, DIM), generator=g)
    mu = offset + torch.arange(classes)[:, None] * 2.5 * step + sideways
    mu_bar = direction * (mu + 0.1 * torch.randn(mu.shape, generator=g))
    z = mu[torch.randint(classes, (N,), generator=g)] + torch.randn((N, DIM), generator=g)
    confidence = torch.rand(N, generator=g) ** 0.3
    confidence[:4] = 0.999999
    confidence[4:12] = torch.tensor([0.0, -1.0, torch.nan, -torch.inf] * 2)  # α₁ is requested
    p = equations.predicted_class(z, mu)
    q = (p + torch.randint(1, classes, (N,), generator=g)) % classes
    tau = 0.7
    found = run_line(model_with(mu, mu_bar, tau), z, q, confidence)

    z, mu, mu_bar, confidence = (each.double() for each in (z, mu, mu_bar, confidence))
    delta = mu_bar[q] - mu_bar[p]
    alpha_0 = equations.tipping_point_alpha(z, delta, mu[p], mu[q])
    wanted = torch.where(confidence > 0, confidence, 0.5)
    alpha, reachable = equations.confident_alpha(z, delta, mu, tau, q, wanted)
    assert direction > 0 or classes != 2 or not reachable[4:12].any()
    alpha[4:12], reachable[4:12] = 0.8 + 0.5 * alpha_0[4:12], True
    assert direction < 0 or reachable.any()
    assert (direction > 0 and classes == 2) or not reachable.all()
    np.testing.assert_array_equal(found["reachable"], reachable)
    np.testing.assert_allclose(found["alpha_0"], alpha_0, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(found["alpha"], alpha, atol=1e-4, rtol=1e-4)
