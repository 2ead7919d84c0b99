"""Checks of the GPU's kernels against formulas in double precision.

They need a GPU or Triton's interpreter (TRITON_INTERPRET=1). tests/flow/test_kernels.py runs them;
`python -m helpers.kernel_checks` in tests/ does so without pytest.
"""

import random

import torch
from torch import Tensor, nn

from ecinn.flow import kernels
from ecinn.flow.bijections import Bijection
from ecinn.flow.fused import FusedDownsamplingCoupling, KernelCoupling, fused
from ecinn.flow.network import Architecture, Stage, build_inn
from ecinn.flow.precision import exact_convolutions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _normal(drawn: random.Random, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(drawn.randrange(2**32))
    return torch.randn(shape, generator=generator).to(DEVICE)


def check_group_norm() -> None:
    """Groups of one value to 40,960, of any number of channels, far from zero too."""
    drawn = random.Random(0)
    shapes = [(5, 8, 4, 14, 14), (5, 8, 8, 7, 7), (1, 1, 10, 64, 64), (5, 2, 3, 65, 90)]
    shapes += [(1, 1, 1, 1, 1), (1, 8, 14, 8, 8), (2, 1, 10, 32, 32), (1, 1, 700, 5, 5)]
    for _ in range(12):
        shapes.append(tuple(drawn.randint(1, most) for most in (5, 4, 20, 24, 24)))
    for count, groups, channels, height, width in shapes:
        channels *= groups
        mean = drawn.choice([0.0, 300.0])
        x = 3 * _normal(drawn, count, channels, height, width) + mean
        added, weight, bias = _normal(drawn, 3, channels)
        sums = x.double() + added.double()[:, None, None]
        expected = torch.group_norm(sums, groups, weight.double(), bias.double()).relu()
        y = kernels.group_norm_relu_(x, added, groups, weight, bias, 1e-5)
        assert y is x
        # Near 300, values are known to 3e-5; E[x²] − E[x]² would give errors of 1e-3.
        error = (y - expected).abs() - 1e-6 * expected
        assert error.max() <= 3e-6 + 3e-7 * mean, (x.shape, mean, error.max())


def check_group_norm_of_special_values() -> None:
    """A value that is not a number is seen in its group, and maps in another order are copied."""
    x = _normal(random.Random(1), 2, 4, 3, 5)
    zeros, ones = torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)
    expected = torch.group_norm(x, 2).relu()
    channels_last = x.contiguous(memory_format=torch.channels_last)
    y = kernels.group_norm_relu_(channels_last, zeros, 2, ones, zeros, 1e-5)
    torch.testing.assert_close(y, expected)
    x[0, 0, 0, 0] = torch.nan
    y = kernels.group_norm_relu_(x, zeros, 2, ones, zeros, 1e-5)
    assert y[0, :2].isnan().all()
    assert not y[0, 2:].isnan().any()
    assert not y[1].isnan().any()


def check_couplings() -> None:
    """Both directions, the map of log-scales, channels in unequal halves, and what stays."""
    drawn = random.Random(2)
    shapes = [(5, 4, 14, 14), (1, 12, 32, 32), (5, 7, 7, 7), (1, 2, 1, 1), (2, 3, 33, 47)]
    for shape in shapes:
        count, channels, height, width = shape
        half, clamp = channels - channels // 2, drawn.choice([0.5, 1.0, 2.0])
        x, log_scales = _normal(drawn, *shape), _normal(drawn, count, half, height, width)
        raw = _normal(drawn, count, 2 * half, height, width) * drawn.choice([0.01, 1.0, 20.0])
        bias = _normal(drawn, 2 * half)
        sums = raw.double() + bias.double()[:, None, None]
        s, t = clamp * sums[:, :half].tanh(), sums[:, half:]
        y, y_scales = x.clone(), log_scales.clone()
        kernels.couple_(y, raw, bias, clamp, y_scales)
        x_a, x_b = x.split([channels - half, half], 1)
        torch.testing.assert_close(y[:, : channels - half], x_a, rtol=0, atol=0)
        torch.testing.assert_close(y_scales, (log_scales + s).float(), rtol=1e-6, atol=1e-6)
        expected = (x_b.double() * s.exp() + t).float()
        torch.testing.assert_close(y[:, channels - half :], expected, rtol=2e-6, atol=1e-5)
        kernels.uncouple_(y, raw, bias, clamp)
        largest = expected.abs().max().item() * float(2.7183**clamp)
        torch.testing.assert_close(y, x, rtol=0, atol=3e-7 * largest + 3e-7)


