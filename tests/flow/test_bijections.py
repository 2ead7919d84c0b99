"""Every layer, randomised: both round trips, log-det against autograd, images independent."""

from collections.abc import Callable

import FrEIA.modules as freia
import numpy as np
import pytest
import scipy.fft
import torch
from torch import Tensor, nn

from ecinn.errors import InputError
from ecinn.flow import bijections as b
from ecinn.flow.network import Architecture, Stage, build_inn
from helpers.builders import randomise

Shape = tuple[int, ...]
# Rotations and DCTs are stored in float32, so orthogonal to about 1e-7.
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def _rng() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _inn(channels: int, height: int, width: int, **changes: object) -> b.Bijection:
    return build_inn(
        Architecture(
            channels, height, width, 2, (Stage(1, 4), Stage(2, 4)), dense_width=6, **changes
        )
    )


LAYERS: dict[str, tuple[Callable[[], b.Bijection], Shape]] = {
    "pixel scale": (lambda: b.PixelScale(2.5), (2, 3, 4)),
    "pixel logit": (lambda: b.PixelLogit(2.0, 0.02), (2, 3, 4)),
    "squeeze": (b.Squeeze, (3, 4, 6)),
    "haar, one channel": (lambda: b.Haar(1), (1, 4, 6)),
    "haar, three channels": (lambda: b.Haar(3), (3, 4, 2)),
    "channel mix": (lambda: b.ChannelMix(5, _rng()), (5, 2, 3)),
    "channel mix of fixed scale": (lambda: b.ChannelMix(5, _rng(), 0.8), (5, 2, 3)),
    "cosine mix": (lambda: b.CosineMix(6, _rng()), (6, 2, 3)),
    "coupling": (lambda: b.Coupling(4, b.convolutional_subnet(2, 4, 8), 1.5), (4, 4, 3)),
    "coupling, odd channels": (
        lambda: b.Coupling(5, b.convolutional_subnet(2, 6, 8, norm="none"), 0.7),
        (5, 3, 3),
    ),
    "coupling, batch norm": (
        lambda: b.Coupling(2, b.convolutional_subnet(1, 2, 4, norm="batch"), 0.7),
        (2, 3, 3),
    ),
    "coupling with dropout": (
        lambda: b.Coupling(2, b.convolutional_subnet(1, 2, 4, dropout=0.5), 0.7),
        (2, 3, 3),
    ),
    "downsampling coupling": (
        lambda: b.DownsamplingCoupling(4, b.convolutional_subnet(2, 16, 8, stride=2), 1.0),
        (4, 4, 6),
    ),
    "downsampling coupling, odd channels": (
        lambda: b.DownsamplingCoupling(3, b.convolutional_subnet(1, 16, 8, stride=2), 1.0),
        (3, 4, 4),
    ),
    "dct pooling": (lambda: b.DCTPooling(3, 4, 5), (3, 4, 5)),
    "permutation": (lambda: b.Permutation(9, _rng()), (9,)),
    "dense coupling": (
        lambda: b.Coupling(7, b.fully_connected_subnet(3, 8, 16), 1.0),
        (7,),
    ),
    "chain": (lambda: b.Chain([b.Squeeze(), b.ChannelMix(8, _rng()), b.Haar(8)]), (2, 4, 4)),
    "whole network": (lambda: _inn(1, 8, 12), (1, 8, 12)),
    "whole network, colour, haar": (lambda: _inn(3, 4, 8, downsampling="haar"), (3, 4, 8)),
    "whole network, cosine": (lambda: _inn(3, 8, 4, mixing="cosine"), (3, 8, 4)),
    "whole network, logit": (lambda: _inn(1, 4, 8, pixel_margin=0.05), (1, 4, 8)),
    "whole network, squeeze": (lambda: _inn(2, 8, 4, downsampling="squeeze"), (2, 8, 4)),
}


@pytest.fixture(params=LAYERS, ids=str)
def layer(request: pytest.FixtureRequest) -> tuple[b.Bijection, Tensor]:
    build, shape = LAYERS[request.param]
    bijection = build().double().eval()
    # A deep network of wild layers amplifies float32's rounding of the rotations.
    randomise(bijection, seed=2, scale=0.3 if "network" in request.param else 1.0)
    x = torch.rand((3, *shape), generator=_rng(), dtype=torch.float64)
    return bijection.requires_grad_(requires_grad=False), x


def test_inverse_undoes_forward(layer) -> None:
    bijection, x = layer
    y, _ = bijection(x)
    torch.testing.assert_close(bijection.inverse(y), x, **CLOSE)


def test_forward_undoes_inverse(layer) -> None:
    bijection, x = layer
    y, _ = bijection(x)
    other = torch.randn(y.shape, generator=_rng(), dtype=torch.float64)
    torch.testing.assert_close(bijection(bijection.inverse(other))[0], other, **CLOSE)


def test_log_det_is_that_of_the_jacobian(layer) -> None:
    bijection, x = layer
    _, log_det = bijection(x)
    assert log_det.shape == (3,)
    for image, value in zip(x, log_det, strict=True):
        jacobian = torch.autograd.functional.jacobian(
            lambda flat, image=image: bijection(flat.reshape(1, *image.shape))[0].flatten(),
            image.flatten(),
        )
        torch.testing.assert_close(torch.linalg.slogdet(jacobian)[1], value, **CLOSE)


def test_an_image_does_not_depend_on_its_batch(layer) -> None:
    bijection, x = layer
    y, log_det = bijection(x)
    alone, alone_log_det = bijection(x[1:2])
    torch.testing.assert_close(y[1:2], alone)
    torch.testing.assert_close(log_det[1:2], alone_log_det)


