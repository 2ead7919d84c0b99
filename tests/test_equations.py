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


def test_bent_direction_leads_to_q_and_away_from_what_was_seen(numbers) -> None:
    """Component by component, image by image."""
    n, rho = numbers, equations.TAKEN_BACK
    g = torch.Generator().manual_seed(BATCH)
    seen = torch.rand((BATCH, CLASSES), generator=g, dtype=torch.float64)
    seen[torch.arange(BATCH), n["q"]] = 0
    seen = seen / seen.sum(1, keepdim=True)
    seen[0] = 0
    bent = equations.bent_direction(n["z"], n["mu_bar"], n["p"], n["q"], seen)
    for row in range(BATCH):
        p, q = n["mu_bar"][n["p"][row]], n["mu_bar"][n["q"][row]]
        if row == 0:
            assert torch.equal(bent[0], q - p)
            continue
        parts = [
            2 * q[d]
            - p[d]
            - sum(seen[row, y] * n["mu_bar"][y, d] for y in range(CLASSES))
            + rho * (p[d] - n["z"][row, d])
            for d in range(DIM)
        ]
        length, wanted = math.sqrt(sum(float(v) ** 2 for v in parts)), float((q - p).norm())
        expected = torch.stack(parts) * wanted / length
        torch.testing.assert_close(bent[row], expected)


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
    torch.testing.assert_close(equations.log_posterior(n["z"], n["mu"], 1.0).exp(), bayes)
    assert torch.equal(equations.predicted_class(n["z"], n["mu"]), bayes.argmax(1))


@pytest.mark.parametrize("tau", [0.02, 0.5, 3.0])
def test_tau_is_temperature_scaling(numbers, tau: float) -> None:
    """Posteriors are those of Eq. 2 to the power τ, normalised; the tipping point is no other."""
    n = numbers
    powers = equations.log_posterior(n["z"], n["mu"], 1.0).exp() ** tau
    tempered = equations.log_posterior(n["z"], n["mu"], torch.tensor(tau).double()).exp()
    torch.testing.assert_close(tempered, powers / powers.sum(1, keepdim=True))
    alpha, delta = _alpha_0(n)
    tipping = equations.log_posterior(n["z"] + alpha[:, None] * delta, n["mu"], tau)
    p, q = (tipping.gather(1, n[label][:, None]) for label in "pq")
    torch.testing.assert_close(p, q)


def test_what_all_means_have_in_common_costs_no_digits(numbers) -> None:
    """In float32, with means that are close to each other and far from zero."""
    far = 300 * numbers["shift"]
    z, mu = (n.float().double() for n in (numbers["z"] + far, numbers["mu"] + far))
    posterior = (-0.5 * torch.cdist(z, mu).square()).softmax(1)
    single = equations.log_posterior(z.float(), mu.float(), 1.0).exp()
    torch.testing.assert_close(single.double(), posterior, atol=1e-5, rtol=0)
    delta, q = (mu[0] - mu[1]).expand_as(z), torch.zeros(len(z), dtype=torch.int64)
    exact = equations.confident_alpha(z, delta, mu, 1.0, q, 0.9)[0]
    alpha = equations.confident_alpha(z.float(), delta.float(), mu.float(), 1.0, q, 0.9)[0]
    torch.testing.assert_close(alpha.double(), exact, atol=1e-4, rtol=1e-4)


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


