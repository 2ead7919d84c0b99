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
from ecinn.explanation.counterfactual import Known, explain
from ecinn.explanation.path import CounterfactualPath
from ecinn.explanation.protocol import InvertibleClassifier
from ecinn.explanation.reading import stored_posterior
from ecinn.explanation.result import Confidence, Explanation
from ecinn.explanation.targets import given_targets, resolve_targets
from ecinn.model import Model
from ecinn.pixels import Images, Labels, to_uint8
from ecinn.web.batching import AbandonedError, Wanted

BEYOND = 1.3
"""End of a path as a multiple of the convincing α: far enough to see where it leads."""


@dataclass(frozen=True)
class Network:
    """An `InvertibleClassifier` made of functions."""

    mu: Tensor
    tau: Tensor
    encode_with_log_det: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor], Tensor]


def split_network(
    classifier: InvertibleClassifier,
    size: int,
    threads: Executor | None = None,
    wanted: Wanted = lambda: True,
) -> Network:
    """Evaluate f and f⁻¹ in parts of this size, which bounds the memory, on several threads.

    Args:
        threads: evaluate the parts; None for the calling thread.
    """

    def evaluate(function: Callable[[Tensor], Any], batch: Tensor) -> list[Any]:
        def evaluate_part(part: Tensor) -> Any:  # noqa: ANN401
            if not wanted():
                raise AbandonedError("no client waits for this answer any more")
            with torch.inference_mode():
                return function(part)

        # A single part does not wait behind the many parts of somebody else's request.
        run = map if threads is None or len(batch) <= size else threads.map
        return list(run(evaluate_part, batch.split(size)))

    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        z, log_det = zip(*evaluate(classifier.encode_with_log_det, x), strict=True)
        return torch.cat(z), torch.cat(log_det)

    def decode(z: Tensor) -> Tensor:
        return torch.cat(evaluate(classifier.decode, z))

    return Network(classifier.mu, classifier.tau, encode, decode)


@dataclass(frozen=True)
class Question:
    """Images to explain, and the options of the explanation."""

    pixels: Images
    targets: tuple[int, ...] | Literal["all"] | None = None
    """None for the class with the second highest posterior."""
    confidence: Confidence | None = None
    """None for the model's default."""
    correct: bool = False
    path: int | tuple[float, ...] | None = None
    """Number of frames, besides the tipping point and the convincing image, or all α."""

    @property
    def steps(self) -> int:
        """Images of every path."""
        if isinstance(self.path, int):
            return self.path + 2 if self.path else 0
        return len(self.path or ())

    def cost(self, classes: int) -> int:
        """Pixel values to evaluate: the inputs, and two images and a path for every target."""
        targets = classes - 1 if self.targets == "all" else len(self.targets or (0,))
        return self.pixels.numel() * (1 + targets * (2 + self.steps))


@dataclass(frozen=True)
class Prediction:
    """Posterior, likelihood and out-of-distribution flags of some images."""

    p: Labels
    posterior: Float[Tensor, "batch classes"]
    log_p: Float[Tensor, " batch"]
    out_of_distribution: Bool[Tensor, "batch reasons"]
    answer: Float[Tensor, "batch classes"] | None = None
    """Probabilities by the classifier that the model is a student of; p is its prediction."""


@torch.inference_mode()
def predict_jointly(
    model: Model, network: Network, batches: Sequence[Tensor]
) -> list[Prediction | InputError]:
    """Predict the images of all requests with one encode."""
    x = torch.cat(list(batches))
    z, log_det = network.encode_with_log_det(x)
    posterior = equations.log_posterior(z, network.mu, network.tau).exp()
    answer = None if model.reader is None else model.reader.predict(to_uint8(x))
    p = equations.predicted_class(z, network.mu) if answer is None else answer.argmax(1)
    log_p = equations.log_marginal(equations.log_likelihood(z, log_det, network.mu))
    flags = model.ood.flags(z, z - model.mu_bar[p], log_p)
    columns = (p, posterior, log_p, flags, *(() if answer is None else (answer,)))
    sound = _is_finite(Prediction(*columns))
    parts = (column.split([len(batch) for batch in batches]) for column in columns)
    return [_finite(Prediction(*part), sound) for part in zip(*parts, strict=True)]


