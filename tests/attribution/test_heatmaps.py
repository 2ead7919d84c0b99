"""Heatmaps against closed forms, against Captum's own classes, and their cost."""

import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ecinn.attribution.heatmaps import (
    METHODS,
    Attribution,
    Heatmaps,
    HeatmapSettings,
    attribute,
    ecinn_heatmaps,
    heatmaps,
)
from ecinn.attribution.scores import ExplainedINN, FlowLogits
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import explain
from ecinn.pixels import to_pixels
from helpers.builders import RotationClassifier, random_images, randomise, small_cnn, small_model

GRADIENT_METHODS = METHODS[1:]
FEW = HeatmapSettings(steps=6, baselines=3, samples=4, noise=0.05)
ZERO = torch.zeros(5).double()
P, Q = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([1, 2, 0, 2, 0])


class Quadratic(nn.Module):
    """s_y(x) = xᵀA_y x + b_y·x on flattened pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3, 64, 64, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(3, 64, dtype=torch.float64))
        randomise(self, scale=1.0).eval()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return torch.einsum("ni,kij,nj->nk", flat, self.a, flat) + flat @ self.b.T


class SharedLog(list[tuple[str, int]]):
    """Shared with copies of the module that holds it."""

    def __deepcopy__(self, memo: object) -> "SharedLog":
        return self


class Spy(nn.Module):
    """A network's scores; logs the batch sizes of forward and backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.network = cnn()
        self.log = SharedLog()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        self.log.append(("forward", len(x)))
        if x.requires_grad:
            x.register_hook(lambda gradient: self.log.append(("backward", len(gradient))))
        return self.network(x)


def network_of(*layers: nn.Module) -> nn.Sequential:
    network = nn.Sequential(*layers).double()
    for parameter in network.parameters():
        nn.init.zeros_(parameter)  # they start from the global generator
    return randomise(network, scale=3.0).eval()


def cnn(channels: int = 1, *, inplace: bool = False) -> nn.Module:
    """With everything DeepLift has a rule for, and batch norm, which is linear in evaluation."""
    return network_of(
        nn.Conv2d(channels, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=inplace),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.ReLU(inplace=inplace),
        nn.Flatten(),
        nn.Linear(96, 3),
    )


def linear() -> tuple[nn.Module, Tensor]:
    """A linear network and ∇F of every image's pair."""
    network = network_of(nn.Flatten(), nn.Linear(64, 3))
    weight = network[1].weight.detach()
    return network, (weight[Q] - weight[P]).reshape(5, 1, 8, 8)


@pytest.fixture
def inn(small_classifier, generator) -> ExplainedINN:
    noise = torch.randn(small_classifier.mu.shape, generator=generator, dtype=torch.float64)
    return ExplainedINN(small_classifier, small_classifier.mu + 0.1 * noise)


@pytest.fixture
def x(uniform) -> Tensor:
    return uniform(5, 1, 8, 8)


@pytest.fixture
def pool(uniform) -> Tensor:
    return uniform(7, 1, 8, 8)


@pytest.fixture
def ask(x, pool):
    def maps_of_x(network, method: str, **more) -> Heatmaps:
        return heatmaps(network, x, P, Q, method, **{"baselines": pool, **more})

    return maps_of_x


def test_ecinn_is_the_explanations_heatmap(inn, x) -> None:
    e = explain(inn.classifier, inn.mu_bar, x, "all", check=False)
    for column in range(2):
        h = heatmaps(inn, x, e.p, e.q[:, column], "ecinn")
        torch.testing.assert_close(h.maps, e.convincing[:, column] - x)
        assert h.convergence_delta is None


def test_ecinn_takes_one_encode_and_one_decode(uniform) -> None:
    rotation = RotationClassifier()
    h = ecinn_heatmaps(rotation, rotation.mu_bar, uniform(5, 1, 2, 3), P, Q)
    assert rotation.calls == {"encode": 1, "decode": 1}
    assert h.passes == 2


def test_both_logits_have_the_posterior_of_eq_2(inn, x) -> None:
    z = inn.classifier.encode(x)
    gauss = torch.distributions.MultivariateNormal(inn.classifier.mu, torch.eye(64).double())
    log_density = gauss.log_prob(z[:, None])
    linear, density = (FlowLogits(inn.classifier, logit)(x) for logit in ("linear", "density"))
    torch.testing.assert_close(linear.log_softmax(1), log_density.log_softmax(1))
    torch.testing.assert_close(density, log_density + 32 * np.log(2 * np.pi))
    assert (linear - density).abs().min() > 1


