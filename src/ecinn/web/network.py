"""A classifier evaluated in parts on several threads, as long as somebody waits for the answer."""

from collections.abc import Callable
from concurrent.futures import Executor

import torch
from torch import Tensor

from ecinn.explanation.protocol import InvertibleClassifier
from ecinn.web.batching import AbandonedError, Wanted


class PartedNetwork:
    """f and f⁻¹ of many pictures: memory is that of a few parts, whatever is asked."""

    def __init__(
        self,
        classifier: InvertibleClassifier,
        part: int,
        threads: Executor | None = None,
        wanted: Wanted = lambda: True,
    ) -> None:
        """Args: threads: evaluate the parts; None for the thread that asks."""
        self._classifier, self._part = classifier, part
        self._threads, self._wanted = threads, wanted

    @property
    def mu(self) -> Tensor:
        """Class means in latent space."""
        return self._classifier.mu

    def encode_with_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z = f(x) and log |det J|."""
        parts = self._each(self._classifier.encode_with_log_det, x)
        return torch.cat([z for z, _ in parts]), torch.cat([log_det for _, log_det in parts])

    def decode(self, z: Tensor) -> Tensor:
        """x = f⁻¹(z)."""
        return torch.cat(
            [x for (x,) in self._each(lambda part: (self._classifier.decode(part),), z)]
        )

    def _each(
        self, evaluate: Callable[[Tensor], tuple[Tensor, ...]], batch: Tensor
    ) -> list[tuple[Tensor, ...]]:
        def one(part: Tensor) -> tuple[Tensor, ...]:
            if not self._wanted():
                raise AbandonedError("nobody waits for this any more")
            with torch.inference_mode():
                return evaluate(part)

        parts = batch.split(self._part)
        return list(map(one, parts) if self._threads is None else self._threads.map(one, parts))


class EncodedNetwork:
    """A network that need not encode again what has been encoded together with other requests."""

    def __init__(
        self, network: InvertibleClassifier, x: Tensor, z: Tensor, log_det: Tensor
    ) -> None:
        self._network, self._x, self._known = network, x, (z, log_det)

    @property
    def mu(self) -> Tensor:
        """Class means in latent space."""
        return self._network.mu

    def encode_with_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z = f(x) and log |det J|, remembered for the x that is known."""
        return self._known if x is self._x else self._network.encode_with_log_det(x)

    def decode(self, z: Tensor) -> Tensor:
        """x = f⁻¹(z)."""
        return self._network.decode(z)
