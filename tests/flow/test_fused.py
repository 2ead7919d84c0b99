"""The fused flow is the same map: values, log-determinants and inverses of every layer."""

import pytest
import torch
from torch import nn

from ecinn.flow.bijections import Chain, Coupling, Norm, Squeeze
from ecinn.flow.fused import fused
from ecinn.flow.network import Architecture, Stage, build_inn
from helpers.builders import randomise, small_model


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
@pytest.mark.parametrize("downsampling", ["coupling", "haar", "squeeze"])
@pytest.mark.parametrize("mixing", ["rotation", "cosine"])
def test_a_fused_flow_is_the_same_map(norm: Norm, downsampling: str, mixing: str) -> None:
    architecture = Architecture(
        3, 8, 4, 2, (Stage(2, 8), Stage(2, 64)), dense_width=6, dropout=0.5, norm=norm,
        downsampling=downsampling, mixing=mixing, pixel_margin=0.02,
    )  # fmt: skip
    inn = randomise(build_inn(architecture)).double().eval().requires_grad_(requires_grad=False)
    x = torch.rand((5, 3, 8, 4), generator=torch.Generator().manual_seed(4)).double()
    z, log_det = inn(x)
    fast = fused(inn)
    torch.testing.assert_close(fast(x), (z, log_det), atol=1e-10, rtol=1e-10)
    other = z + torch.randn(z.shape, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(fast.inverse(other), inn.inverse(other), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_couplings_in_place_leave_the_input_as_it_is(seed: int) -> None:
    """A chain may start and end with a coupling; its log-scales need not have one shape."""
    generator = torch.Generator().manual_seed(seed)
    couplings = [
        Coupling(channels, nn.Sequential(nn.Conv2d(channels // 2, channels, 1)), clamp=1.0)
        for channels in (2, 8, 8)
    ]
    chain = Chain([couplings[0], Squeeze(), *couplings[1:]]).requires_grad_(requires_grad=False)
    x = torch.randn((3, 2, 4, 4), generator=generator)
    kept, fast = x.clone(), fused(chain)
    y, log_det = chain(x)
    torch.testing.assert_close(fast(x), (y, log_det))
    kept_y = y.clone()
    torch.testing.assert_close(fast.inverse(y), kept, atol=1e-5, rtol=1e-5)
    assert torch.equal(x, kept)
    assert torch.equal(y, kept_y)


def test_a_model_uses_it_without_gradients_only() -> None:
    model = small_model()
    x = torch.rand((4, 1, 8, 8), generator=torch.Generator().manual_seed(4))
    z, log_det = model.classifier.encode_with_log_det(x)
    model.classifier.inn.bijections[2].bijections[0].subnet = None
    with pytest.raises(TypeError, match="NoneType"):
        model.encode_with_log_det(x.requires_grad_())
    model = small_model()
    copy = model.fuse()
    model.encode(x.detach())
    assert model.fuse() is copy  # made once
    model.classifier.inn = None  # what was encoded with is a copy
    with torch.no_grad():
        torch.testing.assert_close(model.encode_with_log_det(x), (z, log_det))
        torch.testing.assert_close(model.decode(z), x, atol=1e-4, rtol=0)
    assert model.predict(x.detach()).shape == (4, 3)