def test_integrated_gradients_of_a_quadratic(ask, x, uniform) -> None:
    """∇F is linear, so its mean along the path is its value at the middle: two steps are exact."""
    network, baseline, two = Quadratic(), uniform(1, 8, 8), HeatmapSettings(steps=2)
    h = ask(network, "integrated_gradients", baseline=baseline, settings=two)
    a, b = ((k[Q] - k[P]).detach() for k in (network.a, network.b))
    half_way = ((x + baseline) / 2).flatten(1)
    gradient = torch.einsum("nij,nj->ni", a + a.transpose(1, 2), half_way) + b
    expected = (x - baseline) * gradient.reshape(x.shape)
    torch.testing.assert_close(h.maps, expected)
    torch.testing.assert_close(h.output_change, expected.flatten(1).sum(1))


@pytest.mark.parametrize("method", ["integrated_gradients", "deep_lift"])
@pytest.mark.parametrize("grey", [None, 0.3])
def test_a_linear_network_is_weight_times_difference(ask, x, method, grey) -> None:
    network, slope = linear()
    baseline = None if grey is None else torch.full((1, 8, 8), grey).double()
    h = ask(network, method, baseline=baseline)
    torch.testing.assert_close(h.maps, slope * (x - (grey or 0.0)))


def test_deep_lift_rescales_every_relu(ask, x, uniform) -> None:
    """Its rule written out for one hidden layer: slopes are Δrelu / Δinput, not derivatives."""
    network = network_of(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 3))
    baseline = uniform(1, 8, 8)
    h = ask(network, "deep_lift", baseline=baseline)
    with torch.no_grad():
        hidden, start = network[1](x.flatten(1)), network[1](baseline.flatten()[None])
        slope = (hidden.relu() - start.relu()) / (hidden - start)
        top = network[3].weight[Q] - network[3].weight[P]
        multiplier = (top * slope) @ network[1].weight
    assert ((slope > 0.01) & (slope < 0.99)).any()
    torch.testing.assert_close(h.maps, (x - baseline) * multiplier.reshape(x.shape))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("method", ["deep_lift", "deep_lift_shap"])
def test_deep_lift_accounts_for_all_of_a_cnn(ask, inplace, method) -> None:
    h = ask(cnn(inplace=inplace), method)
    assert h.output_change.abs().min() > 0.01
    torch.testing.assert_close(h.convergence_delta, ZERO, atol=1e-9, rtol=0)


@pytest.mark.parametrize("logit", ["linear", "density"])
def test_integrated_gradients_accounts_for_all_of_a_flow(inn, ask, x, logit) -> None:
    inn = ExplainedINN(inn.classifier, inn.mu_bar, logit)
    rough, fine = (
        ask(inn, "integrated_gradients", settings=HeatmapSettings(steps=n), batch_size=128)
        for n in (10, 1000)
    )
    assert fine.convergence_delta.abs().max() < 0.15
    assert rough.convergence_delta.abs().max() > 1
    z, start = (inn.classifier.encode(v) for v in (x, torch.zeros_like(x)))

    def score(z: Tensor) -> Tensor:
        to_p, to_q = ((z - inn.classifier.mu[y]).square().sum(1) / 2 for y in (P, Q))
        return to_p - to_q if logit == "linear" else to_p

    torch.testing.assert_close(fine.output_change, score(z) - score(start))


def test_deep_lift_is_worse_with_the_density_logit(inn, ask) -> None:
    """The square is not a module, so DeepLift takes the gradient at x for the whole path."""

    def incomplete(logit: str) -> Tensor:
        h = ask(ExplainedINN(inn.classifier, inn.mu_bar, logit), "deep_lift")
        return (h.convergence_delta / h.output_change).abs().median()

    assert incomplete("density") > 3 * incomplete("linear")


def test_deep_lift_shap_is_captums(inn, ask, x, pool) -> None:
    from captum.attr import DeepLiftShap

    h = ask(inn, "deep_lift_shap")
    options = {"additional_forward_args": (P, Q), "return_convergence_delta": True}
    with pytest.warns(UserWarning, match="hooks"):
        maps, delta = DeepLiftShap(inn.score).attribute(x.requires_grad_(), pool, **options)
    torch.testing.assert_close(h.maps, maps.detach())
    torch.testing.assert_close(h.convergence_delta, delta.reshape(5, 7).mean(1))


