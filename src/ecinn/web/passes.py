"""Network passes that requests share: one for predictions, a few for explanations."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ecinn import equations
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import explain, given_targets, resolve_targets
from ecinn.explanation.path import CounterfactualPath
from ecinn.explanation.protocol import InvertibleClassifier
from ecinn.explanation.reading import stored_posterior
from ecinn.explanation.result import Explanation
from ecinn.model import Model
from ecinn.pixels import Images, Labels
from ecinn.web.batching import AbandonedError, Wanted

BEYOND = 1.3
"""End of a path as a multiple of the convincing α: far enough to see where it leads."""


class SplitNetwork:
    """Evaluates f and f⁻¹ in parts, which bounds the memory, on several threads."""

    def __init__(
        self,
        classifier: InvertibleClassifier,
        part: int,
        threads: Executor | None = None,
        wanted: Wanted = lambda: True,
    ) -> None:
        """Args: threads: evaluate the parts; None for the calling thread."""
        self._classifier, self._part = classifier, part
        self._threads, self._wanted = threads, wanted

    @property
    def mu(self) -> Tensor:
        """Class means in latent space."""
        return self._classifier.mu

    def encode_with_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z = f(x) and log |det J|."""
        z, log_det = self._evaluate(self._classifier.encode_with_log_det, x)
        return z, log_det

    def decode(self, z: Tensor) -> Tensor:
        """x = f⁻¹(z)."""
        (x,) = self._evaluate(lambda part: (self._classifier.decode(part),), z)
        return x

    def _evaluate(
        self, function: Callable[[Tensor], tuple[Tensor, ...]], batch: Tensor
    ) -> tuple[Tensor, ...]:
        def evaluate(part: Tensor) -> tuple[Tensor, ...]:
            if not self._wanted():
                raise AbandonedError("no client waits for this answer any more")
            with torch.inference_mode():
                return function(part)

        run = map if self._threads is None else self._threads.map
        results = list(run(evaluate, batch.split(self._part)))
        return tuple(torch.cat(column) for column in zip(*results, strict=True))