@torch.inference_mode()
def explain_jointly(
    model: Model, network: Network, questions: Sequence[Question]
) -> list[Explanation | InputError]:
    """Answer every question with one encode, one decode and one check for all.

    Questions that differ in their number of targets, confidence or correction are decoded
    separately; all paths are decoded together. A student's explanations are verified on the
    classifier that it was distilled from.
    """
    sizes = [len(question.pixels) for question in questions]
    pixels = torch.cat([question.pixels for question in questions])
    encoded = network.encode_with_log_det(pixels)
    latents, log_dets = (column.split(sizes) for column in encoded)
    if model.reader is None:
        scores = equations.linear_logits(encoded[0], network.mu).split(sizes)
    else:
        scores = model.reader.predict(to_uint8(pixels)).to(pixels).split(sizes)
    answers: list[Any] = []  # targets at first, then explanations or errors
    groups: dict[Any, list[int]] = {}
    for place, (question, score) in enumerate(zip(questions, scores, strict=True)):
        try:
            q = _targets(model, score, question)
        except InputError as error:
            answers.append(error)
            continue
        answers.append(q)
        confidence, _ = model.request(question.confidence)
        options = (q.shape[1], confidence, question.correct)
        groups.setdefault(options, []).append(place)
    for (_, confidence, correct), places in groups.items():
        columns = ([question.pixels for question in questions], latents, log_dets, scores, answers)
        x, z, log_det, score, q = (
            torch.cat([column[place] for place in places]) for column in columns
        )
        explanation = explain(
            network,
            model.mu_bar,
            x,
            q,
            confidence=confidence,
            correct=correct,
            ood=model.ood,
            class_names=model.class_names,
            reader=model.reader,
            known=Known(z, log_det, None if model.reader is None else score),
        )
        start, sound = 0, _is_finite(explanation)
        for place in places:
            part = _rows_of(explanation, start, start + sizes[place])
            _, by_default = model.request(questions[place].confidence)
            planted = model.recipe.planted
            answers[place] = _finite(
                dataclasses.replace(part, confidence_by_default=by_default, planted=planted), sound
            )
            start += sizes[place]
    _add_paths(model, network, questions, answers, latents)
    return answers


def _add_paths(
    model: Model,
    network: Network,
    questions: Sequence[Question],
    answers: list[Explanation | InputError],
    latents: Sequence[Tensor],
) -> None:
    """Add the requested paths to the answers, all decoded at once."""
    lines: list[tuple[int, Explanation, Tensor, Tensor]] = []
    for place, (question, e) in enumerate(zip(questions, answers, strict=True)):
        if question.steps and isinstance(e, Explanation):
            alphas = path_alphas(question, e)
            z = latents[place][e.indices][:, None].expand(*e.q.shape, -1)
            delta = e.direction(z, model.mu_bar)
            shape = (*alphas.shape, -1)
            z_hat = equations.corrected_latent(
                z[:, :, None].expand(shape), alphas, delta[:, :, None].expand(shape)
            )
            lines.append((place, e, alphas, z_hat))
    if not lines:
        return
    images = network.decode(torch.cat([z_hat.flatten(0, 2) for *_, z_hat in lines]))
    sizes = [alphas.numel() for _, _, alphas, _ in lines]
    parts = images.split(sizes), stored_posterior(network, images).split(sizes)
    for (place, e, alphas, z_hat), x_hat, stored in zip(lines, *parts, strict=True):
        posterior = equations.log_posterior(z_hat, network.mu, network.tau).exp()
        path = CounterfactualPath(
            posterior,
            stored.reshape(posterior.shape),
            alphas=alphas,
            images=x_hat.reshape(*alphas.shape, *x_hat.shape[1:]),
            p=e.p,
            q=e.q,
            class_names=e.class_names,
        )
        answers[place] = _finite(dataclasses.replace(e, path=path))


def path_alphas(question: Question, e: Explanation) -> Float[Tensor, "batch targets steps"]:
    """Return the α of every path: the given ones, or even ones up to 1.3·α with α₀ and α."""
    if isinstance(question.path, tuple):
        return torch.tensor(question.path, dtype=e.alpha.dtype).expand(*e.alpha.shape, -1)
    even = torch.linspace(0, BEYOND, question.path or 0, dtype=e.alpha.dtype)
    marks = torch.stack([e.alpha_0, e.alpha], -1)
    return torch.cat([e.alpha[..., None] * even, marks], -1).sort(-1).values


def _targets(
    model: Model, scores: Float[Tensor, "batch classes"], question: Question
) -> Int[Tensor, "batch targets"]:
    """Return the targets of every image; refuse if all images are predicted as a target.

    Args:
        scores: logits, or the answers of the classifier that the model is a student of.
    """
    order = scores.argsort(dim=1, descending=True, stable=True)  # a tie as `argmax` breaks it
    if question.targets is None:
        return order[:, 1:2]
    p, classes = order[:, 0], scores.shape[1]
    targets = question.targets if question.targets == "all" else list(question.targets)
    q = given_targets(targets, p, classes)
    if bool((q == p[:, None]).any(1).all()):
        resolve_targets(targets, p, classes, model.class_names)
    return q


def _rows_of(e: Explanation, start: int, stop: int) -> Explanation:
    """Return the part of a joint explanation that belongs to one question."""
    first, last = torch.searchsorted(e.indices, torch.tensor([start, stop])).tolist()
    part = e[first:last]
    skipped = tuple(
        dataclasses.replace(image, index=image.index - start)
        for image in e.skipped
        if start <= image.index < stop
    )
    return dataclasses.replace(part, indices=part.indices - start, skipped=skipped)


def _finite(answer: Any, sound: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002
    """Return the answer, or an error if the network overflowed far from all training images.

    Args:
        sound: True if all answers of the pass are finite, so that none need be checked alone.
    """
    if sound or _is_finite(answer):
        return answer
    return InputError(
        "this image or α is so far from the training images that the network overflows: "
        "use another one"
    )


def _is_finite(value: Any) -> bool:  # noqa: ANN401
    if isinstance(value, Tensor):
        return bool(value.isfinite().all())
    if dataclasses.is_dataclass(value):
        return all(_is_finite(getattr(value, f.name)) for f in dataclasses.fields(value))
    return True