def test_gradient_shap_is_captums_on_the_same_draws(inn, ask, x, pool, monkeypatch) -> None:
    from captum.attr import GradientShap

    same, four = pool[:1].expand(2, -1, -1, -1), HeatmapSettings(samples=4)
    first, again = (torch.Generator().manual_seed(5) for _ in range(2))
    h = ask(inn, "gradient_shap", baselines=same, settings=four, generator=first)
    torch.randperm(2, generator=again)
    torch.randint(2, (5, 4), generator=again)
    share = torch.rand(20, generator=again).double().numpy()
    monkeypatch.setattr(np.random, "uniform", lambda low, high, size: share)
    captums = GradientShap(inn.score)
    maps = captums.attribute(x, same, n_samples=4, additional_forward_args=(P, Q))
    torch.testing.assert_close(h.maps, maps.detach())


def test_gradient_shap_of_a_linear_network_has_the_right_mean(ask, x, pool) -> None:
    network, slope = linear()
    many = HeatmapSettings(samples=3000, noise=0.2)
    h = ask(network, "gradient_shap", settings=many, batch_size=3000)
    torch.testing.assert_close(h.maps / slope, x - pool.mean(0), atol=0.04, rtol=0)
    # Without noise only the baselines are random, and those enter the output change too.
    torch.testing.assert_close(ask(network, "gradient_shap").convergence_delta, ZERO)


def test_noise_is_of_the_asked_size(ask, x) -> None:
    """One sample of a linear network is w (x + noise − b), so the noise can be read off."""
    network, slope = linear()
    one = HeatmapSettings(samples=1, noise=0.3)
    h = ask(network, "gradient_shap", baselines=torch.zeros(2, 1, 8, 8), settings=one)
    noise = h.maps / slope - x
    assert abs(noise.square().mean().sqrt() / 0.3 - 1) < 0.2


@pytest.mark.parametrize("method", METHODS)
def test_swapping_p_and_q_and_the_order_of_images(inn, x, pool, method) -> None:
    maps = heatmaps(inn, x, P, Q, method, baselines=pool, settings=FEW).maps
    if method != "ecinn":
        swapped = heatmaps(inn, x, Q, P, method, baselines=pool, settings=FEW).maps
        torch.testing.assert_close(maps, -swapped)
    if method != "gradient_shap":  # its draws depend on the position
        flipped = (tensor.flip(0) for tensor in (x, P, Q))
        reversed_ = heatmaps(inn, *flipped, method, baselines=pool, settings=FEW).maps
        torch.testing.assert_close(reversed_.flip(0), maps)


@pytest.mark.parametrize("method", METHODS)
def test_batch_size_and_inference_mode_change_nothing(inn, ask, x, pool, method) -> None:
    whole = ask(inn, method, settings=FEW, batch_size=500)
    parts = ask(inn, method, settings=FEW, batch_size=3)
    with torch.inference_mode():
        copies = (tensor.clone() for tensor in (x, P, Q))
        inside = heatmaps(inn, *copies, method, baselines=pool.clone(), settings=FEW)
    for other in (parts, inside):
        torch.testing.assert_close(other.maps, whole.maps)
        if method != "ecinn":
            torch.testing.assert_close(other.output_change, whole.output_change)
    assert not whole.maps.requires_grad


def test_a_batch_larger_than_the_classifier_takes_at_once(inn, uniform) -> None:
    """The classifier splits batches at 128, which would separate images from their baselines."""
    x = uniform(70, 1, 8, 8)
    p, q = torch.zeros(70).long(), torch.ones(70).long()
    large = heatmaps(inn, x, p, q, "deep_lift", batch_size=140).maps
    torch.testing.assert_close(large, heatmaps(inn, x, p, q, "deep_lift", batch_size=8).maps)


@pytest.mark.parametrize("method", GRADIENT_METHODS)
@pytest.mark.parametrize("batch_size", [2, 5, 16])
def test_passes_and_batch_sizes_are_counted(ask, method, batch_size) -> None:
    spy = Spy()
    h = ask(spy, method, settings=FEW, batch_size=batch_size)
    baselines = 3 if "shap" in method else 1
    assert sum(size for _, size in spy.log) == 5 * h.passes + 5 + baselines
    assert 2 * sum(size for way, size in spy.log if way == "backward") == 5 * h.passes
    assert min(batch_size, 5) - 1 <= max(size for _, size in spy.log) <= batch_size