def test_layers_that_learn_are_not_the_identity(layer) -> None:
    """Guards the tests above: on an identity they could not fail."""
    bijection, x = layer
    if any(isinstance(m, b.Coupling) for m in bijection.modules()):
        assert not torch.allclose(bijection(x)[1], torch.zeros(3).double(), atol=1e-3)


def test_haar_agrees_with_freia() -> None:
    x = torch.rand((2, 3, 4, 6), generator=_rng())
    theirs, _ = freia.HaarDownsampling([(3, 4, 6)], order_by_wavelet=True)([x])
    ours, _ = b.Haar(3)(x)
    torch.testing.assert_close(ours[:, :3], theirs[0][:, :3])
    # FrEIA orders and signs the details in its own way: each of ours is one of its.
    energy = lambda y: y[:, 3:].reshape(2, 3, 3, 2, 3).square().sum((2, 3, 4)).sort(1)[0]  # noqa: E731
    torch.testing.assert_close(energy(ours), energy(theirs[0]))


def test_coupling_agrees_with_freia() -> None:
    """The same subnet inside FrEIA's one-sided affine coupling gives the same map."""
    subnet = randomise(nn.Sequential(nn.Conv2d(2, 4, 3, padding=1)), scale=1.0)
    theirs = freia.AffineCouplingOneSided(
        [(4, 3, 3)], subnet_constructor=lambda *_: subnet, clamp=1.0, clamp_activation=torch.tanh
    )
    x = torch.rand((2, 4, 3, 3), generator=_rng())
    (expected,), expected_log_det = theirs([x])
    # Theirs scales with clamp·tanh(s), ours with clamp·tanh(0.1·s): undo the factor.
    tenfold = randomise(nn.Sequential(nn.Conv2d(2, 4, 3, padding=1)), scale=0.0)
    tenfold.load_state_dict(subnet.state_dict())
    with torch.no_grad():
        tenfold[0].weight[:2] *= 10
        tenfold[0].bias[:2] *= 10
        actual, log_det = b.Coupling(4, tenfold, clamp=1.0)(x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(log_det, expected_log_det)


def test_dct_is_scipys() -> None:
    x = torch.rand((2, 3, 4, 5), generator=_rng(), dtype=torch.float64)
    layer = b.DCTPooling(3, 4, 5).double()
    expected = scipy.fft.dctn(x.numpy(), axes=(2, 3), norm="ortho")
    actual = layer(x)[0].reshape(2, 20, 3).numpy()
    places = [(row, column) for row in range(4) for column in range(5)]
    for number, (row, column) in enumerate(sorted(places, key=sum)):
        np.testing.assert_allclose(actual[:, number], expected[:, :, row, column], atol=1e-6)


@pytest.mark.parametrize("channels", [(1, 3), (2, 4), (5, 16), (9, 7), (8, 24)])
@pytest.mark.parametrize("settings", [(3, 1, 1), (3, 2, 1), (1, 1, 0)], ids=str)
def test_padded_channels_change_neither_the_result_nor_the_gradient(channels, settings) -> None:
    size, stride, padding = settings
    plain = b.Convolution(*channels, size, stride, padding).double()
    randomise(plain, scale=1.0)
    x = torch.randn((2, channels[0], 6, 8), generator=_rng(), dtype=torch.float64)
    results = []
    for padded in (False, True):
        plain.padded = padded
        x = x.detach().requires_grad_()
        y = plain(x)
        weights = torch.randn(y.shape, generator=_rng(), dtype=torch.float64)
        gradients = torch.autograd.grad((weights * y).sum(), (x, *plain.parameters()))
        results.append((y, *gradients))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one)
        assert one.abs().max() > 0


def test_log_scale_never_leaves_its_clamp() -> None:
    layer = b.Coupling(2, nn.Conv2d(1, 2, 1), clamp=0.5)
    nn.init.constant_(layer.subnet.weight, 1e6)
    _, log_det = layer(torch.rand((1, 2, 1, 1), generator=_rng()))
    assert log_det.abs().item() <= 0.5 + 1e-6


def test_couplings_start_as_the_identity() -> None:
    layer = b.Coupling(4, b.convolutional_subnet(2, 4, 8), 1.5)
    x = torch.rand((2, 4, 3, 3), generator=_rng())
    torch.testing.assert_close(layer(x)[0], x)


@pytest.mark.parametrize(
    "changes", [{"height": 30}, {"classes": 1}, {"stages": ()}, {"downsampling": "crop"}]
)
def test_what_cannot_be_built_is_refused(changes: dict[str, object]) -> None:
    settings: dict[str, object] = {
        "channels": 1,
        "height": 8,
        "width": 8,
        "classes": 2,
        "stages": (Stage(1, 4), Stage(1, 4)),
        "dense_width": 4,
    }
    with pytest.raises(InputError):
        Architecture(**(settings | changes))


def test_the_seed_alone_fixes_the_network_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = _inn(1, 4, 4, seed=7), _inn(1, 4, 4, seed=7)
    assert torch.equal(torch.rand(3), expected)
    for a, c in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, c)


def test_logit_pixels_have_the_slope_asked_for_and_bound_what_is_decoded() -> None:
    layer = b.PixelLogit(scale=2.0, margin=0.02)
    near_grey = torch.tensor([0.5, 0.501], dtype=torch.float64).reshape(2, 1, 1, 1)
    y, _ = layer(near_grey)
    assert float((y[1] - y[0]) / 0.001) == pytest.approx(2.0, rel=0.05)
    wild = layer.inverse(torch.tensor([-1e3, 1e3]).reshape(2, 1, 1, 1)).flatten()
    assert wild.tolist() == pytest.approx([-0.02 / 0.96, 1 + 0.02 / 0.96])