def line_in_latent_space(
    classes: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """z, Δ, μ, p and q of 300 lines that lead roughly, not exactly, from p to q."""
    g = torch.Generator().manual_seed(seed)
    mu = 3 * torch.randn((classes, 6), generator=g, dtype=torch.float64)
    p = torch.randint(classes, (300,), generator=g)
    q = (p + torch.randint(1, classes, (300,), generator=g)) % classes
    z = mu[p] + torch.randn((300, 6), generator=g, dtype=torch.float64)
    delta = mu[q] - mu[p] + 0.8 * torch.randn((300, 6), generator=g, dtype=torch.float64)
    return z, delta, mu, p, q


TAU = 0.6


def posterior_by_distances(z: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    return (-0.5 * TAU * torch.cdist(z, mu).square()).softmax(-1)


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("confidence", [0.03, 0.5, 0.9, 0.999])
def test_confident_alpha_gives_the_asked_confidence(classes: int, confidence: float) -> None:
    z, delta, mu, _, q = line_in_latent_space(classes, seed=classes)
    alpha, reachable = equations.confident_alpha(z, delta, mu, TAU, q, confidence)
    posterior = posterior_by_distances(z + alpha[:, None] * delta, mu)
    obtained = posterior.gather(1, q[:, None]).squeeze(1)
    expected = torch.full_like(obtained, confidence)
    torch.testing.assert_close(obtained[reachable], expected[reachable], rtol=1e-6, atol=1e-9)
    assert reachable.float().mean() > 0.5
    # On the way to q: a little further, q is surer.
    further = posterior_by_distances(z + (alpha + 1e-3)[:, None] * delta, mu)
    assert (further.gather(1, q[:, None]).squeeze(1) > obtained)[reachable].all()


def test_an_unreachable_confidence_returns_the_highest() -> None:
    """By brute force over a fine grid of α."""
    z, delta, mu, _, q = line_in_latent_space(10, seed=1)
    alpha, reachable = equations.confident_alpha(z, delta, mu, TAU, q, 0.99)
    grid = torch.linspace(-2, 6, 3001, dtype=torch.float64)
    on_grid = torch.stack(
        [posterior_by_distances(z + a * delta, mu).gather(1, q[:, None]).squeeze(1) for a in grid]
    )
    assert torch.equal(reachable, on_grid.amax(0) >= 0.99)
    assert 0 < int((~reachable).sum()) < 150
    obtained = posterior_by_distances(z + alpha[:, None] * delta, mu)
    obtained = obtained.gather(1, q[:, None]).squeeze(1)[~reachable]
    highest = on_grid.amax(0)[~reachable]
    assert (obtained >= highest).all()
    torch.testing.assert_close(obtained, highest, rtol=1e-3, atol=1e-4)


def test_half_confidence_between_two_classes_is_the_tipping_point() -> None:
    z, delta, mu, p, q = line_in_latent_space(2, seed=5)
    alpha, reachable = equations.confident_alpha(z, delta, mu, TAU, q, 0.5)
    alpha_0 = equations.tipping_point_alpha(z, delta, mu[p], mu[q])
    torch.testing.assert_close(alpha[reachable], alpha_0[reachable])


def test_two_classes_in_closed_form_agree_with_the_solver() -> None:
    """A third class infinitely far away changes nothing but the route."""
    z, delta, mu, _, q = line_in_latent_space(2, seed=6)
    far = torch.cat([mu, torch.full((1, 6), 40.0, dtype=torch.float64)])
    closed, reachable = equations.confident_alpha(z, delta, mu, TAU, q, 0.8)
    solved, _ = equations.confident_alpha(z, delta, far, TAU, q, 0.8)
    near = reachable & (closed.abs() < 3)
    assert near.sum() > 200
    torch.testing.assert_close(closed[near], solved[near])


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("towards", [-1.0, 0.0, 1e-12])
def test_a_line_that_leads_away_from_q_reaches_no_confidence(classes: int, towards: float) -> None:
    mu = torch.tensor([[0.0, 0.0], [4.0, 0.0], [1.0, 1.0]], dtype=torch.float64)[:classes]
    line = torch.tensor([[towards, 0.0]], dtype=torch.float64)
    alpha, reachable = equations.confident_alpha(mu[:1], line, mu, TAU, torch.tensor([1]), 0.9)
    assert not reachable.any()
    assert alpha.abs().max() <= equations.FARTHEST_ALPHA


@pytest.mark.parametrize("classes", [2, 4])
def test_departing_alpha_leaves_p_at_the_asked_confidence(classes: int) -> None:
    z, delta, mu, p, _ = line_in_latent_space(classes, seed=7)
    asked = torch.linspace(0.05, 0.95, 300, dtype=torch.float64)
    alpha, reachable = equations.departing_alpha(z, delta, mu, TAU, p, asked)
    obtained = posterior_by_distances(z + alpha[:, None] * delta, mu)
    obtained = obtained.gather(1, p[:, None]).squeeze(1)
    torch.testing.assert_close(obtained[reachable], asked[reachable])
    further = posterior_by_distances(z + (alpha + 1e-3)[:, None] * delta, mu)
    assert (further.gather(1, p[:, None]).squeeze(1) < obtained)[reachable].all()
    assert reachable.float().mean() > 0.5
