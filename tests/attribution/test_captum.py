"""ECINN's heatmaps in Captum's pipelines, against the formula and against Captum's definitions."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from captum.attr import Attribution, IntegratedGradients, NoiseTunnel
from captum.metrics import infidelity
from torch import Tensor

import ecinn
from ecinn.attribution.captum import CounterfactualAttribution
from ecinn.errors import InputError
from ecinn.model import Model
from ecinn.pixels import to_pixels, to_uint8
from helpers.builders import random_images, small_model, with_default


@pytest.fixture(scope="module")
def model() -> Model:
    return small_model()


@pytest.fixture(scope="module")
def x() -> Tensor:
    return to_pixels(random_images(12, 1, 3, 4).images)


def change(model: Model, x: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """f⁻¹(f(x) + α₁Δ) − x, with α₀ where both means are equally far, and α₁ = ⅘ + α₀/2."""
    z = model.encode(x).double()
    mu, mu_bar = model.mu.double(), model.mu_bar.double()
    delta = mu_bar[q] - mu_bar[p]
    away = mu[q] - mu[p]
    middle = (mu[q] + mu[p]) / 2
    alpha_0 = ((middle - z) * away).sum(1) / (delta * away).sum(1)
    moved = z + (0.8 + alpha_0 / 2)[:, None] * delta
    return model.decode(moved.float()) - x


def test_maps_are_those_of_the_formula_for_every_kind_of_target(model: Model, x: Tensor) -> None:
    method = CounterfactualAttribution(model)
    assert isinstance(method, Attribution)
    order = model.predict(x).argsort(1, descending=True)
    p, second, third = order.unbind(1)
    assert len(p.unique()) > 1
    away = change(model, x, p, second)
    torch.testing.assert_close(method.attribute(x, p), -away, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(method.attribute(x), -away, atol=1e-4, rtol=1e-3)
    towards = change(model, x, p, third)
    for target in (third, third.tolist(), third.numpy(), third.int()):
        torch.testing.assert_close(method.attribute(x, target), towards, atol=1e-4, rtol=1e-3)
    for target in (1, torch.tensor(1), torch.tensor([1])):
        maps = method.attribute(x, target)
        other = p != 1
        expected = model.explain(x[other], 1).heatmap[:, 0]
        torch.testing.assert_close(maps[other], expected, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(maps[~other], -away[~other], atol=1e-4, rtol=1e-3)
    assert not maps.is_inference()


def test_the_container_type_and_device_of_the_inputs_are_kept(model: Model, x: Tensor) -> None:
    method = CounterfactualAttribution(model)
    maps = method.attribute(x, 1)
    (in_tuple,) = method.attribute((x,), 1)
    assert torch.equal(in_tuple, maps)
    double = method.attribute(x.double().requires_grad_(), 1)
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), maps)


def test_8_bit_images_have_the_same_maps(model: Model, x: Tensor) -> None:
    images = to_uint8(x)
    maps = CounterfactualAttribution(model).attribute(images, target=2)
    expected = CounterfactualAttribution(model).attribute(model.pixels(images), target=2)
    assert maps.dtype == torch.float32
    assert torch.equal(maps, expected)
    assert maps.abs().max() > 0.01
    with pytest.raises(InputError, match="a tensor of images"):
        CounterfactualAttribution(model)._maps(images.numpy(), target=2)
    with pytest.raises(InputError, match=r"ecinn\.load"):
        # Bypass the runtime type checker, which users do not run.
        CounterfactualAttribution.__init__.__wrapped__(model, "mnist")


def test_the_models_default_confidence_holds(model: Model, x: Tensor) -> None:
    sure = with_default(model, 0.8)
    p = model.predict(x).argmax(1)
    q = (p + 1) % 3
    for method, confidence in (
        (CounterfactualAttribution(sure), 0.8),
        (CounterfactualAttribution(model, 0.6), 0.6),
    ):
        expected = model.explain(x, q[:, None], confidence=confidence).heatmap[:, 0]
        assert torch.equal(method.attribute(x, q), expected)


def test_the_prediction_is_that_of_the_classifier_that_a_student_explains(
    model: Model, x: Tensor
) -> None:
    class Turned:
        """Reads every class as the next one, three times as sure."""

        name = "turned"

        def predict(self, images: Tensor) -> Tensor:
            return (3 * model.predict(images).log()).softmax(1).roll(1, 1)

    student = Model(model.checkpoint, "cpu", Turned())
    p = Turned().predict((256 * x).byte()).argmax(1)
    q = model.predict(x).argmax(1)  # what the student predicts is not what is explained
    assert torch.equal(q, (p - 1) % 3)
    maps = CounterfactualAttribution(student).attribute(x, q)
    assert torch.equal(maps, student.explain(x, q[:, None]).heatmap[:, 0])
    assert not torch.allclose(maps, CounterfactualAttribution(model).attribute(x, q))


def test_noise_tunnel_averages_the_maps_of_noisy_images(model: Model, x: Tensor) -> None:
    method = CounterfactualAttribution(model)
    torch.manual_seed(5)
    smooth = NoiseTunnel(method).attribute(
        x, nt_type="smoothgrad", nt_samples=3, stdevs=0.01, target=1
    )
    torch.manual_seed(5)
    noisy = torch.normal(x.repeat_interleave(3, 0), 0.01)
    expected = method.attribute(noisy, 1).unflatten(0, (len(x), 3)).mean(1)
    torch.testing.assert_close(smooth, expected)


@pytest.mark.slow
def test_noise_tunnel_takes_it_where_no_shapes_are_checked() -> None:
    """It asks for an attribute that checked functions have anyway."""
    program = (
        "import ecinn; from captum.attr import NoiseTunnel\n"
        "method = ecinn.CounterfactualAttribution(ecinn.load('mnist', 'cpu'))\n"
        "x = ecinn.load_dataset('mnist', 'test').images[:1] / 255\n"
        "print(NoiseTunnel(method).attribute(x, nt_samples=2, stdevs=0.01, target=5).shape)"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "torch.Size([1, 1, 28, 28])\n"


def test_infidelity_of_the_maps_is_captums_definition(model: Model, x: Tensor) -> None:
    """E (Σ n·map − (F(x) − F(x − n)))², for one n."""
    method = CounterfactualAttribution(model)
    maps, target = method.attribute(x, 2), 2
    noise = 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    measured = infidelity(
        method.forward_func,
        lambda given: (noise, given - noise),
        x,
        maps,
        target=target,
        n_perturb_samples=1,
    )

    def logit(pixels: Tensor) -> Tensor:
        return model.encode(pixels) @ model.mu[2] - model.mu[2].square().sum() / 2

    expected = (noise * maps).flatten(1).sum(1) - (logit(x) - logit(x - noise))
    torch.testing.assert_close(measured, expected.square(), atol=1e-3, rtol=1e-3)
    gradients = IntegratedGradients(method.forward_func).attribute(x, target=2, n_steps=3)
    assert gradients.shape == maps.shape


def test_quantus_calls_it_with_arrays(model: Model, x: Tensor) -> None:
    """Its explain_func takes the network, images and labels as arrays, and returns an array."""
    method = CounterfactualAttribution(model)

    def explain_func(model, inputs: np.ndarray, targets: np.ndarray, **options) -> np.ndarray:
        maps = method.attribute(torch.as_tensor(inputs), torch.as_tensor(targets))
        return maps.numpy()

    labels = np.arange(12) % 3
    maps = explain_func(method.forward_func, x.numpy(), labels, device="cpu")
    assert maps.shape == x.shape
    assert np.array_equal(maps, method.attribute(x, torch.from_numpy(labels)).numpy())


@pytest.mark.parametrize(
    ("target", "says"),
    [(3, "classes 0 to 2"), ([0, 1], "12 images"), (0.5, "class number"), ("a", "class number")],
)
def test_wrong_targets_are_refused(model: Model, x: Tensor, target, says: str) -> None:
    with pytest.raises(InputError, match=says):
        CounterfactualAttribution(model).attribute(x, target)


def test_wrong_inputs_are_refused(model: Model, x: Tensor) -> None:
    method = CounterfactualAttribution(model)
    with pytest.raises(InputError, match="one tensor"):
        method.attribute((x, x), 0)
    with pytest.raises(InputError, match="8, 8"):
        method.attribute(x[..., 1:], 0)


def test_without_captum_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ecinn.attribution.captum", raising=False)
    monkeypatch.delitem(vars(ecinn), "CounterfactualAttribution", raising=False)
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    with pytest.raises(InputError, match=r"pip install 'ecinn\[heatmaps\]'"):
        _ = ecinn.CounterfactualAttribution
