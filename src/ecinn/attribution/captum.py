"""ECINN's heatmaps as one of Captum's methods."""

from typing import Any

import torch
from torch import Tensor

from ecinn.attribution.gradients import captum, require_classes
from ecinn.attribution.scores import FlowLogits
from ecinn.errors import InputError
from ecinn.explanation.result import Confidence
from ecinn.model import Model
from ecinn.pixels import Images, Labels, to_uint8

captum()  # says how to install it where it is missing

from captum.attr import Attribution  # noqa: E402
from captum.log import log_usage  # noqa: E402


class CounterfactualAttribution(Attribution):  # type: ignore[misc]  # Captum has no types
    """Heatmaps of counterfactuals behind Captum's interface: `attribute(inputs, target)`.

    For a class q that is not predicted, the map is h(x, q) = x̂ − x (Eq. 4), as in
    `Explanation.heatmap`. Pipelines usually ask about the predicted class p: then the map is
    x − x̂, where x̂ is the counterfactual of the second most likely class. Either way positive
    values are lighter in the picture that belongs to the target.

    `forward_func` returns the model's logits, for Captum's metrics and its other methods.
    """

    def __init__(self, model: Model, confidence: Confidence | None = None) -> None:
        """Explain a model.

        Args:
            confidence: as for `Model.explain`.
        """
        if not isinstance(model, Model):
            raise InputError("give a model: ecinn.load(…) returns one")
        super().__init__(FlowLogits(model.classifier, "linear"))
        self.model, self.confidence = model, confidence

    @log_usage()  # type: ignore[untyped-decorator]  # NoiseTunnel needs what this adds
    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,  # noqa: ANN401
    ) -> Tensor | tuple[Tensor, ...]:
        """Return a signed map of every image, of its shape.

        Args:
            inputs: pixels in [0, 1], or a tuple of one such tensor, which gives a tuple.
            target: a class for all images or for every image; by default the predicted ones.
        """
        if isinstance(inputs, tuple):
            if len(inputs) != 1:
                raise InputError(f"give one tensor of images, not {len(inputs)}")
            return (self._maps(inputs[0], target),)
        return self._maps(inputs, target)

    def _maps(self, inputs: Any, target: Any) -> Tensor:  # noqa: ANN401
        if not isinstance(inputs, Tensor):
            raise InputError(f"inputs are a tensor of images, not {type(inputs).__name__}")
        x = self.model.pixels(inputs.detach())
        order = self._scores(x).argsort(dim=1, descending=True, stable=True)
        p, second = order[:, 0], order[:, 1]
        wanted = p if target is None else _labels(target, x)
        require_classes(order.shape[1], p, wanted)
        is_p = wanted == p
        q = torch.where(is_p, second, wanted)
        e = self.model.explain(x, q[:, None], confidence=self.confidence, check=False)
        sign = torch.where(is_p, -1.0, 1.0)[:, None, None, None]
        # The product is made outside of inference mode, so that gradients may use it.
        maps = e.heatmap[:, 0].clone() * sign
        return maps.to(inputs) if inputs.is_floating_point() else maps.to(inputs.device)

    def _scores(self, x: Images) -> Tensor:
        """Return the probabilities by the classifier that is explained, which may be a reader."""
        reader = self.model.reader
        scores = self.model.predict(x) if reader is None else reader.predict(to_uint8(x))
        return scores.to(x.device)


def _labels(target: Any, x: Images) -> Labels:  # noqa: ANN401
    """Return one class for every image."""
    try:
        labels = torch.as_tensor(target, device=x.device)
    except (TypeError, ValueError, RuntimeError):
        labels = torch.zeros(())
    if labels.numel() == 1:
        labels = labels.reshape(1).expand(len(x))
    if labels.is_floating_point() or labels.shape != (len(x),):
        raise InputError(
            f"a target is one class number for all images or for each of the {len(x)} images, "
            f"not {target!r}"
        )
    return labels.long()