@pytest.mark.parametrize("method", ["deep_lift_shap", "gradient_shap"])
def test_all_randomness_comes_from_the_generator(inn, ask, method) -> None:
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()  # noqa: NPY002
    first, again, other = (
        ask(inn, method, settings=FEW, generator=torch.Generator().manual_seed(seed)).maps
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # noqa: NPY002


def test_deep_lift_leaves_the_network_as_it_was(ask) -> None:
    network, relu = cnn(inplace=True), nn.ReLU()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    ask(network, "deep_lift")
    twice = network_of(nn.Flatten(), nn.Linear(64, 8), relu, nn.Linear(8, 3), relu)
    with pytest.raises(InputError, match="more than once"):
        ask(twice, "deep_lift")
    for module in (*network.modules(), *twice.modules()):
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        assert not any(hooks)
        assert not {"input", "output"} & set(vars(module))
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert all(w.grad is None and w.requires_grad for w in network.parameters())
    assert network[2].inplace


@pytest.mark.parametrize("method", GRADIENT_METHODS)
def test_colour_images(uniform, method) -> None:
    x = uniform(5, 3, 8, 8)
    h = heatmaps(cnn(3), x, P, Q, method, baselines=uniform(4, 3, 8, 8), settings=FEW)
    assert h.maps.shape == x.shape
    assert h.maps.isfinite().all()
    assert h.maps.abs().amax((2, 3)).min() > 0


def test_without_captum_two_methods_still_work(inn, ask, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    for method in ("integrated_gradients", "deep_lift", "deep_lift_shap"):
        with pytest.raises(InputError, match=r"pip install 'ecinn\[heatmaps\]'"):
            ask(inn, method)
    for method in ("ecinn", "gradient_shap"):
        assert ask(inn, method).maps.isfinite().all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"method": "lime"}, "one of ecinn, integrated_gradients"),
        ({"q": torch.tensor([1, 2, 2, 2, 0])}, "image 2 is already of the target class"),
        ({"q": torch.tensor([1, 2, 3, 2, 0])}, "classes 0 to 2"),
        ({"q": torch.tensor([1, 2, 3, 2, 0]), "method": "ecinn"}, "classes 0 to 2"),
        ({"p": torch.tensor([0, 1])}, "5 images"),
        ({"x": torch.zeros(5, 8, 8)}, "shape"),
        ({"x": torch.zeros(5, 1, 8, 8, dtype=torch.uint8)}, "uint8"),
        ({"baseline": torch.zeros(1, 4, 4)}, "baseline"),
        ({"method": "gradient_shap"}, "2 baselines"),
        ({"method": "deep_lift_shap", "baselines": torch.zeros(1, 1, 8, 8)}, "2 baselines"),
        ({"method": "deep_lift_shap", "baselines": torch.zeros(4, 3, 8, 8)}, "baseline"),
        ({"batch_size": 1}, "batch_size"),
        ({"x": torch.full((5, 1, 8, 8), 254.0)}, "not up to 254"),
        ({"x": torch.zeros(5, 3, 8, 8)}, r"reads images of shape \(1, 8, 8\), not \(3, 8, 8\)"),
        ({"x": torch.zeros(0, 1, 8, 8), "p": P[:0], "q": Q[:0]}, "no images"),
    ],
)
def test_wrong_input_is_refused(inn, x, change, says) -> None:
    arguments = {"x": x, "p": P, "q": Q, "method": "deep_lift", **change}
    with pytest.raises(InputError, match=says):
        # __wrapped__ skips the runtime type checker, which users do not have.
        heatmaps.__wrapped__(inn, **arguments)


def test_wrong_networks_are_refused(inn, ask, x) -> None:
    with pytest.raises(InputError, match="invertible"):
        ask(cnn(), "ecinn")
    with pytest.raises(InputError, match="ExplainedINN"):
        ask(inn.classifier, "deep_lift")
    with pytest.raises(InputError, match=r"ecinn\.load"):
        heatmaps.__wrapped__(torch.sin, x, P, Q, "deep_lift")
    with pytest.raises(InputError, match=r"eval\(\)"):
        ask(cnn().train(), "deep_lift")
    with pytest.raises(InputError, match=r"eval\(\)"):
        ask(ExplainedINN(inn.classifier.train(), inn.mu_bar), "deep_lift")
    inn.classifier.eval()
    with pytest.raises(InputError, match="scores of shape"):
        ask(nn.Identity().eval(), "deep_lift")


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"samples": 0}, {"baselines": 1}, {"noise": -0.1}]
)
def test_wrong_settings_are_refused(wrong) -> None:
    with pytest.raises(InputError):
        HeatmapSettings(**wrong)


