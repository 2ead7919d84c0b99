"""The network passes that requests share: reading pictures, and explaining them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ecinn import equations
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import explain, resolve_targets
from ecinn.explanation.path import CounterfactualPath
from ecinn.explanation.protocol import InvertibleClassifier
from ecinn.explanation.reading import stored_posterior
from ecinn.explanation.result import Explanation
from ecinn.model import Model
from ecinn.web.network import EncodedNetwork

BEYOND = 1.3
"""Where a path ends, in convincing α: far enough to see what more of it does."""
Pixels = Float[Tensor, "batch channels height width"]


@dataclass(frozen=True)
class Question:
    """What is to be explained of some pictures."""

    pixels: Pixels
    targets: tuple[int, ...] | Literal["all"] | None = None
    """None for the class that comes second."""
    confidence: float | None = None
    correct: bool = False
    frames: int = 0
    """Of the path, besides the tipping point and the convincing picture."""
    alphas: tuple[float, ...] | None = None
    """Of the path, instead of frames."""

    @property
    def steps(self) -> int:
        """Pictures of every path."""
        if self.alphas is not None:
            return len(self.alphas)
        return self.frames + 2 if self.frames else 0

    def pictures(self, classes: int) -> int:
        """The network has to look at: the inputs, and for every target two and the path."""
        every = {"all": classes - 1, None: 1}
        targets = every[self.targets] if not isinstance(self.targets, tuple) else len(self.targets)
        return len(self.pixels) * (1 + targets * (2 + self.steps))


@dataclass(frozen=True)
class Reading:
    """What the classifier says of some pictures."""

    p: Int[Tensor, " batch"]
    posterior: Float[Tensor, "batch classes"]
    out_of_distribution: Bool[Tensor, "batch reasons"]


@torch.inference_mode()
def read_jointly(
    model: Model, network: InvertibleClassifier, asked: Sequence[Tensor]
) -> list[Reading | InputError]:
    """What the classifier says, from one encode of all requests' pictures."""
    z, log_det = network.encode_with_log_det(torch.cat(list(asked)))
    posterior = equations.log_posterior(z, network.mu).exp()
    p = posterior.argmax(1)
    log_p = equations.log_marginal(equations.log_likelihood(z, log_det, network.mu))
    unlike = model.ood.flags(z, z - model.mu_bar[p], log_p)
    return [_finite(Reading(p[rows], posterior[rows], unlike[rows])) for rows in _slices(asked)]


@torch.inference_mode()
def explain_jointly(
    model: Model, network: InvertibleClassifier, questions: Sequence[Question]
) -> list[Explanation | InputError]:
    """Every question's explanation, from one encode, one decode and one verification.

    Questions with another number of targets, another confidence or corrections decode on their
    own; all paths are decoded together.
    """
    x = torch.cat([question.pixels for question in questions])
    z, log_det = network.encode_with_log_det(x)
    slices = _slices([question.pixels for question in questions])
    targets = [
        _targets(model, equations.log_posterior(z[rows], network.mu), question)
        for rows, question in zip(slices, questions, strict=True)
    ]
    answers: list[Explanation | InputError | None] = [
        q if isinstance(q, InputError) else None for q in targets
    ]
    alike: dict[Any, list[int]] = {}
    for place, (question, q) in enumerate(zip(questions, targets, strict=True)):
        if not isinstance(q, InputError):
            kind = (q.shape[1], question.confidence, question.correct)
            alike.setdefault(kind, []).append(place)
    for (_, confidence, correct), places in alike.items():
        rows = torch.cat([torch.arange(len(x))[slices[place]] for place in places])
        joined = x[rows]
        explanation = explain(
            EncodedNetwork(network, joined, z[rows], log_det[rows]),
            model.mu_bar,
            joined,
            torch.cat([q for q in (targets[place] for place in places) if isinstance(q, Tensor)]),
            confidence=confidence,
            correct=correct,
            ood=model.ood,
            class_names=model.class_names,
        )
        parts = _slices([questions[place].pixels for place in places])
        for place, part in zip(places, parts, strict=True):
            answers[place] = _finite(explanation[part])
    return _with_paths(model, network, questions, answers, [z[rows] for rows in slices])


def _with_paths(
    model: Model,
    network: InvertibleClassifier,
    questions: Sequence[Question],
    answers: Sequence[Explanation | InputError | None],
    latents: Sequence[Tensor],
) -> list[Explanation | InputError]:
    """The same with the paths that were asked for, all of them decoded at once."""
    done: list[Explanation | InputError] = [a for a in answers if a is not None]
    lines: dict[int, tuple[Tensor, Tensor]] = {}
    for place, (question, e) in enumerate(zip(questions, done, strict=True)):
        if question.steps and isinstance(e, Explanation):
            alphas = steps(question, e)
            from_class = e.p[:, None].expand_as(e.q)
            delta = equations.latent_direction(model.mu_bar, from_class, e.q)
            shape = (*alphas.shape, -1)
            lines[place] = (
                alphas,
                equations.corrected_latent(
                    latents[place][:, None, None].expand(shape),
                    alphas,
                    delta[:, :, None].expand(shape),
                ),
            )
    if not lines:
        return done
    flat = [z_hat.flatten(0, 2) for _, z_hat in lines.values()]
    images = network.decode(torch.cat(flat))
    stored = stored_posterior(network, images)
    for (place, (alphas, z_hat)), rows in zip(lines.items(), _slices(flat), strict=True):
        e = done[place]
        assert isinstance(e, Explanation)
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
        done[place] = _finite(dataclasses.replace(e, path=path))
    return done


def steps(question: Question, e: Explanation) -> Float[Tensor, "batch targets steps"]:
    """The α of every path: those given, or frames from 0 to 1.3·α₁ with α₀ and α₁ among them."""
    if question.alphas is not None:
        given = torch.tensor(question.alphas, dtype=e.alpha.dtype)
        return given.expand(*e.alpha.shape, -1)
    even = torch.linspace(0, BEYOND, question.frames, dtype=e.alpha.dtype)
    marks = torch.stack([e.alpha_0, e.alpha], -1)
    return torch.cat([e.alpha[..., None] * even, marks], -1).sort(-1).values


def _targets(
    model: Model, log_posterior: Float[Tensor, "batch classes"], question: Question
) -> Int[Tensor, "batch targets"] | InputError:
    order = log_posterior.argsort(1, descending=True)
    if question.targets is None:
        return order[:, 1:2]
    try:
        chosen = question.targets if question.targets == "all" else list(question.targets)
        return resolve_targets(chosen, order[:, 0], log_posterior.shape[1], model.class_names)
    except InputError as error:
        return error


def _finite(answer: Any) -> Any:  # noqa: ANN401
    """The answer, or that there is none: far from all training images the network overflows."""
    return (
        answer
        if _is_finite(answer)
        else InputError(
            "this picture or α is so far from the training images that the network overflows: "
            "take another one"
        )
    )


def _is_finite(value: Any) -> bool:  # noqa: ANN401
    if isinstance(value, Tensor):
        return bool(value.isfinite().all())
    if dataclasses.is_dataclass(value):
        return all(_is_finite(getattr(value, f.name)) for f in dataclasses.fields(value))
    return True


def _slices(batches: Sequence[Tensor]) -> list[slice]:
    """Where each batch is when they are joined."""
    ends = torch.tensor([len(batch) for batch in batches]).cumsum(0).tolist()
    return [slice(end - len(batch), end) for end, batch in zip(ends, batches, strict=True)]