class EncodedNetwork:
    """A network that returns known latents of one batch instead of encoding it again."""

    def __init__(
        self, network: InvertibleClassifier, x: Tensor, z: Tensor, log_det: Tensor
    ) -> None:
        self._x, self._known = x, (z, log_det)
        self._network = network
        self.decode = network.decode

    @property
    def mu(self) -> Tensor:
        """Class means in latent space."""
        return self._network.mu

    def encode_with_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z = f(x) and log |det J|."""
        return self._known if x is self._x else self._network.encode_with_log_det(x)


@dataclass(frozen=True)
class Question:
    """Images to explain, and the options of the explanation."""

    pixels: Images
    targets: tuple[int, ...] | Literal["all"] | None = None
    """None for the class with the second highest posterior."""
    confidence: float | None = None
    correct: bool = False
    path: int | tuple[float, ...] | None = None
    """Number of frames, besides the tipping point and the convincing image, or all α."""

    @property
    def steps(self) -> int:
        """Images of every path."""
        if isinstance(self.path, int):
            return self.path + 2 if self.path else 0
        return len(self.path or ())

    def images(self, classes: int) -> int:
        """Images that the network evaluates: the inputs, and two and a path per target."""
        targets = classes - 1 if self.targets == "all" else len(self.targets or (0,))
        return len(self.pixels) * (1 + targets * (2 + self.steps))


@dataclass(frozen=True)
class Prediction:
    """Posterior, likelihood and out-of-distribution flags of some images."""

    p: Labels
    posterior: Float[Tensor, "batch classes"]
    log_p: Float[Tensor, " batch"]
    out_of_distribution: Bool[Tensor, "batch reasons"]


@torch.inference_mode()
def predict_jointly(
    model: Model, network: InvertibleClassifier, batches: Sequence[Tensor]
) -> list[Prediction | InputError]:
    """Predict the images of all requests with one encode."""
    z, log_det = network.encode_with_log_det(torch.cat(list(batches)))
    posterior = equations.log_posterior(z, network.mu).exp()
    p = posterior.argmax(1)
    log_p = equations.log_marginal(equations.log_likelihood(z, log_det, network.mu))
    columns = (p, posterior, log_p, model.ood.flags(z, z - model.mu_bar[p], log_p))
    return [
        _finite(Prediction(*(column[rows] for column in columns))) for rows in _slices(batches)
    ]


@torch.inference_mode()
def explain_jointly(
    model: Model, network: InvertibleClassifier, questions: Sequence[Question]
) -> list[Explanation | InputError]:
    """Answer every question with one encode, one decode and one check for all.

    Questions that differ in their number of targets, confidence or correction are decoded
    separately; all paths are decoded together.
    """
    x = torch.cat([question.pixels for question in questions])
    z, log_det = network.encode_with_log_det(x)
    slices = _slices([question.pixels for question in questions])
    targets: dict[int, Tensor] = {}
    answers: dict[int, Explanation | InputError] = {}
    groups: dict[Any, list[int]] = {}
    for place, (question, rows) in enumerate(zip(questions, slices, strict=True)):
        try:
            q = _targets(model, equations.log_posterior(z[rows], network.mu), question)
        except InputError as error:
            answers[place] = error
            continue
        targets[place] = q
        options = (q.shape[1], question.confidence, question.correct)
        groups.setdefault(options, []).append(place)
    for (_, confidence, correct), places in groups.items():
        chosen = torch.cat([torch.arange(len(x))[slices[place]] for place in places])
        joined = x[chosen]
        explanation = explain(
            EncodedNetwork(network, joined, z[chosen], log_det[chosen]),
            model.mu_bar,
            joined,
            torch.cat([targets[place] for place in places]),
            confidence=confidence,
            correct=correct,
            ood=model.ood,
            class_names=model.class_names,
        )
        parts = _slices([questions[place].pixels for place in places])
        for place, part in zip(places, parts, strict=True):
            answers[place] = _finite(_rows_of(explanation, part))
    return _with_paths(
        model,
        network,
        questions,
        [answers[place] for place in range(len(questions))],
        [z[rows] for rows in slices],
    )


def _with_paths(
    model: Model,
    network: InvertibleClassifier,
    questions: Sequence[Question],
    answers: list[Explanation | InputError],
    latents: Sequence[Tensor],
) -> list[Explanation | InputError]:
    """Add the paths that were asked for, all decoded at once."""
    lines: dict[int, tuple[Explanation, Tensor, Tensor]] = {}
    for place, (question, e) in enumerate(zip(questions, answers, strict=True)):
        if question.steps and isinstance(e, Explanation):
            alphas = path_alphas(question, e)
            delta = equations.latent_direction(model.mu_bar, e.p[:, None].expand_as(e.q), e.q)
            shape = (*alphas.shape, -1)
            z = latents[place][e.indices][:, None, None].expand(shape)
            z_hat = equations.corrected_latent(z, alphas, delta[:, :, None].expand(shape))
            lines[place] = (e, alphas, z_hat)
    if not lines:
        return answers
    flat = [z_hat.flatten(0, 2) for _, _, z_hat in lines.values()]
    images = network.decode(torch.cat(flat))
    stored = stored_posterior(network, images)
    for (place, (e, alphas, z_hat)), rows in zip(lines.items(), _slices(flat), strict=True):
        posterior = equations.log_posterior(z_hat, network.mu).exp()
        path = CounterfactualPath(
            posterior,
            stored[rows].reshape(posterior.shape),
            alphas=alphas,
            images=images[rows].reshape(*alphas.shape, *images.shape[1:]),
            p=e.p,
            q=e.q,
            class_names=e.class_names,
        )
        answers[place] = _finite(dataclasses.replace(e, path=path))
    return answers


def path_alphas(question: Question, e: Explanation) -> Float[Tensor, "batch targets steps"]:
    """Return the α of every path: the given ones, or even ones up to 1.3·α with α₀ and α."""
    if isinstance(question.path, tuple):
        return torch.tensor(question.path, dtype=e.alpha.dtype).expand(*e.alpha.shape, -1)
    even = torch.linspace(0, BEYOND, question.path or 0, dtype=e.alpha.dtype)
    marks = torch.stack([e.alpha_0, e.alpha], -1)
    return torch.cat([e.alpha[..., None] * even, marks], -1).sort(-1).values


def _targets(
    model: Model, log_posterior: Float[Tensor, "batch classes"], question: Question
) -> Int[Tensor, "batch targets"]:
    """Return the targets of every image; refuse if all images are predicted as a target."""
    order = log_posterior.argsort(1, descending=True)
    if question.targets is None:
        return order[:, 1:2]
    p, classes = order[:, 0], log_posterior.shape[1]
    targets = question.targets if question.targets == "all" else list(question.targets)
    q = given_targets(targets, p, classes)
    if bool((q == p[:, None]).any(1).all()):
        resolve_targets(targets, p, classes, model.class_names)
    return q


def _rows_of(e: Explanation, rows: slice) -> Explanation:
    """Return the part of a joint explanation that belongs to one question."""
    ends = torch.tensor([rows.start, rows.stop])
    first, last = torch.searchsorted(e.indices, ends).tolist()
    part = e[first:last]
    skipped = tuple(
        dataclasses.replace(image, index=image.index - rows.start)
        for image in e.skipped
        if rows.start <= image.index < rows.stop
    )
    return dataclasses.replace(part, indices=part.indices - rows.start, skipped=skipped)


def _finite(answer: Any) -> Any:  # noqa: ANN401
    """Return the answer, or an error if the network overflowed far from all training images."""
    return (
        answer
        if _is_finite(answer)
        else InputError(
            "this image or α is so far from the training images that the network overflows: "
            "use another one"
        )
    )


def _is_finite(value: Any) -> bool:  # noqa: ANN401
    if isinstance(value, Tensor):
        return bool(value.isfinite().all())
    if dataclasses.is_dataclass(value):
        return all(_is_finite(getattr(value, f.name)) for f in dataclasses.fields(value))
    return True


def _slices(batches: Sequence[Tensor]) -> list[slice]:
    """Return the rows of each batch in the concatenated batch."""
    ends = torch.tensor([len(batch) for batch in batches]).cumsum(0).tolist()
    return [slice(end - len(batch), end) for end, batch in zip(ends, batches, strict=True)]