@pytest.mark.parametrize("method", METHODS)
def test_an_inn_runs_in_exact_arithmetic_and_other_networks_as_always(
    inn, x, pool, method
) -> None:
    tf32 = SharedLog()
    network = cnn()
    for module in (inn.classifier.inn, network):
        module.register_forward_pre_hook(lambda *_: tf32.append(torch.backends.cudnn.allow_tf32))
    heatmaps(inn, x, P, Q, method, baselines=pool, settings=FEW)
    assert set(tf32) == {False}
    if method != "ecinn":
        tf32.clear()
        heatmaps(network, x, P, Q, method, baselines=pool, settings=FEW)
        assert set(tf32) == {True}


@pytest.mark.parametrize("method", METHODS)
def test_attribute_explains_a_models_prediction(method) -> None:
    model, data = small_model(), random_images(12, 1, 3, 4)
    pool = random_images(5, 1, 3, 8).images
    x, p = to_pixels(data.images), model.predict(data.images).argmax(1)
    rows = p != 2
    a = attribute(model, data.images[rows], "c", method, baselines=pool, settings=FEW)
    assert isinstance(a, Attribution)
    assert torch.equal(a.p, p[rows])
    assert a.p.unique().tolist() == [0, 1]
    assert a.q.tolist() == [2] * len(a.p)
    pool = to_pixels(pool)
    expected = heatmaps(
        ExplainedINN(model.classifier, model.mu_bar), x[rows], a.p, a.q, method,
        baseline=pool.mean(0), baselines=pool, settings=FEW,
    )  # fmt: skip
    assert torch.equal(a.maps, expected.maps)
    assert a.passes == expected.passes
    seed = torch.Generator().manual_seed(5)
    other = attribute(model, x[rows], 2, method, baselines=pool, settings=FEW, generator=seed)
    assert torch.equal(other.maps, a.maps) == ("shap" not in method)
    by_number = attribute(model, data.images[rows], 2, method, baselines=pool, settings=FEW)
    assert torch.equal(by_number.maps, a.maps)


def test_attribute_explains_any_network_against_a_target_for_every_image() -> None:
    network, x = small_cnn(), to_pixels(random_images(9, 1, 3, 2).images)
    p = network(x).argmax(1)
    target = (p + 1 + torch.arange(9) % 2) % 3
    a = attribute(network, x, target.tolist(), "deep_lift")
    assert torch.equal(a.p, p)
    assert torch.equal(a.maps, heatmaps(network, x, p, target, "deep_lift").maps)
    other = attribute(network, x, target, "deep_lift", p=(6 - p - target) % 3)
    assert torch.equal(other.p, 3 - p - target)
    assert not torch.allclose(other.maps, a.maps)


@pytest.mark.parametrize(
    ("network", "change", "says"),
    [
        ("inn", {"target": "d"}, "'d'.*a, b, c"),
        ("inn", {"target": "all"}, "number of a target class, not 'all'"),
        ("inn", {"target": 5}, "classes 0 to 2"),
        ("cnn", {"target": "a"}, "number of a target class"),
        ("cnn", {"images": "face.png"}, "tensor of pixels"),
        ("cnn", {"images": torch.zeros(2, 8, 8)}, "shape"),
        ("cnn", {"method": "ecinn"}, "invertible"),
        ("cnn", {"batch_size": 1}, "batch_size"),
        ("function", {}, r"ecinn\.load"),
        ("training", {}, r"eval\(\)"),
        ("pixels", {}, "scores of shape"),
    ],
)
def test_attribute_refuses_wrong_input(network, change, says) -> None:
    models = {
        "inn": small_model, "cnn": small_cnn, "function": lambda: torch.sin,
        "training": lambda: small_cnn().train(), "pixels": lambda: nn.Identity().eval(),
    }  # fmt: skip
    arguments = {"images": torch.zeros(1, 1, 8, 8), "target": 1, "method": "deep_lift", **change}
    with pytest.raises(InputError, match=says):
        # __wrapped__ skips the runtime type checker, which users do not have.
        attribute.__wrapped__(models[network](), **arguments)
