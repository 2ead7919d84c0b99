"""Figure 1, with a small random network instead of a face model."""

import numpy as np
import pytest
import torch

from ecinn.drawing import pictures
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import explain
from ecinn.pixels import to_uint8
from ecinn.studies.paper.artefact import ARTEFACTS, Context
from ecinn.studies.paper.figures_method import draw_pipeline, latent_picture


def test_a_latent_becomes_a_rectangle_of_all_its_values(generator) -> None:
    latent = torch.randn(12_288, generator=generator)
    array = latent_picture(latent, 2.0)
    assert array.shape == (96, 128, 3)
    flat = array.reshape(-1, 3).astype(int)
    # Row by row; red where positive, blue where negative, whiter the nearer to zero.
    assert (flat[latent > 0.1][:, 0] > flat[latent > 0.1][:, 2]).all()
    assert (flat[latent < -0.1][:, 0] < flat[latent < -0.1][:, 2]).all()
    order = latent.abs().clamp(max=2).argsort()
    positive = flat[order[latent[order] > 0]][:, 1]
    assert (np.diff(positive) <= 0).all()
    assert (latent_picture(torch.zeros(7)) == 255).all()
    assert latent_picture(torch.zeros(7)).shape == (1, 7, 3)


@pytest.mark.parametrize("image", [0, 1])
def test_the_pipeline_shows_input_latents_and_counterfactual(
    small_classifier, generator, image
) -> None:
    x = torch.rand((2, 1, 8, 8), generator=generator, dtype=torch.float64)
    mu_bar = small_classifier.mu + 0.1
    mu_bar[1] *= 2
    p = small_classifier.log_posterior(x).argmax(1)
    explanation = explain(small_classifier, mu_bar, x, ((p + 1) % 3)[:, None])
    z, _ = small_classifier.encode_with_log_det(x)
    change = explanation.alpha_1[image, 0] * (mu_bar[explanation.q[image, 0]] - mu_bar[p[image]])
    figure = draw_pipeline(explanation, image, z[image], change)
    shown = [np.asarray(each.get_array()) for each in figure.axes[0].images]
    assert len(shown) == 6
    assert np.array_equal(shown[0], latent_picture(z[image]))
    assert np.array_equal(shown[3], pictures.image_array(to_uint8(x[image])))
    assert np.array_equal(shown[4], pictures.image_array(explanation.stored_convincing[image, 0]))
    # The third latent, inverted, is the counterfactual beside it.
    decoded = small_classifier.decode((z[image] + change)[None])
    torch.testing.assert_close(decoded[0], explanation.convincing[image, 0])
    assert np.array_equal(shown[2], latent_picture(z[image] + change))
    words = {text.get_text() for text in figure.axes[0].texts}
    assert {"$x$", "$z$", "$f$", "$f^{-1}$", r"$\alpha_1\Delta$", r"$\hat{x}$", "$h$"} <= words


def test_figure_1_needs_faces(tmp_path) -> None:
    figure = next(artefact for artefact in ARTEFACTS if artefact.name == "figure-1")
    assert figure.needs == {"faces"}
    with pytest.raises(InputError):
        figure.make(Context(celeba=tmp_path))