def check_the_hyperbolic_tangent() -> None:
    """s = tanh(raw), to 3e-7 everywhere and to 6e-7 of its value."""
    ends = torch.tensor([0.0, 1e-30, 0.6249999, 0.625, 9.0, 100.0, 1000.0])
    positive = torch.cat([ends, torch.logspace(-9, 2, 3000), torch.linspace(0, 9, 3000)])
    raw = torch.cat([positive, -positive]).to(DEVICE)
    raw = torch.stack([raw, torch.zeros_like(raw)])[None, :, :, None]
    x, s = torch.ones_like(raw), torch.zeros_like(raw[:, :1])
    kernels.couple_(x, raw, raw.new_zeros(2), 1.0, s)
    exact = raw[:, :1].double().tanh()
    assert ((s - exact).abs() <= 6e-7 * exact.abs()).all()
    assert ((s - exact).abs() <= 3e-7).all()


@exact_convolutions()
def check_whole_flows() -> None:
    """With the kernels, a flow is the same map as without them, and as exact a round trip."""
    drawn = random.Random(3)
    for seed, (norm, downsampling, dense, size) in enumerate(
        [
            ("group", "coupling", 6, (8, 12)),
            ("group", "haar", 0, (12, 4)),
            ("batch", "coupling", 0, (4, 4)),
            ("none", "squeeze", 6, (8, 4)),
        ]
    ):
        architecture = Architecture(
            3, *size, 2, (Stage(2, 8), Stage(2, 72)), dense, dropout=0.5, norm=norm,
            downsampling=downsampling, pixel_margin=0.02, mixing="cosine" if seed else "rotation",
        )  # fmt: skip
        inn = build_inn(architecture).eval().requires_grad_(requires_grad=False)
        for parameter in inn.parameters():
            parameter += 0.3 * _normal(drawn, *parameter.shape).cpu() / parameter[0].numel() ** 0.5
        inn = inn.to(DEVICE)
        plain, fast = fused(inn), fused(inn, kernels)
        assert _kinds(fast).count(KernelCoupling) == 4
        assert (FusedDownsamplingCoupling in _kinds(fast)) == (downsampling == "coupling")
        for count in (1, 5):
            x = torch.sigmoid(_normal(drawn, count, 3, *size))
            for given in (x, x.contiguous(memory_format=torch.channels_last)):
                kept = given.clone()
                (z, log_det), (same_z, same_log_det) = plain(given), fast(given)
                assert torch.equal(given, kept)
                torch.testing.assert_close(same_z, z, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(same_log_det, log_det, rtol=1e-5, atol=1e-4)
                torch.testing.assert_close(fast.inverse(same_z), x, rtol=0, atol=1e-5)
            other = z + _normal(drawn, *z.shape)
            expected = plain.inverse(other)
            torch.testing.assert_close(fast.inverse(other), expected, rtol=1e-5, atol=1e-5)


def _kinds(chain: Bijection) -> list[type[nn.Module]]:
    return [type(layer) for layer in chain.bijections]


def check_that_gradients_are_refused() -> None:
    """Triton's kernels are unknown to autograd, which would return wrong gradients."""
    x = torch.ones(1, 2, 2, 2, device=DEVICE, requires_grad=True) * 2
    try:
        kernels.uncouple_(x, x.detach(), x.new_zeros(2), 1.0)
    except RuntimeError as error:
        assert "no gradients" in str(error)  # noqa: PT017 (it runs without pytest)
    else:
        raise AssertionError


def check_empty_batches() -> None:
    """No image gives no image, as without the kernels."""
    none, vector = torch.zeros((0, 4, 3, 5), device=DEVICE), torch.ones(4, device=DEVICE)
    assert kernels.group_norm_relu_(none, vector, 2, vector, vector, 1e-5) is none
    kernels.couple_(none, none, vector, 1.0, none[:, 2:])
    kernels.uncouple_(none, none, vector, 1.0)


def check_the_trial() -> None:
    """What decides whether the kernels are used passes here."""
    kernels.try_out(torch.device(DEVICE))


if __name__ == "__main__":
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            print(name, "passed")  # noqa: T201
