"""Every equation against an independent way to the same number."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from ecinn import equations

DIM, CLASSES, BATCH = 7, 4, 16


@pytest.fixture(params=range(5))
def numbers(request: pytest.FixtureRequest) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(request.param)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    p = torch.randint(CLASSES, (BATCH,), generator=g)
    return {
        "z": 2 * normal(BATCH, DIM),
        "log_det": normal(BATCH),
        "mu": normal(CLASSES, DIM),
        "mu_bar": 1.5 * normal(CLASSES, DIM),
        "p": p,
        "q": (p + torch.randint(1, CLASSES, (BATCH,), generator=g)) % CLASSES,
        "rotation": torch.linalg.qr(normal(DIM, DIM))[0],
        "shift": normal(DIM),
    }


def _alpha_0(n: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    delta = equations.latent_direction(n["mu_bar"], n["p"], n["q"])
    alpha = equations.tipping_point_alpha(n["z"], delta, n["mu"][n["p"]], n["mu"][n["q"]])
    return alpha, delta


def test_log_likelihood_is_the_gaussian_density_times_the_jacobian(numbers) -> None:
    n = numbers
    ours = equations.log_likelihood(n["z"], n["log_det"], n["mu"])
    for label in range(CLASSES):
        gaussian = Independent(Normal(n["mu"][label], torch.ones(DIM).double()), 1)
        torch.testing.assert_close(ours[:, label], gaussian.log_prob(n["z"]) + n["log_det"])


def test_log_posterior_is_bayes_rule_written_out(numbers) -> None:
    n = numbers
    density = torch.stack(
        [
            Independent(Normal(m, torch.ones(DIM).double()), 1).log_prob(n["z"]).exp()
            for m in n["mu"]
        ],
        1,
    )
    bayes = density / density.sum(1, keepdim=True)
    torch.testing.assert_close(equations.log_posterior(n["z"], n["mu"]).exp(), bayes)


def test_log_marginal_is_the_mixture_density(numbers) -> None:
    n = numbers
    mixture = MixtureSameFamily(
        Categorical(torch.ones(CLASSES).double()),
        Independent(Normal(n["mu"], torch.ones(CLASSES, DIM).double()), 1),
    )
    likelihood = equations.log_likelihood(n["z"], n["log_det"], n["mu"])
    torch.testing.assert_close(
        equations.log_marginal(likelihood), mixture.log_prob(n["z"]) + n["log_det"]
    )


def test_latent_direction_points_from_p_to_q(numbers) -> None:
    n = numbers
    delta = equations.latent_direction(n["mu_bar"], n["p"], n["q"])
    torch.testing.assert_close(n["mu_bar"][n["p"]] + delta, n["mu_bar"][n["q"]])


def test_decision_boundary_holds_the_points_equally_far_from_both_means(numbers) -> None:
    n = numbers
    mu_p, mu_q = n["mu"][n["p"]], n["mu"][n["q"]]
    w, b = equations.decision_boundary(mu_p, mu_q)
    signed = (w * n["z"]).sum(1) + b
    farther = (n["z"] - mu_p).square().sum(1) - (n["z"] - mu_q).square().sum(1)
    torch.testing.assert_close(signed, farther / 2)


def test_tipping_point_is_equally_far_from_both_means(numbers) -> None:
    n = numbers
    alpha, delta = _alpha_0(n)
    there = equations.corrected_latent(n["z"], alpha, delta)
    torch.testing.assert_close(
        (there - n["mu"][n["p"]]).norm(dim=1), (there - n["mu"][n["q"]]).norm(dim=1)
    )
    torch.testing.assert_close(there, n["z"] + alpha[:, None] * delta)


def test_tipping_point_does_not_depend_on_the_coordinates(numbers) -> None:
    n = numbers
    moved = n | {k: n[k] @ n["rotation"].T + n["shift"] for k in ("z", "mu", "mu_bar")}
    torch.testing.assert_close(_alpha_0(moved)[0], _alpha_0(n)[0])


def test_convincing_alpha_of_the_paper() -> None:
    torch.testing.assert_close(
        equations.convincing_alpha(torch.tensor([0.0, 0.4, 1.0])), torch.tensor([0.8, 1.0, 1.3])
    )


def test_heatmap_is_positive_where_light_is_added() -> None:
    assert equations.heatmap(torch.zeros(1, 2, 2), torch.ones(1, 2, 2)).min() == 1


@pytest.mark.parametrize("beta", [0.0, 1.0, 3.0])
def test_information_bottleneck_weights(beta: float) -> None:
    nll, cross_entropy = torch.tensor(0.7), torch.tensor(0.2)
    expected = 2 / (1 + beta) * 0.7 + 2 * beta / (1 + beta) * 0.2
    actual = equations.information_bottleneck_loss(nll, cross_entropy, beta)
    torch.testing.assert_close(actual, torch.tensor(expected))


def test_bits_per_dim_of_a_gaussian_is_its_entropy(generator: torch.Generator) -> None:
    # Pixels of [0, 1] with standard deviation s, coded in bins of 1/256.
    s, dim, n = 0.05, 50, 4000
    x = 0.5 + s * torch.randn((n, dim), generator=generator, dtype=torch.float64)
    gaussian = Independent(Normal(torch.full((dim,), 0.5).double(), s), 1)
    expected = math.log2(256 * s * math.sqrt(2 * math.pi * math.e))
    actual = equations.bits_per_dim(gaussian.log_prob(x), dim).mean().item()
    assert actual == pytest.approx(expected, abs=0.01)


def test_paper_convention_is_ib_inns_formula() -> None:
    """(L_x + ln 256 − ½ ln 2π) / ln 2, where L_x lacks the Gaussian's constant and γ."""
    gamma, dim = 2.0, 5
    z = torch.linspace(-1, 1, dim, dtype=torch.float64)
    flow_log_det = 0.3  # behind the scaling, as IB-INN sees it
    l_x = (0.5 * z.square().sum() - flow_log_det) / dim
    published = (l_x + math.log(256) - 0.5 * math.log(2 * math.pi)) / math.log(2)
    log_det = torch.tensor([flow_log_det + dim * math.log(gamma)], dtype=torch.float64)
    log_p = equations.log_likelihood(z[None], log_det, torch.zeros(1, dim).double())[:, 0]
    exact = equations.bits_per_dim(log_p, dim).item()
    assert equations.paper_bits_per_dim(exact, gamma) == pytest.approx(float(published))


def test_smoothed_cross_entropy_is_torchs(numbers) -> None:
    n = numbers
    logits = n["z"][:, :CLASSES]
    expected = torch.nn.functional.cross_entropy(logits, n["p"], label_smoothing=0.1)
    ours = equations.smoothed_cross_entropy(logits.log_softmax(1), n["p"], 0.1)
    torch.testing.assert_close(ours, expected)
